"""The router's HTTP application: vLLM's OpenAI routes and a few of dualpath's own.

    GET /dualpath/v1/status   engines, queues and recent decisions
    GET /dashboard            the live page; its data is at /dualpath/v1/dashboard
    GET /health               200 while requests can be served: a prefill and a decode engine
                              are live and the router is not draining; otherwise 503 and the reason
    GET /metrics              vLLM's request metrics and the router's own
    POST, DELETE /dualpath/v1/engines/ENGINE/pause   stop or resume dispatching to an engine
    POST, DELETE /dualpath/v1/drain   front ends of several schedulers use the others, or all again
    POST, DELETE /dualpath/v1/sessions/SESSION       send hints for an agent's session, or end it

Unknown JSON fields of a request are ignored with a warning, as in vLLM, because OpenAI clients
often send extensions.
"""

import argparse
import asyncio
import socket
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.exceptions import VLLMValidationError
from vllm.v1.metrics.prometheus import get_prometheus_registry

from dualpath.core.errors import BadRequestError
from dualpath.core.modes import Mode
from dualpath.router.api_keys import ApiKeyGuard, router_keys, server_hosts
from dualpath.router.asgi import App, Message, Receive, Send, adding_headers, collect_seldom
from dualpath.router.connections import Connections, uvicorn_protocol
from dualpath.router.http.shared_port import SharedPort
from dualpath.router.observe.dashboard.board import Dashboard
from dualpath.router.observe.dashboard.page_file import dashboard_page
from dualpath.router.observe.loop_lag import measure_loop_lag
from dualpath.router.observe.metrics import shared_metrics
from dualpath.router.observe.status import ORACLE_NOTE
from dualpath.router.requests.limits import RequestLimits, connection_limits
from dualpath.router.requests.session_calls import HintedService, session_call
from dualpath.router.scheduler.pauses import PAUSE_PATH, no_such_engine
from dualpath.router.scheduler.role_calls import ROLES_PATH, roles_call
from dualpath.router.scheduler.scheduler import DRAIN_PATH, Scheduler
from dualpath.router.scheduler.session_orders import SESSION_PATH
from dualpath.router.scheduler.weights import WEIGHTS_PATH, weights_call
from dualpath.router.token_api.statuses import NOT_FOUND, api_error, status_of
from dualpath.router.token_api.wire import ApiError
from dualpath.vllm.drain_on_sigterm import drain_on_sigterm
from dualpath.vllm.frontend import ClientFrontEnd, DualPathLLM

# ------------------------------------------------------------------------------------- shared port
# Connects vLLM's server to a port shared by several processes (``router.http.shared_port``).

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

        close = ((b"connection", b"close"),)
        await self._app(scope, receive, adding_headers(send, lambda: close))


# -------------------------------------------------------------------------------------- validation
# Answers 400 instead of 500 to requests that raise an error in one of vLLM's validators.
#
# A validator of vLLM that reads a field before checking its type (``structured_outputs: 5``) raises
# a plain Python error.  pydantic does not convert it, so vLLM answers 500 and logs a traceback, for
# as many requests as a client sends.  The same happens with JSON that is nested too deep.  Here
# every error raised while a body is read is reported as an error of the body.

#: Errors of reading a value of the wrong type; vLLM itself answers 400 to other errors.
_KINDS = (AttributeError, LookupError, RecursionError)
#: Functions that read bodies, at FastAPI's routes and at ``/invocations``.
_READ_BODIES = frozenset({"TypeAdapter.validate_python", "Request.json"})


def answer_400_for_validator_errors(app: FastAPI) -> None:
    """Make the application answer 400 if one of vLLM's validators raises such an error."""
    for kind in _KINDS:
        app.add_exception_handler(kind, _handler)
    # vLLM built the middleware stack with the application; it is rebuilt at the first call.
    app.middleware_stack = None


async def _handler(request: Request, error: Exception) -> Response:
    if not _while_reading_body(error.__traceback__):
        raise error
    refused = VLLMValidationError(f"the request body is invalid: {error}; correct it")
    return await exception_handler(request, refused)


def _while_reading_body(trace: TracebackType | None) -> bool:
    frames = (frame.f_code.co_qualname for frame, _ in traceback.walk_tb(trace))
    return not _READ_BODIES.isdisjoint(frames)


#: Seconds that open connections may take to close after a signal; their requests failed before.
SHUTDOWN_GRACE_S = 5


