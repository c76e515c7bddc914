"""The control link of an engine: one thread, one ZMQ socket, the router at the other end.

The thread sends ``Hello`` until it is welcomed, hands commands to the traffic manager, sends what
the traffic manager and the engine queue, and reports load on change and as heartbeat.  A router
that restarts has forgotten the engine: it answers a report with ``Refused("unknown engine …")``,
and the link sends ``Hello`` again.

With a cluster secret the connection is encrypted, and no other router than one that has the secret
is believed; without one the router must be on this machine (``transport.cluster_secret``).
"""

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

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
from dualpath.core.errors import ConfigError, IncompatibleError
from dualpath.transport.cluster_secret import SECRET_VARIABLE, ClusterSecret, check_control_url

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
#: Least time between two reports that follow changes.
REPORT_GAP_S = 0.01
HELLO_GAP_S = 0.25
#: A router that lives answers a hello in far less.
PATIENCE_S = 5.0
TICK_MS = 50


class ControlLink:
    """Connects one traffic manager to the router.

    ``hello`` builds the registration, or is None-valued as long as the engine cannot serve yet;
    ``report`` gives the current load, ``handle`` carries out a command, ``tick`` gets the time in
    ns now and then.  ``secret`` is the cluster's.  Raises ``ConfigError`` for an address ZMQ cannot
    connect to, and for one of another machine without a secret.
    """

    def __init__(
        self,
        router: str,
        hello: Callable[[], Hello | None],
        report: Callable[[], Report],
        handle: Callable[[Message], None],
        tick: Callable[[int], None],
        secret: ClusterSecret | None = None,
    ) -> None:
        check_control_url(router, secret)
        self._router = router
        self._hello = hello
        self._report = report
        self._handle = handle
        self._tick = tick
        self._outgoing: deque[Message] = deque()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        if secret is not None:
            secret.guard_connection(self._socket)
        try:
            self._socket.connect(router)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"router address {router!r}: {error}; use the form tcp://host:port"
            ) from error
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._welcomed = False
        self._unanswered_since_s: float | None = None
        self._last_hello_s = self._last_report_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name="control-link", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message; every message also means that the load changed."""
        self._outgoing.append(message)
        self._changed.set()
        self._wake()

    def changed(self) -> None:
        """The load changed: report soon."""
        self._changed.set()
        self._wake()

    def close(self, reason: str) -> None:
        """Say goodbye, then stop; idempotent."""
        if self._closing.is_set():
            return
        self._outgoing.append(Goodbye(reason=reason))
        self._closing.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"\0")
        except (BlockingIOError, OSError):
            return  # full: the thread is about to look anyway; closed: nobody listens any more

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        try:
            while True:
                closing = self._closing.is_set()
                self._send_due()
                if closing:
                    return
                ready = dict(poller.poll(TICK_MS))
                if self._wake_receiver.fileno() in ready:
                    self._drain_wake()
                if self._socket in ready:
                    self._receive()
                self._tick(time.monotonic_ns())
        finally:
            self._socket.close()
            self._context.destroy(linger=500)

    def _send_due(self) -> None:
        """Send the hello, what is queued and the report, each if it is time for it."""
        now_s = time.monotonic()
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
        """Send without waiting; False if there is no connection or its queue is full."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send_hello(self, hello: Hello, now_s: float) -> None:
        if not self._sent(hello):
            # libzmq gives up a router with another security; it may be restarted.
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(self._router)
            self._socket.connect(self._router)
        if self._unanswered_since_s is None:
            self._unanswered_since_s = now_s
        elif now_s - self._unanswered_since_s >= PATIENCE_S:
            self._unanswered_since_s = float("inf")
            log.warning(
                "router %s has not answered for %g s; see that it runs there and has this "
                "engine's cluster secret (%s), and its log; still trying",
                *(self._router, PATIENCE_S, SECRET_VARIABLE),
            )

    def _receive(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
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

    def _drain_wake(self) -> None:
        try:
            while self._wake_receiver.recv(4096):
                pass
        except BlockingIOError:
            return
