"""The control link of an engine: one thread, one connection, the router at the other end.

The thread sends ``Hello`` until it is welcomed, hands commands to the traffic manager, sends what
the traffic manager and the engine queue, and reports load on change and as heartbeat.  A router
that restarts has forgotten the engine: it answers a report with ``Refused("unknown engine …")``,
and the link sends ``Hello`` again.
"""

import logging
from collections import deque
from collections.abc import Callable

from dualpath.core.control import (
    UNKNOWN_ENGINE,
    Goodbye,
    Hello,
    Message,
    Refused,
    Report,
    Welcome,
    decode_router_message,
    encode,
)
from dualpath.core.errors import IncompatibleError
from dualpath.engine.router_connection import RouterConnection
from dualpath.engine.threads import OS_THREADS, Thread, Threads
from dualpath.transport.cluster_secret import SECRET_VARIABLE

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
#: Least time between two reports that follow changes.
REPORT_GAP_S = 0.01
HELLO_GAP_S = 0.25
#: A router that lives answers a hello in far less.
PATIENCE_S = 5.0
TICK_S = 0.05


class ControlLink:
    """Connects one traffic manager to the router.

    ``hello`` builds the registration, or is None-valued as long as the engine cannot serve yet;
    ``report`` gives the current load, ``handle`` carries out a command, ``tick`` gets the time in
    ns now and then.  The connection is closed with the link.
    """

    def __init__(
        self,
        connection: RouterConnection,
        hello: Callable[[], Hello | None],
        report: Callable[[], Report],
        handle: Callable[[Message], None],
        tick: Callable[[int], None],
        threads: Threads = OS_THREADS,
    ) -> None:
        self._connection = connection
        self._threads = threads
        self._hello = hello
        self._report = report
        self._handle = handle
        self._tick = tick
        self._outgoing: deque[Message] = deque()
        self._changed = threads.event()
        self._closing = threads.event()
        self._welcomed = False
        self._unanswered_since_s: float | None = None
        self._last_hello_s = self._last_report_s = float("-inf")
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = self._threads.start("control-link", self._run)

    def send(self, message: Message) -> None:
        """Queue a message; every message also means that the load changed."""
        self._outgoing.append(message)
        self._changed.set()
        self._connection.wake()

    def changed(self) -> None:
        """The load changed: report soon."""
        self._changed.set()
        self._connection.wake()

    def close(self, reason: str) -> None:
        """Say goodbye, then stop; idempotent."""
        if self._closing.is_set():
            return
        self._outgoing.append(Goodbye(reason=reason))
        self._closing.set()
        self._connection.wake()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while True:
                closing = self._closing.is_set()
                self._send_due()
                if closing:
                    return
                self._connection.wait(TICK_S)
                self._receive()
                self._tick(self._threads.now_ns())
        finally:
            self._connection.close()

    def _send_due(self) -> None:
        """Send the hello, what is queued and the report, each if it is time for it."""
        now_s = self._threads.now_ns() / 1e9
        if not self._welcomed and now_s - self._last_hello_s >= HELLO_GAP_S:
            self._last_hello_s = now_s
            if (hello := self._hello()) is not None:
                self._send_hello(hello, now_s)
        while self._outgoing and self._sent(self._outgoing[0]):
            self._outgoing.popleft()
        gap_s = REPORT_GAP_S if self._changed.is_set() else HEARTBEAT_S
        if self._welcomed and now_s - self._last_report_s >= gap_s:
            self._changed.clear()
            self._last_report_s = now_s
            self._sent(self._report())

    def _sent(self, message: Message) -> bool:
        return self._connection.send(encode(message))

    def _send_hello(self, hello: Hello, now_s: float) -> None:
        if not self._sent(hello):
            self._connection.reconnect()
        if self._unanswered_since_s is None:
            self._unanswered_since_s = now_s
        elif now_s - self._unanswered_since_s >= PATIENCE_S:
            self._unanswered_since_s = float("inf")
            log.warning(
                "router %s has not answered for %g s; see that it runs there and has this "
                "engine's cluster secret (%s), and its log; still trying",
                *(self._connection.router, PATIENCE_S, SECRET_VARIABLE),
            )

    def _receive(self) -> None:
        while (frame := self._connection.receive()) is not None:
            try:
                message = decode_router_message(frame)
            except IncompatibleError as error:
                log.error("%s", error)
                continue
            self._note(message)
            self._handle(message)

    def _note(self, message: Message) -> None:
        self._unanswered_since_s = None
        if isinstance(message, Welcome):
            self._welcomed = True
        elif isinstance(message, Refused) and message.reason.startswith(UNKNOWN_ENGINE):
            self._welcomed = False
