"""All trace readers are lenient and strict in the same way (`workload/formats/lines.py`)."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import re
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualpath.core.errors import TraceError
from dualpath.workload.columns.sessions_to_columns import (
    WorkloadSettings,
    as_lengths,
    dropped_sessions,
)
from dualpath.workload.conversation.block_session import BlockSession
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import FORMATS, read_trace
from dualpath_lab.experiments.settings import WindowSettings
from dualpath_lab.experiments.workload import windows


def span(number: int) -> dict[str, Any]:
    counts = {"gen_ai.usage.input_tokens": "9", "gen_ai.usage.output_tokens": "2"}
    attributes = [{"key": key, "value": {"intValue": value}} for key, value in counts.items()]
    times = {"startTimeUnixNano": str(number), "endTimeUnixNano": str(number)}
    return {"traceId": f"s{number}", "spanId": "1", "attributes": attributes, **times}


def chat(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": "done"}]


#: A line of every format, with the number of the line.
LINES: dict[str, Callable[[int], dict[str, Any]]] = {
    "rounds": lambda n: {"session_id": f"s{n}", "rounds": [[5, 2]]},
    "agentperf": lambda n: {
        "conversation_id": f"s{n}",
        "conversation_idx": 0,
        "messages": chat(n),
        "target_output_tokens": 7,
    },
    "weka": lambda n: {"id": f"s{n}", "requests": [{"in": 100, "out": 3, "hash_ids": [n]}]},
    "bailian": lambda n: {
        "chat_id": n,
        "timestamp": n,
        "input_length": 32,
        "output_length": 2,
        "hash_ids": [n, n + 100],
    },
    "otel": lambda n: {"resourceSpans": [{"scopeSpans": [{"spans": [span(n)]}]}]},
    "lmcache": lambda n: {"session_id": f"s{n}", "input": f"{n}", "output": "b", "timestamp": n},
    "mooncake": lambda n: {
        "timestamp": n,
        "input_length": 1000,
        "output_length": 3,
        "hash_ids": [n * 10, n * 10 + 1],
    },
    "mini-swe": lambda n: {"session_id": f"s{n}", "messages": chat(n)},
    "requests": lambda n: {"TIMESTAMP": n, "ContextTokens": 9 + n, "GeneratedTokens": 3},
}
EVERY = pytest.mark.parametrize("name", sorted(LINES))
#: A number of every format that is an integer, and a field that may be missing.
INTEGERS: dict[str, tuple[str, float]] = {
    "agentperf": ("target_output_tokens", 7.0),
    "bailian": ("input_length", 32.0),
    "mooncake": ("input_length", 1000.0),
    "weka": ("block_size", 64.0),
    "requests": ("ContextTokens", 9.0),
}
OPTIONAL = {
    "rounds": "session_id",
    "agentperf": "simulated_tool_delay_ms_after",
    "weka": "block_size",
    "bailian": "parent_chat_id",
    "otel": "resource",
    "lmcache": "output",
    "mooncake": "wait_for",
    "mini-swe": "session_id",
    "requests": "Session ID",
}


def lines(name: str, count: int = 3) -> bytes:
    return b"".join(json.dumps(LINES[name](n)).encode() + b"\n" for n in range(1, count + 1))


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def ids(sessions: list[Session]) -> list[str]:
    return [session.session_id for session in sessions]


def test_the_samples_are_of_every_format():
    assert set(LINES) == set(FORMATS) == set(OPTIONAL)


@EVERY
def test_byte_order_marks_and_utf_16_are_read(name: str, tmp_path: Path):
    plain = read_trace(put(tmp_path / "plain/t.jsonl", lines(name)), name)
    marked = put(tmp_path / "marked/t.jsonl", codecs.BOM_UTF8 + lines(name))
    utf_16 = put(tmp_path / "wide/t.jsonl", lines(name).decode().encode("utf-16"))
    assert len(plain) == 3
    assert ids(read_trace(marked)) == ids(read_trace(utf_16)) == ids(plain)


@EVERY
def test_a_null_is_a_missing_field(name: str, tmp_path: Path):
    without = LINES[name](1)
    without.pop(OPTIONAL[name], None)
    null = put(tmp_path / "a/t.jsonl", json.dumps(without | {OPTIONAL[name]: None}).encode())
    missing = put(tmp_path / "b/t.jsonl", json.dumps(without).encode())
    assert ids(read_trace(null, name)) == ids(read_trace(missing, name))


NAMES = {
    "rounds": "session_id",
    "agentperf": "conversation_id",
    "weka": "id",
    "bailian": "session_id",
    "lmcache": "session_id",
    "mooncake": "session_id",
    "mini-swe": "session_id",
    "requests": "Session ID",
}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_session_may_be_named_by_a_number(name: str, tmp_path: Path):
    line = json.dumps(LINES[name](1) | {NAMES[name]: 70})
    assert ids(read_trace(put(tmp_path / "t.jsonl", line.encode()))) == ["70"]


@pytest.mark.parametrize("name", sorted(INTEGERS))
def test_an_integral_float_is_an_integer_and_another_is_not(name: str, tmp_path: Path):
    key, value = INTEGERS[name]
    whole = put(tmp_path / "whole.jsonl", json.dumps(LINES[name](1) | {key: value}).encode())
    assert len(read_trace(whole)) == 1
    for wrong in (value + 0.5, float("nan"), float("inf")):
        line = json.dumps(LINES[name](1) | {key: wrong})
        with pytest.raises(TraceError, match=r"t\.jsonl, line 1: .*--skip-broken"):
            read_trace(put(tmp_path / "t.jsonl", line.encode()))


def test_rounds_and_values_of_other_fields_are_as_lenient(tmp_path: Path):
    line = b'{"rounds": [[5.0, 2], {"prompt": 9.0, "append": 2, "context": 7, "gen": 1}], "x": NaN}'
    (session,) = read_trace(put(tmp_path / "t.jsonl", line))
    assert isinstance(session, TokenSession)
    assert [r.append_tokens for r in session.trajectory.rounds] == [5, 2]


@EVERY
def test_every_broken_line_is_named_or_skipped_and_counted(name: str, tmp_path: Path):
    good = lines(name, 2)
    path = put(tmp_path / "t.jsonl", good + b'{"cut": \n\n"text"\n' + lines(name, 3))
    with pytest.raises(TraceError, match=r"t\.jsonl, line 3: .*--skip-broken"):
        read_trace(path)
    broken: list[TraceError] = []
    read_trace(path, on_broken=broken.append)
    assert [str(error).split(": ")[0].split("line ")[1] for error in broken[:2]] == ["3", "5"]


@EVERY
def test_the_first_line_may_be_the_broken_one(name: str, tmp_path: Path):
    path = put(tmp_path / "t.jsonl", b'{"a header": 1}\n' + lines(name))
    with pytest.raises(TraceError, match="line 1: the format is not recognised by a header"):
        read_trace(path)
    broken: list[TraceError] = []
    assert len(read_trace(path, on_broken=broken.append)) == 3
    assert len(broken) == 1


def zstd(content: bytes) -> bytes:
    module = pytest.importorskip("backports.zstd")
    compressed: bytes = module.compress(content)
    return compressed


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress, zstd])
def test_compression_is_recognised_by_content(compress: Callable[[bytes], bytes], tmp_path: Path):
    plain = ids(read_trace(put(tmp_path / "t.jsonl", lines("rounds"))))
    packed = compress(lines("rounds"))
    for name in ("named/t.jsonl.xz", "unnamed/t.jsonl", "bare/t"):
        assert ids(read_trace(put(tmp_path / name, packed))) == plain
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("t.jsonl", packed)
    assert ids(read_trace(tmp_path / "z.zip")) == plain


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, bz2.compress, zstd])
def test_archives_are_recognised_by_content(compress: Callable[[bytes], bytes], tmp_path: Path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("t.jsonl")
        member.size = len(lines("rounds"))
        tar.addfile(member, io.BytesIO(lines("rounds")))
    path = put(tmp_path / "download", compress(packed.getvalue()))
    assert ids(read_trace(path)) == ["s1", "s2", "s3"]


def test_zstandard_without_its_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "backports", None)
    path = put(tmp_path / "t.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(9))
    with pytest.raises(TraceError, match=r"pip install 'backports\.zstd>=1'"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"PAR1" + bytes(9), "Parquet"), (b"\x89HDF\r\n", "HDF5"), (b"SQLite format 3\0", "SQLite")],
)
def test_other_containers_are_refused_by_name(content: bytes, kind: str, tmp_path: Path):
    with pytest.raises(TraceError, match=f"{kind}.*not read; convert it to JSON lines"):
        read_trace(put(tmp_path / "t.jsonl", content))


APPLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X"
METADATA = ("__MACOSX/._t.jsonl", "._t.jsonl", ".cache/old.jsonl", "in/._t.json")


def test_files_of_the_system_are_passed_over(tmp_path: Path):
    for name in METADATA:
        put(tmp_path / "folder" / name, APPLE)
    put(tmp_path / "folder/t.jsonl", lines("rounds"))
    with (
        zipfile.ZipFile(tmp_path / "z.zip", "w") as archive,
        tarfile.open(tmp_path / "t.tar.gz", "w:gz") as tar,
    ):
        for name in (*METADATA, "t.jsonl"):
            archive.write(tmp_path / "folder" / name, name)
            tar.add(tmp_path / "folder" / name, name)
    for place in ("folder", "z.zip", "t.tar.gz"):
        assert ids(read_trace(tmp_path / place)) == ["s1", "s2", "s3"]


def test_a_json_file_may_hold_lines(tmp_path: Path):
    assert len(read_trace(put(tmp_path / "t.json", lines("weka")))) == 3
    whole = json.dumps(LINES["weka"](1), indent=1).encode()
    assert len(read_trace(put(tmp_path / "one.json", whole))) == 1


# Mooncake


def mooncake(*rows: tuple[int, list[int]]) -> bytes:
    return b"".join(
        json.dumps(
            {"timestamp": n * 1000, "input_length": tokens, "output_length": 5, "hash_ids": listed}
        ).encode()
        + b"\n"
        for n, (tokens, listed) in enumerate(rows)
    )


@pytest.mark.parametrize("bad", [0, 1234, 1999])
@pytest.mark.parametrize("block_tokens", [512, 100])
def test_one_inconsistent_line_of_many_is_named(bad: int, block_tokens: int, tmp_path: Path):
    rows = [
        (block_tokens * (n % 30 + 1) - 5, list(range(n * 40, n * 40 + n % 30 + 1)))
        for n in range(2000)
    ]
    rows[bad][1].append(99_999_999)
    rows[bad][1].append(99_999_998)
    path = put(tmp_path / "t.jsonl", mooncake(*rows))
    with pytest.raises(TraceError, match=rf"line {bad + 1}: hash_ids has .* --skip-broken"):
        read_trace(path)
    broken: list[TraceError] = []
    sessions = read_trace(path, on_broken=broken.append)
    assert (sum(s.turns for s in sessions), len(broken)) == (1999, 1)
    assert {s.block_tokens for s in sessions if isinstance(s, BlockSession)} == {block_tokens}


@pytest.mark.parametrize("name", ["bailian", "mooncake", "otel"])
def test_a_line_with_too_many_ids_is_named_in_every_format_of_block_ids(name: str, tmp_path: Path):
    def with_ids(number: int, count: int) -> dict[str, Any]:
        line = LINES[name](number)
        if name == "otel":
            values = {"values": [{"intValue": n} for n in range(count)]}
            line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"] += [
                {"key": "dualpath.block_ids", "value": {"arrayValue": values}},
                {"key": "dualpath.block_tokens", "value": {"intValue": 8}},
            ]
            return line
        return line | {"hash_ids": list(range(count)), "block_size": 16}

    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(with_ids(n, 99 if n == 2 else 1)) + "\n" for n in (1, 2, 3)))
    with pytest.raises(TraceError, match=r"line 2: 99 blocks of \d+ tokens exceed"):
        read_trace(path)
    broken: list[TraceError] = []
    assert sum(s.turns for s in read_trace(path, on_broken=broken.append)) == 2
    assert len(broken) == 1


def test_production_requests_become_sessions_by_their_blocks(tmp_path: Path):
    path = put(
        tmp_path / "t.jsonl",
        mooncake(
            (700, [0, 1]),  # a system prompt of one block begins them all
            (1300, [0, 10, 11]),
            (1400, [0, 20, 21]),
            (1700, [0, 10, 12, 13]),  # goes on from line 2
            (1800, [0, 10, 12, 14]),  # in the same blocks
            (3000, [0, 10, 12, 15, 16, 17]),
            (1500, [0, 30, 31]),
        ),
    )
    sessions = read_trace(path)
    assert [(s.session_id, s.turns) for s in sessions] == [
        ("request-1", 1),
        ("request-2", 4),
        ("request-3", 1),
        ("request-7", 1),
    ]
    longest = next(as_lengths(sessions[1:2])).trajectory
    assert [r.delay_s for r in longest.rounds] == [0, 2, 1, 1]


def test_a_file_that_names_sessions_is_not_chained(tmp_path: Path):
    rows = [json.loads(line) for line in mooncake((600, [1, 2]), (1100, [1, 3, 4])).splitlines()]
    for number, row in enumerate(rows):
        row["session_id"] = f"agent-{number}"
    path = put(tmp_path / "t.jsonl", b"".join(json.dumps(r).encode() + b"\n" for r in rows))
    assert ids(read_trace(path)) == ["agent-0", "agent-1"]


@pytest.mark.parametrize("name", ["bailian", "mooncake", "requests"])
def test_files_of_a_folder_have_their_own_block_ids_and_names(name: str, tmp_path: Path):
    """Mooncake's folder of traces has files that all begin with block 0 and chat 1."""
    for file in ("a.jsonl", "b.jsonl"):
        put(tmp_path / file, lines(name))
    sessions = read_trace(tmp_path)
    assert len(set(ids(sessions))) == 6
    assert [s.turns for s in sessions] == [1] * 6
    blocks = [s for s in sessions if isinstance(s, BlockSession)]
    assert [s.shared_ids for s in blocks] == [frozenset()] * len(blocks)
    assert len({s.scope for s in blocks}) == (2 if blocks else 0)


