"""What reaches a server before there is a request: bounded in number, in time and in bytes."""

import asyncio
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.emulated_cluster import Cluster, cluster
from tests.guard import GUARD_S

from dualpath.core.modes import Mode
from dualpath.router import connections as guard
from dualpath.router.connections import (
    CROWDED_S,
    LARGEST_HEAD_BYTES,
    ConnectionLimits,
    Connections,
    GuardedConnection,
    Progress,
)
from dualpath.router.requests import limits
from dualpath.router.requests.limits import ArrivingBodies, ArrivingBody, BodyRefusedError
from dualpath.router.settings import RouterSettings

PROMPT = list(range(1, 20))


# ---------------------------------------------------------------------- connections


class Wire(asyncio.Transport):
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


def connect(connections: Connections) -> tuple[GuardedConnection, Wire]:
    made = connections.guarded(asyncio.Protocol)
    assert isinstance(made, GuardedConnection)
    made.connection_made(wire := Wire())
    return made, wire


@pytest.mark.virtual_time
async def test_a_connection_that_asks_nothing_is_closed_and_one_that_works_is_not():
    connections = Connections(ConnectionLimits(quiet_s=30.0))
    _, silent = connect(connections)
    half, half_head = connect(connections)
    slow, answering = connect(connections)
    busy, keeps_alive = connect(connections)
    with slow.request():
        for _ in range(10):
            await asyncio.sleep(10.0)
            half.data_received(b"X")  # A byte now and then is no request.
            with busy.request():
                busy.data_received(b"GET / HTTP/1.1\r\n\r\n")
        assert silent.is_closing()
        assert half_head.is_closing()
        assert not answering.is_closing()
    assert not keeps_alive.is_closing()
    await asyncio.sleep(40.0)
    assert answering.is_closing()
    assert keeps_alive.is_closing()


@pytest.mark.virtual_time
async def test_between_two_requests_a_connection_has_the_servers_own_limit_if_that_is_longer():
    """An agent's tool may run for longer than a stranger may be silent."""
    connections = Connections(ConnectionLimits(quiet_s=30.0, idle_s=75.0))
    _, stranger = connect(connections)
    agent, idle = connect(connections)
    with agent.request():
        pass
    await asyncio.sleep(60.0)
    assert (stranger.is_closing(), idle.is_closing()) == (True, False)
    await asyncio.sleep(30.0)
    assert idle.is_closing()


async def test_one_connection_too_many_gets_an_error():
    connections = Connections(ConnectionLimits(most=2))
    first, _ = connect(connections)
    connect(connections)
    refused, wire = connect(connections)
    assert wire.is_closing()
    head, _, body = wire.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"Retry-After: 1" in head
    assert "2 connections are open" in msgspec.json.decode(body)["error"]["message"]
    refused.data_received(b"GET / HTTP/1.1\r\n\r\n")
    refused.connection_lost(None)
    assert len(connections) == 2
    first.connection_lost(None)
    _, wire = connect(connections)
    assert not wire.is_closing()


@pytest.mark.virtual_time
async def test_half_heads_of_a_full_server_make_room_for_others():
    connections = Connections(ConnectionLimits(most=4, quiet_s=30.0))
    busy, working = connect(connections)
    idle, keeps_alive = connect(connections)
    with idle.request():
        pass
    with busy.request():
        half_heads = [connect(connections)[1] for _ in range(2)]
        _, refused = connect(connections)
        assert refused.written.startswith(b"HTTP/1.1 429 ")  # they may still send their requests
        await asyncio.sleep(CROWDED_S + 0.1)
        for half_head in half_heads:
            _, admitted = connect(connections)
            assert half_head.is_closing()
            assert admitted.written == b""
        assert not keeps_alive.is_closing()
        await asyncio.sleep(CROWDED_S + 0.1)
        for _ in range(3):
            connect(connections)
        assert keeps_alive.is_closing()
        assert not working.is_closing()
        _, refused = connect(connections)
        assert refused.written.startswith(b"HTTP/1.1 429 ")
        assert len(connections) == 4


