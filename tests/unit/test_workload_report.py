"""Comparisons, their HTML page and their file format."""

import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import msgspec
import pytest
from rich.console import Console

from dualpath.core.errors import ConfigError
from dualpath.node.machine import this_machine
from dualpath.report import html
from dualpath.report.files import write_page
from dualpath.report.model import NOTHING, Notes, Plots, Table
from dualpath.report.text import print_report
from dualpath.workload.replay.progress import ConsoleProgress, ProgressState
from dualpath.workload.replay.report import compare
from dualpath.workload.replay.result import (
    SCHEMA,
    Isolation,
    ReplayResult,
    ReplaySetting,
    SentHints,
    ServerCounters,
    SessionRecord,
    ToolDelays,
    TurnRecord,
    read_result,
    summarise,
    trace_shape,
    write_result,
)

SETTING = ReplaySetting(
    label="",
    endpoint="http://127.0.0.1:8000",
    trace="t.jsonl",
    trace_format="rounds",
    broken_lines=0,
    mode=None,
    mode_note=None,
    model="tiny",
    block_tokens=64,
    snic_bytes_per_s=5e7,
    agents=1,
    agents_per_s=None,
    seed=3,
    tool_delays=ToolDelays.NONE,
    isolation=Isolation.SESSION,
    session_hints=SentHints.NONE,
    max_context_tokens=4096,
    max_turns=None,
    scale_append=1.0,
    scale_generate=1.0,
    token_low=1000,
    token_high=30000,
)


def turn(number: int, **more: Any) -> TurnRecord:
    known: dict[str, Any] = {
        "start_s": float(number),
        "delay_s": 0.0,
        "prompt_tokens": 1000,
        "context_tokens": 900,
        "ideal_hit_tokens": 896,
        "generated_tokens": 5,
        "hit_tokens": 832,
        "ttft_s": 0.2,
        "ttst_s": 0.05,
        "tpot_s": 0.01,
        "latency_s": 0.28,
        "generated_digest": f"digest-{number}",
    }
    return TurnRecord(session_id="a", conversation_id="a", turn=number, **(known | more))


def result(mode: str | None, jct_s: float, *turns: TurnRecord, **setting: Any) -> ReplayResult:
    turns = turns or (turn(0), turn(1))
    failed = any(t.error for t in turns)
    sessions = [SessionRecord("a", 0.0, jct_s, len(turns), False, failed)]
    return ReplayResult(
        setting=msgspec.structs.replace(SETTING, mode=mode, label=mode or "plain", **setting),
        machine=this_machine(),
        summary=summarise(turns, sessions, jct_s),
        trace=trace_shape(turns),
        server=ServerCounters(
            hit_tokens=1664,
            recomputed_tokens=0,
            path_bytes={"pe_path": 2_000_000, "de_path": 1_500_000},
            snic_read_bytes={"pe-0": 2_000_000, "de-0": 1_500_000},
        ),
        sessions=sessions,
        turns=list(turns),
    )


RUNS = [result("basic", 10.0), result("dualpath", 5.0), result("oracle", 4.0)]


def figures(runs: list[ReplayResult]) -> Table:
    (table,) = (block for block in compare(runs).blocks if isinstance(block, Table))
    return table


def row(runs: list[ReplayResult], name: str) -> list[str]:
    return {row[0]: list(row[1:]) for row in figures(runs).rows}[name]


def test_modes_are_set_against_basic_and_oracle():
    assert row(RUNS, "speed-up over Basic") == ["1.00x", "2.00x", "2.50x"]
    assert row(RUNS, "JCT relative to Oracle") == ["2.50x", "1.25x", "1.00x"]
    assert row(RUNS, "TTFT mean, ms") == ["200.0"] * 3
    assert row(RUNS, "PE path, MB") == ["2.0"] * 3
    assert row(RUNS, "SNIC de-0 read, MB") == ["1.5"] * 3
    assert row(RUNS, "hit rate") == ["83.2%"] * 3


def test_the_headline_is_speed_up_ceiling_and_share():
    first, ceiling, share = compare(RUNS).headline
    assert (
        first == "DualPath is 2.00 times as fast as Basic: 1 agent finished in 5.0 s, not 10.0 s."
    )
    assert ceiling.startswith("The ceiling is 2.50 times")
    assert share.startswith("DualPath removes 83% of Basic's waiting for loads")


def test_the_headline_names_the_modes_that_are_missing():
    basic, dualpath, oracle = RUNS
    assert (
        compare([basic, dualpath]).headline[0].endswith("Oracle is missing: no ceiling, no share.")
    )
    (line,) = compare([dualpath, oracle]).headline
    assert line.endswith(
        "1.25 times as long as Oracle, which loads nothing. Basic is missing: no speed-up."
    )
    assert compare([basic]).headline == ()
    assert compare([basic, result("dualpath", 5.0, turn(0, error="x")), oracle]).headline == ()


def test_without_waiting_for_loads_no_speed_up_is_possible():
    runs = [result("basic", 4.0), result("dualpath", 4.0), result("oracle", 4.0)]
    assert compare(runs).headline[-1].endswith("so no speed-up was possible.")


def test_the_parts_of_a_turns_time_are_last_and_add_up():
    last = [block for block in compare(RUNS).blocks if isinstance(block, Plots)][-1].panels[-1]
    assert last.title == "Where the time of a turn goes"
    parts = [series.y[0] for series in last.series]
    assert parts == pytest.approx([0.2, 0.05, 0.03])


def test_ratios_need_their_base_and_rows_without_figures_are_left_out():
    names = [row[0] for row in figures([result(None, 3.0)]).rows]

    assert "speed-up over Basic" not in names
    assert "JCT, s" in names


