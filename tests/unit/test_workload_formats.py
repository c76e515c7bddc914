"""Trace readers: what they accept, what they refuse, and the errors."""

import gzip
import json
import lzma
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dualpath.core.errors import TraceError
from dualpath.workload.conversation.block_session import BlockSession, BlockTurn
from dualpath.workload.conversation.text_session import TextSession
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import FORMATS, read_trace

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "fix it"},
    {"role": "assistant", "content": "ls", "extra": {"response": {"usage": {}}}},
    {"role": "user", "content": [{"type": "text", "text": "a.py"}]},
    {"role": "assistant", "content": "cat a.py"},
    {"role": "exit", "content": "done"},
]
WEKA = {
    "id": "w",
    "block_size": 4,
    "requests": [
        {"t": 0, "type": "n", "in": 10, "out": 3, "hash_ids": [[1, 2]], "think_time": 0.0},
        {
            "t": 1,
            "type": "subagent",
            "agent_id": "helper",
            "requests": [{"t": 0, "type": "n", "in": 5, "out": 1, "hash_ids": [9]}],
        },
        {"t": 2, "type": "s", "in": 17, "out": 0, "hash_ids": [[1, 4]], "think_time": 1.5},
    ],
}


def write_lines(path: Path, *lines: object) -> Path:
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    path.write_text(text)
    return path


def agentperf_line(session: str, index: int, delay_ms: float | None = None) -> dict[str, Any]:
    return {
        "conversation_id": session,
        "conversation_idx": index,
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": f"u{index}"}],
        "tools": [{"name": "bash"}],
        "target_output_tokens": 7,
        "simulated_tool_delay_ms_after": delay_ms,
    }


def test_rounds_are_read_from_objects_and_from_bare_lists(tmp_path: Path):
    path = write_lines(
        tmp_path / "t.jsonl", {"session_id": "a", "rounds": [[5, 2], [3, 0]]}, "", [[4, 1]]
    )

    named, bare = read_trace(path)

    assert isinstance(named, TokenSession)
    assert (named.session_id, bare.session_id) == ("a", "t-3")
    rounds = [(r.append_tokens, r.generated_tokens) for r in named.trajectory.rounds]
    assert rounds == [(5, 2), (3, 1)]
    assert named.retained_tokens == ()


def test_recorded_rounds_state_how_much_context_they_retain(tmp_path: Path):
    rounds = [
        {"t": 0, "prompt": 10, "append": 10, "context": 0, "gen": 4, "think_s": 0, "api_s": 1},
        {"t": 1, "prompt": 20, "append": 6, "context": 14, "gen": 2, "think_s": 1.5},
        {"t": 2, "prompt": 12, "append": 4, "context": 8, "gen": 2, "think_s": None},
    ]
    path = write_lines(tmp_path / "t.jsonl", {"session_id": "a", "rounds": rounds})

    (session,) = read_trace(path)

    assert isinstance(session, TokenSession)
    assert session.retained_tokens == (None, None, 8)
    assert [r.delay_s for r in session.trajectory.rounds] == [0.0, 1.5, 0.0]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"rounds": [[5, -1]]}', r"Expected `int` >= 0"),
        ('{"rounds": [[99999999999, 1]]}', r"Expected `int` <= 16777216"),
        ('{"rounds": [[5, 1.5]]}', r"Expected `int`, got `float`"),
        ('{"rounds": [[5, true]]}', r"got `bool`"),
        ('{"rounds": [[5]]}', r"length 2"),
        ('{"rounds": []}', r"length >= 1"),
        ('{"rounds": [[0, 4]]}', r"prompt would be empty"),
        ('{"rounds": [[5, 1]', r"truncated"),
        ('{"rounds": [{"prompt": 9, "append": 3, "context": 3, "gen": 1}]}', r"is not prompt 9"),
        ("[[5, 1], 7]", r"got `int`"),
        ("\x00\xff", r"malformed"),
    ],
)
def test_a_broken_line_is_named_with_fault_and_remedy(tmp_path: Path, line: str, fault: str):
    path = write_lines(tmp_path / "t.jsonl", [[5, 1]], line)

    with pytest.raises(TraceError, match=rf"t\.jsonl, line 2: .*{fault}.*--skip-broken"):
        read_trace(path)


