"""Decode engines that compute appends answer like a plain engine: hits in DRAM, HBM and storage.

1P2D; the second decode engine caches prefixes in its HBM.  Agents append a few tokens per turn.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import Answer, PlainEngine, Round, in_parallel, play_plain
from tests.e2e.test_engines import at_decode

from dualpath.core.cluster import Role
from dualpath.policy import read_side
from dualpath.policy.events import Assignment
from dualpath_lab.models.random_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long]

BLOCK_TOKENS = 32
GENERATE = 40
#: Five turns each; the last one appends more than two blocks.
AGENTS = [
    [
        Round([5 + (seed * 31 + index * index) % 480 for index in range(240)], GENERATE),
        *(
            Round([9 + (seed + turn + 11 * index) % 480 for index in range(tokens)], GENERATE)
            for turn, tokens in enumerate((10, 3, 25, 90))
        ),
    ]
    for seed in range(2)
]


class Served(NamedTuple):
    """The cluster, and a plain engine's answers to the agents."""

    cluster: EngineCluster
    turns: list[list[list[int]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, folder = make_tiny_model("qwen2"), tmp_path_factory.mktemp("append")
    settings = tiny_cluster_settings(
        model,
        folder / "storage",
        block_tokens=BLOCK_TOKENS,
        dram_tier=True,
        append_at_decode_tokens=160,
    )
    with EngineCluster(settings, folder) as cluster:
        names = [
            cluster.start_engine(Role.PREFILL, 0),
            cluster.start_engine(Role.DECODE, 0),
            cluster.start_engine(Role.DECODE, 1, decode_prefix_caching=True),
        ]
        with PlainEngine(model, folder, BLOCK_TOKENS) as plain:
            turns = in_parallel([partial(play_plain, plain.url, agent) for agent in AGENTS])
        cluster.wait_for(*names)
        yield Served(cluster, turns)


def blocks(cluster: EngineCluster, counter: str, *engines: str) -> float:
    """Full Blocks of a counter of bytes, once nothing is under way."""
    cluster.wait_idle()
    return cluster.total(counter, *engines) / cluster.storage.geometry.full_block_bytes


def are_right(served: Served, answers: list[list[Answer]]) -> None:
    for agent, got, expected in zip(AGENTS, answers, served.turns, strict=True):
        assert [answer.token_ids for answer in got] == expected
        assert [answer.cached_tokens for answer in got] == served.cluster.expected_hits(agent)
    assert served.cluster.total("transfer_failures") == 0
    assert served.cluster.total("persist_dropped_blocks") == 0
    assert served.cluster.total("stale_transfers") == 0


def appended(assignments: list[Assignment]) -> list[Assignment]:
    return [one for one in assignments if one.prefill_engine is None]


def test_hits_in_dram_and_in_hbm(served: Served) -> None:
    cluster = served.cluster
    cluster.forget_assignments()
    answers = in_parallel(
        [partial(cluster.replay_cached, agent, f"dram {n}") for n, agent in enumerate(AGENTS)]
    )
    are_right(served, answers)
    decisions = cluster.assignments()
    engines = {one.decode_engine for one in decisions[:2]}
    assert engines == {"de-0", "de-1"}, "each agent has a decode engine of its own"
    alone = appended(decisions)
    assert len(alone) == sum(len(agent) - 1 for agent in AGENTS)
    assert {one.read_reason for one in alone} == {"kept"}
    # The PE has loaded no hit, and has sent the first turns; nothing was read from storage.
    prompts = sum(-(-len(agent[0].append) // BLOCK_TOKENS) for agent in AGENTS)
    assert blocks(cluster, "de_hit_bytes") == blocks(cluster, "pe_hit_bytes") == 0
    assert blocks(cluster, "pe_to_de_bytes") == prompts
    assert blocks(cluster, "storage_read_bytes") == 0
    # Without a prefix cache each hit is copied into HBM; with one it is there.
    hits = sum(cluster.expected_hits(AGENTS[0])) // BLOCK_TOKENS
    assert blocks(cluster, "h2d_bytes", "de-0") == prompts // 2 + hits
    assert blocks(cluster, "h2d_bytes", "de-1") == prompts // 2


def test_hits_in_storage(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, scheduler = served.cluster, served.cluster.service.scheduler
    off = msgspec.structs.replace(scheduler.settings, dram_tier=False)
    monkeypatch.setattr(scheduler, "settings", off)
    monkeypatch.setattr(read_side, "choose_reads", at_decode)
    cluster.forget_assignments()
    read = blocks(cluster, "storage_read_bytes", "de-0", "de-1")
    loaded = blocks(cluster, "de_hit_bytes")
    answers = in_parallel(
        [partial(cluster.replay, agent, f"storage {n}") for n, agent in enumerate(AGENTS)]
    )
    are_right(served, answers)
    alone = appended(cluster.assignments())
    assert len(alone) == sum(len(agent) - 1 for agent in AGENTS)
    assert {run.cached for one in alone for run in one.reads} == {False}
    hits = sum(sum(cluster.expected_hits(agent)) for agent in AGENTS) // BLOCK_TOKENS
    assert blocks(cluster, "storage_read_bytes", "de-0", "de-1") - read == hits
    assert blocks(cluster, "de_hit_bytes") == loaded


def test_an_appended_context_is_stored_as_a_prefilled_one(served: Served) -> None:
    """The blocks of appends are hits for a request with a PE, and its tokens are the same."""
    cluster, agent, turns = served.cluster, AGENTS[1], served.turns[1]
    context = [
        t for turn, answer in zip(agent, turns, strict=True) for t in (*turn.append, *answer)
    ]
    prompt = [*context, *range(5, 5 + 200)]
    cluster.forget_assignments()
    answer = cluster.ask(prompt, GENERATE, "dram 1")
    (decision,) = cluster.assignments()
    assert decision.prefill_engine == "pe-0"
    assert answer.cached_tokens == (len(context) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert answer.token_ids == cluster.ask(prompt, GENERATE, "never seen").token_ids
