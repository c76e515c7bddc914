"""What is asked of a cluster without vLLM: the live page, pauses, drains, roles and weights."""

import functools
from collections.abc import Callable

from aiohttp import web

from dualpath.core.errors import BadRequestError, DualPathError
from dualpath.router.http.server import (
    body_refused,
    error_answer,
    json_answer,
    read_body,
)
from dualpath.router.observe.dashboard.page_file import dashboard_page
from dualpath.router.requests.limits import ArrivingBodies, BodyRefusedError
from dualpath.router.scheduler.pauses import PAUSE_PATH, no_such_engine
from dualpath.router.scheduler.role_calls import ROLES_PATH, roles_call
from dualpath.router.scheduler.scheduler import DRAIN_PATH, Scheduler
from dualpath.router.scheduler.weights import WEIGHTS_PATH, weights_call
from dualpath.router.token_api.statuses import NOT_FOUND
from dualpath.router.token_api.wire import ApiError


class ClusterCalls:
    """Handlers over the scheduler of this process."""

    def __init__(self, scheduler: Scheduler, bodies: ArrivingBodies) -> None:
        self._scheduler = scheduler
        self._bodies = bodies

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_get("/dashboard", self._page)
        app.router.add_get("/dualpath/v1/dashboard", self._dashboard)
        app.router.add_post(PAUSE_PATH, self._pause)
        app.router.add_delete(PAUSE_PATH, self._pause)
        app.router.add_post(DRAIN_PATH, self._drain)
        app.router.add_delete(DRAIN_PATH, self._drain)
        app.router.add_get(ROLES_PATH, self._roles)
        app.router.add_post(ROLES_PATH, self._roles)
        app.router.add_get(WEIGHTS_PATH, self._weights)
        app.router.add_post(WEIGHTS_PATH, self._weights)

    async def _pause(self, request: web.Request) -> web.Response:
        engine_id, paused = request.match_info["engine_id"], request.method == "POST"
        if self._scheduler.pause_engine(engine_id, paused=paused):
            return json_answer({"engine_id": engine_id, "paused": paused})
        return json_answer({"error": ApiError(no_such_engine(engine_id), NOT_FOUND)}, NOT_FOUND)

    async def _drain(self, request: web.Request) -> web.Response:
        return json_answer(self._scheduler.drain(draining=request.method == "POST"))

    async def _roles(self, request: web.Request) -> web.Response:
        return await self._called(request, functools.partial(roles_call, self._scheduler.roles))

    async def _weights(self, request: web.Request) -> web.Response:
        return await self._called(request, functools.partial(weights_call, self._scheduler.weights))

    async def _called(
        self, request: web.Request, call: Callable[[bytes | None], tuple[int, object]]
    ) -> web.Response:
        """Answer a call that shows a state (GET) or begins something (POST)."""
        try:
            body = await read_body(request, self._bodies) if request.method == "POST" else None
        except BodyRefusedError as error:
            return body_refused(error)
        except DualPathError as error:
            return error_answer(error)
        status, answer = call(body)
        return json_answer(answer, status)

    async def _dashboard(self, request: web.Request) -> web.Response:
        try:
            return json_answer(self._scheduler.dashboard.report(request.query.get("since", "0")))
        except BadRequestError as error:
            return error_answer(error)

    async def _page(self, request: web.Request) -> web.Response:
        page = dashboard_page()
        return web.Response(body=page.body, headers=page.headers)
