"""A scheduler's process without clients: it needs neither vLLM nor a model, and starts in a second.

Engines and front ends have their own addresses; this HTTP server is for operators and tools:

    GET  /dualpath/v1/status    engines, queues and recent decisions
    GET, POST /dualpath/v1/roles, POST, DELETE /dualpath/v1/engines/ENGINE/pause
    POST, DELETE /dualpath/v1/drain
    GET  /dashboard             the live page
    GET  /health                200 while requests can be placed, else 503 and why
    GET  /metrics               engines, assignments and storage; requests are their front ends'
"""

import time
from contextlib import AsyncExitStack

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from dualpath.core.addresses import http_url
from dualpath.core.errors import ConfigError
from dualpath.node.certificates import serving
from dualpath.router.api_keys import (
    ApiKeys,
    engine_headers,
    router_keys,
    server_hosts,
    warn_if_open,
)
from dualpath.router.asgi import collect_seldom
from dualpath.router.connections import Connections
from dualpath.router.http.cluster_calls import ClusterCalls
from dualpath.router.http.server import (
    api_key_guard,
    json_answer,
    refusal_count,
    serving_app,
    until_client_leaves,
    until_signal,
)
from dualpath.router.observe.loop_lag import measure_loop_lag
from dualpath.router.requests.limits import ArrivingBodies, allow_many_streams, connection_limits
from dualpath.router.scheduler.leadership import STANDS_BY, bound, open_leadership, stop_when_lost
from dualpath.router.scheduler.scheduler import Scheduler
from dualpath.router.settings import RouterSettings, SchedulerAddress
from dualpath.router.token_api.client import TokenApiClient
from dualpath.router.token_api.statuses import UNAVAILABLE


def scheduler_app(scheduler: Scheduler, host: str = "") -> web.Application:
    """Return the application over a scheduler's service; ``host`` is where it listens."""
    settings = scheduler.settings
    keys = router_keys(
        settings.api_keys,
        open_metrics=settings.open_metrics,
        hosts=server_hosts(settings.allowed_hosts, host),
    )
    app = web.Application(
        middlewares=[
            refusal_count(scheduler.metrics),
            until_client_leaves,
            api_key_guard(keys),
        ],
    )

    async def status(request: web.Request) -> web.Response:
        return json_answer(scheduler.status())

    async def health(request: web.Request) -> web.Response:
        if (reason := scheduler.unready()) is None:
            return json_answer({})
        return json_answer({"status": "unavailable", "reason": reason}, UNAVAILABLE)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=await scheduler.metrics.scrape(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    app.router.add_get("/dualpath/v1/status", status)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    ClusterCalls(scheduler, ArrivingBodies(settings)).add_to(app)
    return app


async def run_scheduler(settings: RouterSettings, address: SchedulerAddress) -> None:
    """Run a scheduler until SIGINT or SIGTERM.

    Raises ``ConfigError`` for an address that is taken, or if front ends would have none.
    """
    if settings.front_ends_port is None:
        raise ConfigError(
            "{front_ends_port} is none; a scheduler serves no clients itself, give a number for "
            "its front ends, 0 for any free port"
        )
    tls = serving(address.ssl_certfile, address.ssl_keyfile)
    allow_many_streams()
    host = address.host
    warn_if_open(host, ApiKeys(settings.api_keys))
    async with AsyncExitStack() as stack:
        leadership = open_leadership(settings)
        stack.push_async_callback(leadership.release)
        calls = TokenApiClient(engine_headers(), settings.engine_ca_file)
        stack.push_async_callback(calls.aclose)
        scheduler = Scheduler(settings, calls, time.monotonic, adapter_paths=address.lora_modules)
        if leadership.contended:
            print(STANDS_BY, flush=True)
        await leadership.acquired()
        scheduler.is_leader = lambda: leadership.held
        await stop_when_lost(leadership, stack, scheduler.stop)
        stack.push_async_callback(scheduler.stop)
        await bound(leadership, scheduler.start)
        connections = Connections(connection_limits(settings), scheduler.metrics)

        async def serve() -> int:
            app = scheduler_app(scheduler, host)
            server = serving_app(app, host, address.port, connections, tls=tls)
            return await stack.enter_async_context(server)

        at = await bound(leadership, serve)
        collect_seldom()
        measure_loop_lag(scheduler.metrics.loop_lagged)
        url = http_url(host, at, tls=tls is not None)
        print(
            f"dualpath scheduler: cluster at {url}, engines register at "
            f"{scheduler.server.address}, front ends at {scheduler.front_ends.address}",
            flush=True,
        )
        await until_signal(_at_once)


async def _at_once() -> None:
    """Drain nothing: running requests belong to front ends, which find the next scheduler."""
