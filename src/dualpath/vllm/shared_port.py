"""The place of vLLM's server at a port that others share (``router.http.shared_port``)."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import uvicorn

from dualpath.router.asgi import App, Message, Receive, Send
from dualpath.router.connections import Connections
from dualpath.router.http.shared_port import SharedPort

Place = tuple[Sequence[asyncio.Server], Connections, Callable[[socket.socket], Awaitable[object]]]


def place_of(server: uvicorn.Server, connections: Connections) -> Place:
    """Return what ``SharedPort.taken`` has to know of a server that listens."""
    config, loop = server.config, asyncio.get_running_loop()

    def made() -> asyncio.Protocol:
        # As uvicorn's own ``startup`` does for connections that its servers take.
        return config.http_protocol_class(  # type: ignore[call-arg,return-value,unused-ignore]
            config=config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
            _loop=loop,
        )

    async def connected(connection: socket.socket) -> object:
        return await loop.connect_accepted_socket(made, connection, ssl=config.ssl)

    return server.servers, connections, connected


class LastAnswers:
    """ASGI middleware: a server that has left its port lets each client come once more."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass the call on; the answer says that the connection is closed, if so."""
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
