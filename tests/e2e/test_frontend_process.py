"""`dualpath frontend`, vLLM's OpenAI server with its scheduler behind a link; emulated engines."""

import asyncio
import re
from pathlib import Path

import pytest
from tests.emulated_cluster import GEOMETRY, cluster
from tests.guard import GUARD_S

pytest.importorskip("vllm")

from dualpath.core.modes import Mode
from dualpath.launch.fork_server import ForkedProcess
from dualpath.router.settings import RouterSettings
from dualpath_lab.models.random_models import make_tiny_model

PROMPT = list(range(1, 38))


@pytest.fixture(scope="module")
def model() -> str:
    return str(make_tiny_model("qwen2"))


def command(model: str, scheduler: str, *more: str) -> list[str]:
    own = ["--port", "0", "--block-tokens", str(GEOMETRY.block_tokens)]
    return ["frontend", model, *own, "--scheduler", scheduler, *more]


async def test_it_answers_as_the_router_does_and_leaves_the_cluster_to_it(
    model: str, tmp_path: Path
) -> None:
    router = RouterSettings(mode=Mode.DUALPATH, front_ends_port=0)
    async with cluster(tmp_path / "kv", Mode.DUALPATH, router=router, vocab_size=256) as made:
        words = command(model, made.service.scheduler.front_ends.address)
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