def test_prompts_that_lmcache_did_not_record_are_passed_over(tmp_path: Path):
    line = LINES["lmcache"]
    rows = [line(1), line(1) | {"input": "", "timestamp": 2}, line(1) | {"timestamp": 5}]
    path = put(tmp_path / "t.jsonl", b"".join(json.dumps(r).encode() + b"\n" for r in rows))
    (session,) = read_trace(path)
    assert session.turns == 2


# Tables


def test_the_azure_table_is_read(tmp_path: Path):
    table = (
        b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\n"
        b"2023-11-16 18:15:46.6805900,374,44\n\n2023-11-16 18:15:50.99,396,0\n"
    )
    first, second = read_trace(put(tmp_path / "AzureLLM.csv", table))
    assert isinstance(first, TokenSession)
    assert isinstance(second, TokenSession)
    assert first.session_id == "AzureLLM-2"
    assert [first.trajectory.rounds[0].append_tokens, first.trajectory.total_tokens] == [374, 418]
    assert second.trajectory.rounds[0].generated_tokens == 1
    assert ids(read_trace(put(tmp_path / "AzureLLM.csv.xz", lzma.compress(table)))) == [
        "AzureLLM-2",
        "AzureLLM-4",
    ]


def test_the_burstgpt_table_has_sessions(tmp_path: Path):
    table = (
        b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log\n"
        b"5,a,1,ChatGPT,100,20,120,x\n7,b,1,GPT-4,50,9,59,x\n9.5,a,1,ChatGPT,150,8,158,x\n"
    )
    first, second = read_trace(put(tmp_path / "t.csv", table))
    assert isinstance(first, TokenSession)
    rounds = [(r.append_tokens, r.generated_tokens, r.delay_s) for r in first.trajectory.rounds]
    assert rounds == [(100, 20, 0.0), (30, 8, 4.5)]
    assert ids([first, second]) == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (b"1,many,3\n", "contexttokens is 'many'"),
        (b"1,0,3\n", "contexttokens is '0'"),
        (b"1,5\n", "has 2 values, but the first line names 3 columns"),
        (b"noon,5,3\n", "timestamp 'noon' is neither seconds nor a date"),
    ],
)
def test_a_broken_row_is_named(row: bytes, fault: str, tmp_path: Path):
    table = b"TIMESTAMP,ContextTokens,GeneratedTokens\n1,4,2\n" + row
    path = put(tmp_path / "t.csv", table)
    with pytest.raises(TraceError, match=rf"t\.csv, line 3: {fault}.*--skip-broken"):
        read_trace(path)
    broken: list[TraceError] = []
    assert len(read_trace(path, on_broken=broken.append)) == 1
    assert len(broken) == 1


