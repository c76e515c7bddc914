"""Traces as the simulator's agents, and when they arrive."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.workload_statistics import context_tokens, describe

from dualpath.core.errors import ConfigError, TraceError
from dualpath.core.request import Round, Trajectory
from dualpath.workload.arrivals import (
    arrival_times_s,
    poisson_times_for_s,
    poisson_times_s,
    with_arrivals,
)
from dualpath.workload.columns.agent_table import AgentTable
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_sessions
from dualpath.workload.conversation.block_session import BlockSession, BlockTurn, SubAgent
from dualpath.workload.conversation.prompts import Contents, Vocabulary, approximate_encode
from dualpath.workload.conversation.sessions import AgentSettings, Session, make_agents
from dualpath.workload.conversation.spans import StoredPrefixes, TokenIds, hit_tokens
from dualpath.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import read_trace


def rounds(*pairs: tuple[int, int], delay_s: float = 0.0) -> TokenSession:
    return TokenSession(Trajectory("s", tuple(Round(a, g, delay_s) for a, g in pairs)))


def test_the_last_generated_token_is_no_hit_and_hits_are_full_blocks():
    table = agents_from_sessions([rounds((100, 28), (10, 30), (1, 1))])

    assert table.prompt_tokens.tolist() == [100, 138, 169]
    # After round 0 there is KV for 127 tokens, after round 1 for 167.
    assert table.hit_tokens.tolist() == [0, 64, 128]
    assert table.generated_tokens.tolist() == [28, 30, 1]


def test_tool_delays_are_dropped_recorded_or_scaled():
    session = rounds((5, 1), (5, 1), delay_s=2.0)

    delays = [
        agents_from_sessions([session], WorkloadSettings(tool_delay_scale=scale)).delay_s.tolist()
        for scale in (0.0, 1.0, 0.25)
    ]

    assert delays == [[0.0, 0.0], [2.0, 2.0], [0.5, 0.5]]


def blocks(name: str, *turns: tuple[int, int, tuple[int, int]]) -> BlockSession:
    return BlockSession(name, 4, tuple(BlockTurn(p, g, (ids,)) for p, g, ids in turns), scope="w")


def test_sub_agents_start_after_a_round_of_their_parent_and_hit_its_blocks():
    nested = BlockSession("w/a/b", 4, blocks("", (8, 1, (0, 1))).block_turns, (), "w")
    helper = blocks("w/a", (12, 1, (0, 2)), (12, 2, (0, 2)))
    helper = BlockSession("w/a", 4, helper.block_turns, (SubAgent(1, nested),), "w")
    own = blocks("w", (8, 1, (0, 1)), (12, 1, (0, 2)), (16, 1, (0, 3)))
    session = BlockSession("w", 4, own.block_turns, (SubAgent(0, helper),), "w")
    settings = WorkloadSettings(block_tokens=4, agents=2)

    table = agents_from_sessions([session], settings)

    assert table.first_round.tolist() == [0, 3, 5, 6, 10, 12, 13]
    assert table.start_after_round.tolist() == [-1, 0, 4, -1, 7, 11]
    assert table.prompt_tokens.tolist()[6:10] == [64, 73, 77, 81]
    assert table.hit_tokens.tolist()[3:6] == [8, 8, 4]
    table.check()


def test_truncation_removes_sub_agents_of_removed_rounds():
    helpers = (
        SubAgent(0, blocks("w/a", (4, 1, (0, 0)))),
        SubAgent(1, blocks("w/b", (4, 1, (0, 0)))),
    )
    own = blocks("w", (8, 1, (0, 1)), (12, 1, (0, 2)))
    session = BlockSession("w", 4, own.block_turns, helpers, "w")
    long = rounds((50, 1))

    table = agents_from_sessions([long, session], WorkloadSettings(max_context_tokens=12))

    assert table.first_round.tolist() == [0, 1, 2]
    assert table.start_after_round.tolist() == [-1, 0]


def text(name: str, *asked: str) -> TextSession:
    system = Message("system", "s" * 400)
    turn = TextTurn((system, *(Message("user", words) for words in asked)), "answer")
    return TextSession(name, (turn, TextTurn((*turn.messages, Message("user", "more")), "")))


def test_shared_tokens_depend_on_the_order_of_sessions():
    sessions = [text("a", "x"), text("b", "y")]

    first_hits = {}
    for sharing in ("none", "parallel", "sequential"):
        settings = WorkloadSettings(block_tokens=16, share_across_sessions=sharing)
        table = agents_from_sessions(sessions, settings)
        first_hits[sharing] = table.hit_tokens[table.first_round[:-1]].tolist()

    assert first_hits["none"] == first_hits["parallel"] == [0, 0]
    assert first_hits["sequential"] == [0, 112]


def test_text_without_a_tokenizer_is_four_bytes_a_token():
    assert len(approximate_encode("abcdefghi")) == 3
    assert approximate_encode("abcd") == approximate_encode("abcdefg")[:1]
    assert approximate_encode("") == []
    assert max(approximate_encode("\N{PILE OF POO}" * 2)) < 1 << 31


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agents": 0}, "agents is 0; it must be between 1"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"tool_delay_scale": -1.0}, "tool_delay_scale is -1.0"),
        ({"scale_append": 0.0}, "scale_append is 0.0"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"share_across_sessions": "all"}, "must be one of none, parallel"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        WorkloadSettings(**settings)


def test_invalid_workloads_are_refused():
    with pytest.raises(ConfigError, match="there are no sessions"):
        agents_from_sessions([])
    with pytest.raises(TraceError, match="no round fits into max_context_tokens 4"):
        agents_from_sessions([rounds((5, 1))], WorkloadSettings(max_context_tokens=4))
    with pytest.raises(
        TraceError, match=r"round 1 of agent 0 needs 12 tokens.* limit of 10;.*trunc"
    ):
        agents_from_sessions([rounds((5, 1), (5, 1))], WorkloadSettings(context_limit_tokens=10))
    with pytest.raises(ConfigError, match="consists of block ids, which cannot be scaled"):
        agents_from_sessions([blocks("w", (8, 1, (0, 1)))], WorkloadSettings(scale_append=2.0))
    with pytest.raises(ConfigError, match="is text, which cannot be scaled"):
        agents_from_sessions([text("a", "x")], WorkloadSettings(scale_append=2.0))
    with pytest.raises(ConfigError, match="is a AdditionalAgent, which has no recorded rounds"):
        agents_from_sessions(make_agents([rounds((5, 1))], 2, 0))


def test_statistics_average_turns_and_trajectories():
    sessions = [rounds((100, 10), (20, 10)), rounds((40, 2))]

    made = describe(agents_from_sessions(sessions))

    assert (made.trajectories, made.rounds, made.turns) == (2, 3, 1.5)
    assert made.total_tokens == (140 + 42) / 2
    assert made.per_turn.append_tokens == pytest.approx(160 / 3)
    assert made.per_trajectory.append_tokens == 50
    assert made.per_turn.hit_rate == pytest.approx(64 / 270)
    assert made.per_trajectory.hit_rate == pytest.approx(64 / 230 / 2)


def test_context_of_an_edited_prompt_is_its_hit():
    session = TokenSession(Trajectory("s", (Round(300, 10), Round(200, 10))), (None, 100))

    table = agents_from_sessions([session])

    assert table.hit_tokens.tolist() == [0, 64]
    assert context_tokens(table).tolist() == [0, 64]


def test_arrivals_are_given_to_agents_and_not_to_sub_agents():
    helper = SubAgent(0, blocks("w/a", (4, 1, (0, 0))))
    own = blocks("w", (8, 1, (0, 1)))
    session = BlockSession("w", 4, own.block_turns, (helper,), "w")
    table = agents_from_sessions([session, rounds((5, 1))])

    assert with_arrivals(table, [3.0, 4.0]).start_s.tolist() == [3.0, 0.0, 4.0]
    with pytest.raises(ConfigError, match="1 arrival times for 2 agents"):
        with_arrivals(table, [1.0])
    with pytest.raises(ConfigError, match="arrival 1 is at nan s"):
        with_arrivals(table, [1.0, float("nan")])


def test_random_arrivals_equal_those_of_a_replay_and_end_with_the_duration():
    times = poisson_times_s(1000, 2.0, 5)

    assert times.tolist() == arrival_times_s(1000, 2.0, 5)
    within = poisson_times_for_s(100.0, 2.0, 5)
    assert np.array_equal(within, times[times < 100.0])
    with pytest.raises(ConfigError, match="shorten the duration"):
        poisson_times_for_s(0.0, 2.0, 5)
    with pytest.raises(ConfigError, match="agents per second is -1"):
        poisson_times_s(3, -1.0, 0)


DATA = Path(os.environ.get("DUALPATH_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
real_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"real traces not found at {DATA}")


@real_data
@pytest.mark.parametrize(
    ("name", "agents", "rounds_in_all", "hit_rate"),
    [
        ("mini_swe_gemini3/rounds_dev_dsv3tok.jsonl.xz", 338, 13395, 0.977),
        ("mini_swe_gemini3/dev.jsonl.xz", 338, 13395, 0.976),
        ("kv_cache_tester/rounds_dev.jsonl.xz", 501, 33763, 0.966),
        ("kv_cache_tester/dev.jsonl.xz", 551, 34315, 0.966),
        ("agentperf_local/traces.tar.xz", 9, 174, 0.927),
    ],
)
def test_real_traces_have_their_published_hit_rate(
    name: str, agents: int, rounds_in_all: int, hit_rate: float
):
    table = agents_from_sessions(read_trace(DATA / name))

    table.check()
    assert (table.agents, table.rounds) == (agents, rounds_in_all)
    assert describe(table).per_turn.hit_rate == pytest.approx(hit_rate, abs=0.001)


def replayed(sessions: Sequence[Session]) -> list[tuple[int, int]]:
    """(prompt, hit) of every round of sessions without sub-agents, with a perfect store."""
    vocabulary = Vocabulary(high=1 << 30, encode=approximate_encode)
    rows: list[tuple[int, int]] = []
    for session in sessions:
        stored: StoredPrefixes[TokenIds] = StoredPrefixes()
        conversation = session.start(AgentSettings(), Contents(vocabulary))
        while (turn := conversation.next_turn()) is not None:
            prompt = conversation.token_ids(turn)
            common = stored.common_tokens(TokenIds.of(prompt))
            rows.append((len(prompt), hit_tokens(common, len(prompt), 64)))
            answer = [(1 << 31) + len(rows)] * turn.generate_tokens
            conversation.record(answer)
            stored.add(TokenIds.of([*prompt, *answer[:-1]]))
    return rows


def rows_of(table: AgentTable) -> list[tuple[int, int]]:
    return list(zip(table.prompt_tokens.tolist(), table.hit_tokens.tolist(), strict=True))


@real_data
@pytest.mark.parametrize(
    ("name", "first", "count"),
    [
        ("kv_cache_tester/rounds_dev.jsonl.xz", 0, 2),
        ("kv_cache_tester/dev.jsonl.xz", 0, 2),
        ("agentperf_local/traces.tar.xz", 0, 9),
        ("mini_swe_gemini3/dev.jsonl.xz", 0, 3),
    ],
)
def test_real_sessions_are_simulated_as_they_are_replayed(name: str, first: int, count: int):
    read = read_trace(DATA / name, limit=first + count)[first:]
    sessions = [s for s in read if not (isinstance(s, BlockSession) and s.sub_agents)]
    assert sessions

    assert rows_of(agents_from_sessions(sessions)) == replayed(sessions)
