"""What the front door's and the engines' HTTP servers have in common; neither is vLLM's."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from dualpath.core.errors import ConfigError, DualPathError
from dualpath.router.api_keys import UNAUTHORIZED, ApiKeys
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.requests.limits import RETRY_AFTER_S
from dualpath.router.token_api.statuses import LATER, api_error, status_of

#: How long open connections may take to end after a signal.
SHUTDOWN_GRACE_S = 1.0
#: For metrics: nobody is there to read it.
CLIENT_LEFT = 499


@asynccontextmanager
async def serving_app(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Serve an application in the block; yields the port.

    Raises ``ConfigError`` if the address is taken.
    """
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_GRACE_S
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {getattr(error, 'strerror', error)}; free it or "
                "choose another port"
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


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
    """Return the middleware that answers 401, in vLLM's words, to requests without a key."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if keys.admit(request.method, request.path, request.headers.get("Authorization")):
            return await handler(request)
        return web.Response(status=401, body=UNAUTHORIZED, content_type="application/json")

    return guard


@web.middleware
async def until_client_leaves(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: a connection that is reset in the middle of an answer is nobody's defect."""
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
    if response.status in LATER:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
