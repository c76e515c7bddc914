"""Live traffic becomes a trace: a real proxy in front of a small endpoint, and its sessions."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dualpath.cli.main import main
from dualpath.workload.columns.sessions_to_columns import as_lengths
from dualpath.workload.conversation.block_session import BlockSession
from dualpath.workload.formats import read_trace, writable, write_trace
from dualpath.workload.formats.block_requests import each_id
from dualpath.workload.record.recording_proxy import Exchange, Recorder, RecordingProxy

SECRET = "attack at dawn"


class Endpoint:
    """An OpenAI endpoint like vLLM's: a token per byte, and token ids on request, else null."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.breaks_off = False
        self.knows_token_ids = True

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]}, headers={"X-Mine": "kept"})

    async def _complete(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked.append(asked)
        if asked["max_tokens"] > 99:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        choice = {"index": 0, "text": "x", "token_ids": [1] * asked["max_tokens"]}
        if not asked.get("return_token_ids"):
            choice["token_ids"] = None
        if not self.knows_token_ids:
            del choice["token_ids"]
        return web.json_response({"choices": [choice]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        prompt = list("".join(m["content"] for m in asked["messages"]).encode())
        for token in b"ok":
            choice: dict[str, Any] = {"index": 0, "delta": {"content": chr(token)}}
            event: dict[str, Any] = {"choices": [choice]}
            choice["token_ids"] = event["prompt_token_ids"] = None
            if asked.get("return_token_ids"):
                choice["token_ids"] = [token]
                event["prompt_token_ids"], prompt = prompt or None, []
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if self.breaks_off:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Recorded:
    """An endpoint behind a proxy, and what the proxy recorded."""

    def __init__(self, endpoint: Endpoint, proxy: RecordingProxy, url: str, recorder: Recorder):
        self.endpoint, self.proxy, self.url, self.recorder = endpoint, proxy, url, recorder

    async def post(self, path: str, body: object) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as http,
            http.post(self.url + path, json=body) as response,
        ):
            return response.status, await response.text()

    async def chat(self, *texts: str, **more: object) -> str:
        messages = [{"role": "user", "content": text} for text in texts]
        body = {"messages": messages, "stream": True, **more}
        return (await self.post("/v1/chat/completions", body))[1]


@asynccontextmanager
async def recording(*, texts: bool = False) -> AsyncIterator[Recorded]:
    endpoint, recorder = Endpoint(), Recorder(4)
    ticks = itertools.count()
    async with listening(endpoint.app()) as upstream:
        proxy = RecordingProxy(upstream, recorder.add, lambda: next(ticks) / 8, texts=texts)
        async with proxy.serving("127.0.0.1", 0) as port:
            yield Recorded(endpoint, proxy, f"http://127.0.0.1:{port}", recorder)


async def test_a_conversation_is_one_session_and_token_ids_are_removed_for_clients():
    async with recording() as live:
        first = await live.chat(SECRET)
        await live.chat(SECRET, "ok", "then retreat")
        await live.chat("something else")

    assert first.count('"token_ids":null') == first.count('"prompt_token_ids":null') == 2
    assert first.count("data: ") == 3
    assert all(asked["return_token_ids"] for asked in live.endpoint.asked)
    one, other = live.recorder.block_sessions()
    assert [turn.prompt_tokens for turn in one.block_turns] == [14, 28]
    assert [turn.generate_tokens for turn in one.block_turns] == [2, 2]
    # Blocks of four tokens: the three full ones of the first prompt begin the second.
    assert [list(each_id(turn.id_ranges)) for turn in one.block_turns] == [
        [0, 1, 2],
        [0, 1, 2, 3, 4, 5, 6],
    ]
    assert [turn.delay_s for turn in one.block_turns] == [0.0, 1 / 8]
    assert (other.turns, other.block_turns[0].start_s) == (1, 4 / 8)


async def test_requested_token_ids_are_forwarded_and_other_paths_are_unchanged():
    async with recording() as live:
        answer = await live.chat("hello", return_token_ids=True)
        async with aiohttp.ClientSession() as http, http.get(f"{live.url}/v1/models") as models:
            assert models.headers["X-Mine"] == "kept"
            assert await models.json() == {"data": [{"id": "m"}]}

    assert '"token_ids": [111]' in answer
    assert (live.proxy.recorded, live.proxy.not_recorded) == (1, 0)


async def test_prompts_of_token_ids_need_none_from_the_endpoint():
    async with recording() as live:
        status, body = await live.post(
            "/v1/completions", {"prompt": [5] * 9, "max_tokens": 3, "session_id": "alice"}
        )

    (choice,) = json.loads(body)["choices"]
    assert (status, choice) == (200, {"index": 0, "text": "x", "token_ids": None})
    (session,) = live.recorder.block_sessions()
    assert session.session_id == "session-1"
    assert session.block_turns[0].prompt_tokens == 9


async def test_requests_that_cannot_be_recorded_are_forwarded_and_counted():
    async with recording() as live:
        refused, _ = await live.post("/v1/completions", {"prompt": [5], "max_tokens": 100})
        live.endpoint.knows_token_ids = False
        unknown, _ = await live.post("/v1/completions", {"prompt": [5], "max_tokens": 1})
        live.endpoint.breaks_off = True
        with pytest.raises(aiohttp.ClientError):
            await live.chat("hello")

    assert (refused, unknown) == (400, 200)
    assert (live.proxy.recorded, live.proxy.not_recorded) == (0, 3)
    assert live.recorder.block_sessions() == []


async def test_an_unreachable_endpoint_is_reported():
    proxy = RecordingProxy("http://127.0.0.1:9", lambda exchange: None, lambda: 0.0)
    async with (
        proxy.serving("127.0.0.1", 0) as port,
        aiohttp.ClientSession() as http,
        http.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": [1]}) as response,
    ):
        assert response.status == 502
        assert "check that the server is running" in await response.text()


@pytest.mark.parametrize("format", writable("blocks"))
async def test_no_text_is_in_a_trace_and_it_reads_as_what_was_served(format: str, tmp_path: Path):
    async with recording() as live:
        await live.chat(SECRET)
        await live.chat(SECRET, "ok", "then retreat")
    path = tmp_path / "trace.jsonl"

    write_trace(live.recorder.block_sessions(), path, format)

    assert "attack" not in path.read_text()
    (session,) = read_trace(path)
    assert isinstance(session, BlockSession)
    assert [turn.prompt_tokens for turn in session.block_turns] == [14, 28]
    (lengths,) = as_lengths([session])
    # A prompt, its answer, and the appended tokens; nothing was dropped between.
    assert [(r.append_tokens, r.generated_tokens) for r in lengths.trajectory.rounds] == [
        (14, 2),
        (12, 2),
    ]


@pytest.mark.parametrize("format", writable("text"))
async def test_texts_are_recorded_on_request(format: str, tmp_path: Path):
    async with recording(texts=True) as live:
        await live.chat(SECRET)
    path = tmp_path / "trace.jsonl"

    write_trace(live.recorder.text_sessions(), path, format)

    assert SECRET in path.read_text()
    assert read_trace(path)[0].turns == 1


def test_tenants_do_not_share_blocks_and_turns_are_ordered_by_start():
    recorder = Recorder(4)
    for tenant, start_s in (("a", 2.0), ("b", 1.0), ("a", 0.0)):
        recorder.add(
            Exchange(
                tenant=tenant,
                session_id="s",
                prompt_token_ids=[7] * 8,
                generated_token_ids=[1],
                start_s=start_s,
                end_s=start_s + 0.5,
            )
        )

    first, second = recorder.block_sessions()

    assert [turn.start_s for turn in first.block_turns] == [0.0, 2.0]
    assert [turn.delay_s for turn in first.block_turns] == [0.0, 1.5]
    assert list(each_id(first.block_turns[0].id_ranges)) == [0, 1]
    assert list(each_id(second.block_turns[0].id_ranges)) == [2, 3]


def test_a_text_format_is_written_only_if_texts_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = str(tmp_path / "t.jsonl")
    assert main(["record", "--endpoint", "http://x", "--out", out, "--format", "lmcache"]) == 2
    assert "give --text to record them" in capsys.readouterr().err
    assert main(["record", "--endpoint", "http://x", "--out", out, "--text"]) == 2
    assert "or give agentperf or lmcache" in capsys.readouterr().err


async def test_a_client_that_disconnects_does_not_block_recording():
    async with recording() as live:
        asking = asyncio.create_task(live.chat("hello"))
        await asyncio.sleep(0)
        asking.cancel()
        assert "[DONE]" in await live.chat("hello again")
    assert live.proxy.recorded >= 1
