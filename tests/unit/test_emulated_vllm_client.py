"""The calls that the full router makes to vLLM engines, made to emulated ones."""

from pathlib import Path

import pytest
from tests.emulated_cluster import GEOMETRY, cluster

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from dualpath.core.errors import BadRequestError
from dualpath.core.key_cache import KeyCache
from dualpath.core.modes import Mode
from dualpath.router.service import RouterService
from dualpath.vllm.engine_core import make_job
from dualpath.vllm.generate_client import GenerateClient

PROMPT = list(range(1, 38))


async def ask(service: RouterService, name: str, salt: str | None, **sampling) -> list[int]:
    return [token for ids in await events(service, name, salt, **sampling) for token in ids]


async def events(
    service: RouterService, name: str, salt: str | None, **sampling
) -> list[tuple[int, ...]]:
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=PROMPT,
        mm_features=None,
        sampling_params=SamplingParams(**{"max_tokens": 9, **sampling}),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )
    job = make_job(request, KeyCache(GEOMETRY.block_tokens), stateful_sampling=False)
    return [event.token_ids async for event in service.submit(job)]


async def test_vllms_front_end_gets_the_same_answers_as_the_light_router(tmp_path: Path) -> None:
    calls = GenerateClient(max_logprobs=20)
    try:
        async with cluster(tmp_path, Mode.DUALPATH) as made:
            light, _ = await made.ask(PROMPT, 9)
            made.service.engine_calls = calls
            assert await ask(made.service, "a", None) == light
            assert await ask(made.service, "b", "salt") == light
            # With a seed the DE samples the first token as well.
            assert await ask(made.service, "c", None, seed=1) == light
            # The PE's token, the DE's first token, four together, and the rest.
            chunks = await events(made.service, "d", None, stream_interval=4)
            assert [token for chunk in chunks for token in chunk] == light
            assert len(chunks[0]) == 1
            assert len(chunks) <= 4
            await made.idle()
    finally:
        await calls.aclose()


async def test_wrong_kv_is_a_permanent_failure_for_vllms_front_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = GenerateClient(max_logprobs=20)
    try:
        async with cluster(tmp_path, Mode.DUALPATH) as made:
            made.service.engine_calls = calls
            hbm = made.engines["prefill-0"].plane.hbm
            monkeypatch.setattr(hbm, "write_blocks", lambda *_: None)
            with pytest.raises(BadRequestError, match="is wrong in de_buffer"):
                await ask(made.service, "a", None)
            assert made.service.metrics.retries == 0
    finally:
        await calls.aclose()
