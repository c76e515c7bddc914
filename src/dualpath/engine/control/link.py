"""The control link of an engine: one thread that maintains its session with the router.

It registers, passes commands to the traffic manager, sends messages that the engine queues, and
reports load on change and as heartbeat.  The protocol is in ``router_session``, the socket in
``router_connection``.
"""

import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import zmq

from dualpath.core.addresses import tcp_address, tcp_endpoint
from dualpath.core.control import (
    Ack,
    Deregister,
    EngineMessage,
    Envelope,
    FromEngine,
    KvInHbm,
    LookupDone,
    Message,
    Refused,
    Register,
    Registered,
    Report,
    RequestOver,
    RouterMessage,
    StoredChain,
    Synced,
    decode_router_message,
    encode,
    unnumbered,
)
from dualpath.core.errors import ConfigError, IncompatibleError
from dualpath.core.sessions import (
    ENGINE_TABLE,
    HEARTBEAT_S,
    REGISTER_INTERVAL_S,
    REGISTER_TIMEOUT_S,
    ROUTER_TIMEOUT_S,
    Action,
    Channel,
    EngineSideState,
    Event,
    StateMachine,
)
from dualpath.engine.threads import OS_THREADS, Thread, Threads, TimeLimit
from dualpath.node.cluster_secret import SECRET_VARIABLE, ClusterSecret, check_control_url
from dualpath.node.sockets import zmq_host

# ------------------------------------------------------------------------------------------ dealer
# The socket by which engines and front ends connect to their router or scheduler.
#
# A process that ends closes its connections; a machine that is lost does not.  In that case the
# local kernel retransmits unacknowledged packets for some 15 minutes (``net.ipv4.tcp_retries2``),
# even if the address leads to another machine by now: address translation, such as a Kubernetes
# Service, holds an existing connection at the old machine.  So the kernel is configured to give up
# sooner, and the next connection goes to the current target of the address.
#
# ZMTP heartbeats are not used: a suspended process does not answer them though it may continue, and
# ``router.control.control_connections`` would count their bytes as traffic without messages.  They
# are not needed either: a process that has a session or registers sends something at least every
# ``heartbeat_s``, which is 2.5 s at most.  The other machine's kernel acknowledges it also for a
# suspended process, as long as its receive buffer has room; otherwise the session continues over
# another connection.

#: Time for queued messages to be sent after the socket is closed.
LINGER_MS = 500
#: Interval between attempts to connect: the first one, and the maximum after repeated doubling.
_FIRST_RETRY_MS, _LAST_RETRY_MS = 20, 250
#: A connection without acknowledgements for this time is dropped.  Linux has retransmitted four
#: times by then (after 0.2, 0.4, 0.8 and 1.6 s), so that a few lost packets do not end it; and
#: another connection can be made before the session ends, after ``ROUTER_TIMEOUT_S`` of silence.
_UNACKNOWLEDGED_MS = 5000
#: Limit of one attempt to connect: two packets, the second after 1 s.  The kernel would send more
#: for two minutes, to the machine that had the address when the first packet was sent.
_CONNECT_MS = 2000


def prepare_dealer(dealer: "zmq.Socket[Any]", secret: ClusterSecret | None) -> None:
    """Set the options of a DEALER socket before it connects."""
    dealer.setsockopt(zmq.LINGER, LINGER_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL, _FIRST_RETRY_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _LAST_RETRY_MS)
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    dealer.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
    if secret is not None:
        secret.guard_connection(dealer)


def connect_dealer(dealer: "zmq.Socket[Any]", address: str, target: str) -> str:
    """Connect; return libzmq's endpoint.

    Raises ``ConfigError`` for an invalid address of ``target``.
    """
    try:
        return _connected(dealer, address)
    except (ValueError, zmq.ZMQError) as error:
        dealer.context.destroy(linger=0)
        raise ConfigError(
            f"{target} address {address!r}: {error}; use the form tcp://host:port, or "
            "tcp://[address]:port for IPv6"
        ) from error


