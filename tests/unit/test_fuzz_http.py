"""Any body gets a status below 500 soon, and the service works afterwards."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.emulated_cluster import Cluster, cluster
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.router.token_api.wire import GENERATE_PATH
from dualpath_lab.faults.fuzz.campaign import Campaign
from dualpath_lab.faults.fuzz.http import BODIES, HttpSubject
from dualpath_lab.faults.fuzz.inputs import Inputs

EXAMPLES = settings(max_examples=50, suppress_health_check=list(HealthCheck))
PROMPT = list(range(1, 20))

COMPLETION: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2, "stream": False, "cache_salt": "s"}
PREFILL_TRANSFER = PrefillTransfer(
    "x", 19, 0, b"", (HitRun(Role.DECODE, BlockRun(0, 1), (0,)),), "decode-0", "e", (0, 1)
)
GENERATE: dict[str, Any] = {
    "request_id": "x",
    "token_ids": PROMPT,
    "sampling_params": {"max_tokens": 1},
    "stream": False,
    "cache_salt": None,
}


def bodies(valid: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Return the bodies of `dualpath chaos fuzz http`."""
    return st.integers(0, 1 << 32).map(lambda number: Inputs(0, number).json(valid))


Story = Callable[[Cluster, bytes], Awaitable[None]]


def every_body(storage: Path, strategy: st.SearchStrategy[bytes], story: Story) -> None:
    """Run a story with many bodies against one cluster, which still serves at the end."""

    async def guarded(body: bytes) -> None:
        async with asyncio.timeout(GUARD_S):
            await story(made, body)

    async def still_right() -> None:
        answers = [await made.ask(PROMPT, 3) for _ in range(2)]
        assert answers[0][0] == answers[1][0]
        await made.idle()

    with asyncio.Runner() as runner:
        context = cluster(storage, Mode.DUALPATH)
        made = runner.run(context.__aenter__())
        try:
            EXAMPLES(given(strategy)(lambda body: runner.run(guarded(body))))()
            runner.run(asyncio.wait_for(still_right(), GUARD_S))
        finally:
            runner.run(context.__aexit__(None, None, None))


async def posted(made: Cluster, url: str, body: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    async with made.http.post(url, data=body, headers=headers) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
def test_the_light_router_answers_every_body(path: str, tmp_path: Path) -> None:
    async def story(made: Cluster, body: bytes) -> None:
        assert await posted(made, f"{made.endpoint}{path}", body) < 500

    valid = {**BODIES[path], **(COMPLETION if path == "/v1/completions" else {})}
    every_body(tmp_path, bodies(valid), story)


@pytest.mark.parametrize("role", list(Role))
def test_an_engine_answers_every_body(role: Role, tmp_path: Path) -> None:
    """Only the router calls engines, but no body that it sends may break them."""
    ours = PREFILL_TRANSFER if role is Role.PREFILL else DecodeTransfer("x", 19, (0, 1))
    strategy = bodies({**GENERATE, "kv_transfer_params": to_transfer_params(ours)})

    async def story(made: Cluster, body: bytes) -> None:
        engine = made.engines[f"{role.value}-0"]
        assert await posted(made, engine.api_url + GENERATE_PATH, body) < 500

    every_body(tmp_path, strategy, story)


async def test_bodies_and_streams_at_an_endpoint(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        subject = HttpSubject(made.endpoint, "", None, ("/v1/completions",))
        result = await Campaign("http", subject, seed=1, count=300, at_once=4).run()
        await made.idle()
    assert result.findings == []
    assert {"200", "400", "stream: 400"} <= set(result.outcomes)