class ModeHeaders:
    """ASGI middleware: adds the mode to every response, in Oracle with a note that text is invalid.

    Changes only the headers of a response, so that streams pass through unbuffered.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forward the call and add headers to an HTTP response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        def mode_headers() -> list[tuple[bytes, bytes]]:
            return _mode_headers(scope["app"].state.dualpath_registry.mode)

        await self._app(scope, receive, adding_headers(send, mode_headers))


def _mode_headers(mode: Mode | None) -> list[tuple[bytes, bytes]]:
    if mode is None:
        return []
    headers = [(b"x-dualpath-mode", mode.value.encode())]
    if not mode.moves_bytes:
        headers.append((b"x-dualpath-note", ORACLE_NOTE.encode()))
    return headers


async def make_app(llm: DualPathLLM, service: ClientFrontEnd, args: argparse.Namespace) -> FastAPI:
    """Return the application for vLLM's ``args``; ``llm`` and ``service`` outlive it."""
    tasks = await llm.get_supported_tasks()
    args.middleware = [*args.middleware, *middleware_names()]
    app = build_app(args, tasks, llm.model_config)
    answer_400_for_validator_errors(app)
    await init_app_state(llm, app.state, args, tasks)
    app.state.dualpath_registry = service.registry
    app.state.dualpath_service = service
    app.state.dualpath_api_keys = router_keys(
        args.api_key or (),
        open_metrics=service.settings.open_metrics,
        hosts=server_hosts(service.settings.allowed_hosts, args.host or ""),
    )
    _put_first(app, "/health", _health_endpoint(service))
    _put_first(app, "/metrics", _metrics_endpoint(service))
    _put_first(app, "/dualpath/v1/status", _status_endpoint(service))
    add_sessions(app, service)
    add_pointers(app)
    return app


def add_pointers(app: FastAPI) -> None:
    """Answer calls of the cluster with their place; ``add_cluster_routes`` takes precedence."""
    pages = ("/dashboard", "/dualpath/v1/dashboard")
    for path in (*pages, ROLES_PATH, PAUSE_PATH, DRAIN_PATH, WEIGHTS_PATH):
        methods = ["GET", "POST", "DELETE"]
        app.router.routes.append(APIRoute(path, _at_the_scheduler, methods=methods))


async def _at_the_scheduler(request: Request) -> Response:
    message = (
        f"{request.url.path} is not at this front end but at the scheduler's HTTP address, which "
        "`dualpath router` and `dualpath serve` print as cluster (--cluster-port)"
    )
    return _json({"error": ApiError(message, NOT_FOUND)}, NOT_FOUND)


def add_cluster_routes(app: FastAPI, scheduler: Scheduler) -> None:
    """Add what only the scheduler's process answers: live page, pauses, drains, roles, weights."""
    add_dashboard(app, scheduler.dashboard)
    add_pauses(app, scheduler)
    add_drain(app, scheduler)
    add_calls(app, ROLES_PATH, partial(roles_call, scheduler.roles))
    add_calls(app, WEIGHTS_PATH, partial(weights_call, scheduler.weights))


def middleware_names() -> list[str]:
    """Return our middleware classes for ``--middleware``, innermost first, around vLLM's own.

    ``RequestLimits`` is outside ``ApiKeyGuard``, so that it also counts requests that are refused.
    """
    layers = (ApiKeyGuard, RequestLimits, ModeHeaders, ConnectionCloser)
    return [f"{layer.__module__}.{layer.__name__}" for layer in layers]


def add_dashboard(app: FastAPI, dashboard: Dashboard) -> None:
    """Add the live page and its data."""

    async def data(request: Request) -> Response:
        try:
            return _json(dashboard.report(request.query_params.get("since", "0")), 200)
        except BadRequestError as error:
            return _json({"error": api_error(error)}, status_of(error))

    async def page(request: Request) -> Response:
        found = dashboard_page()
        return Response(found.body, headers=found.headers)

    _put_first(app, "/dualpath/v1/dashboard", data)
    _put_first(app, "/dashboard", page)


def limited_protocol(connections: Connections) -> Callable[..., asyncio.Protocol]:
    """Return the protocol factory for uvicorn: its own protocol, wrapped in connection limits."""
    assert AutoHTTPProtocol is not None
    return uvicorn_protocol(connections, AutoHTTPProtocol)


