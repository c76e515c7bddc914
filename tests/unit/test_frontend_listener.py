"""The router's endpoint sends every token at once, on whatever event loop it is served."""

import asyncio
import socket

import pytest

pytest.importorskip("vllm")

from dualpath.vllm.engine_config import bind_listen_socket, parse_front_end_arguments
from dualpath.vllm.front_end_settings import FrontEndSettings


async def test_no_token_waits_for_the_ack_of_the_previous_one() -> None:
    listener = bind_listen_socket(parse_front_end_arguments(FrontEndSettings("m", port=0)))
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda _, w: accepted.set_result(w), sock=listener)
    async with server:
        _, client = await asyncio.open_connection(*listener.getsockname())
        writer = await accepted
        connection: socket.socket = writer.get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for end in (writer, client):
            end.close()
