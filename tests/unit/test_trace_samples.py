"""Published traces in their own formats: samples in `tests/data/traces` as sessions."""

import json
from pathlib import Path
from typing import Any

import pytest

from dualpath.core.errors import TraceError
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_sessions
from dualpath.workload.conversation.block_session import BlockSession
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.text_session import Message, TextSession
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import detect_format, read_trace
from dualpath.workload.formats.block_requests import each_id

SAMPLES = Path(__file__).parents[1] / "data" / "traces"


def sample(name: str) -> list[Session]:
    return read_trace(SAMPLES / f"{name}.jsonl")


def turns(session: Session) -> list[tuple[int, int, list[int], float]]:
    assert isinstance(session, BlockSession)
    return [
        (t.prompt_tokens, t.generate_tokens, list(each_id(t.id_ranges)), t.delay_s)
        for t in session.block_turns
    ]


def rounds(session: Session) -> list[tuple[int, int, float]]:
    assert isinstance(session, TokenSession)
    return [(r.append_tokens, r.generated_tokens, r.delay_s) for r in session.trajectory.rounds]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("mooncake", "mooncake"),
        ("dynamo", "mooncake"),
        ("aiperf", "mooncake"),
        ("bailian", "bailian"),
        ("lmcache", "lmcache"),
        ("otel", "otel"),
    ],
)
def test_a_format_is_recognised_by_what_the_file_holds(name: str, format: str, tmp_path: Path):
    other = tmp_path / "anything.json.jsonl"
    other.write_bytes((SAMPLES / f"{name}.jsonl").read_bytes())

    assert detect_format(other) == format


def test_mooncake_requests_share_ids_and_leave_the_partial_last_block_out():
    first, second = sample("mooncake")

    assert isinstance(first, BlockSession)
    assert first.block_tokens == 512
    # The third request goes on from the blocks of the first.
    assert turns(first) == [(1536, 40, [0, 1, 2], 0.0), (2200, 7, [0, 1, 2, 5], 3.0)]
    assert turns(second) == [(1300, 12, [0, 3], 0.0)]
    assert isinstance(second, BlockSession)
    assert second.scope == first.scope
    assert second.shared_ids == {0}
    assert first.block_turns[1].start_s == second.block_turns[0].start_s == 3.0


def test_blocks_of_one_trace_are_hit_across_sessions_where_sessions_share():
    apart = agents_from_sessions(sample("mooncake"), WorkloadSettings(block_tokens=512))
    shared = agents_from_sessions(
        sample("mooncake"),
        WorkloadSettings(block_tokens=512, share_across_sessions="sequential"),
    )

    assert apart.hit_tokens.tolist() == [0, 1536, 0]
    assert shared.hit_tokens.tolist() == [0, 1536, 512]


def test_dynamos_sub_agents_follow_wait_for_and_hashes_become_small_ids():
    (agent,) = sample("dynamo")

    assert isinstance(agent, BlockSession)
    assert agent.block_tokens == 128
    assert turns(agent) == [(256, 30, [0, 1], 0.0), (400, 5, [0, 1, 2], 1.5)]
    (helper,) = agent.sub_agents
    assert helper.after_turn == 0
    assert turns(helper.session) == [(300, 9, [0, 1], 0.25)]


def test_aiperfs_lines_without_ids_are_appends_and_messages_may_be_deltas():
    text, deltas = sorted(sample("aiperf"), key=lambda session: session.session_id, reverse=True)

    assert rounds(deltas) == [(300, 40, 0.0), (150, 20, 2.0)]
    assert isinstance(text, TextSession)
    asked = (Message("system", "be brief"), Message("user", "list"))
    assert text.text_turns[0].messages == asked
    assert text.text_turns[1].messages == (
        *asked,
        Message("assistant", ""),
        Message("user", "a.py"),
    )
    assert text.text_turns[1].delay_s == 0.5


def test_bailian_chats_follow_their_parents_and_branch():
    first, second = sample("bailian")

    assert (first.session_id, second.session_id) == ("55", "60")
    assert isinstance(first, BlockSession)
    assert first.block_tokens == 16
    assert turns(first) == [(40, 20, [1089, 1090], 0.0), (70, 13, [1089, 1090, 2000, 2001], 10.0)]
    (branch,) = first.sub_agents
    assert (branch.after_turn, turns(branch.session)) == (0, [(50, 2, [1089, 1090, 3000], 14.0)])
    assert turns(second) == [(35, 3, [1089, 1090], 0.0)]
    assert first.shared_ids == {1089, 1090}


