"""Real engines that take hits from each other's DRAM say what one plain engine says."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import PlainEngine, Round, in_parallel, play_plain

from dualpath.core.cluster import Role
from dualpath.laboratory.models.tiny import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long]

BLOCK_TOKENS = 32
GENERATE = 40
#: 40 blocks.
SMALL = 10 << 20
HEAD = [3 + (index * index) % 487 for index in range(190)]
#: Four turns each, of some 450 tokens in all.
AGENTS = [
    [
        Round(HEAD + [5 + (seed + 7 * index) % 480 for index in range(50)], GENERATE),
        *(
            Round([9 + (seed + turn + 11 * index) % 480 for index in range(10)], GENERATE)
            for turn in range(3)
        ),
    ]
    for seed in range(3)
]


class Served(NamedTuple):
    """The cluster, and what a plain engine says to the agents."""

    cluster: EngineCluster
    turns: list[list[list[int]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Each engine's buffer holds less than three agents."""
    model, folder = make_tiny_model("qwen2"), tmp_path_factory.mktemp("dram")
    settings = tiny_cluster_settings(
        model, folder / "storage", block_tokens=BLOCK_TOKENS, dram_tier=True
    )
    with EngineCluster(settings, folder) as cluster:
        names = [
            cluster.start_engine(Role.PREFILL, 0, buffer_bytes=SMALL),
            cluster.start_engine(Role.DECODE, 0, buffer_bytes=SMALL),
        ]
        with PlainEngine(model, folder, BLOCK_TOKENS) as plain:
            turns = in_parallel([partial(play_plain, plain.url, agent) for agent in AGENTS])
        cluster.wait_for(*names)
        yield Served(cluster, turns)


def test_turns_take_their_hits_from_the_decode_engines_dram(served: Served) -> None:
    cluster, turns = served
    answers = cluster.replay(AGENTS[0], "alone")
    assert [answer.token_ids for answer in answers] == turns[0]
    assert [answer.cached_tokens for answer in answers] == cluster.expected_hits(AGENTS[0])
    cluster.wait_idle()
    assert cluster.total("storage_read_bytes") == 0
    assert cluster.total("dram_hit_blocks", "de-0") > 0


def test_agents_that_push_each_other_out_in_mid_request_get_their_tokens(served: Served) -> None:
    cluster, turns = served
    for salt in "abc":
        answers = in_parallel(
            [partial(cluster.replay, agent, f"{salt} {n}") for n, agent in enumerate(AGENTS)]
        )
        assert [[answer.token_ids for answer in each] for each in answers] == turns
    cluster.wait_idle()
    assert cluster.total("dram_evicted_blocks", "de-0") > 0
    assert cluster.service.metrics.recomputed_tokens == 0