@pytest.mark.virtual_time
async def test_half_bodies_of_a_full_server_make_room_after_half_heads():
    connections = Connections(ConnectionLimits(most=3))
    (half, half_body), (whole, working) = connect(connections), connect(connections)
    with half.request(lambda: True), whole.request(lambda: False):
        _, half_head = connect(connections)
        await asyncio.sleep(CROWDED_S + 0.1)
        for closed in (half_head, half_body):
            _, admitted = connect(connections)
            assert closed.is_closing()
            assert admitted.written == b""
        assert not working.is_closing()


class Server(asyncio.Protocol):
    """A protocol that knows of a request as soon as its head is there."""

    progress = Progress(None, under_way=False)


async def test_a_head_without_end_is_cut_off():
    server = Server()
    connections = Connections(ConnectionLimits())

    def connected() -> tuple[asyncio.Protocol, Wire]:
        made = connections.guarded(lambda: server, lambda inner: server.progress)
        made.connection_made(wire := Wire())
        return made, wire

    endless, wire = connected()
    endless.data_received(b"x" * LARGEST_HEAD_BYTES)
    assert not wire.is_closing()
    endless.data_received(b"x")
    assert wire.is_closing()
    assert wire.written.startswith(b"HTTP/1.1 431 ")
    # A body belongs to its request, and counts nothing here.
    posting, wire = connected()
    server.progress = Progress("request", under_way=True)
    for _ in range(4):
        posting.data_received(b"x" * (1 << 24))
    server.progress = Progress("request", under_way=False)
    posting.data_received(b"x")
    posting.data_received(b"x" * LARGEST_HEAD_BYTES)
    assert not wire.is_closing()
    posting.data_received(b"x")
    assert wire.is_closing()
    assert wire.written == b""


async def test_a_server_that_takes_its_time_with_a_request_still_gets_its_body():
    """aiohttp begins a request some turns of the loop after its head is there."""
    early, wire = connect(Connections(ConnectionLimits()))
    early.data_received(b"x" * (1 << 24))
    assert not wire.closed


# ---------------------------------------------------------------------- bodies


async def piece(body: ArrivingBody, count: int) -> int:
    async def arrives() -> int:
        return count

    return await body.read(arrives, int)


async def test_unfinished_bodies_have_one_bound_together():
    bodies = ArrivingBodies(RouterSettings(max_body_bytes=100, max_arriving_bytes=150))
    with bodies.one() as first, bodies.one() as second:
        await piece(first, 100)
        await piece(second, 50)
        with bodies.one() as third, pytest.raises(BodyRefusedError, match="arriving") as refused:
            await piece(third, 1)
        assert refused.value.status == 429
        first.end()  # whole: from here on it is a request among those that are counted
        await piece(second, 50)
        with pytest.raises(BodyRefusedError, match="more than 100 bytes") as refused:
            await piece(second, 1)
        assert refused.value.status == 413
    assert bodies.held_bytes == 0


@pytest.mark.virtual_time
async def test_a_body_that_trickles_ends_at_its_time():
    bodies = ArrivingBodies(RouterSettings(body_timeout_s=60.0))

    async def trickle() -> int:
        await asyncio.sleep(7.0)
        return 1

    with bodies.one() as body:
        for _ in range(8):
            await body.read(trickle, int)
        with pytest.raises(BodyRefusedError, match="within 60 s") as late:
            await body.read(trickle, int)
    assert late.value.status == 408
    assert bodies.held_bytes == 0


# ---------------------------------------------------------------------- the light router