def test_another_table_is_refused_with_its_columns(tmp_path: Path):
    path = put(tmp_path / "t.csv", b"name,age\nx,3\n")
    with pytest.raises(TraceError, match="the format is not recognised by name, age"):
        read_trace(path)


# Commands


def test_every_command_that_reads_traces_skips_broken_lines_if_asked_to():
    """The flag that errors advise; pages are generated from the commands' own flags."""
    reading, skipping = set(), set()
    for page in (Path(__file__).parents[2] / "docs/reference/cli").glob("*.md"):
        for section in re.split(r"^#+ (?=dualpath )", page.read_text(), flags=re.MULTILINE)[1:]:
            command = section.partition("\n")[0]
            if re.search(r"^\| `(--traces? |TRACE`)", section, flags=re.MULTILINE):
                reading.add(command)
            if "| `--skip-broken`" in section:
                skipping.add(command)
    # These read a trace of an engine's own, and make one of their own.
    reading -= {"dualpath lab bench traces", "dualpath lab bench simulator-speed"}
    assert reading == skipping
    assert {"dualpath lab run", "dualpath demo"} <= reading


def test_the_lab_takes_production_requests_and_skips_broken_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    grown = [(600 * n, list(range(-(-600 * n // 512)))) for n in range(1, 7)]
    rows = [(tokens, [*listed[:-1], 1000 + tokens]) for tokens, listed in grown]
    path = put(tmp_path / "t.jsonl", mooncake(*rows) + b"cut\n")
    settings = WindowSettings(trace=str(path), agents=1, turns=2, scale=1.0, skip_broken=True)
    (window,) = windows(settings)
    assert len(window.trajectory.rounds) == 2
    assert window.history_tokens > 0
    assert "t.jsonl, line 7: " in caplog.text


# max_context_tokens


def test_sessions_that_a_context_limit_drops_are_named(tmp_path: Path):
    path = put(
        tmp_path / "t.jsonl", lines("rounds") + b'{"session_id": "long", "rounds": [[99, 1]]}'
    )
    sessions = read_trace(path)
    assert dropped_sessions(sessions, WorkloadSettings(max_context_tokens=50)) == ["long"]
    assert dropped_sessions(sessions, WorkloadSettings()) == []


DATA = Path(os.environ.get("DUALPATH_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))


@pytest.mark.skipif(not DATA.is_dir(), reason=f"real traces not found at {DATA}")
def test_the_azure_traces_are_read_whole():
    assert len(read_trace(DATA / "azure_llm/AzureLLMInferenceTrace_code.csv.xz")) == 8819
