"""The router's calls for a trainer at engines' HTTP servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.guard import GUARD_S

from dualpath.core.errors import EngineLostError
from dualpath.router.http.server import serving_app
from dualpath.router.scheduler.weights import EngineCall, HttpOperator

RELOAD = EngineCall("/collective_rpc", {"method": "reload_weights"})


@asynccontextmanager
async def server(answer: web.Response) -> AsyncIterator[tuple[str, list[tuple[str, bytes]]]]:
    """An engine's HTTP server with one answer; yields its URL and what it gets."""
    got: list[tuple[str, bytes]] = []

    async def called(request: web.Request) -> web.Response:
        got.append((request.path_qs, await request.read()))
        return answer

    app = web.Application()
    app.router.add_post("/{path:.*}", called)
    app.router.add_get("/{path:.*}", called)
    async with serving_app(app, "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}", got


async def test_a_call_has_its_body_and_query() -> None:
    operator = HttpOperator({})
    call = EngineCall("/wake_up", {"a": 1}, {"tags": ["weights", "kv_cache"]})
    async with server(web.json_response({"status": "awake"})) as (url, got):
        assert await operator.post("e", url, call, GUARD_S) == {"status": "awake"}
    assert got == [("/wake_up?tags=weights&tags=kv_cache", b'{"a":1}')]


async def test_an_answer_without_a_body_is_one() -> None:
    async with server(web.Response()) as (url, _):
        assert await HttpOperator({}).post("e", url, RELOAD, GUARD_S) is None


async def test_a_refusal_names_engine_call_and_reason() -> None:
    async with server(web.Response(status=500, text="out of\nmemory")) as (url, _):
        with pytest.raises(EngineLostError, match=r"engine e at .* 500: /collective_rpc: out"):
            await HttpOperator({}).post("e", url, RELOAD, GUARD_S)


async def test_an_engine_that_has_ended_does_not_answer() -> None:
    async with server(web.Response()) as (url, _):
        pass
    with pytest.raises(EngineLostError, match=r"engine e at .* does not answer /collective_rpc"):
        await HttpOperator({}).post("e", url, RELOAD, GUARD_S)


async def test_the_version_of_an_engines_weights_is_that_of_vllm() -> None:
    version = "step-1-0123456789abcdef"
    async with server(web.json_response({"weight_version": version})) as (url, got):
        assert await HttpOperator({}).weights("e", url, GUARD_S) == version
    assert got == [("/weight_info", b"")]
