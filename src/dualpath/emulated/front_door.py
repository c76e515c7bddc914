"""A light front door: the router's service behind an endpoint for prompts of token ids.

`dualpath router` serves emulated engines as well; it brings vLLM's whole front end, for text.  This
one needs neither vLLM nor a model:

    POST /v1/completions        token ids in, token ids out
    GET  /v1/models             the one model, as the first engine names it
    GET  /dualpath/v1/status    as `dualpath router`
    GET  /health, /metrics      as `dualpath router`, without vLLM's own metrics
"""

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from dualpath.core.blocks import block_keys
from dualpath.core.cluster import Role
from dualpath.core.errors import (
    BadRequestError,
    BufferTooSmallError,
    DeadlineError,
    DualPathError,
)
from dualpath.emulated.engine_client import EngineClient
from dualpath.emulated.process import serving_app, until_signal
from dualpath.emulated.server import LARGEST_BODY_BYTES
from dualpath.emulated.wire import STREAM_END, WireError, decode_body, server_event
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings


class CompletionRequest(msgspec.Struct):
    """A completion of token ids; other fields are ignored, exactly ``max_tokens`` come."""

    prompt: list[int]
    max_tokens: int = 16
    cache_salt: str | None = None
    stream: bool = False


class FrontDoor:
    """HTTP application over a ``RouterService``; both live in one event loop."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=LARGEST_BODY_BYTES)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/dualpath/v1/status", self._status)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = decode_body(await request.read(), CompletionRequest)
            job = await self._job(asked)
        except DualPathError as error:
            return _refusal(error)
        events = self._service.submit(job)
        try:
            # What is wrong from the beginning shall be a status, not an event of a stream.
            first = await anext(events)
            if asked.stream:
                return await self._stream(request, asked, first, events)
            return _json(_whole(asked, [first, *[event async for event in events]]))
        except DualPathError as error:
            return _refusal(error)
        finally:
            # Aborts the request if its client has left.
            if (close := getattr(events, "aclose", None)) is not None:
                await close()

    async def _stream(
        self,
        request: web.Request,
        asked: CompletionRequest,
        first: TokenEvent,
        rest: AsyncIterator[TokenEvent],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(server_event(_chunk(first)))
        generated = len(first.token_ids)
        try:
            async for event in rest:
                generated += len(event.token_ids)
                await response.write(server_event(_chunk(event)))
        except DualPathError as error:
            await response.write(server_event({"error": _wire_error(error)}))
        else:
            usage = _usage(asked, generated, first.cached_tokens)
            await response.write(server_event({"choices": [], "usage": usage}))
        await response.write(STREAM_END)
        return response

    async def _job(self, asked: CompletionRequest) -> Job:
        """Return the router's job; raises ``DeadlineError`` if no engine tells the block size."""
        registry = self._service.registry
        if registry.namespace is None:
            await self._service.wait_ready(1, 1, self._service.settings.engine_wait_s)
        assert registry.namespace is not None
        block_tokens = registry.namespace.geometry.block_tokens

        def keys_for(token_ids: Sequence[int]) -> Sequence[bytes]:
            return block_keys(token_ids, block_tokens, cache_salt=asked.cache_salt)

        return Job(
            request_id=f"cmpl-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(asked.prompt),
            max_new_tokens=asked.max_tokens,
            keys=tuple(keys_for(asked.prompt)),
            keys_for=keys_for,
            payload=asked.cache_salt,
        )

    async def _models(self, request: web.Request) -> web.Response:
        report = self._service.status()
        model = {"id": report["model"] or "emulated", "object": "model"}
        return _json({"data": [{**model, "max_model_len": report["max_model_len"]}]})

    async def _status(self, request: web.Request) -> web.Response:
        return _json(self._service.status())

    async def _health(self, request: web.Request) -> web.Response:
        missing = [r.value for r in Role if not self._service.registry.alive(r)]
        return _json({"missing": missing}, 503 if missing else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._service.exposition())


@asynccontextmanager
async def front_door(
    settings: RouterSettings, host: str, port: int
) -> AsyncIterator[tuple[str, RouterService]]:
    """Serve in the block; yields the endpoint and the service.

    Raises ``ConfigError`` for an address that is taken.
    """
    calls = EngineClient()
    service = RouterService(settings, calls)
    try:
        await service.start()
        async with serving_app(FrontDoor(service).app(), host, port) as bound:
            yield f"http://{host}:{bound}", service
    finally:
        await service.stop()
        await calls.aclose()


async def run_front_door(settings: RouterSettings, host: str, port: int) -> None:
    """Run a front door until SIGINT or SIGTERM.  Raises ``ConfigError`` as ``front_door``."""
    async with front_door(settings, host, port) as (endpoint, service):
        print(
            f"dualpath front door: token ids at {endpoint}/v1, engines register at "
            f"{service.control_address}",
            flush=True,
        )
        await until_signal()


def _chunk(event: TokenEvent) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": "",
        "token_ids": event.token_ids,
        "finish_reason": event.finish_reason,
    }
    return {"object": "text_completion", "choices": [choice]}


def _whole(asked: CompletionRequest, events: Sequence[TokenEvent]) -> dict[str, Any]:
    token_ids = [token for event in events for token in event.token_ids]
    body = _chunk(TokenEvent(tuple(token_ids), events[-1].finish_reason))
    body["usage"] = _usage(asked, len(token_ids), events[0].cached_tokens)
    return body


def _usage(asked: CompletionRequest, generated: int, cached: int | None) -> dict[str, Any]:
    prompt = len(asked.prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _status_of(error: DualPathError) -> int:
    if isinstance(error, BadRequestError | BufferTooSmallError):
        return 400
    return 504 if isinstance(error, DeadlineError) else 503


def _wire_error(error: DualPathError) -> WireError:
    return WireError(str(error), _status_of(error))


def _refusal(error: DualPathError) -> web.Response:
    return _json({"error": _wire_error(error)}, _status_of(error))


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )
