"""Attention reads only loaded or computed KV: all other HBM of a prefill engine is NaN."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import PlainEngine, Round, play_plain

from dualpath.core.cluster import Role
from dualpath_lab.models.random_models import TinyKind, make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(400)]

BLOCK_TOKENS = 32
GENERATE = 12
#: Each turn is computed in chunks, as the quota cuts prompts after 256 tokens.
AGENT = [
    Round([3 + (index * index) % 487 for index in range(700)], GENERATE),
    Round([5 + (11 * index) % 480 for index in range(640)], GENERATE),
]
POISONED = ("--worker-extension-cls", "tests.e2e.poisoned_worker.PoisonedHbm")
CARELESS = ("--worker-extension-cls", "tests.e2e.unwaited_worker.UnwaitedHbm")


@pytest.mark.parametrize(("kind", "buffers"), [("qwen2", 1), ("gemma3", 2)])
def test_stale_kv_is_in_no_answer_and_would_be_in_one_of_an_engine_that_does_not_wait(
    kind: TinyKind, buffers: int, tmp_path: Path
) -> None:
    model = make_tiny_model(kind)
    settings = tiny_cluster_settings(
        model, tmp_path / "storage", block_tokens=BLOCK_TOKENS, layer_buffers=buffers
    )
    with EngineCluster(settings, tmp_path) as cluster:
        poisoned = cluster.start_engine(Role.PREFILL, 0, vllm_args=POISONED)
        decode = cluster.start_engine(Role.DECODE, 0)
        with PlainEngine(model, tmp_path, BLOCK_TOKENS) as plain:
            expected = play_plain(plain.url, AGENT)
        cluster.wait_for(poisoned, decode)
        answers = cluster.replay(AGENT, "poisoned")
        assert [answer.token_ids for answer in answers] == expected
        assert [answer.cached_tokens for answer in answers] == cluster.expected_hits(AGENT)
        cluster.wait_idle()
        # Chunks load stored KV, and KV that other chunks have computed.
        assert min(answers[-1].cached_tokens, cluster.total("reload_bytes")) > 0
        cluster.kill(poisoned)
        cluster.wait_for(cluster.start_engine(Role.PREFILL, 1, vllm_args=CARELESS))
        prompt = AGENT[0].append + expected[0] + AGENT[1].append
        careless = cluster.ask(prompt, GENERATE, "poisoned")
        assert careless.cached_tokens > 0
        assert careless.token_ids != expected[1]
        assert cluster.total("transfer_failures") == 0
