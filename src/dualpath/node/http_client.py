"""HTTP sessions as all clients of this project open them: idle time, resends, trusted certificates.

**Idle connections.**  A server closes an idle connection after some time (vLLM's after
``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``, 5 s by default).  A request that is sent at that moment is lost.
So this side closes it sooner, after ``IDLE_CONNECTION_S``.

**Resends.**  A server may still close a connection as a request is on its way: it has a shorter
limit, or it restarts.  aiohttp repeats idempotent methods only.  ``sent`` also repeats a POST whose
connection ended before the other machine's kernel had acknowledged a byte of it: that server cannot
have begun the request.  After an acknowledgement the request is not repeated, because the server
may be computing it.
"""

import asyncio
import functools
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from dualpath.node.sockets import IDLE_CONNECTION_S

if TYPE_CHECKING:
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

#: Resends of a request that no server has begun; each one uses another connection.
_RESENDS = 3
#: ``tcpi_bytes_acked`` in Linux's ``struct tcp_info``: bytes sent here that the other end has
#: acknowledged.
_ACKED_AT, _TCP_INFO_BYTES = 120, 128
_NOT_BEGUN = "dualpath_not_begun"


class _Handler(ResponseHandler):
    """Marks the error of a connection if the other end has not received its request."""

    #: Local address and acknowledged bytes when the current request began; None if unknown.
    at_request: tuple[object, int] | None = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Mark the error that the request raises."""
        now = _acknowledged(self.transport)
        super().connection_lost(exc)
        if now is not None and now == self.at_request and (error := self.exception()) is not None:
            setattr(error, _NOT_BEGUN, True)


class _Connector(aiohttp.TCPConnector):
    def __init__(self, tls: ssl.SSLContext | bool) -> None:
        # Without a limit: requests queue at the server, not at the client.
        super().__init__(limit=0, keepalive_timeout=IDLE_CONNECTION_S, ssl=tls)
        self._factory = functools.partial(  # type: ignore[assignment]
            _Handler, loop=self._loop
        )

    async def connect(
        self, req: "ClientRequest", traces: "list[Trace]", timeout: aiohttp.ClientTimeout
    ) -> "Connection":
        """Return a connection of the pool or a new one."""
        connection = await super().connect(req, traces, timeout)
        if isinstance(connection.protocol, _Handler):
            connection.protocol.at_request = _acknowledged(connection.transport)
        return connection


def client_session(
    *,
    timeout: aiohttp.ClientTimeout,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    auto_decompress: bool = True,
    line_bytes: int = 8190,
) -> aiohttp.ClientSession:
    """Return a session of the running event loop, to be closed by its owner.

    ``tls`` checks servers' certificates; None: they must be of an authority of the system's.
    A line of an answer's head has at most ``line_bytes``, aiohttp's default.
    """
    return aiohttp.ClientSession(
        connector=_Connector(True if tls is None else tls),
        timeout=timeout,
        headers=headers,
        auto_decompress=auto_decompress,
        max_line_size=line_bytes,
        max_field_size=line_bytes,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


@asynccontextmanager
async def sent(
    session: aiohttp.ClientSession,
    method: str,
    url: str | URL,
    **more: Any,  # noqa: ANN401 - aiohttp's
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request, again if no server can have begun it; the answer's head has arrived.

    ``more`` are arguments of ``ClientSession.request``; ``data`` must be bytes.
    """
    for resends_left in range(_RESENDS, -1, -1):
        try:
            response = await session.request(method, url, **more)
            break
        except aiohttp.ClientError as error:
            if not (resends_left and getattr(error, _NOT_BEGUN, False)):
                raise
    async with response:
        yield response


def _acknowledged(transport: "asyncio.BaseTransport | None") -> tuple[object, int] | None:
    """Return local address and acknowledged bytes of a connection, None if they are unknown.

    The address tells connections apart: event loops may reuse the number of a closed file.
    """
    sock: Any = transport.get_extra_info("socket") if transport is not None else None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (acknowledged,) = struct.unpack_from("=Q", info, _ACKED_AT)
        return sock.getsockname(), int(acknowledged)
    except (OSError, AttributeError, struct.error):  # Not Linux, or closed.
        return None