def test_broken_lines_are_left_out_and_reported_on_request(tmp_path: Path):
    path = write_lines(tmp_path / "t.jsonl", "{", [[5, 1]], [[5, -1]], [[6, 1]])
    broken: list[TraceError] = []

    sessions = read_trace(path, on_broken=broken.append)

    assert [s.session_id for s in sessions] == ["t-2", "t-4"]
    assert ["line 1" in str(broken[0]), "line 3" in str(broken[1])] == [True, True]


def test_a_trajectory_file_and_its_compact_line_are_the_same_session(tmp_path: Path):
    trajectory = {"info": {}, "messages": CHAT, "trajectory_format": "mini-swe-agent-1.1"}
    single = tmp_path / "repo__issue-1.traj.json"
    single.write_text(json.dumps(trajectory, indent=2))
    compact = write_lines(
        tmp_path / "all.jsonl", {"session_id": "repo__issue-1", "messages": CHAT, "turns": []}
    )

    assert read_trace(single) == read_trace(compact)
    (session,) = read_trace(single)
    assert isinstance(session, TextSession)
    assert [len(turn.messages) for turn in session.text_turns] == [2, 4]
    assert [turn.answer_text for turn in session.text_turns] == ["ls", "cat a.py"]
    assert session.text_turns[1].messages[3].text == "a.py"


def block_ids(turn: BlockTurn) -> list[int]:
    return [block_id for first, last in turn.id_ranges for block_id in range(first, last + 1)]


def test_weka_runs_plain_ids_and_sub_agents(tmp_path: Path):
    (session,) = read_trace(write_lines(tmp_path / "t.jsonl", WEKA))

    assert isinstance(session, BlockSession)
    assert [block_ids(turn) for turn in session.block_turns] == [[1, 2], [1, 2, 3, 4]]
    assert [turn.generate_tokens for turn in session.block_turns] == [3, 1]
    assert session.block_turns[1].delay_s == 1.5
    (helper,) = session.sub_agents
    assert helper.after_turn == 0
    assert helper.session.session_id == "w/helper-0"
    assert session.turns == 3


def test_weka_one_file_per_session_with_expanded_ids(tmp_path: Path):
    expanded = json.loads(json.dumps(WEKA))
    expanded["requests"][2]["hash_ids"] = [1, 2, 3, 4]
    (tmp_path / "traces").mkdir()
    for number in (1, 2):
        text = json.dumps(expanded | {"id": f"w{number}"}, indent=1)
        (tmp_path / "traces" / f"trace_{number}.json").write_text(text)

    sessions = read_trace(tmp_path)

    assert [s.session_id for s in sessions] == ["w1", "w2"]
    assert isinstance(sessions[0], BlockSession)
    assert sessions[0].block_turns[1].id_ranges == ((1, 4),)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"in": -3}, "Expected `int` >= 0"),
        ({"in": 0}, "must be at least 1"),
        ({"in": 3, "hash_ids": [1, 2, 3]}, "exceed its prompt"),
        ({"hash_ids": [[5, 2]]}, "not a run of block ids"),
        ({"hash_ids": [-4]}, "not a run of block ids"),
        ({"hash_ids": [[0, 1099511627775]]}, "not a run of block ids"),
        ({"think_time": -1}, "Expected `float` >= 0"),
    ],
)
def test_invalid_weka_requests_are_refused(tmp_path: Path, change: dict[str, Any], fault: str):
    trace = json.loads(json.dumps(WEKA))
    trace["requests"][0] |= change

    with pytest.raises(TraceError, match=fault):
        read_trace(write_lines(tmp_path / "t.jsonl", trace))


def test_agentperf_groups_requests_and_shifts_delays_to_the_next_turn(tmp_path: Path):
    path = write_lines(
        tmp_path / "t.jsonl",
        agentperf_line("a", 1, 30.0),
        agentperf_line("a", 0, 250.0),
        agentperf_line("b", 0),
    )

    first, second = read_trace(path)

    assert isinstance(first, TextSession)
    assert [turn.messages[1].text for turn in first.text_turns] == ["u0", "u1"]
    assert [turn.delay_s for turn in first.text_turns] == [0.0, 0.25]
    assert first.text_turns[0].generate_tokens == 7
    assert first.text_turns[0].messages[0].text == 's\n[{"name":"bash"}]'
    assert second.session_id == "b"