def _connected(dealer: "zmq.Socket[Any]", address: str) -> str:
    """Connect to ``tcp://HOST:PORT``; return libzmq's endpoint."""
    host, port = tcp_address(address)
    endpoint = tcp_endpoint(zmq_host(dealer, host), port)
    dealer.connect(endpoint)
    return endpoint


# ------------------------------------------------------------------------------- router connection
# An engine's connection to the router: a ZMQ DEALER socket, used by one thread.
#
# With a cluster secret the connection is encrypted and the router must have the same secret;
# without one the router must be on this machine (``transport.cluster_secret``).


class RouterConnection(Protocol):
    """Frames to and from the router; only ``wake`` may be called from any thread."""

    router: str

    def send(self, frame: bytes) -> bool:
        """Send without waiting; False if there is no connection or its queue is full."""
        ...

    def receive(self) -> bytes | None:
        """Return the next frame, None if none has arrived."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Return when a frame has arrived, ``wake`` was called or after the timeout.

        Returns True at once after a new connection, perhaps to another router.
        """
        ...

    def wake(self) -> None:
        """End the current ``wait``, or the next one."""
        ...

    def reconnect(self) -> None:
        """Drop the connection and make a new one."""
        ...

    def close(self) -> None:
        """Flush sent frames, then close; ``wake`` has no effect afterwards."""
        ...


class ZmqRouterConnection:
    """The ``RouterConnection`` of a live engine.

    Raises ``ConfigError`` for an address that ZMQ cannot connect to, and for an address of another
    machine without a secret.
    """

    def __init__(self, router: str, secret: ClusterSecret | None = None) -> None:
        check_control_url(router, secret)
        self.router = router
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        prepare_dealer(self._socket, secret)
        self._connected = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._endpoint = connect_dealer(self._socket, router, "router")
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._poller.register(self._connected, zmq.POLLIN)

    def send(self, frame: bytes) -> bool:
        """Send a frame through ZMQ."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """Receive a frame from ZMQ."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)[-1]
        except zmq.Again:
            return None

    def wait(self, timeout_s: float) -> bool:
        """Poll the socket, the socket pair of ``wake``, and the monitor of the connection."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wake_receiver.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                while self._wake_receiver.recv(4096):
                    pass
        if self._connected not in ready:
            return False
        with contextlib.suppress(zmq.Again):
            while True:
                self._connected.recv_multipart(zmq.NOBLOCK)
        return True

    def wake(self) -> None:
        """Write a byte to the socket pair."""
        # Full: the thread is about to wake anyway; closed: no thread waits any more.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_sender.send(b"\0")

    def reconnect(self) -> None:
        """Reconnect: libzmq does not retry after a failed security handshake with an old router."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self._endpoint)
        self._endpoint = _connected(self._socket, self.router)

    def close(self) -> None:
        """Close the socket; frames have ``LINGER_MS`` to be sent."""
        self._socket.disable_monitor()
        self._connected.close(linger=0)
        self._socket.close()
        self._context.destroy(linger=LINGER_MS)
        self._wake_receiver.close()
        self._wake_sender.close()


# ---------------------------------------------------------------------------------- router session
# An engine's end of its session with the router, without sockets or threads.
#
# Methods get the time and return envelopes to send; ``engine.link`` adds a socket and a thread.  It
# executes the state machine ``core.sessions.ENGINE_TABLE``.

#: Minimum interval between reports after changes of the load: the router knows what it has assigned
#: since, so that a load of this age misleads no decision.
REPORT_GAP_S = 0.05
_NEVER = float("-inf")

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


