"""The control socket: a ZMQ ROUTER socket, one connection per engine or front end, and its limits.

- ``ControlGuard`` admits connections that have the cluster secret.
- ``LoopSocket`` reads and writes a ZMQ socket from an event loop.
- ``ControlConnections`` bounds the memory that connections can make this process hold.
- ``ZmqControlSocket`` puts the three together, ``SessionLoops`` runs what serves an address.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import resource
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from dualpath.core.addresses import HostPort, tcp_endpoint
from dualpath.core.errors import ConfigError
from dualpath.node.cluster_secret import SECRET_VARIABLE, ClusterSecret, check_control_host
from dualpath.node.sockets import zmq_host
from dualpath.router.refusals import ControlRefusal, ControlRefusals

logger = logging.getLogger(__name__)


class ControlGuard:
    """Guards a socket that is about to be bound; connections without the key go to ``refusals``.

    libzmq asks an authenticator (ZAP) whether a key is admitted; ``ControlConnections`` sees which
    connections ended in their handshake.  A peer without the secret gets no further: none of its
    bytes reach the router's own code.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        socket: "zmq.Socket[bytes]",
        secret: ClusterSecret,
        refusals: ControlRefusals,
    ) -> None:
        self._refusals = refusals
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=secret)
        secret.guard_listener(socket)

    def close(self) -> None:
        """Release the context, which cannot end before."""
        self._authenticator.stop()

    def refused(self, endpoint: str) -> None:
        """A connection has ended in its handshake at ``endpoint``, which is our own address."""
        refused = self._refusals.count(ControlRefusal.SECRET)
        # The peers themselves log that they are refused.
        if refused & (refused - 1) == 0:
            logger.warning(
                "%d control connection(s) at %s refused so far: the peer does not have this "
                "router's cluster secret; give it the same (%s)",
                *(refused, endpoint, SECRET_VARIABLE),
            )


T = TypeVar("T")

#: As integers: combining pyzmq's flags takes longer than libzmq needs for a frame.
AT_ONCE, _AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
#: How long messages are received in a row before other tasks of the loop run.  A frame may have
#: one message or a megabyte of them, so that their number would be no bound.
_IN_A_ROW_S = 0.005