def test_folders_tars_and_wheels_read_alike_and_skip_manifests(tmp_path: Path):
    package = tmp_path / "package"
    traces = package / "replays" / "v1" / "traces"
    traces.mkdir(parents=True)
    write_lines(traces / "a.jsonl", agentperf_line("a", 0))
    write_lines(traces / "b.jsonl", agentperf_line("b", 0))
    write_lines(traces.parent / "tasks.jsonl", {"repo": "r"})
    (traces.parent / "manifest.json").write_text("{}")
    with tarfile.open(tmp_path / "p.tar.xz", "w:xz") as tar:
        tar.add(package, "package")
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as wheel:
        for file in package.rglob("*"):
            wheel.write(file, file.relative_to(tmp_path))

    ids = [
        [s.session_id for s in read_trace(place)]
        for place in (package, tmp_path / "p.tar.xz", tmp_path / "p.whl")
    ]

    assert ids == [["a", "b"]] * 3


def test_compressed_files_read_like_plain_ones(tmp_path: Path):
    raw = b"[[5, 1]]\n"
    (tmp_path / "t.jsonl").write_bytes(raw)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "t.jsonl.xz").write_bytes(lzma.compress(raw))

    plain, zipped, xz = (read_trace(tmp_path / f"t.jsonl{s}") for s in ("", ".gz", ".xz"))

    assert plain == zipped == xz


def test_ids_are_made_unique_and_the_limit_holds(tmp_path: Path):
    line = {"session_id": "a", "rounds": [[5, 1]]}
    path = write_lines(tmp_path / "t.jsonl", line, line, line)

    assert [s.session_id for s in read_trace(path, limit=2)] == ["a", "a#2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "cannot be read"),
        ("empty.jsonl", b"", "has no readable JSON"),
        ("odd.jsonl", b'{"a": 1}\n', "format is not recognised.*--trace-format"),
        ("cut.jsonl.xz", lzma.compress(b"[[5, 1]]\n" * 1000)[:40], "cannot be read"),
        ("no.tar", b"not a tar", "cannot be read"),
    ],
)
def test_unusable_files_are_refused_with_the_reason(
    tmp_path: Path, name: str, content: bytes | None, message: str
):
    if content is not None:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / name)


def test_an_empty_folder_and_an_unknown_format_are_refused_with_the_reason(tmp_path: Path):
    with pytest.raises(TraceError, match=r"has no \.jsonl, \.json or \.csv file"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="format 'csv' is unknown; give one of auto, rounds"):
        read_trace(write_lines(tmp_path / "t.jsonl", [[5, 1]]), "csv")


def test_a_named_format_refuses_what_it_cannot_read(tmp_path: Path):
    path = write_lines(tmp_path / "t.jsonl", [[5, 1]])

    for name in set(FORMATS) - {"rounds"}:
        with pytest.raises(TraceError, match="Expected `object`, got `array`"):
            read_trace(path, name)


DATA = Path(os.environ.get("DUALPATH_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))


@pytest.mark.skipif(not DATA.is_dir(), reason=f"real traces not found at {DATA}")
@pytest.mark.parametrize(
    ("name", "sessions", "turns", "kind"),
    [
        ("mini_swe_gemini3/rounds_dev_dsv3tok.jsonl.xz", 338, 13395, TokenSession),
        ("kv_cache_tester/rounds_dev.jsonl.xz", 501, 33763, TokenSession),
        ("kv_cache_tester/dev.jsonl.xz", 501, 34315, BlockSession),
        ("agentperf_local/traces.tar.xz", 9, 174, TextSession),
        ("mini_swe_gemini3/dev.jsonl.xz", 338, 13395, TextSession),
    ],
)
def test_real_traces_are_read_whole(name: str, sessions: int, turns: int, kind: type):
    read = read_trace(DATA / name)

    assert (len(read), sum(s.turns for s in read)) == (sessions, turns)
    assert all(isinstance(session, kind) for session in read)