class RouterSession(Generic[M, R]):
    """Not thread-safe; its owner passes times in seconds of one clock.

    ``register`` returns a ``Register`` message with the given registration number, None while the
    engine cannot serve.  ``report`` returns the current load, ``handle`` executes a command,
    ``end`` drops the state of a session that is over, for the given reason.  A report may be lost,
    unless ``is_numbered``.
    """

    def __init__(
        self,
        register: Callable[[int], M | None],
        report: Callable[[], M],
        handle: Callable[[R], None],
        end: Callable[[str], None],
        is_numbered: Callable[[M], bool] = lambda report: False,
    ) -> None:
        self._register_message = register
        self._is_numbered = is_numbered
        self._report = report
        self._handle = handle
        self._end = end
        self._machine = StateMachine(ENGINE_TABLE, EngineSideState.UNREGISTERED)
        self._channel: Channel[M, R] = Channel("")
        self._registration = 0
        self._registration_s = _NEVER
        self._register_sent_s = self._reported_s = self._received_s = _NEVER
        self._logged_refusal = ""
        self._outbox: list[Envelope[M]] = []
        self._heartbeat_s: float | None = None
        #: Set by any thread to have the load reported soon.
        self.load_changed = False

    @property
    def state(self) -> EngineSideState:
        """The state of the session."""
        return self._machine.state

    @property
    def joined(self) -> bool:
        """Whether a session is open."""
        return self._machine.state is EngineSideState.REGISTERED

    @property
    def session(self) -> str:
        """The name of the open session, empty without one."""
        return self._channel.session if self.joined else ""

    @property
    def heartbeat_s(self) -> float:
        """The interval of heartbeats of both ends, as the router asks for it."""
        return HEARTBEAT_S if self._heartbeat_s is None else self._heartbeat_s

    def silent_s(self, now_s: float) -> float:
        """Return for how long the router has sent nothing in this session or registration."""
        return now_s - (self._received_s if self.joined else self._registration_s)

    def send(self, message: M, now_s: float) -> Sequence[Envelope[M]]:
        """Return the envelope of a message; without a session the message is dropped."""
        return [self._channel.send(message, now_s)] if self.joined else []

    def due(self, now_s: float) -> Sequence[Envelope[M]]:
        """Return the envelopes that are due: a ``Register`` or a report."""
        if self.joined and now_s - self._received_s > ROUTER_TIMEOUT_S:
            self._on(
                Event.ROUTER_SILENT, now_s, f"the router was silent for {ROUTER_TIMEOUT_S:g} s"
            )
        registering_s = now_s - self._registration_s
        if self.state is EngineSideState.REGISTERING and registering_s > REGISTER_TIMEOUT_S:
            self._on(Event.REGISTER_TIMED_OUT, now_s)
        if self.state in (EngineSideState.UNREGISTERED, EngineSideState.REGISTERING):
            self._register(now_s)
        gap_s = REPORT_GAP_S if self.load_changed else self.heartbeat_s
        if now_s - self._reported_s >= gap_s:
            self._outbox += self.load(now_s)
        return self._take_outbox()

    def load(self, now_s: float) -> Sequence[Envelope[M]]:
        """Return a report; nothing without a session."""
        if not self.joined:
            return []
        self.load_changed = False
        self._reported_s = now_s
        report = self._report()
        if self._is_numbered(report):
            return [self._channel.send(report, now_s)]
        return [self._channel.send_lossy(report)]

    def receive(self, envelope: Envelope[R], now_s: float) -> Sequence[Envelope[M]]:
        """Process an envelope of the router; return envelopes to send at once."""
        message, current = envelope.message, envelope.session == self._channel.session
        if isinstance(message, Refused):
            self._refused(message, current=current, now_s=now_s)
        elif isinstance(message, Registered):
            if message.registration == self._registration:  # others answer earlier registrations
                self._on(Event.REGISTERED, now_s, envelope=envelope)
        elif current:
            if isinstance(message, Ack):
                self._heartbeat_s = message.heartbeat_s
            self._on(Event.MESSAGE, now_s, envelope=envelope)
        return self._take_outbox()

    def leave(self, deregister: M, now_s: float) -> Sequence[Envelope[M]]:
        """End the session; return the envelope of ``deregister`` if a session was open."""
        if Action.DEREGISTER in self._machine.on(Event.SHUTS_DOWN):
            return [self._channel.send(deregister, now_s)]
        return []

    def _refused(self, message: Refused, *, current: bool, now_s: float) -> None:
        if not message.reregister:
            self._on(Event.REFUSED, now_s, message.reason)
        elif current:
            self._on(Event.MUST_REREGISTER, now_s, message.reason)
            self._register_sent_s = _NEVER  # the router is ready: register at once

    def _register(self, now_s: float) -> None:
        if now_s - self._register_sent_s < REGISTER_INTERVAL_S:
            return
        self._register_sent_s = now_s
        number = self._registration + (self.state is EngineSideState.UNREGISTERED)
        if (message := self._register_message(number)) is None:
            return
        if Action.REGISTER in self._machine.on(Event.HTTP_READY):
            self._registration, self._registration_s = number, now_s
            self._channel = Channel("")
        self._outbox.append(unnumbered(message))

    def _on(
        self, event: Event, now_s: float, reason: str = "", envelope: Envelope[R] | None = None
    ) -> None:
        for action in self._machine.on(event):
            if action is Action.BEGIN_SESSION and envelope is not None:
                self._begin(envelope, now_s)
            elif action is Action.END_SESSION:
                self._channel = Channel("")
                log.warning("the session with the router is over: %s", reason)
                self._end(reason)
            elif action is Action.LOG_REFUSAL and reason != self._logged_refusal:
                self._logged_refusal = reason
                log.error("the router refuses this process: %s", reason)
            elif action is Action.DELIVER and envelope is not None:
                self._deliver(envelope, now_s)

    def _begin(self, envelope: Envelope[R], now_s: float) -> None:
        self._channel = Channel(envelope.session)
        self._received_s, self._reported_s = now_s, _NEVER
        self._handle(envelope.message)

    def _deliver(self, envelope: Envelope[R], now_s: float) -> None:
        self._received_s = now_s
        message, resent = self._channel.receive(envelope, now_s)
        self._outbox += resent
        if message is not None:
            self._handle(message)

    def _take_outbox(self) -> list[Envelope[M]]:
        out, self._outbox = self._outbox, []
        return out


