"""A server leaves a port that others serve as well: no connection is refused or broken."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from tests.guard import GUARD_S

from dualpath.router.connections import ConnectionLimits, Connections
from dualpath.router.http.server import serving_app
from dualpath.router.http.shared_port import SharedPort

REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


class Service:
    """Has nothing under way but what its clients still send."""

    async def drain(self, clients_gone: Callable[[], Awaitable[None]] | None = None) -> None:
        assert clients_gone is not None
        await clients_gone()


@contextlib.asynccontextmanager
async def server(name: str, shared: SharedPort, port: int = 0) -> AsyncIterator[int]:
    async def named(request: web.Request) -> web.Response:
        return web.Response(text=name)

    app = web.Application()
    app.router.add_get("/", named)
    connections = Connections(ConnectionLimits())
    async with serving_app(app, "127.0.0.1", port, connections, shared) as at:
        yield at


def connected(port: int) -> socket.socket:
    """Connect without a turn of the event loop: the kernel alone has the connection."""
    return socket.create_connection(("127.0.0.1", port), timeout=GUARD_S)


def whole_answer(client: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    return b"".join(iter(lambda: client.recv(4096), b""))


async def test_what_is_connected_and_not_taken_is_served_and_then_closed() -> None:
    shared = SharedPort()
    async with server("one", shared) as port, asyncio.timeout(GUARD_S):
        with connected(port) as client:
            client.sendall(REQUEST)
            leaving = asyncio.create_task(shared.leave(Service()))
            answer = await asyncio.to_thread(whole_answer, client)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"\r\nConnection: close\r\n" in answer
        await leaving
        with pytest.raises(ConnectionRefusedError):
            connected(port)


async def test_a_client_with_a_connection_is_served_once_more() -> None:
    shared = SharedPort()
    async with server("one", shared) as port, asyncio.timeout(GUARD_S):
        with connected(port) as client:
            client.sendall(REQUEST)
            first = await asyncio.to_thread(client.recv, 4096)
            assert b"Connection: close" not in first
            leaving = asyncio.create_task(shared.leave(Service()))
            await asyncio.sleep(0)
            client.sendall(REQUEST)
            assert b"\r\nConnection: close\r\n" in await asyncio.to_thread(whole_answer, client)
        await leaving


async def test_new_connections_go_to_those_that_stay() -> None:
    leaves, stays = SharedPort(), SharedPort()
    async with server("one", leaves) as port, server("other", stays, port):
        await leaves.leave(Service())
        for _ in range(16):
            with connected(port) as client:
                client.sendall(REQUEST)
                assert (await asyncio.to_thread(client.recv, 4096)).endswith(b"other")