def test_responses_are_compared_token_by_token_except_with_oracle():
    other = result("dualpath", 5.0, turn(0), turn(1, generated_digest="different"))

    cells = row([RUNS[0], other, RUNS[2]], "responses equal to basic")

    assert cells == ["2 of 2", "1 of 2", NOTHING]


def test_the_notes_state_throttle_seed_setting_and_machine():
    notes = " ".join(
        line for block in compare(RUNS).blocks if isinstance(block, Notes) for line in block.lines
    )

    for stated in ("throttled to 50 MB/s", "seed 3", "1 agents at once", "tool delays: none"):
        assert stated in notes
    assert f"{this_machine().cpu_count} CPUs" in notes


def test_runs_that_cannot_be_compared_and_failures_are_warned_of():
    failed = result("dualpath", 5.0, turn(0), turn(1, error="HTTP 400: no"), seed=4)

    warnings = compare([RUNS[0], failed]).warnings

    assert "the runs differ in seed: 3, 4" in warnings
    assert "dualpath: 1 turns failed, the first: HTTP 400: no" in warnings


def test_the_throttle_of_a_run_that_reads_nothing_is_no_difference():
    oracle = result("oracle", 4.0, snic_bytes_per_s=None)
    assert compare([RUNS[0], RUNS[1], oracle]).warnings == ()
    other = result("dualpath", 5.0, snic_bytes_per_s=None)
    assert compare([RUNS[0], other]).warnings == (
        "the runs differ in snic_bytes_per_s: 50000000.0, None",
    )


def test_equal_labels_are_numbered():
    assert figures([RUNS[0], RUNS[0]]).columns[1:] == ("basic", "basic #2")


def test_a_failed_turn_is_in_no_metric():
    run = result("basic", 5.0, turn(0), turn(1, error="x", ttft_s=None, prompt_tokens=9))

    assert run.failed
    assert run.summary.prompt_tokens == 1000
    assert run.summary.ttft_s is not None
    assert run.summary.ttft_s.count == 1


def test_trace_means_are_given_per_turn_and_per_trajectory():
    short = TurnRecord("b", "b", 0, 0.0, 0.0, 100, 0, 0, 20)
    shape = trace_shape([turn(0), turn(1), turn(2), short])

    assert shape is not None
    assert shape.per_turn.generated_tokens == (3 * 5 + 20) / 4
    assert shape.per_trajectory.generated_tokens == (5 + 20) / 2
    assert shape.turns_per_trajectory == 2.0


def test_the_printed_table_shows_every_row():
    file = StringIO()

    print_report(compare(RUNS), Console(file=file, width=160))

    printed = file.getvalue()
    assert all(row[0] in printed for row in figures(RUNS).rows)


def test_a_result_survives_its_file(tmp_path: Path):
    write_result(RUNS[1], tmp_path / "run.json")

    assert read_result(tmp_path / "run.json") == RUNS[1]
    assert f'"schema": "{SCHEMA}"' in (tmp_path / "run.json").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": "dualpath.replay/99"}', "schema is 'dualpath.replay/99'"),
        ("[]", "is not a replay result"),
        ('{"schema": "dualpath.replay/1"}', "is not a replay result"),
        (None, "cannot be read"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_result(path)


def test_unwritable_places_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_result(RUNS[0], tmp_path / "no" / "run.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_page(compare(RUNS), tmp_path / "no" / "run.html")


class Tags(HTMLParser):
    """Checks that every HTML tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        if tag not in ("meta", "path", "use", "rect"):
            self.open.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[Any]) -> None:
        self.references += [value for name, value in attrs if name in ("src", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_the_page_is_whole_and_needs_nothing_else():
    page = html.page(compare(RUNS, "a <title>"))

    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert all(reference.startswith("#") for reference in tags.references)
    assert "<script" not in page
    assert "a &lt;title&gt;" in page
    assert "prefers-color-scheme: dark" in page


def test_plots_follow_the_pages_colour_and_width():
    drawings = re.findall(r"<svg.*?</svg>", html.page(compare(RUNS)), flags=re.DOTALL)

    assert len(drawings) == 7
    for drawing in drawings:
        svg = ET.fromstring(drawing)
        assert "width" not in svg.attrib
        assert "viewBox" in svg.attrib
        assert "currentColor" in drawing
        assert "#010203" not in drawing


def test_ids_in_the_page_are_unique():
    ids = re.findall(r' id="([^"]*)"', html.page(compare(RUNS)))

    assert len(ids) == len(set(ids))


def test_equal_runs_make_equal_pages():
    assert html.page(compare(RUNS)) == html.page(compare(RUNS))


def test_plots_without_data_are_left_out():
    run = msgspec.structs.replace(RUNS[0], server=None)

    assert html.page(compare([run])).count("<svg") == 5


def state(elapsed_s: float, turns: int) -> ProgressState:
    return ProgressState(elapsed_s, 0, 2, turns, 9, 0, 100, 50)


def test_progress_off_a_terminal_is_a_line_now_and_then_and_the_last():
    file = StringIO()
    console = Console(file=file, width=100, force_terminal=False)

    with ConsoleProgress("basic", console) as progress:
        for second in range(8):
            progress.update(state(float(second), second))

    lines = file.getvalue().splitlines()
    assert lines == [
        "basic  agents 0/2  turns 0/9  0 s  hit 50.0%",
        "basic  agents 0/2  turns 5/9  5 s  hit 50.0%",
        "basic  agents 0/2  turns 7/9  7 s  hit 50.0%",
    ]


def test_progress_on_a_terminal_is_redrawn():
    file = StringIO()
    console = Console(file=file, width=100, force_terminal=True)

    with ConsoleProgress("basic", console) as progress:
        progress.update(state(1.0, 3))

    assert "turns 3/9" in file.getvalue()