log = logging.getLogger(__name__)

TICK_S = 0.05
#: Events of one report, of a thousand requests that end at once.
MOST_EVENTS = 1024


def has_events(report: EngineMessage) -> bool:
    """Whether a report has events, and so must not be lost."""
    return isinstance(report, Report) and bool(report.events)


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
        self._report = report
        self._handle = handle
        self._end = end
        self._session: RouterSession[EngineMessage, RouterMessage] = RouterSession(
            register, self._report_events, self._take, self._end_session, has_events
        )
        self._events: deque[KvInHbm | RequestOver] = deque()
        #: Chains that are stored since the last report: the oldest are dropped.
        self._stored: deque[StoredChain] = deque(maxlen=MOST_EVENTS)
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
        """Queue a message; unless it only answers a query, report the load as well.

        Events are sent with that report, and stored chains with the next one.
        """
        if isinstance(message, StoredChain):
            self._stored.append(message)
            return
        if isinstance(message, KvInHbm | RequestOver):
            self._events.append(message)
        else:
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

    @property
    def heartbeat_s(self) -> float:
        """The interval of heartbeats, as the router asks for it."""
        return self._session.heartbeat_s

    @property
    def silent_s(self) -> float:
        """For how long the router has sent nothing; for the link's thread."""
        return self._session.silent_s(self._now_s())

    def close(self, deregister: Deregister, limit: TimeLimit) -> None:
        """Deregister, then stop, within the limit; idempotent."""
        if self._closing.is_set():
            return
        self._deregister = deregister
        self._closing.set()
        self._connection.wake()
        if self._thread is not None:
            limit.join([self._thread])

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
        self._send_queued()  # Answers to what was received.
        self._tick(self._threads.now_ns())

    def _report_events(self) -> Report:
        report = self._report()
        events: list[KvInHbm | RequestOver] = []
        while self._events and len(events) < MOST_EVENTS:
            events.append(self._events.popleft())
        self._session.load_changed = bool(self._events)
        stored = [self._stored.popleft() for _ in range(len(self._stored))]
        return msgspec.structs.replace(report, events=tuple(events), stored=tuple(stored))

    def _take(self, message: RouterMessage) -> None:
        if isinstance(message, Registered):
            # Those of a former session: the next router may use the names of its requests again.
            self._events.clear()
            self._stored.clear()
        self._handle(message)

    def _end_session(self, reason: str) -> None:
        self._events.clear()
        self._stored.clear()
        self._end(reason)

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
