"""Real engines of four ranks, with one KV head per rank, or with fewer KV heads than ranks."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import PlainEngine, Round, Truth, play_plain, tiny_model

from dualpath.core.cluster import Role
from dualpath_lab.models.random_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

BLOCK_TOKENS = 32
#: Turns of an agent: the second and third have hits.
TURNS = 3


def test_four_ranks_decode_what_two_compute(
    agents: list[list[Round]], truth: Truth, tmp_path: Path
) -> None:
    """Each rank of the DE has one of the model's four KV heads, each of the PE two."""
    settings = tiny_cluster_settings(tiny_model(), tmp_path / "storage", prefill_tp=2, decode_tp=4)
    with EngineCluster(settings, tmp_path) as cluster:
        cluster.wait_for(*[cluster.start_engine(role, 0) for role in Role])
        check_tokens_and_hits(cluster, agents[0][:TURNS], truth.turns[0][:TURNS])


@pytest.mark.parametrize(("pe", "de"), [(4, 2), (1, 4)])
def test_ranks_that_share_a_kv_head_send_and_store_it_in_turn(
    pe: int, de: int, agents: list[list[Round]], tmp_path: Path
) -> None:
    """Of four ranks two each have the same of Gemma's two KV heads; layers have windows."""
    model, rounds = make_tiny_model("gemma3"), agents[0][:TURNS]
    settings = tiny_cluster_settings(
        *(model, tmp_path / "storage"), block_tokens=BLOCK_TOKENS, prefill_tp=pe, decode_tp=de
    )
    with EngineCluster(settings, tmp_path) as cluster:
        names = [cluster.start_engine(role, 0) for role in Role]
        with PlainEngine(model, tmp_path, BLOCK_TOKENS) as plain:
            expected = play_plain(plain.url, rounds)
        cluster.wait_for(*names)
        check_tokens_and_hits(cluster, rounds, expected)


def check_tokens_and_hits(
    cluster: EngineCluster, rounds: list[Round], expected: list[list[int]]
) -> None:
    """Play an agent, then its last turn with nothing stored; compare tokens and hits."""
    answers = cluster.replay(rounds, "an agent")
    assert [a.token_ids for a in answers] == expected
    assert [a.cached_tokens for a in answers] == cluster.expected_hits(rounds)
    assert cluster.ask_without_hits(rounds, expected) == (expected[-1], 0)
    cluster.wait_idle()
    assert cluster.total("transfer_failures") == cluster.total("persist_dropped_blocks") == 0
