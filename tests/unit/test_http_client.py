"""Connections of HTTP clients: when a request is sent again, and which certificates are trusted."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from tests.guard import GUARD_S

from dualpath.core.errors import ConfigError
from dualpath.node.certificates import trusting
from dualpath.node.http_client import client_session, sent
from dualpath.node.sockets import IDLE_CONNECTION_S

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """A server whose connections the test closes, between two steps of the event loop."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/"
        self.loop = asyncio.get_running_loop()

    async def accept(self) -> socket.socket:
        connection, _ = await self.loop.sock_accept(self.listener)
        return connection

    async def read(self, connection: socket.socket) -> bytes:
        return await self.loop.sock_recv(connection, 1 << 16)

    async def answer(self, connection: socket.socket) -> None:
        assert await self.read(connection)
        await self.loop.sock_sendall(connection, ANSWER)


@contextlib.asynccontextmanager
async def client(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    with server.listener:
        async with (
            asyncio.timeout(GUARD_S),
            client_session(timeout=aiohttp.ClientTimeout(total=None)) as session,
        ):
            yield session


async def post(session: aiohttp.ClientSession, server: Server) -> bytes:
    async with sent(session, "POST", server.url, data=b"{}") as response:
        return await response.read()


async def test_a_post_on_a_connection_that_the_server_has_just_closed_is_sent_again():
    server = Server()
    async with client(server) as session:
        asked = asyncio.create_task(post(session, server))
        first = await server.accept()
        await server.answer(first)
        assert await asked == b"ok"

        first.close()  # The client's event loop has not seen it yet.
        asked = asyncio.create_task(post(session, server))
        second = await server.accept()
        await server.answer(second)
        assert await asked == b"ok"
        second.close()


async def test_a_post_that_the_server_may_have_begun_is_not_sent_again():
    server = Server()
    async with client(server) as session:
        asked = asyncio.create_task(post(session, server))
        first = await server.accept()
        await server.answer(first)
        assert await asked == b"ok"

        asked = asyncio.create_task(post(session, server))
        assert await server.read(first)
        first.close()
        with pytest.raises(aiohttp.ClientError):
            await asked
        with pytest.raises(BlockingIOError):
            server.listener.accept()


async def test_idle_connections_end_before_vllms_server_ends_them():
    envs = pytest.importorskip("vllm.envs")
    async with client_session(timeout=aiohttp.ClientTimeout()) as session:
        connector = session.connector
        assert connector is not None
        assert connector._keepalive_timeout == IDLE_CONNECTION_S
    assert IDLE_CONNECTION_S < envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_without_certificates_is_refused(content: str | None, tmp_path):
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"ca_file is .*give a PEM file"):
        trusting(str(file))