def add_pauses(app: FastAPI, scheduler: Scheduler) -> None:
    """Add the calls that pause an engine and let it go on."""

    async def pause(request: Request) -> Response:
        engine_id = request.path_params["engine_id"]
        paused = request.method == "POST"
        if scheduler.pause_engine(engine_id, paused=paused):
            return _json({"engine_id": engine_id, "paused": paused}, 200)
        return _json({"error": ApiError(no_such_engine(engine_id), NOT_FOUND)}, NOT_FOUND)

    app.router.routes.insert(0, APIRoute(PAUSE_PATH, pause, methods=["POST", "DELETE"]))


def add_drain(app: FastAPI, scheduler: Scheduler) -> None:
    """Add the calls with which front ends are asked to use other schedulers, or this one again."""

    async def drain(request: Request) -> Response:
        return _json(scheduler.drain(draining=request.method == "POST"), 200)

    app.router.routes.insert(0, APIRoute(DRAIN_PATH, drain, methods=["POST", "DELETE"]))


def add_calls(app: FastAPI, path: str, call: Callable[[bytes | None], tuple[int, object]]) -> None:
    """Add calls that show a state (GET) and begin something (POST)."""

    async def called(request: Request) -> Response:
        status, answer = call(await request.body() if request.method == "POST" else None)
        return _json(answer, status)

    app.router.routes.insert(0, APIRoute(path, called, methods=["GET", "POST"]))


def add_sessions(app: FastAPI, service: HintedService) -> None:
    """Add the calls with which clients send hints about their sessions between two turns."""

    async def session(request: Request) -> Response:
        session_id, over = request.path_params["session_id"], request.method == "DELETE"
        status, answer = await session_call(service, session_id, await request.body(), over=over)
        return _json(answer, status)

    app.router.routes.insert(0, APIRoute(SESSION_PATH, session, methods=["POST", "DELETE"]))


async def serve_app(
    app: FastAPI,
    args: argparse.Namespace,
    listener: socket.socket,
    shared: SharedPort | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; return when all connections are closed.

    SIGTERM first leaves a ``shared`` port, then drains the service.  SIGINT, or a second SIGTERM,
    fails the open requests with an error.
    """
    log_config = get_uvicorn_log_config(args)
    service: ClientFrontEnd = app.state.dualpath_service
    idle_s = envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    connections = Connections(connection_limits(service.settings, idle_s), service.metrics)

    async def drain() -> None:
        if shared is None:
            await service.drain()
        else:
            shared.taken(*server_parts(app.state.server, connections))
            await shared.leave(service)

    app.state.dualpath_shared_port = shared
    collect_seldom()
    measure_loop_lag(service.metrics.loop_lagged)
    drain_on_sigterm(drain)
    try:
        shutdown: Awaitable[None] = await serve_http(
            app,
            sock=listener,
            host=args.host,
            port=args.port,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=idle_s,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
            h11_max_header_count=args.h11_max_header_count,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            ssl_ciphers=args.ssl_ciphers,
            enable_ssl_refresh=args.enable_ssl_refresh,
            http=limited_protocol(connections),
            ws="none",
            **({"log_config": log_config} if log_config is not None else {}),
        )
        await shutdown
    finally:
        listener.close()


def _put_first(app: FastAPI, path: str, endpoint: Callable[..., Awaitable[Response]]) -> None:
    """Add a GET route that takes precedence over vLLM's route of the same path."""
    app.router.routes.insert(0, APIRoute(path, endpoint, methods=["GET"]))


def _health_endpoint(service: ClientFrontEnd) -> Callable[[Request], Awaitable[Response]]:
    async def health(request: Request) -> Response:
        reason = service.unready()
        if reason is None and not request.app.state.engine_client.errored:
            return Response(status_code=200)
        return _json({"status": "unavailable", "reason": reason or "shutting down"}, 503)

    return health


def _metrics_endpoint(service: ClientFrontEnd) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(request: Request) -> Response:
        # With metrics shared by several processes, the exposition already contains vLLM's metrics.
        vllms = b"" if shared_metrics() else generate_latest(get_prometheus_registry())
        body = vllms + await service.scrape()
        return Response(body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return metrics


def _status_endpoint(service: ClientFrontEnd) -> Callable[[Request], Awaitable[Response]]:
    async def status(request: Request) -> Response:
        return _json(service.status(), 200)

    return status


def _json(value: object, status_code: int) -> Response:
    return Response(
        msgspec.json.encode(value), status_code=status_code, media_type="application/json"
    )
