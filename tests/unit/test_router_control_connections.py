"""What connections to the control address may make the router hold, over real sockets."""

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio
from tests.guard import GUARD_S

from dualpath.node.cluster_secret import ClusterSecret
from dualpath.router.refusals import ControlRefusal, ControlRefusals
from dualpath.router.scheduler import control_socket as control_connections
from dualpath.router.scheduler.control_socket import (
    LARGEST_FRAME_BYTES,
    MOST_HELD_BY_ALL_BYTES,
    MOST_HELD_BYTES,
    ControlConnections,
    LoopSocket,
    ZmqControlSocket,
)

SECRET = ClusterSecret("s" * 32, "test")
#: A registration and a READY of ZMTP 3.0 without security, as a DEALER says them.
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY_BODY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
READY = b"\x04" + bytes([len(READY_BODY)]) + READY_BODY
THEIR_READY_BYTES = 2 + 41
MORE = b"\x01\x00"


class Control:
    """A control socket, the connections to it, and those that it refuses."""

    def __init__(self, secret: ClusterSecret | None) -> None:
        self.socket = ZmqControlSocket()
        self.refusals = ControlRefusals()
        self.context = zmq.asyncio.Context()
        self._secret = secret

    async def open(self) -> None:
        self.address = await self.socket.open("127.0.0.1", 0, self._secret, self.refusals)
        self.port = int(self.address.rpartition(":")[2])

    @property
    def connections(self) -> ControlConnections:
        assert self.socket._connections is not None
        return self.socket._connections

    def engine(self) -> zmq.asyncio.Socket:
        """Connect as an engine does."""
        dealer = self.context.socket(zmq.DEALER)
        if self._secret is not None:
            self._secret.guard_connection(dealer)
        dealer.connect(self.address)
        return dealer

    @property
    def cut_off(self) -> int:
        return self.refusals.totals()[ControlRefusal.FLOOD]


@contextlib.asynccontextmanager
async def control(secret: ClusterSecret | None = None) -> AsyncIterator[Control]:
    made = Control(secret)
    await made.open()
    try:
        async with asyncio.timeout(GUARD_S):
            yield made
    finally:
        made.context.destroy(linger=0)
        await made.socket.close()


async def stranger(made: Control, *frames: bytes) -> asyncio.StreamWriter:
    """Connect without libzmq and say some bytes; after a READY, wait for the other end's."""
    reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
    for some in frames:
        writer.write(some)
    if READY in frames:
        await reader.readexactly(len(ZMTP_GREETING) + THEIR_READY_BYTES)
    return writer


async def sends_until_cut_off(made: Control, writer: asyncio.StreamWriter, piece: bytes) -> None:
    """The kernel may let a sender wait for long after the other end has exited."""
    while not made.cut_off:
        if writer.transport.get_write_buffer_size() < len(piece):
            writer.write(piece)
        await asyncio.sleep(0)
    writer.transport.abort()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "secret"])
async def test_what_was_taken_is_known_to_the_byte(secret: ClusterSecret | None) -> None:
    async with control(secret) as made:
        engine = made.engine()
        await engine.send(b"first")
        await made.socket.receive()
        ((_, handshake_bytes),) = made.connections.held().items()
        assert handshake_bytes < 1000
        for size in (0, 1, 221, 222, 223, 255, 256, 70_000, 2_000_000):
            await engine.send_multipart([b"x" * size] * 3)
            await engine.send(b"y" * size)
            await made.socket.receive()
            await made.socket.receive()
            assert list(made.connections.held().values()) == [handshake_bytes]
        made.connections.check()
        assert made.cut_off == 0


async def test_a_message_of_endless_parts_is_cut_off_and_engines_go_on() -> None:
    async with control() as made:
        engine = made.engine()
        await engine.send(b"before")
        await made.socket.receive()
        flood = await stranger(made, ZMTP_GREETING, READY)
        await sends_until_cut_off(made, flood, MORE * 100_000)
        await engine.send(b"after")
        assert (await made.socket.receive())[1] == (b"after",)
        assert made.cut_off == 1
        async with asyncio.timeout(GUARD_S):  # libzmq closes the file in a thread of its own.
            while len(made.connections.held()) > 1:
                await asyncio.sleep(0)


async def test_many_connections_together_hold_no_more_than_all_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is below what one may hold, and none has shown anything of itself."""
    monkeypatch.setattr(control_connections, "MOST_HELD_BY_ALL_BYTES", 1 << 20)
    long_frame = ZMTP_GREETING + b"\x06" + (LARGEST_FRAME_BYTES - 1).to_bytes(8, "big")
    async with control() as made:
        floods = [await stranger(made, long_frame, bytes(300_000)) for _ in range(6)]
        while made.cut_off < 3:
            await asyncio.sleep(0)
        while len(made.connections.held()) > 3:
            await asyncio.sleep(0)
        assert sum(made.connections.held().values()) <= 1 << 20
        for flood in floods:
            flood.close()


async def test_one_connection_more_than_there_may_be_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_connections, "MOST_CONNECTIONS", 2)
    async with control() as made:
        floods = [await stranger(made) for _ in range(3)]
        while made.cut_off < 1:
            await asyncio.sleep(0)
        floods[0].close()
        while len(made.connections.held()) > 1:
            await asyncio.sleep(0)
        engine = made.engine()
        await engine.send(b"fits again")
        assert (await made.socket.receive())[1] == (b"fits again",)
        for flood in floods[1:]:
            flood.close()


async def test_a_file_that_is_no_control_connection_any_more_is_left_alone() -> None:
    """libzmq closes files in its own thread, and their numbers go to others."""
    async with control() as made:
        ours, theirs = socket.socketpair()
        with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
            other = socket.create_connection(listener.getsockname())
            with other, listener.accept()[0] as accepted:
                for file in (ours.fileno(), accepted.fileno(), 1 << 20):
                    made.connections._taken[file] = -(1 << 30)
                made.connections.check()
                assert made.connections.held() == {}
                accepted.send(b"lives")
                assert other.recv(10) == b"lives"
                ours.send(b"lives")
                assert theirs.recv(10) == b"lives"
        assert made.cut_off == 0


def test_one_connection_may_hold_a_frame_and_all_more_than_one() -> None:
    assert LARGEST_FRAME_BYTES < MOST_HELD_BYTES < MOST_HELD_BY_ALL_BYTES


async def test_a_flood_of_messages_leaves_the_loop_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a message takes to handle, here 2 ms: others run after 5 ms."""
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) * 0.002)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    reader = LoopSocket(dealer)
    taken = 0
    at_turns: list[int] = []

    async def receive() -> None:
        nonlocal taken
        for _ in range(30):
            await reader.receive(lambda: b"")
            taken += 1

    receiving = asyncio.create_task(receive())
    while not receiving.done():
        at_turns.append(taken)
        await asyncio.sleep(0)
    reader.close()
    dealer.close()
    context.destroy()
    in_a_row = [later - before for before, later in itertools.pairwise(at_turns)]
    assert 1 <= max(in_a_row) <= 3
