"""Real engines that store compressed blocks answer like a plain engine."""

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("backports.zstd")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import PlainEngine, Round, in_parallel, play_plain

from dualpath.core.cluster import Role
from dualpath.storage.block_file import HEADER_BYTES, is_compressed
from dualpath_lab.models.random_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long]

BLOCK_TOKENS = 32
AGENT = [
    Round([3 + (index * index) % 487 for index in range(240)], 40),
    *(Round([9 + (turn + 11 * index) % 480 for index in range(10)], 40) for turn in range(2)),
]


def test_turns_read_compressed_blocks_and_answer_like_a_plain_engine(tmp_path: Path) -> None:
    model, clustered, alone = make_tiny_model("qwen2"), tmp_path / "cluster", tmp_path / "plain"
    clustered.mkdir()
    alone.mkdir()
    settings = tiny_cluster_settings(
        model,
        tmp_path / "storage",
        block_tokens=BLOCK_TOKENS,
        storage_codec="zstd",
    )
    with EngineCluster(settings, clustered) as cluster:
        names = [cluster.start_engine(role, 0) for role in (Role.PREFILL, Role.DECODE)]
        with PlainEngine(model, alone, BLOCK_TOKENS) as plain:
            (right,) = in_parallel([partial(play_plain, plain.url, AGENT)])
        cluster.wait_for(*names)
        answers = cluster.replay(AGENT, "alone")
        assert [answer.token_ids for answer in answers] == right
        assert [answer.cached_tokens for answer in answers] == cluster.expected_hits(AGENT)
        cluster.wait_idle()

        files = [path.read_bytes() for path in cluster.storage.path.rglob("*.kv")]
        assert files
        assert all(is_compressed(file[:HEADER_BYTES]) for file in files)
        stored_bytes = sum(len(file) - HEADER_BYTES for file in files)
        assert cluster.total("storage_write_bytes") == stored_bytes
        hit_blocks = sum(cluster.expected_hits(AGENT)) // BLOCK_TOKENS
        block_bytes = cluster.storage.geometry.full_block_bytes
        assert 0 < cluster.total("storage_read_bytes") < 0.95 * hit_blocks * block_bytes
        for info in cluster.service.registry.alive():
            codec = info.rates.storage_codec
            assert codec is not None
            assert codec.codec == "zstd"
            assert codec.ratio > 1
