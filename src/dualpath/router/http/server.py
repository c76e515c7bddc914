"""Common parts of light HTTP servers: of a scheduler, an emulated front end or engine."""

import asyncio
import functools
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger
from aiohttp.typedefs import Handler, Middleware

from dualpath.core.addresses import HostPort
from dualpath.core.errors import (
    BadRequestError,
    ConfigError,
    DrainingError,
    DualPathError,
    OverloadedError,
)
from dualpath.node.sockets import listening_socket
from dualpath.router.api_keys import UNAUTHORIZED, ApiKeys, foreign_body
from dualpath.router.connections import Connections, GuardedConnection
from dualpath.router.http.shared_port import SharedPort
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.requests.limits import (
    RETRY_AFTER_S,
    ArrivingBodies,
    BodyRefusedError,
    server_limits,
)
from dualpath.router.token_api.statuses import LATER, api_error, status_of
from dualpath.router.token_api.wire import ApiError

#: How long open connections may take to end after a signal.
SHUTDOWN_GRACE_S = 1.0
#: For metrics: the client is gone.
CLIENT_LEFT = 499
#: How long the rest of a refused body is read, so that the client sees the answer.
LINGERING_S = 1.0
#: How long a client's TLS handshake may take.
HANDSHAKE_S = 10.0
#: Connections that wait to be taken.
BACKLOG = 128

_EXPECTED = "100-continue"
#: What aiohttp raises for bytes that are no request.
_OF_CLIENTS = (HttpProcessingError, web.RequestPayloadError)
_Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving_app(
    app: web.Application,
    host: str,
    port: int,
    connections: Connections | None = None,
    shared: SharedPort | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """Serve an application in the block; yields the port.

    ``connections`` bounds them, by default at half of the process's files.  With ``shared`` others
    of this user that do the same may have the same port.  With ``tls`` it speaks HTTPS.  Raises
    ``ConfigError`` if the address is taken.
    """
    guard = Connections(server_limits()) if connections is None else connections
    if shared is not None:
        app.on_response_prepare.append(functools.partial(_last_if_left, shared))
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_GRACE_S,
        lingering_time=LINGERING_S,
    )
    await runner.setup()
    assert runner.server is not None
    runner.server.request_handler = _outermost(runner.server.request_handler)
    log_no_bad_requests()
    loop, made = asyncio.get_running_loop(), functools.partial(guard.guarded, runner.server)
    try:
        sock = http_listener(host, port, share=shared is not None)
        limit_s = HANDSHAKE_S if tls is not None else None
        listener = await loop.create_server(
            made, sock=sock, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=limit_s
        )
        if shared is not None:
            connect = functools.partial(
                loop.connect_accepted_socket, made, ssl=tls, ssl_handshake_timeout=limit_s
            )
            shared.taken([listener], guard, connect)
        try:
            yield int(listener.sockets[0].getsockname()[1])
        finally:
            listener.close()
    finally:
        await runner.cleanup()


def http_listener(host: str, port: int, *, share: bool = False) -> socket.socket:
    """Return the listening socket of a server; ``share``: others of this user may have the port.

    Raises ``ConfigError`` if the address is taken or is not of this machine.
    """
    try:
        return listening_socket(host, port, BACKLOG, share=share)
    except (OSError, OverflowError) as error:
        # Python adds the address, which is in this message already.
        reason = str(getattr(error, "strerror", error)).partition(" (while attempting")[0]
        raise ConfigError(
            f"cannot listen on {HostPort(host, port)}: {reason}; free it or choose another port"
        ) from error


def _outermost(handle: _Handle) -> _Handle:
    """Return what comes before an application's routes and middlewares."""

    async def handled(request: web.BaseRequest) -> web.StreamResponse:
        # aiohttp's own answer repeats the header, and breaks where that is no UTF-8.
        if request.headers.get("Expect", _EXPECTED).lower() != _EXPECTED:
            return web.Response(status=417, text=f"Expect: {_EXPECTED} is all that is understood")
        transport = request.transport
        guarded = transport.get_protocol() if transport is not None else None
        if not isinstance(guarded, GuardedConnection):
            return await handle(request)  # The connection has gone.
        with guarded.request(lambda: not request.content.is_eof()):
            return await handle(request)

    return handled