def test_lmcache_lines_are_ordered_by_time_and_share_their_text():
    agent, other = sample("lmcache")

    assert isinstance(agent, TextSession)
    assert [turn.messages[0].text for turn in agent.text_turns] == [
        "fix it",
        "fix it\n\nno such file",
    ]
    assert [turn.answer_text for turn in agent.text_turns] == ["cat a.py", "ls"]
    assert agent.text_turns[1].delay_s == pytest.approx(2.333984)
    assert other.turns == 1


def test_spans_of_agents_and_tools_are_ignored_and_lengths_determine_continuation():
    text, lengths = sample("otel")

    assert isinstance(text, TextSession)
    assert text.text_turns[0].messages == (Message("user", "hi"),)
    assert text.text_turns[0].generate_tokens == 3
    assert lengths.session_id == "c"
    assert isinstance(lengths, TokenSession)
    # The third prompt is shorter than the second: its prefix stays in the server's cache.
    assert lengths.retained_tokens == (None, None, 64)
    assert rounds(lengths) == [(100, 20, 0.0), (30, 5, 2.5), (16, 1, 0.0)]


MOONCAKE = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
BAILIAN = json.loads((SAMPLES / "bailian.jsonl").read_text().splitlines()[0])
LMCACHE = {"timestamp": 0, "input": "a", "output": "b", "session_id": "s"}
OTEL = json.loads((SAMPLES / "otel.jsonl").read_text().splitlines()[1])


def with_span(change: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(OTEL))
    span = changed["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    span |= {key: value for key, value in change.items() if key in span}
    span["attributes"] += [
        {"key": key, "value": value} for key, value in change.items() if key not in span
    ]
    return changed


@pytest.mark.parametrize(
    ("good", "bad", "fault"),
    [
        (MOONCAKE, MOONCAKE | {"input_length": 0}, "input_length is 0; it must be at least 1"),
        (MOONCAKE, MOONCAKE | {"input_length": -4}, "Expected `int` >= 0"),
        (MOONCAKE, {"timestamp": 0, "output_length": 1}, "messages and text_input are missing"),
        (MOONCAKE, MOONCAKE | {"text_input": "a"}, "exclude each other"),
        (
            MOONCAKE,
            {"timestamp": 0, "input_length": 9, "hash_ids": [1]},
            "output_length is missing",
        ),
        (MOONCAKE, MOONCAKE | {"hash_ids": ["x"]}, "Expected `int`, got `str`"),
        (BAILIAN, BAILIAN | {"input_length": 0}, "Expected `int` >= 1"),
        (BAILIAN, BAILIAN, "chat_id 55 occurs twice"),
        (BAILIAN, BAILIAN | {"timestamp": -1}, "Expected `float` >= 0"),
        (LMCACHE, LMCACHE | {"input": 5}, "Expected `str`, got `int`"),
        (LMCACHE, LMCACHE | {"session_id": None}, "missing required field `session_id`"),
        (
            OTEL,
            with_span({"gen_ai.usage.input_tokens": {"intValue": "x"}}),
            "'x' is not an integer",
        ),
        (
            OTEL,
            with_span({"gen_ai.usage.input_tokens": {"intValue": "0"}}),
            "is 0; it must be 1 to",
        ),
        (OTEL, with_span({"endTimeUnixNano": "5"}), "endTimeUnixNano is 5; it must be"),
        (OTEL, with_span({"gen_ai.input.messages": {"stringValue": "{"}}), "is not a list"),
    ],
)
def test_a_bad_line_is_named_with_fault_and_remedy(
    tmp_path: Path, good: object, bad: object, fault: str
):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")

    with pytest.raises(TraceError, match=rf"t\.jsonl, line 2: .*{fault}.*--skip-broken"):
        read_trace(path)

    broken: list[TraceError] = []
    assert len(read_trace(path, on_broken=broken.append)) == 1
    assert len(broken) == 1


def test_lengths_that_fit_no_block_size_are_refused(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    lines = [MOONCAKE, MOONCAKE | {"input_length": 4096, "hash_ids": [1, 2]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    with pytest.raises(TraceError, match="no block size fits"):
        read_trace(path)
