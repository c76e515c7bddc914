"""`dualpath frontend`, vLLM's OpenAI server with its scheduler behind a link; emulated engines."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from tests.emulated_cluster import GEOMETRY, cluster
from tests.guard import GUARD_S

pytest.importorskip("vllm")

from dualpath.core.modes import Mode
from dualpath.launch.fork_server import ForkedProcess
from dualpath.router.settings import RouterSettings
from dualpath.workload.record.recording_proxy import RecordingProxy
from dualpath_lab.models.random_models import make_tiny_model

PROMPT = list(range(1, 38))


@pytest.fixture(scope="module")
def model() -> str:
    return str(make_tiny_model("qwen2"))


def command(model: str, scheduler: str, *more: str) -> list[str]:
    own = ["--port", "0", "--block-tokens", str(GEOMETRY.block_tokens)]
    return ["frontend", model, *own, "--scheduler", scheduler, *more]


@pytest.mark.parametrize("others", ["", ",tcp://127.0.0.1:1"], ids=["one unit", "another is down"])
async def test_it_answers_as_the_router_does_and_leaves_the_cluster_to_it(
    model: str, others: str, tmp_path: Path
) -> None:
    router = RouterSettings(mode=Mode.DUALPATH, front_ends_port=0)
    async with cluster(tmp_path / "kv", Mode.DUALPATH, router=router, vocab_size=256) as made:
        words = command(model, made.service.scheduler.front_ends.address + others)
        log = tmp_path / "frontend.log"
        process = ForkedProcess("frontend", "dualpath.cli.main:main", words, log)
        try:
            line = await asyncio.to_thread(
                process.wait_for_line, "dualpath frontend: OpenAI endpoint", GUARD_S
            )
            (url,) = re.findall(r"http://[\d.]+:\d+", line)
            body = {"model": model, "prompt": PROMPT, "max_tokens": 9, "return_token_ids": True}
            async with asyncio.timeout(GUARD_S):
                async with made.http.post(f"{url}/v1/completions", json=body) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                statuses = {}
                for path in ("/health", "/dualpath/v1/status", "/dashboard", "/dualpath/v1/roles"):
                    async with made.http.get(f"{url}{path}") as response:
                        statuses[path] = response.status
            assert answer["choices"][0]["token_ids"] == (await made.ask(PROMPT, 9))[0]
            assert list(statuses.values()) == [200, 200, 404, 404]
            await made.idle()
            process.terminate()
            assert await asyncio.to_thread(process.wait, GUARD_S) == 0, process.log_tail()
        finally:
            process.kill()


#: Bodies of completions, which vLLM answers in different ways.
ASKED: list[dict[str, object]] = [
    {"prompt": PROMPT, "max_tokens": 5},
    {"prompt": PROMPT, "max_tokens": 5, "stream": True},
    {
        **{"prompt": PROMPT, "max_tokens": 5, "stream": True},
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True},
    {"prompt": PROMPT, "max_tokens": 5, "echo": True},
    {"prompt": PROMPT, "max_tokens": 5, "n": 2, "stream": True},
    {"prompt": [PROMPT, PROMPT[:9]], "max_tokens": 2},
    {"prompt": PROMPT, "max_tokens": -1},
    {"prompt": PROMPT, "max_tokens": 1, "model": "another"},
]
#: What differs between two answers to the same request: the second one hits more blocks.
CHANGING = re.compile(rb'"(?:id|created|cached_tokens)":("[^"]*"|\d+)')
#: What differs between events of a stream: how many tokens are ready together is a matter of time.
OF_EVENTS = re.compile(
    rb'"(?:text|completion_tokens|total_tokens|token_ids)":("(?:[^"\\]|\\.)*"|\d+|\[[\d,]*\])'
)


def compared(body: bytes) -> object:
    """Return what two answers have in common: of a stream the text, and the forms of its events."""
    same = CHANGING.sub(b"", body)
    if not body.startswith(b"data: "):
        return same
    events = [line for line in same.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(
        choice["text"]
        for event in events
        for choice in json.loads(event[6:].replace(b"{,", b"{").replace(b",,", b","))["choices"]
        if choice["index"] == 0
    )
    return text, {OF_EVENTS.sub(b"", event) for event in events}, body[-20:]


async def test_record_passes_on_what_vllm_answers(model: str, tmp_path: Path) -> None:
    router = RouterSettings(mode=Mode.DUALPATH, front_ends_port=0)
    async with cluster(tmp_path / "kv", Mode.DUALPATH, router=router, vocab_size=256) as made:
        words = command(model, made.service.scheduler.front_ends.address)
        log = tmp_path / "frontend.log"
        process = ForkedProcess("frontend", "dualpath.cli.main:main", words, log)
        try:
            said = await asyncio.to_thread(
                process.wait_for_line, "dualpath frontend: OpenAI endpoint", GUARD_S
            )
            (url,) = re.findall(r"http://[\d.]+:\d+", said)
            proxy = RecordingProxy(url, lambda exchange: None, lambda: 0.0)

            async def answer(place: str, path: str, body: dict[str, object]) -> tuple[object, ...]:
                async with made.http.post(
                    place + path, json={"model": model, **body}, allow_redirects=False
                ) as got:
                    names = sorted(name for name in got.headers if name != "Content-Length")
                    place = got.headers.get("Location", "")
                    return got.status, names, place, compared(await got.read())

            async with proxy.serving("127.0.0.1", 0) as port, asyncio.timeout(GUARD_S):
                for path in ("/v1/completions", "/v1/completions/"):
                    for body in ASKED:
                        through = await answer(f"http://127.0.0.1:{port}", path, body)
                        assert through == await answer(url, path, body), body
            assert (proxy.recorded, proxy.not_recorded) == (4, 5)
        finally:
            process.kill()
