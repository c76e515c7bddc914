"""Models with sliding windows on real engines: a plain engine's tokens, with hits and without."""

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import PlainEngine, Round, in_parallel, play_plain

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.steps import run_reads
from dualpath_lab.models.random_models import WINDOW_TOKENS, TinyKind, make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long]

BLOCK_TOKENS = 32
#: The layers with a window.
WINDOWS: dict[TinyKind, list[bool]] = {
    "gemma3": [True, True, True, True, True, False],
    "gpt_oss": [True, False, True, False],
}


def hit_bytes(geometry: BlockGeometry, cached_tokens: int) -> int:
    """Bytes that a hit reads from storage, by the plan."""
    blocks = cached_tokens // BLOCK_TOKENS
    run = HitRun(Role.DECODE, BlockRun(0, blocks)).whole_behind(geometry.whole_from(blocks))
    return sum(step.bytes for step in run_reads(geometry, run))


@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss"])
def test_agents_of_a_model_with_windows_get_a_plain_engines_tokens(
    kind: TinyKind, agents: list[list[Round]], tmp_path: Path
) -> None:
    model = make_tiny_model(kind)
    few = [agent[:3] for agent in agents[:2]]
    # Turns and what is generated are longer than windows: blocks leave them in every turn.
    assert all(len(turn.append) > 2 * WINDOW_TOKENS for agent in few for turn in agent[:1])
    settings = tiny_cluster_settings(model, tmp_path / "storage", block_tokens=BLOCK_TOKENS)
    with EngineCluster(settings, tmp_path) as cluster:
        # All three start at the same time.
        names = [cluster.start_engine(role, 0) for role in (Role.PREFILL, Role.DECODE)]
        with PlainEngine(model, tmp_path, BLOCK_TOKENS) as plain:
            expected = in_parallel([partial(play_plain, plain.url, agent) for agent in few])
        cluster.wait_for(*names)
        answers = in_parallel(
            [partial(cluster.replay, agent, str(n)) for n, agent in enumerate(few)]
        )
        assert [[answer.token_ids for answer in each] for each in answers] == expected
        hits = [[answer.cached_tokens for answer in each] for each in answers]
        assert hits == [cluster.expected_hits(agent) for agent in few]
        assert hits[0][-1] > 0
        assert cluster.ask_without_hits(few[0], expected[0]) == (expected[0][-1], 0)
        cluster.wait_idle()
        geometry = cluster.storage.geometry
        assert [bool(w) for w in geometry.layer_windows] == WINDOWS[kind]
        read_bytes = cluster.total("storage_read_bytes")
        assert read_bytes == sum(hit_bytes(geometry, n) for each in hits for n in each)
        whole_bytes = sum(map(sum, hits)) // BLOCK_TOKENS * geometry.full_block_bytes
        assert read_bytes < 0.8 * whole_bytes
        assert cluster.total("transfer_failures") == cluster.total("persist_dropped_blocks") == 0
