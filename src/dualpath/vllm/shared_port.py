"""Connects vLLM's server to a port shared by several processes (``router.http.shared_port``)."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import uvicorn

from dualpath.router.asgi import App, Message, Receive, Send
from dualpath.router.connections import Connections
from dualpath.router.http.shared_port import SharedPort

ServerParts = tuple[
    Sequence[asyncio.Server], Connections, Callable[[socket.socket], Awaitable[object]]
]


def server_parts(server: uvicorn.Server, connections: Connections) -> ServerParts:
    """Return the arguments of ``SharedPort.taken`` for a listening server."""
    config, loop = server.config, asyncio.get_running_loop()

    def make_protocol() -> asyncio.Protocol:
        # The same call as in uvicorn's ``startup`` for connections that it accepts itself.
        return config.http_protocol_class(  # type: ignore[call-arg,return-value,unused-ignore]
            config=config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
            _loop=loop,
        )

    async def connected(connection: socket.socket) -> object:
        return await loop.connect_accepted_socket(make_protocol, connection, ssl=config.ssl)

    return server.servers, connections, connected


class ConnectionCloser:
    """ASGI middleware: once a server has left its port, it closes connections after a response."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forward the call; add ``Connection: close`` if the server has left its port."""
        shared: SharedPort | None = None
        if scope["type"] == "http":
            shared = getattr(scope["app"].state, "dualpath_shared_port", None)
        if shared is None or not shared.left:
            await self._app(scope, receive, send)
            return

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_last)
