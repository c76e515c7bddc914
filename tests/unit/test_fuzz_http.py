"""Whatever a body says: a status below 500, soon, and the service works afterwards."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.emulated_cluster import GUARD_S, Cluster, cluster

from dualpath.core.cluster import Role
from dualpath.core.control import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun, HitRun
from dualpath.router.token_api.wire import GENERATE_PATH

EXAMPLES = settings(max_examples=50, suppress_health_check=list(HealthCheck))
PROMPT = list(range(1, 20))

scalars: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)

#: No text, no end, no number.
NASTY = [b'{"prompt": "\xff"}', b'{"x": ' + b"[" * 100_000, b'{"prompt": [1e400, "\\ud800"]}']

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
    """Noise, other JSON, and the valid body with a field replaced, missing or cut off."""
    names = st.sampled_from(sorted(valid))
    changed = st.builds(lambda name, value: {**valid, name: value}, names, values)
    fewer = names.map(lambda name: {k: v for k, v in valid.items() if k != name})
    encoded = (changed | fewer | values).map(_json)
    noise = st.binary(max_size=40) | st.sampled_from(NASTY)
    return noise | encoded | encoded.map(lambda body: body[: len(body) // 2])


def _json(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return NASTY[-1]


Story = Callable[[Cluster, bytes], Awaitable[None]]


def every_body(storage: Path, strategy: st.SearchStrategy[bytes], story: Story) -> None:
    """Play a story with many bodies against one cluster, which serves as before at the end."""

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


def test_the_light_front_door_answers_every_body(tmp_path: Path) -> None:
    async def story(made: Cluster, body: bytes) -> None:
        assert await posted(made, f"{made.endpoint}/v1/completions", body) < 500

    every_body(tmp_path, bodies(COMPLETION), story)


@pytest.mark.parametrize("role", list(Role))
def test_an_engine_answers_every_body(role: Role, tmp_path: Path) -> None:
    """Nobody but the router speaks to engines, and yet nothing it is sent may break them."""
    ours = PREFILL_TRANSFER if role is Role.PREFILL else DecodeTransfer("x", 19, (0, 1))
    params = to_transfer_params(ours)
    [[kind, fields]] = params["dualpath"].items()
    forged = st.builds(
        lambda name, value: {"dualpath": {kind: {**fields, name: value}}},
        st.sampled_from(sorted(fields)),
        values | st.lists(st.integers(-3, 1 << 40), max_size=4),
    )
    with_forged = forged.map(lambda p: _json({**GENERATE, "kv_transfer_params": p}))
    strategy = bodies({**GENERATE, "kv_transfer_params": params}) | with_forged

    async def story(made: Cluster, body: bytes) -> None:
        engine = made.engines[f"{role.value}-0"]
        assert await posted(made, engine.api_url + GENERATE_PATH, body) < 500

    every_body(tmp_path, strategy, story)
