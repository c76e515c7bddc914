"""A decode engine with prefix caching: requests share HBM blocks, and tokens stay the same."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import PlainEngine, Round, complete, in_parallel, play_plain

from dualpath.core.cluster import Role
from dualpath_lab.models.random_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long]

BLOCK_TOKENS = 32
GENERATE = 40
#: The common prefix of all prompts, like agents' instructions.
HEAD = [3 + (index * index) % 487 for index in range(290)]
AGENTS = [
    [
        Round(HEAD + [5 + (seed + 7 * index) % 480 for index in range(50)], GENERATE),
        Round([9 + (seed + 11 * index) % 480 for index in range(70)], GENERATE),
    ]
    for seed in range(3)
]
#: A whole number of blocks, so that nothing is copied the second time.
WHOLE = HEAD[: 9 * BLOCK_TOKENS]


class Served(NamedTuple):
    """The cluster, and a plain engine's answers to the agents and to ``WHOLE``."""

    cluster: EngineCluster
    turns: list[list[list[int]]]
    whole: list[int]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, folder = make_tiny_model("qwen2"), tmp_path_factory.mktemp("kept")
    settings = tiny_cluster_settings(model, folder / "storage", block_tokens=BLOCK_TOKENS)
    with EngineCluster(settings, folder) as cluster:
        names = [
            cluster.start_engine(Role.PREFILL, 0),
            cluster.start_engine(Role.DECODE, 0, decode_prefix_caching=True),
        ]
        with PlainEngine(model, folder, BLOCK_TOKENS) as plain:
            turns = in_parallel([partial(play_plain, plain.url, agent) for agent in AGENTS])
            whole = complete(plain.url, WHOLE, GENERATE).token_ids
        cluster.wait_for(*names)
        yield Served(cluster, turns, whole)


def copied_blocks(cluster: EngineCluster) -> float:
    """Full Blocks copied into the decode engine's HBM, once nothing is under way."""
    cluster.wait_idle()
    return cluster.total("h2d_bytes", "de-0") / cluster.storage.geometry.full_block_bytes


def test_agents_with_one_head_share_its_blocks_and_get_a_plain_engines_tokens(
    served: Served,
) -> None:
    cluster = served.cluster
    first = cluster.replay(AGENTS[0], "")
    before = copied_blocks(cluster)
    others = in_parallel([partial(cluster.replay, agent, "") for agent in AGENTS[1:]])
    assert [[a.token_ids for a in agent] for agent in (first, *others)] == served.turns
    prompts = [
        prompt
        for agent, turns in zip(AGENTS[1:], served.turns[1:], strict=True)
        for prompt in (len(agent[0].append), len(agent[0].append + turns[0] + agent[1].append))
    ]
    head = len(HEAD) // BLOCK_TOKENS
    most = sum(-(-tokens // BLOCK_TOKENS) - head for tokens in prompts)
    assert 0 < copied_blocks(cluster) - before <= most


def test_of_a_prompt_that_is_there_as_a_whole_nothing_is_copied(served: Served) -> None:
    cluster = served.cluster
    answers, copied = [], []
    for _ in range(2):
        answers.append(cluster.ask(WHOLE, GENERATE, "whole").token_ids)
        copied.append(copied_blocks(cluster))
    assert answers == [served.whole] * 2
    assert copied[0] == copied[1]


def test_without_hits_the_tokens_are_the_same(served: Served) -> None:
    turns = served.turns[0]
    assert served.cluster.ask_without_hits(AGENTS[0], turns) == (turns[-1], 0)
    served.cluster.wait_idle()
    assert served.cluster.total("transfer_failures") == 0
