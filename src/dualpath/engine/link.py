"""The control link of an engine: one thread that keeps its session with the router.

It greets, hands commands to the traffic manager, sends what the engine queues, and reports load on
change and as heartbeat.  What is said and taken up when is ``router_session``'s; how bytes get
there is ``router_connection``'s.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from dualpath.core.control import (
    EngineMessage,
    Goodbye,
    Hello,
    LookupDone,
    Report,
    RouterMessage,
    Synced,
)
from dualpath.core.envelopes import FromEngine, decode_router_message, encode
from dualpath.core.errors import IncompatibleError
from dualpath.core.sessions import GREETING_S, EngineEnd
from dualpath.engine.router_connection import RouterConnection
from dualpath.engine.router_session import RouterSession
from dualpath.engine.threads import OS_THREADS, Thread, Threads
from dualpath.transport.cluster_secret import SECRET_VARIABLE

log = logging.getLogger(__name__)

TICK_S = 0.05
_CLOSE_S = 5.0


class ControlLink:
    """Connects one traffic manager to the router.

    ``hello``, ``report``, ``handle`` and ``end`` are ``RouterSession``'s; ``tick`` gets the time in
    ns now and then.  ``failed`` is called when the thread ends by a defect, with the reason.  The
    connection is closed with the link.
    """

    def __init__(
        self,
        connection: RouterConnection,
        hello: Callable[[int], Hello | None],
        report: Callable[[], Report],
        handle: Callable[[RouterMessage], None],
        end: Callable[[str], None],
        tick: Callable[[int], None],
        failed: Callable[[str], None],
        threads: Threads = OS_THREADS,
    ) -> None:
        self._connection = connection
        self._threads = threads
        self._session: RouterSession[EngineMessage, RouterMessage] = RouterSession(
            hello, report, handle, end
        )
        self._tick = tick
        self._failed = failed
        self._outgoing: deque[EngineMessage] = deque()
        self._closing = threads.event()
        self._goodbye = Goodbye(reason="")
        self._unanswered_since_s: float | None = None
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = self._threads.start("control-link", self._run)

    def send(self, message: EngineMessage) -> None:
        """Queue a message; the load changed, unless it answers a question."""
        self._outgoing.append(message)
        if isinstance(message, LookupDone | Synced):
            self._connection.wake()
        else:
            self.changed()

    def changed(self) -> None:
        """The load changed: report soon."""
        self._session.load_changed = True
        self._connection.wake()

    @property
    def away(self) -> bool:
        """Whether there is no session, nor a greeting for one."""
        return self._session.state is EngineEnd.AWAY

    def close(self, goodbye: Goodbye) -> None:
        """Say goodbye, then stop; idempotent."""
        if self._closing.is_set():
            return
        self._goodbye = goodbye
        self._closing.set()
        self._connection.wake()
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
            self._say_queued()
            self._send(self._session.leave(self._goodbye, self._now_s()))
        except Exception as error:
            log.exception("the control link failed")
            self._failed(f"its control link failed: {error!r}")
        finally:
            self._connection.close()

    def _turn(self) -> None:
        self._say_queued()
        self._send(self._session.due(self._now_s()))
        if self._connection.wait(TICK_S):
            # A router that does not know the session says so, and is greeted.
            self._session.load_changed = True
        while (frame := self._connection.receive()) is not None:
            self._hear(frame)
        self._tick(self._threads.now_ns())

    def _say_queued(self) -> None:
        while self._outgoing:
            self._send(self._session.say(self._outgoing.popleft(), self._now_s()))

    def _hear(self, frame: bytes) -> None:
        try:
            envelope = decode_router_message(frame)
        except IncompatibleError as error:
            log.error("%s", error)
            return
        self._unanswered_since_s = None
        self._send(self._session.hear(envelope, self._now_s()))

    def _send(self, envelopes: Sequence[FromEngine]) -> None:
        """Send; what does not get through is said again within the session, or greeted anew."""
        for envelope in envelopes:
            sent = self._connection.send(encode(envelope))
            if isinstance(envelope.message, Hello):
                self._watch_greeting(sent=sent)

    def _watch_greeting(self, *, sent: bool) -> None:
        if not sent:
            self._connection.reconnect()
        now_s = self._now_s()
        if self._unanswered_since_s is None:
            self._unanswered_since_s = now_s
        elif now_s - self._unanswered_since_s >= GREETING_S:
            self._unanswered_since_s = float("inf")
            log.warning(
                "router %s has not answered for %g s; see that it runs there and has this "
                "engine's cluster secret (%s), and its log; still trying",
                *(self._connection.router, GREETING_S, SECRET_VARIABLE),
            )

    def _now_s(self) -> float:
        return self._threads.now_ns() / 1e9
