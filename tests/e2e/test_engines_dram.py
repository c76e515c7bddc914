"""Real engines with hits in DRAM, their own and their node's, answer like a plain engine."""

import itertools
import json
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import PlainEngine, Round, in_parallel, play_plain, until
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.launch.settings import LocalClusterSettings
from dualpath.storage.block_file import HEADER_BYTES
from dualpath_lab.models.random_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long]

BLOCK_TOKENS = 32
GENERATE = 40
#: 40 blocks.
SMALL = 10 << 20
BLOCK_BYTES = SMALL // 40
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


#: Hints that disable retention and prefetch.
NO_MORE = {"prefetch": 0, "done": 1}
FREQUENT_JANITOR = ("--worker-extension-cls", "tests.e2e.frequent_janitor_worker.FrequentJanitor")


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """A plain engine's answers to the agents."""
    with PlainEngine(
        make_tiny_model("qwen2"), tmp_path_factory.mktemp("plain"), BLOCK_TOKENS
    ) as plain:
        return in_parallel([partial(play_plain, plain.url, agent) for agent in AGENTS])


def caching_settings(folder: Path, **changes: object) -> LocalClusterSettings:
    """Settings of engines with buffers that cache less than three agents each."""
    return tiny_cluster_settings(
        make_tiny_model("qwen2"),
        folder / "storage",
        block_tokens=BLOCK_TOKENS,
        dram_tier=True,
        buffer_bytes=SMALL,
        **changes,
    )


class Served(NamedTuple):
    """The cluster, and a plain engine's answers to the agents."""

    cluster: EngineCluster
    turns: list[list[list[int]]]


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """1P1D that starts while the plain engine is asked."""
    folder = tmp_path_factory.mktemp("dram")
    with EngineCluster(caching_settings(folder), folder) as cluster:
        names = start_both(cluster)
        turns = request.getfixturevalue("turns")
        cluster.wait_for(*names)
        yield Served(cluster, turns)


def start_both(cluster: EngineCluster, *vllm_args: str) -> list[str]:
    roles = Role.PREFILL, Role.DECODE
    return [cluster.start_engine(role, 0, vllm_args=vllm_args) for role in roles]


def test_turns_take_their_hits_from_the_decode_engines_dram(served: Served) -> None:
    cluster, turns = served
    answers = cluster.replay_cached(AGENTS[0], "alone")
    assert [answer.token_ids for answer in answers] == turns[0]
    assert [answer.cached_tokens for answer in answers] == cluster.expected_hits(AGENTS[0])
    cluster.wait_idle()
    assert cluster.total("storage_read_bytes") == 0
    assert cluster.total("dram_hit_blocks", "de-0") > 0
    # vLLM's own metrics, which it counts after an answer: the DE had them in its DRAM and sent
    # them to the PE.
    hits = sum(cluster.expected_hits(AGENTS[0]))
    until(lambda: cached_by_source(cluster, Role.PREFILL) == {"p2p": hits}, "hits of the PE")
    until(lambda: cached_by_source(cluster, Role.DECODE).get("host") == hits, "hits of the DE")
    assert set(cached_by_source(cluster, Role.DECODE)) == {"host", "p2p"}


def cached_by_source(cluster: EngineCluster, role: Role) -> dict[str, int]:
    """Return the tokens that an engine's own metrics count as cached, by source."""
    (engine,) = [each for each in cluster.service.registry.alive() if each.role is role]
    with urllib.request.urlopen(f"{engine.api_url}/metrics", timeout=GUARD_S) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {
            sample.labels["source"]: int(sample.value)
            for family in families
            for sample in family.samples
            if sample.name == "vllm:prompt_tokens_cached_by_source_total" and sample.value
        }


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


# ---------------------------------------------------------------- two turns with a pause between


class Paused(NamedTuple):
    """An agent that waits for a tool: its next prompt, the right answer, and its KV's keys."""

    prompt: list[int]
    answer: list[int]
    keys: list[bytes]


def first_turn(cluster: EngineCluster, turns: list[list[int]], salt: str) -> Paused:
    """Play the first turn of the first agent; its KV is not prefetched."""
    first, second = AGENTS[0][:2]
    hints = {"session_id": salt, "prefetch": 0}
    answer = cluster.ask(first.append, first.generate, salt, hints=hints)
    assert answer.token_ids == turns[0]
    context = first.append + turns[0]
    keys = cluster.wait_stored(context[:-1], salt)
    cluster.wait_idle()
    return Paused(context + second.append, turns[1], keys)


def push_out(cluster: EngineCluster, keys: list[bytes]) -> None:
    """Send other requests until none of these blocks is in a buffer."""
    numbers = itertools.count()

    def gone() -> bool:
        cluster.ask(AGENTS[1][0].append, 1, f"other {next(numbers)}", hints=NO_MORE)
        return not cluster.cached_blocks(keys)

    until(gone, "an agent's blocks pushed out of all buffers")
    cluster.wait_idle()


