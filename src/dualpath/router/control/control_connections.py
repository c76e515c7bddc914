"""Bounds what connections to the control address can make this process hold.

libzmq keeps the parts of a message until the last has come, and bounds the size of one part and
the number of whole messages only.  But the kernel counts the bytes of every connection, and what of
them reached the router is known to the byte: the rest is what libzmq and the kernel hold.  Who
makes that too much is disconnected, upon which libzmq forgets it all.  An honest engine that is cut
off connects again, and its session goes on.
"""

import asyncio
import contextlib
import functools
import logging
import os
import resource
import socket
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from dualpath.router.loop_socket import LoopSocket
from dualpath.router.refusals import ControlRefusal, ControlRefusals

logger = logging.getLogger(__name__)

#: Far above any valid message, such as a registration with all regions of an engine of many GPUs.
LARGEST_FRAME_BYTES = 8 << 20
#: What one connection may have sent that is no whole message yet, or was not taken yet.
MOST_HELD_BYTES = 2 * LARGEST_FRAME_BYTES
#: The same for all connections; those that hold most are cut off first.
MOST_HELD_BY_ALL_BYTES = 64 << 20
MOST_CONNECTIONS = 4096
#: Of this process's files.
_FILES_SHARE = 4
_LOOK_EVERY_S = 0.1
#: Where ``struct tcp_info`` has ``tcpi_bytes_received`` (Linux 4.1).
_RECEIVED_AT, _TCP_INFO_BYTES = 128, 136

_FAILED_HANDSHAKES = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


class ControlConnections:
    """The connections of a socket that is about to be bound; a task watches them until ``close``.

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
        #: By the number of its file: bytes of its frames that were taken.
        self._taken: dict[int, int] = {}
        events = _FAILED_HANDSHAKES | zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED
        # Not `get_monitor_socket`: the context is asyncio's, and so would be the socket.
        address = f"inproc://monitor-{uuid.uuid4().hex}"
        listener.monitor(address, int(events))
        self._monitor: zmq.Socket[bytes] = zmq.Socket(listener.context, zmq.PAIR)
        self._monitor.connect(address)
        self._events = LoopSocket(self._monitor)
        self._tasks = [
            asyncio.create_task(loop(), name="control connections")
            for loop in (self._hear, self._look)
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
            self._hear_all()  # libzmq has said that it came, before any frame of it
        if file in self._taken:
            self._taken[file] += wire_bytes(len(frame), curve=self._curve)

    def held(self) -> dict[int, int]:
        """Return, by the number of its file, the bytes of each connection that were not taken.

        Of these a handshake makes some hundred.
        """
        found = {}
        for file, taken in list(self._taken.items()):
            if (received := _received_bytes(file)) is None:
                del self._taken[file]
            else:
                found[file] = received - taken
        return found

    def look(self) -> None:
        """Cut off who holds too much, and then the largest until all hold little enough."""
        held = self.held()
        total = sum(held.values())
        for file, held_bytes in sorted(held.items(), key=lambda one: -one[1]):
            if held_bytes <= MOST_HELD_BYTES and total <= MOST_HELD_BY_ALL_BYTES:
                return
            total -= held_bytes
            self._cut_off(file, f"has sent {held_bytes} bytes that make no message")

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()

    async def _hear(self) -> None:
        while True:
            self._heard(await self._events.receive(self._next_event))

    def _hear_all(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._heard(self._next_event())

    def _next_event(self) -> Sequence[bytes]:
        return self._monitor.recv_multipart(zmq.NOBLOCK)

    def _heard(self, message: Sequence[bytes]) -> None:
        event = parse_monitor_message(list(message))
        kind, value = event["event"], int(event["value"])
        if kind == zmq.Event.ACCEPTED:
            self._taken[value] = 0
            if len(self._taken) > self._most:
                self._cut_off(value, f"is one more than {self._most}")
        elif kind == zmq.Event.DISCONNECTED:
            self._taken.pop(value, None)
        else:
            self._on_stranger(event["endpoint"].decode())

    def _cut_off(self, file: int, why: str) -> None:
        with self._connection(file) as connection:
            if connection is None:
                self._taken.pop(file, None)
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
        """Give a file's connection, None if the number is no connection's to us any more.

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
        """Of the listener, known once it is bound, as it is when there are connections."""
        return int(self._listener.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _is_ours(self, connection: socket.socket) -> bool:
        try:
            connection.getpeername()
            name = connection.getsockname()
        except OSError:
            return False
        return connection.family in (socket.AF_INET, socket.AF_INET6) and name[1] == self._port


def most_connections() -> int:
    """Return how many connections there may be."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, files // _FILES_SHARE)


def wire_bytes(frame_bytes: int, *, curve: bool) -> int:
    """Return what a frame takes on a connection: ZMTP 3's head, CURVE's command, nonce and box."""
    body = frame_bytes + (33 if curve else 0)
    return body + (2 if body <= 255 else 9)


def _received_bytes(file: int) -> int | None:
    """Return what has come over the connection of a file, None if there is none.

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
        return 0  # A kernel that does not tell.
    (received,) = struct.unpack_from("=Q", info, _RECEIVED_AT)
    return int(received)
