"""The control link of an engine: one thread that maintains its session with the router.

It registers, passes commands to the traffic manager, sends messages that the engine queues, and
reports load on change and as heartbeat.  The protocol is in ``router_session``, the socket in
``router_connection``.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from dualpath.core.control import (
    Deregister,
    EngineMessage,
    LookupDone,
    Register,
    Report,
    RouterMessage,
    Synced,
)
from dualpath.core.envelopes import FromEngine, decode_router_message, encode
from dualpath.core.errors import IncompatibleError
from dualpath.core.sessions import REGISTER_TIMEOUT_S, EngineSideState
from dualpath.engine.router_connection import RouterConnection
from dualpath.engine.router_session import RouterSession
from dualpath.engine.threads import OS_THREADS, Thread, Threads
from dualpath.transport.cluster_secret import SECRET_VARIABLE

log = logging.getLogger(__name__)

TICK_S = 0.05
_CLOSE_S = 5.0


class ControlLink:
    """Connects one traffic manager to the router.

    ``register``, ``report``, ``handle`` and ``end`` are those of ``RouterSession``; ``tick`` is
    called every ``TICK_S`` or more often, with the time in ns.  ``failed`` is called with the
    reason when the thread ends by a defect.  The connection is closed with the link.
    """

    def __init__(
        self,
        connection: RouterConnection,
        register: Callable[[int], Register | None],
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
            register, report, handle, end
        )
        self._tick = tick
        self._failed = failed
        self._outgoing: deque[EngineMessage] = deque()
        self._closing = threads.event()
        self._deregister = Deregister(reason="")
        self._unanswered_since_s: float | None = None
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = self._threads.start("control-link", self._run)

    def send(self, message: EngineMessage) -> None:
        """Queue a message; unless it only answers a query, report the load as well."""
        self._outgoing.append(message)
        if isinstance(message, LookupDone | Synced):
            self._connection.wake()
        else:
            self.changed()

    def changed(self) -> None:
        """The load has changed: report it soon."""
        self._session.load_changed = True
        self._connection.wake()

    @property
    def unregistered(self) -> bool:
        """Whether there is neither a session nor a registration under way."""
        return self._session.state is EngineSideState.UNREGISTERED

    def close(self, deregister: Deregister) -> None:
        """Deregister, then stop; idempotent."""
        if self._closing.is_set():
            return
        self._deregister = deregister
        self._closing.set()
        self._connection.wake()
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._poll()
            self._send_queued()
            self._send(self._session.leave(self._deregister, self._now_s()))
        except Exception as error:
            log.exception("the control link failed")
            self._failed(f"its control link failed: {error!r}")
        finally:
            self._connection.close()

    def _poll(self) -> None:
        self._send_queued()
        self._send(self._session.due(self._now_s()))
        if self._connection.wait(TICK_S):
            # A report makes a router that does not know the session request a registration.
            self._session.load_changed = True
        while (frame := self._connection.receive()) is not None:
            self._receive(frame)
        self._tick(self._threads.now_ns())

    def _send_queued(self) -> None:
        while self._outgoing:
            self._send(self._session.send(self._outgoing.popleft(), self._now_s()))

    def _receive(self, frame: bytes) -> None:
        try:
            envelope = decode_router_message(frame)
        except IncompatibleError as error:
            log.error("%s", error)
            return
        self._unanswered_since_s = None
        self._send(self._session.receive(envelope, self._now_s()))

    def _send(self, envelopes: Sequence[FromEngine]) -> None:
        """Send envelopes; lost ones are resent by the session or by the next registration."""
        for envelope in envelopes:
            sent = self._connection.send(encode(envelope))
            if isinstance(envelope.message, Register):
                self._watch_registration(sent=sent)

    def _watch_registration(self, *, sent: bool) -> None:
        if not sent:
            self._connection.reconnect()
        now_s = self._now_s()
        if self._unanswered_since_s is None:
            self._unanswered_since_s = now_s
        elif now_s - self._unanswered_since_s >= REGISTER_TIMEOUT_S:
            self._unanswered_since_s = float("inf")
            log.warning(
                "router %s has not answered for %g s; check that it runs there and has this "
                "engine's cluster secret (%s), and read its log; still trying",
                *(self._connection.router, REGISTER_TIMEOUT_S, SECRET_VARIABLE),
            )

    def _now_s(self) -> float:
        return self._threads.now_ns() / 1e9
