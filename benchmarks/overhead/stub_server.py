"""A process with all stub engines of a cluster and the HTTP server of their token API.

Prefills and decode steps take fixed times and compute nothing.
"""

import argparse
import asyncio
from typing import Any

import msgspec
from aiohttp import web
from benchmarks.overhead.stub_engines import StubEngines

from dualpath.core.transfers import PrefillTransfer, from_transfer_params
from dualpath.router.http.server import json_answer, serving_app, until_client_leaves
from dualpath.router.requests.limits import allow_many_streams
from dualpath.router.token_api.wire import (
    GENERATE_PATH,
    STREAM_END,
    Choice,
    GenerateAnswer,
    server_event,
)

_TOKEN = 7


class _Sampling(msgspec.Struct):
    max_tokens: int = 16
    stream_interval: int = 1


class _StubRequest(msgspec.Struct):
    """The fields of a ``GenerateRequest`` that a stub needs: not its tokens."""

    request_id: str
    sampling_params: _Sampling
    kv_transfer_params: dict[str, Any]


class StubServer:
    """The token API of ``engines``, each under a path with its id; times in seconds."""

    def __init__(self, engines: StubEngines, prefill_s: float, step_s: float) -> None:
        self._engines = engines
        self._prefill_s = prefill_s
        self._step_s = step_s

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[until_client_leaves], client_max_size=1 << 28)
        app.router.add_post(f"/{{engine}}{GENERATE_PATH}", self._generate)
        app.router.add_get("/{engine}/health", self._health)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        stub_request = msgspec.json.decode(await request.read(), type=_StubRequest)
        transfer = from_transfer_params(stub_request.kv_transfer_params)
        assert transfer is not None
        engine_id = request.match_info["engine"]
        if isinstance(transfer, PrefillTransfer):
            await asyncio.sleep(self._prefill_s)
            self._engines.computed(engine_id, transfer)
            return json_answer(
                GenerateAnswer(stub_request.request_id, [Choice([_TOKEN], "length")])
            )
        self._engines.computed(engine_id, transfer)
        return await self._stream(request, stub_request)

    async def _stream(self, request: web.Request, stub_request: _StubRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        left, count = stub_request.sampling_params.max_tokens, 1
        while left:
            await asyncio.sleep(count * self._step_s)
            left -= count
            choice = Choice([_TOKEN] * count, None if left else "length")
            await response.write(server_event(GenerateAnswer(stub_request.request_id, [choice])))
            count = min(stub_request.sampling_params.stream_interval, left)
        await response.write(STREAM_END)
        return response


async def _serve(args: argparse.Namespace) -> None:
    allow_many_streams()
    engines = StubEngines(
        args.router, args.nodes, hit_share=args.hit_share, max_model_len=args.max_model_len
    )
    server = StubServer(engines, args.prefill_s, args.step_s)
    async with serving_app(server.app(), "127.0.0.1", 0) as port:
        url = f"http://127.0.0.1:{port}"
        async with engines.running(lambda engine_id: f"{url}/{engine_id}"):
            await asyncio.Event().wait()


def main(words: list[str] | None = None) -> int:
    """Run until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", required=True)
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--hit-share", type=float, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--prefill-s", type=float, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    asyncio.run(_serve(parser.parse_args(words)))
    return 0