async def _last_if_left(
    shared: SharedPort, request: web.Request, response: web.StreamResponse
) -> None:
    """Let no client come again over a connection to a server that has left its port."""
    if shared.left:
        response.headers["Connection"] = "close"
        response.force_close()


def log_no_bad_requests() -> None:
    """Keep tracebacks about clients' bytes that are no HTTP out of aiohttp's log; idempotent."""
    server_logger.addFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    """Filter for aiohttp's log: what is wrong with a client's bytes is no traceback here."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, _OF_CLIENTS)


async def read_body(request: web.Request, bodies: ArrivingBodies) -> bytes:
    """Return a request's body; raises ``BodyRefusedError`` where a limit ends it.

    Raises ``BadRequestError`` for one that is not encoded as its header says.
    """
    pieces: list[bytes] = []
    try:
        with bodies.one() as body:
            while piece := await body.read(request.content.readany, len):
                pieces.append(piece)
    except _OF_CLIENTS as error:
        raise BadRequestError(f"the body cannot be read: {error}; send it as JSON") from error
    return b"".join(pieces)


def body_refused(error: BodyRefusedError) -> web.Response:
    """Return the answer to a body that a limit ended; the rest of it is not waited for."""
    refused = json_answer({"error": ApiError(str(error), error.status)}, error.status)
    refused.force_close()
    return refused


async def until_signal(drain: Callable[[], Awaitable[None]]) -> None:
    """Return at SIGINT, after SIGTERM when ``drain`` has returned, or at a second SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    draining: list[asyncio.Task[None]] = []

    def terminated() -> None:
        if draining:
            stop.set()
            return
        draining.append(asyncio.ensure_future(drain()))
        draining[0].add_done_callback(lambda done: stop.set())

    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, terminated)
    await stop.wait()
    for task in draining:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def api_key_guard(keys: ApiKeys) -> Middleware:
    """Return the middleware that refuses requests without a key, and those of foreign pages.

    A request without a key gets 401 in vLLM's words.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        method, path, headers = request.method, request.path, request.headers
        if not keys.admit(method, path, headers.get("Authorization")):
            return web.Response(status=401, body=UNAUTHORIZED, content_type="application/json")
        foreign = keys.foreign(method, path, lambda name: headers.getall(name, ()))
        if foreign is None:
            return await handler(request)
        refused = web.Response(
            status=foreign.status, body=foreign_body(foreign), content_type="application/json"
        )
        refused.force_close()
        return refused

    return guard


@web.middleware
async def until_client_leaves(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: a connection that is reset in the middle of an answer is no error."""
    try:
        return await handler(request)
    except ConnectionResetError:
        return web.Response(status=CLIENT_LEFT)


def refusal_count(metrics: RouterMetrics) -> Middleware:
    """Return the middleware, to be the outermost: it counts what those inside refuse as well."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:  # No such path or method.
            metrics.answered(error.status, b"")
            raise
        body = response.body if isinstance(response, web.Response) else None
        metrics.answered(response.status, body if isinstance(body, bytes) else b"")
        return response

    return count


def json_answer(value: object, status: int = 200) -> web.Response:
    """Return a value as JSON."""
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )


def error_answer(error: DualPathError) -> web.Response:
    """Return the answer to a request that ended with ``error``."""
    response = json_answer({"error": api_error(error)}, status_of(error))
    if isinstance(error, DrainingError):
        response.force_close()  # The next request goes to the router that follows.
    if response.status in LATER:
        after_s = error.retry_after_s if isinstance(error, OverloadedError) else RETRY_AFTER_S
        response.headers["Retry-After"] = str(after_s)
    return response