class LoopSocket:
    """Reads and writes ``socket`` in an event loop; one reader, any number of senders.

    ``zmq.asyncio`` makes a future for each frame in either direction and asks libzmq for its state
    several times more: half of what a scheduler spent on a message.  Here an available message is
    received at once, and sending does not wait.  libzmq's file descriptor wakes the loop, and
    signals a change only once: so the loop waits for it only after a receive has found nothing, and
    receives once more after a send, which may have consumed the signal.

    The socket must not be closed before ``close``.

    ``send`` raises ``zmq.ZMQError`` as ``zmq.Socket`` does.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._until_s = 0.0
        self._file = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file, self._changed.set)

    async def receive(self, take: Callable[[], T]) -> T:
        """Return the result of ``take``, once it no longer raises ``zmq.Again``."""
        # Not the loop's time, which uvloop reads once in an iteration.
        if time.monotonic() > self._until_s:
            await asyncio.sleep(0)
            self._until_s = time.monotonic() + _IN_A_ROW_S
        while True:
            try:
                return take()
            except zmq.Again:
                self._changed.clear()
                await self._changed.wait()
                self._until_s = time.monotonic() + _IN_A_ROW_S

    def send(self, frames: Sequence[bytes]) -> None:
        """Pass a message to libzmq; raises ``zmq.Again`` if it accepts none at present."""
        try:
            *first, last = frames
            for frame in first:
                self._socket.send(frame, _AND_MORE)
            self._socket.send(last, AT_ONCE)
        finally:
            self._changed.set()

    def close(self) -> None:
        """Stop watching the descriptor."""
        self._loop.remove_reader(self._file)


#: Far above any honest message, e.g. a registration with all regions of an engine's many devices.
LARGEST_FRAME_BYTES = 8 << 20
#: Bytes that one connection may have sent which are no whole message yet, or not received yet.
MOST_HELD_BYTES = 2 * LARGEST_FRAME_BYTES
#: The same for all connections; those with the most bytes are closed first.
MOST_HELD_BY_ALL_BYTES = 64 << 20
MOST_CONNECTIONS = 4096
#: Of this process's files.
_FILES_SHARE = 4
_LOOK_EVERY_S = 0.1
#: Connections that the kernel is asked about at a time: all of a cluster of 64 engines.
_ASKED_AT_ONCE = 64
#: Where ``struct tcp_info`` has ``tcpi_bytes_received`` (Linux 4.1).
_RECEIVED_AT, _TCP_INFO_BYTES = 128, 136

_FAILED_HANDSHAKES = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


class ControlConnections:
    """The connections of a socket that is about to be bound; a task watches them until ``close``.

    libzmq holds the parts of a message until the last one has come, and bounds only the size of a
    part and the number of whole messages.  But the kernel counts the bytes of every connection, and
    those that reached the router are known: the rest is held by libzmq and the kernel.
    Connections over the limit are closed, upon which libzmq frees it all.  An honest engine then
    connects again, and its session goes on.

    The kernel is asked about ``_ASKED_AT_ONCE`` connections at a time, in turn, and about all of
    them when this process has grown by ``MOST_HELD_BYTES``: what libzmq holds is in its memory.

    ``on_stranger`` is called with the endpoint for a connection that ends in its handshake.
    """

    def __init__(
        self,
        listener: "zmq.Socket[bytes]",
        refusals: ControlRefusals,
        on_stranger: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._curve = bool(listener.curve_server)
        self._refusals = refusals
        self._on_stranger = on_stranger
        self._most = most_connections()
        #: Received bytes of its frames, by the number of its file.
        self._taken: dict[int, int] = {}
        #: Bytes of each connection that were not received, when the kernel was last asked.
        self._held: dict[int, int] = {}
        #: Connections that the kernel has not been asked about in this turn.
        self._unasked: list[int] = []
        self._memory_bytes = resident_bytes()
        events = _FAILED_HANDSHAKES | zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED
        # Not `get_monitor_socket`: the context is asyncio's, and so would be the socket.
        address = f"inproc://monitor-{uuid.uuid4().hex}"
        listener.monitor(address, int(events))
        self._monitor: zmq.Socket[bytes] = zmq.Socket(listener.context, zmq.PAIR)
        self._monitor.connect(address)
        self._events = LoopSocket(self._monitor)
        self._tasks = [
            asyncio.create_task(loop(), name="control connections")
            for loop in (self._watch, self._check_often)
        ]

    async def close(self) -> None:
        """Stop watching; the socket may be closed afterwards."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._events.close()
        self._listener.disable_monitor()
        self._monitor.close(linger=0)

    def taken(self, frame: zmq.Frame) -> None:
        """A frame has reached the router."""
        file = int(frame.get(zmq.SRCFD))
        if file not in self._taken:
            self._read_events()  # libzmq reports the connection before any frame of it
        if file in self._taken:
            self._taken[file] += wire_bytes(len(frame), curve=self._curve)

    def held(self) -> dict[int, int]:
        """Return the bytes of each connection that were not received, by the number of its file.

        Of these a handshake makes some hundred.
        """
        self._ask(list(self._taken))
        return self._held

    def _ask(self, files: Sequence[int]) -> None:
        """Ask the kernel about connections."""
        for file in files:
            received = _received_bytes(file) if file in self._taken else None
            if received is not None:
                self._held[file] = received - self._taken[file]
            else:
                self._remove(file)

    def _remove(self, file: int) -> None:
        """Remove a file that is closed, or is not a connection any more."""
        self._taken.pop(file, None)
        self._held.pop(file, None)

    def check(self) -> None:
        """Close connections over the limit, then the largest until all are below theirs."""
        held = self.held()
        total = sum(held.values())
        for file, held_bytes in sorted(held.items(), key=lambda one: -one[1]):
            if held_bytes <= MOST_HELD_BYTES and total <= MOST_HELD_BY_ALL_BYTES:
                return
            total -= held_bytes
            self._cut_off(file, f"has sent {held_bytes} bytes that make no message")

    def check_some(self) -> None:
        """Check some connections, in turn; check all if these or this process hold too much."""
        memory_bytes = resident_bytes()
        if memory_bytes - self._memory_bytes > MOST_HELD_BYTES:
            self._memory_bytes = memory_bytes
            self.check()
            return
        self._memory_bytes = min(self._memory_bytes, memory_bytes)
        if not self._unasked:
            self._unasked = list(self._taken)
        asked = self._unasked[-_ASKED_AT_ONCE:]
        del self._unasked[-_ASKED_AT_ONCE:]
        self._ask(asked)
        largest = max((self._held.get(file, 0) for file in asked), default=0)
        if largest > MOST_HELD_BYTES or sum(self._held.values()) > MOST_HELD_BY_ALL_BYTES:
            self.check()

    async def _check_often(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.check_some()

    async def _watch(self) -> None:
        while True:
            self._on_event(await self._events.receive(self._next_event))

    def _read_events(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._on_event(self._next_event())

    def _next_event(self) -> Sequence[bytes]:
        return self._monitor.recv_multipart(zmq.NOBLOCK)

    def _on_event(self, message: Sequence[bytes]) -> None:
        event = parse_monitor_message(list(message))
        kind, value = event["event"], int(event["value"])
        if kind == zmq.Event.ACCEPTED:
            self._taken[value] = 0
            if len(self._taken) > self._most:
                self._cut_off(value, f"is one more than {self._most}")
        elif kind == zmq.Event.DISCONNECTED:
            self._remove(value)
        else:
            self._on_stranger(event["endpoint"].decode())

    def _cut_off(self, file: int, why: str) -> None:
        with self._connection(file) as connection:
            if connection is None:
                self._remove(file)
                return
            peer = connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
        refused = self._refusals.count(ControlRefusal.FLOOD)
        if refused & (refused - 1) == 0:
            logger.warning(
                "control connection of %s:%s cut off, it %s (%d so far, not all are logged)",
                *(peer[0], peer[1], why, refused),
            )

    @contextlib.contextmanager
    def _connection(self, file: int) -> Iterator[socket.socket | None]:
        """Yield a file's connection, None if the number is no longer a connection to us.

        libzmq closes files in its own thread, and their numbers go to others: what is looked at is
        a duplicate, which stays what it is.
        """
        connection = None
        with contextlib.suppress(OSError):
            duplicate = os.dup(file)
            try:
                connection = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
        if connection is None:
            yield None
            return
        with connection:
            yield connection if self._is_ours(connection) else None

    @functools.cached_property
    def _port(self) -> int:
        """The listener's port; it is bound before there are connections."""
        return int(self._listener.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _is_ours(self, connection: socket.socket) -> bool:
        try:
            connection.getpeername()
            name = connection.getsockname()
        except OSError:
            return False
        return connection.family in (socket.AF_INET, socket.AF_INET6) and name[1] == self._port


def most_connections() -> int:
    """Return the limit on connections."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, files // _FILES_SHARE)


def resident_bytes() -> int:
    """Return the resident memory of this process, 0 where /proc does not show it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def wire_bytes(frame_bytes: int, *, curve: bool) -> int:
    """Return the bytes of a frame on the wire: ZMTP 3's head, CURVE's command, nonce, box."""
    body = frame_bytes + (33 if curve else 0)
    return body + (2 if body <= 255 else 9)


def _received_bytes(file: int) -> int | None:
    """Return the bytes received over the connection of a file, None if there is none.

    Its number may be another's by now: what is found is to be believed only after ``_connection``.
    """
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=file)
    except OSError:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    finally:
        connection.detach()  # The file is libzmq's.
    if len(info) < _TCP_INFO_BYTES:
        return 0  # A kernel without the counter.
    (received,) = struct.unpack_from("=Q", info, _RECEIVED_AT)
    return int(received)


_LINGER_MS = 200
#: A connection without the secret by then is closed; libzmq would wait for 30 s.
_HANDSHAKE_MS = 5000


class ControlSocket(Protocol):
    """Frames to and from engines; those of one engine stay in order in each direction.

    ``identity`` names a connection; an engine that connects again has another one.
    """

    async def open(
        self, host: str, port: int, secret: ClusterSecret | None, refusals: ControlRefusals
    ) -> str:
        """Return the endpoint that engines connect to (port 0: any free one).

        Connections without the secret are counted in ``refusals``.  Raises ``ConfigError`` if the
        address cannot be bound, or other machines could reach it and there is no secret.
        """
        ...

    async def receive(self) -> tuple[bytes, Sequence[bytes]]:
        """Return the next message's identity and its frames; an honest message has one."""
        ...

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send a message without waiting; it is dropped if the connection is gone."""
        ...

    async def close(self) -> None:
        """Send pending frames, then close."""
        ...


class ZmqControlSocket:
    """The ``ControlSocket`` of a live router."""

    def __init__(self) -> None:
        self._guard: ControlGuard | None = None
        self._connections: ControlConnections | None = None
        self._in_loop: LoopSocket | None = None

    async def open(
        self, host: str, port: int, secret: ClusterSecret | None, refusals: ControlRefusals
    ) -> str:
        """Bind to ``tcp://host:port``."""
        check_control_host(host, secret)
        self._context = zmq.asyncio.Context()
        # The context is asyncio's for guard and watch; this socket is not.
        self._socket: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        # A restarted engine may use its old identity before TCP notices the end of the old one.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_FRAME_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if secret is not None:
            self._guard = ControlGuard(self._context, self._socket, secret, refusals)
        on_stranger = self._guard.refused if self._guard else _ignore_failed_handshake
        self._connections = ControlConnections(self._socket, refusals, on_stranger)
        try:
            self._socket.bind(tcp_endpoint(zmq_host(self._socket, host, listens=True), port))
        except zmq.ZMQError as error:
            await self._close_now()
            self._socket.close(linger=0)
            self._context.destroy(linger=0)
            remedy = "choose another control port or stop what uses it"
            if error.errno != errno.EADDRINUSE:
                remedy = "give {control_host} an address of this machine"
            raise ConfigError(
                f"control address {HostPort(host, port)} cannot be bound: {error}; {remedy}"
            ) from error
        self._in_loop = LoopSocket(self._socket)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> tuple[bytes, Sequence[bytes]]:
        """Return the next message, without a frame if the sender sends none or several.

        Parts are received one by one and dropped, so that a message of a million of them costs no
        million objects here.  libzmq holds them until the last is there: ``ControlConnections``
        bounds how much.
        """
        assert self._in_loop is not None
        return await self._in_loop.receive(self._take)

    def _take(self) -> tuple[bytes, Sequence[bytes]]:
        part = self._socket.recv(AT_ONCE, copy=False)
        identity, frame, parts = part.bytes, b"", 0
        while part.more:
            part = self._socket.recv(copy=False)  # libzmq has all parts, or gives none.
            if self._connections is not None:
                self._connections.taken(part)
            frame, parts = part.bytes, parts + 1
        return identity, (frame,) if parts == 1 else ()

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send with an unlimited queue for a slow engine; dropped unless the socket is open."""
        if self._in_loop is None:
            return
        try:
            self._in_loop.send((identity, frame))
        except zmq.ZMQError:
            logger.exception("control message could not be sent")

    async def close(self) -> None:
        """Close; pending frames are sent for up to ``_LINGER_MS``."""
        in_loop, self._in_loop = self._in_loop, None
        if in_loop is not None:
            in_loop.close()
        await self._close_now()
        self._socket.close(linger=_LINGER_MS)
        self._context.term()

    async def _close_now(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()


def _ignore_failed_handshake(endpoint: str) -> None:
    """Without a secret, a connection that ends in its handshake is no ZMQ; it is not counted."""


#: Delay of an acknowledgement if there is no other message to send.
ACKNOWLEDGE_S = 0.25
#: Checks for silent peers per time-out.
CHECKS_PER_TIMEOUT = 10


class SessionLoops:
    """The loops that serve an address: receive, send, timers; ``handle`` gets each message.

    Neither a message nor a timer that fails ends a loop.
    """

    def __init__(
        self, socket: ControlSocket, handle: Callable[[bytes, Sequence[bytes]], None]
    ) -> None:
        self._socket = socket
        self._handle = handle
        self.tasks: list[asyncio.Task[None]] = []

    async def start(
        self,
        host: str,
        port: int,
        secret: ClusterSecret | None,
        refusals: ControlRefusals,
        timers: Mapping[Callable[[], None], float],
    ) -> str:
        """Bind and run; return the endpoint to connect to.  ``timers`` run at their intervals.

        Raises ``ConfigError`` if the address cannot be bound, or other machines could reach it and
        there is no secret.
        """
        address = await self._socket.open(host, port, secret, refusals)
        loops = [
            self._receive(),
            *(self._repeat(timer, gap_s) for timer, gap_s in timers.items()),
        ]
        self.tasks = [asyncio.create_task(loop, name=f"control at {address}") for loop in loops]
        return address

    def post(self, identity: bytes, frame: bytes) -> None:
        """Send a frame after those before it."""
        self._socket.send(identity, frame)

    async def stop(self) -> None:
        """Stop receiving; close; idempotent, also while it closes."""
        tasks, self.tasks = self.tasks, []
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._socket.close()

    async def _receive(self) -> None:
        while True:
            identity, frames = await self._socket.receive()
            try:
                self._handle(identity, frames)
            except Exception:
                # One message must never end the scheduler.
                logger.exception("control message from %s failed", identity.hex())

    async def _repeat(self, timer: Callable[[], None], gap_s: float) -> None:
        while True:
            await asyncio.sleep(gap_s)
            try:
                timer()
            except Exception:
                # Without this timer no silent peer would be found, and no message acknowledged.
                logger.exception("a timer of sessions failed")


class OwnStalls:
    """How long the event loop itself did not run, from checks that are ``gap_s`` apart.

    Peers were not silent then: their messages of that time are still unread.
    """

    def __init__(self, now_s: float, gap_s: float) -> None:
        self._checked_s = now_s
        self._gap_s = gap_s

    def late_s(self, now_s: float) -> float:
        """Return by how much this check is late; 0 if by less than the interval."""
        late_s = now_s - self._checked_s - self._gap_s
        self._checked_s = now_s
        return late_s if late_s > self._gap_s else 0.0