async def sent(url: str, request: bytes) -> bytes:
    """Send bytes; return what comes back until the server closes the connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(GUARD_S):
            return await reader.read()
    finally:
        writer.close()


def post(*headers: bytes, path: bytes = b"/v1/completions", body: bytes = b"12345") -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" % path
    head += b"Content-Type: application/json\r\n"
    more = b"".join(header + b"\r\n" for header in headers)
    return head + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def served_as_before(made: Cluster) -> None:
    assert (await made.post(PROMPT, 1))[0] == 200


async def halves(url: str, half: bytes, count: int) -> list[asyncio.StreamWriter]:
    """Open connections that send half a request, as a stranger without a key can."""
    host, _, port = url.removeprefix("http://").partition(":")
    opened = []
    for _ in range(count):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(half)
        opened.append(writer)
    return opened


async def test_an_emulated_engine_serves_among_thousands_of_half_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(guard, "CROWDED_S", 0.0)
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        opened = []
        post = b"POST /inference/v1/generate HTTP/1.1\r\nContent-Type: application/json\r\n"
        half_body = post + b"Host: x\r\nContent-Length: 1000000\r\n\r\n{"
        for role in ("decode-0", "prefill-0"):
            for half in (b"GET / HTTP/1.1\r\nHost: x\r\nX: ", half_body):
                opened += await halves(made.engines[role].api_url, half, 1000)
                for _ in range(3):
                    await served_as_before(made)
        for writer in opened:
            writer.close()
        await served_as_before(made)


def test_a_server_leaves_half_of_its_files_to_its_process(monkeypatch):
    for files, most in ((1024, 512), (1 << 20, 16384), (resource.RLIM_INFINITY, 16384)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert limits.server_limits() == ConnectionLimits(most=most)


async def test_a_body_may_be_large_and_come_fast(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        body = msgspec.json.encode({"prompt": PROMPT, "max_tokens": 1}) + b" " * (24 << 20)
        assert (await sent(made.endpoint, post(body=body))).startswith(b"HTTP/1.1 200 ")


async def test_connections_of_a_light_router_end_by_themselves(tmp_path: Path) -> None:
    settings = RouterSettings(mode=Mode.DUALPATH, quiet_timeout_s=0.2, body_timeout_s=0.2)
    async with cluster(tmp_path, Mode.DUALPATH, router=settings) as made:
        assert await sent(made.endpoint, b"") == b""
        assert await sent(made.endpoint, b"GET /health HT") == b""
        late = post(body=b"1")[:-1]
        assert (await sent(made.endpoint, late)).startswith(b"HTTP/1.1 408 ")
        await served_as_before(made)


async def test_a_light_router_refuses_connections_beyond_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "CROWDED_S", 10 * GUARD_S)  # both connections are kept
    settings = RouterSettings(mode=Mode.DUALPATH, max_connections=2)
    async with cluster(tmp_path, Mode.DUALPATH, router=settings) as made:
        host, _, port = made.endpoint.removeprefix("http://").partition(":")
        _, taken = await asyncio.open_connection(host, int(port))
        await served_as_before(made)  # its client's connection is the second
        assert (await sent(made.endpoint, b"")).startswith(b"HTTP/1.1 429 ")
        taken.close()
        await served_as_before(made)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Content-Encoding: gzip", 400),
        (b"Content-Encoding: deflate", 400),
        (b"Content-Encoding: br", 400),
        (b"Content-Encoding: no-such", 400),
        (b"Expect: \xff\xfe", 417),
        (b"Expect: a miracle", 417),
        (b"Transfer-Encoding: gzip", 400),
        (b"Content-Type: \xff", 400),
        (b"traceparent: \xff", 400),
        (b"Host: another", 400),
    ],
)
async def test_odd_headers_get_a_4xx_and_leave_no_traceback(header, status, tmp_path, caplog):
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        engine = made.engines["decode-0"].api_url
        for url, path in (
            (made.endpoint, b"/v1/completions"),
            (engine, b"/inference/v1/generate"),
            (made.endpoint, b"/no-such-path"),
        ):
            answer = await sent(url, post(header, path=path))
            got = int(answer.split()[1])
            assert got == status or (path == b"/no-such-path" and 400 <= got < 500), answer
            assert b"Traceback" not in answer
        await served_as_before(made)
    assert not [record for record in caplog.records if record.exc_info]
