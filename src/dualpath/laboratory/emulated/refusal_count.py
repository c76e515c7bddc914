"""Counts refused HTTP requests, for routers that are not vLLM's."""

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from dualpath.router.observe.metrics import RouterMetrics


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
