"""KV in fp8 on real engines: a quarter of the bytes, and the tokens of a plain engine with fp8."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import PlainEngine, Round, play_plain

from dualpath.core.cluster import Role
from dualpath_lab.models.random_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long]

BLOCK_TOKENS = 32
FP8 = ("--kv-cache-dtype", "fp8")
ROUNDS = [
    Round([3 + (index * index) % 487 for index in range(300)], 30),
    Round([5 + (7 * index) % 480 for index in range(90)], 30),
]


def test_agents_get_a_plain_engines_tokens_and_blocks_are_smaller(tmp_path: Path) -> None:
    model = make_tiny_model("qwen2")
    settings = tiny_cluster_settings(
        model, tmp_path / "storage", block_tokens=BLOCK_TOKENS, vllm_args=FP8
    )
    with EngineCluster(settings, tmp_path) as cluster:
        names = [cluster.start_engine(role, 0) for role in Role]
        with PlainEngine(model, tmp_path, BLOCK_TOKENS, *FP8) as plain:
            expected = play_plain(plain.url, ROUNDS)
        cluster.wait_for(*names)
        answers = cluster.replay(ROUNDS, "")
        assert [a.token_ids for a in answers] == expected
        assert [a.cached_tokens for a in answers] == cluster.expected_hits(ROUNDS)
        assert cluster.ask_without_hits(ROUNDS, expected) == (expected[-1], 0)
        # Of qwen2: 8 layers with keys and values of 4 heads of 32.
        assert cluster.storage.geometry.bytes_per_token == 8 * 2 * 4 * 32
        cluster.wait_idle()
        assert cluster.total("transfer_failures") == 0
