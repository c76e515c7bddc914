"""Asks for an API key, for servers that are not vLLM's."""

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from dualpath.router.api_keys import ApiKeys


def api_key_guard(keys: ApiKeys) -> Middleware:
    """Return the middleware that answers 401, in vLLM's words, to requests without a key."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if keys.admit(request.method, request.path, request.headers.get("Authorization")):
            return await handler(request)
        return web.json_response({"error": "Unauthorized"}, status=401)

    return guard