def say(cluster: EngineCluster, session: str, **hints: object) -> None:
    """Send session hints while the agent's tool runs."""
    body = json.dumps({"cache_salt": session, **hints}).encode()
    url = f"{cluster.url}/dualpath/v1/sessions/{session}"
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=GUARD_S) as response:
        assert response.status == 200


def test_what_a_client_asks_for_in_a_pause_is_in_dram_for_its_next_turn(served: Served) -> None:
    cluster, turns = served
    agent = first_turn(cluster, turns[0], "paused")
    push_out(cluster, agent.keys)
    fetched = cluster.total("dram_fetched_blocks", "de-0")
    say(cluster, "paused", next_turn_s=0, retain_s=GUARD_S)
    until(lambda: cluster.cached_blocks(agent.keys) == {"de-0": len(agent.keys)}, "blocks back")
    until(
        lambda: cluster.total("dram_fetched_blocks", "de-0") >= fetched + len(agent.keys),
        "blocks counted",
    )
    read_bytes, hits = cluster.total("storage_read_bytes"), cluster.total("dram_hit_blocks", "de-0")
    cluster.forget_assignments()
    answer = cluster.ask(agent.prompt, GENERATE, "paused")
    assert answer == (agent.answer, len(agent.keys) * BLOCK_TOKENS)
    (note,) = cluster.assignments()
    assert (note.read_reason, [run.side for run in note.reads]) == ("kept", ["decode"])
    cluster.wait_idle()
    assert cluster.total("storage_read_bytes") == read_bytes
    assert cluster.total("dram_hit_blocks", "de-0") == hits + len(agent.keys)


# ---------------------------------------------------------------- what the node's engines share


def test_engines_read_from_the_dram_that_they_share_what_has_left_their_buffers(
    turns: list[list[list[int]]], tmp_path: Path
) -> None:
    shared = {"dram_dir": str(tmp_path / "shared"), "dram_bytes": 512 * BLOCK_BYTES}
    with EngineCluster(caching_settings(tmp_path, **shared), tmp_path) as cluster:
        cluster.wait_for(*start_both(cluster))
        agent = first_turn(cluster, turns[0], "sharing")
        push_out(cluster, agent.keys)
        assert cluster.total("node_dram_read_bytes") == 0
        cluster.forget_assignments()
        answer = cluster.ask(agent.prompt, GENERATE, "sharing")
        assert answer == (agent.answer, len(agent.keys) * BLOCK_TOKENS)
        # The router knows the block.
        (note,) = cluster.assignments()
        assert (note.read_reason, [run.side for run in note.reads]) == ("kept", ["decode"])
        cluster.wait_idle()
        shared_bytes = cluster.total("node_dram_read_bytes", "de-0")
        assert shared_bytes == cluster.total("node_dram_read_bytes")
        assert shared_bytes == len(agent.keys) * BLOCK_BYTES
        salts = [f"all {number}" for number in range(len(AGENTS))]
        answers = in_parallel(
            [partial(cluster.replay, agent, s) for agent, s in zip(AGENTS, salts, strict=True)]
        )
        assert [[answer.token_ids for answer in each] for each in answers] == turns
        cluster.wait_idle()
        assert cluster.total("storage_read_bytes") == 0
        assert cluster.service.metrics.recomputed_tokens == 0


# ---------------------------------------------------------------- a storage that is too small


def test_a_janitor_that_removes_blocks_in_mid_request_changes_no_token(
    turns: list[list[list[int]]], tmp_path: Path
) -> None:
    """No block is protected: a block found by a look-up may be removed before it is read."""
    limits = tmp_path / "limits.toml"
    limits.write_text("[engine]\nstorage_protect_s = 0.0\nstorage_low = 0.3\n")
    settings = caching_settings(
        tmp_path,
        storage_quota=24 * (HEADER_BYTES + BLOCK_BYTES),
        config_file=str(limits),
    )
    with EngineCluster(settings, tmp_path) as cluster:
        cluster.wait_for(*start_both(cluster, *FREQUENT_JANITOR))

        salts = itertools.cycle("abc")

        def missed() -> bool:
            salt = next(salts)
            play = partial(play_plain, cluster.url, salt=salt)
            assert in_parallel([partial(play, agent) for agent in AGENTS]) == turns
            read_bytes = cluster.total("storage_read_bytes")
            return min(cluster.service.metrics.recomputed_tokens, read_bytes) > 0

        until(missed, "promised blocks, some read and some removed before")
        cluster.wait_idle()
        assert cluster.total("storage_evicted_blocks") > 0
        assert cluster.service.metrics.retries == 0
