"""The PD proxy of peers: prefill on one engine, decode on another, the prefill engine's hits."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dualpath_lab.benchmarks.peers.pd_proxy import Proxy, UsageLines, decode_body, prefill_body

BODY = {
    "model": "m",
    "prompt": [1, 2, 3],
    "max_tokens": 4,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.0,
}
TRANSFER_PARAMS = {"do_remote_prefill": True, "remote_block_ids": [7], "remote_host": "10.0.0.1"}


def usage(cached: int) -> dict[str, Any]:
    return {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}}


class FakeEngine:
    """Responds as vLLM does: complete if not streamed, else a token per chunk and the usage."""

    def __init__(
        self, cached: int, *, transfer_params: dict[str, Any] | None = None, status: int = 200
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._cached, self._transfer_params, self._status = cached, transfer_params, status

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self._status != 200:
            return web.json_response({"error": {"message": "no room"}}, status=self._status)
        if not body["stream"]:
            answer = {"usage": usage(self._cached), "kv_transfer_params": self._transfer_params}
            return web.json_response({"choices": [], **answer})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        chunks = [{"choices": [{"token_ids": [9]}]}, {"choices": [], "usage": usage(self._cached)}]
        for chunk in chunks:
            await stream.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def serve(self) -> TestServer:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/health", self._health)
        server = TestServer(app)
        await server.start_server()
        return server

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self._status)


class Cluster:
    """Fake engines behind a real proxy."""

    def __init__(self) -> None:
        self.servers: list[TestServer] = []

    async def proxy(self, prefill: list[FakeEngine], decode: list[FakeEngine]) -> str:
        urls = [[await self._url(e) for e in engines] for engines in (prefill, decode)]
        server = TestServer(Proxy(*urls).application())
        await server.start_server()
        self.servers.insert(0, server)
        return str(server.make_url("")).rstrip("/")

    async def _url(self, engine: FakeEngine) -> str:
        server = await engine.serve()
        self.servers.append(server)
        return str(server.make_url("")).rstrip("/")


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    found = Cluster()
    yield found
    for server in found.servers:
        await server.close()


async def post(url: str, body: dict[str, Any] = BODY) -> tuple[int, list[dict[str, Any]]]:
    """Return the status and the chunks before [DONE]."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/completions", json=body) as response,
    ):
        text = await response.text()
        if response.status != 200:
            return response.status, [json.loads(text)]
        payloads = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert payloads[-1] == "[DONE]"
        return 200, [json.loads(payload) for payload in payloads[:-1]]


def test_the_prefill_engine_generates_one_token_and_holds_the_kv():
    body = prefill_body(BODY)
    assert body["max_tokens"] == 1
    assert body["stream"] is False
    assert "stream_options" not in body
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    assert BODY["max_tokens"] == 4, "the client's request is unchanged"


def test_a_prefill_response_without_transfer_params_is_an_error():
    with pytest.raises(ValueError, match="kv_transfer_params"):
        decode_body(BODY, {"usage": usage(0)})


async def test_a_request_is_prefilled_and_then_decoded_with_the_transfer_params(cluster):
    prefill, decode = FakeEngine(cached=2, transfer_params=TRANSFER_PARAMS), FakeEngine(cached=3)
    status, chunks = await post(await cluster.proxy([prefill], [decode]))
    assert status == 200
    assert decode.bodies == [{**BODY, "kv_transfer_params": TRANSFER_PARAMS}]
    assert chunks[0]["choices"][0]["token_ids"] == [9]
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


async def test_engines_of_both_roles_are_used_round_robin(cluster):
    prefill = [
        FakeEngine(0, transfer_params=TRANSFER_PARAMS),
        FakeEngine(0, transfer_params=TRANSFER_PARAMS),
    ]
    decode = [FakeEngine(0), FakeEngine(0), FakeEngine(0)]
    url = await cluster.proxy(prefill, decode)
    for _ in range(6):
        await post(url)
    assert [len(e.bodies) for e in prefill] == [3, 3]
    assert [len(e.bodies) for e in decode] == [2, 2, 2]


async def test_a_refused_prefill_is_the_clients_response(cluster):
    decode = FakeEngine(0)
    url = await cluster.proxy([FakeEngine(0, status=400)], [decode])
    status, [answer] = await post(url)
    assert (status, answer) == (400, {"error": {"message": "no room"}})
    assert decode.bodies == []


async def test_without_decode_engines_an_agent_stays_on_its_engine(cluster):
    engines = [FakeEngine(1), FakeEngine(1)]
    url = await cluster.proxy(engines, [])
    prompts = [[agent] * 64 for agent in range(8)]
    for turn in range(3):
        for prompt in prompts:
            await post(url, {**BODY, "prompt": [*prompt, turn]})
    prompts_by_engine = [
        [tuple(body["prompt"][:64]) for body in engine.bodies] for engine in engines
    ]
    assert all(prompts_by_engine), "both engines are used"
    assert not set(prompts_by_engine[0]) & set(prompts_by_engine[1])


async def test_the_proxy_is_healthy_when_all_engines_are(cluster):
    healthy = await cluster.proxy([FakeEngine(0)], [FakeEngine(0)])
    unhealthy = await cluster.proxy([FakeEngine(0)], [FakeEngine(0, status=503)])
    async with aiohttp.ClientSession() as http:
        assert (await http.get(f"{healthy}/health")).status == 200
        assert (await http.get(f"{unhealthy}/health")).status == 503


def test_a_usage_chunk_split_anywhere_is_corrected_and_the_rest_is_unchanged():
    first = b'data: {"choices": [{"token_ids": [9]}]}\n\n'
    last = b"data: " + json.dumps({"choices": [], "usage": usage(3)}).encode() + b"\n\ndata: [DONE]"
    stream = first + last
    for cut in range(len(stream)):
        lines = UsageLines(2)
        forwarded = lines.feed(stream[:cut]) + lines.feed(stream[cut:]) + lines.end()
        assert forwarded.startswith(first)
        answer = json.loads(forwarded.splitlines()[2][6:])
        assert answer["usage"] == usage(2)
        assert forwarded.endswith(b"data: [DONE]")
