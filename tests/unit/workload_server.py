"""A small server that streams exactly as vLLM 0.32 does, and a clock that ticks at every look."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web
from tests.guard import GUARD_S

from dualpath.core.blocks import block_keys
from dualpath.core.request import Round, Trajectory
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.replay.client import ReplayOptions, replay
from dualpath.workload.replay.progress import ProgressState
from dualpath.workload.replay.result import ReplayResult

BLOCK_TOKENS = 4
VOCABULARY = 500


class TickingClock:
    """Moves one second at every look, so that the order of events fixes every figure."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.slept_s: list[float] = []

    def now(self) -> float:
        self.time_s += 1
        return self.time_s

    async def sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        self.time_s += delay_s


class Recorder:
    """Collects every progress state."""

    def __init__(self) -> None:
        self.states: list[ProgressState] = []

    def update(self, state: ProgressState) -> None:
        self.states.append(state)


Fault = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse | None]]


class FakeServer:
    """Answers like vLLM, and like a perfect block store in ``cached_tokens``."""

    def __init__(self, *, status: bool = True, details: bool = True, fault: Fault | None = None):
        self.bodies: list[dict[str, Any]] = []
        self.hints: list[tuple[str, str, dict[str, Any]]] = []
        self.stored: set[bytes] = set()
        self.counters: dict[str, Any] = {
            "hit_tokens": 100,
            "bytes": {"pe_path": 5},
            "snic_read_bytes": {"pe-0": 7},
        }
        self._status = status
        self._details = details
        self._fault = fault

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        if self._status:
            app.router.add_get("/dualpath/v1/status", self.status)
            app.router.add_route("*", "/dualpath/v1/sessions/{session}", self.session)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 4096}]})

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "mode": "dualpath",
                "mode_note": "a note",
                "model": "tiny",
                "vocab_size": VOCABULARY,
                "block_tokens": BLOCK_TOKENS,
                "snic_bytes_per_s": 1e8,
                "counters": self.counters,
                "engines": [],
            }
        )

    async def session(self, request: web.Request) -> web.Response:
        name = request.match_info["session"]
        self.hints.append((request.method, name, json.loads(await request.read())))
        return web.json_response({"session_id": name})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self._fault is not None and (answer := await self._fault(request, body)) is not None:
            return answer
        prompt, count = body["prompt"], body["max_tokens"]
        hits = self._hit_tokens(prompt, body.get("cache_salt"))
        generated = [(sum(prompt) + i) % VOCABULARY for i in range(count)]
        self.stored.update(self._keys(prompt + generated[:-1], body.get("cache_salt")))
        self.counters["hit_tokens"] += hits
        self.counters["bytes"]["pe_path"] += hits * 10
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "text": "x", "token_ids": [token], "finish_reason": None}]}
            for token in generated
        ]
        chunks[0]["choices"][0]["prompt_token_ids"] = prompt
        usage: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "total_tokens": 0,
        }
        if self._details:
            usage["prompt_tokens_details"] = {"cached_tokens": hits}
        chunks.append({"choices": [], "usage": usage})
        return await stream(request, chunks)

    def _keys(self, tokens: list[int], salt: str | None) -> list[bytes]:
        return block_keys(tokens, BLOCK_TOKENS, cache_salt=salt)

    def _hit_tokens(self, prompt: list[int], salt: str | None) -> int:
        hits = 0
        for key in self._keys(prompt[:-1], salt):
            if key not in self.stored:
                break
            hits += BLOCK_TOKENS
        return hits


async def stream(
    request: web.Request, chunks: list[dict[str, Any]], done: bool = True
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    if done:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def agent(name: str, *rounds: tuple[int, int], delay_s: float = 0.0) -> Session:
    return TokenSession(Trajectory(name, tuple(Round(a, g, delay_s) for a, g in rounds)))


def run(
    server: FakeServer,
    sessions: list[Session],
    clock: TickingClock | None = None,
    **options: Any,
) -> ReplayResult:
    async def whole() -> ReplayResult:
        async with server.running() as endpoint:
            return await replay(
                sessions, endpoint, ReplayOptions(**options), clock=clock or TickingClock()
            )

    return asyncio.run(asyncio.wait_for(whole(), GUARD_S))


@contextmanager
def served(server: FakeServer) -> Iterator[str]:
    """Run the server in a thread, for commands that bring their own event loop."""
    ready, stop = threading.Event(), asyncio.Event()
    endpoint: list[str] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with server.running() as url:
            endpoint.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(timeout=GUARD_S)
    try:
        yield endpoint[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=GUARD_S)
        loop.close()
