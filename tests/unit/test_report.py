"""Reports: one model, and what each medium makes of it."""

import importlib.util
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from dualpath.cli.main import main
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.report import ExperimentReport, as_report
from dualpath.report import files, html, markdown
from dualpath.report.model import (
    Notes,
    Panel,
    Plots,
    Report,
    Series,
    SideBySide,
    Table,
    Text,
)
from dualpath.report.style import LOOKS, looks
from dualpath.report.text import print_report

LAB = Path(__file__).parents[2] / "docs" / "evaluation" / "lab"
TABLE = Table("Rates", ("who", "GB/s"), (("[red]a|b", "1.5"), ("<c>", "22")), rules=(1,))
PLOTS = Plots("rates", (Panel("Rates", "grouped", "", "GB/s", (Series("a", ("all",), (1.5,)),)),))
PART = Report(name="part", title="A part", blocks=(Text("*More* <b>words</b>."), PLOTS))
REPORT = Report(
    name="whole",
    title="A & B",
    blocks=(Notes(("Seed 1.",)), TABLE, Notes(("below the table",)), Text("- one\n- two", "Why")),
    warnings=("too busy",),
    parts=(PART,),
)


def printed(report: Report, width: int = 80) -> str:
    file = StringIO()
    print_report(report, Console(file=file, width=width))
    return file.getvalue()


def test_columns_of_numbers_stand_to_the_right_unless_the_table_says_otherwise():
    assert TABLE.right == (False, True)
    assert msgspec.structs.replace(TABLE, align="rl").right == (True, False)
    assert Table("", ("a",), ()).right == (False,)


def test_runs_side_by_side_leave_out_what_no_run_knows():
    rows = SideBySide(("x", "y"), (1, 2))
    rows.add("one", "odd", lambda run: str(run) if run % 2 else None)
    rows.add("one", "nothing", lambda run: None)
    rows.add("two", "twice", lambda run: str(2 * run))
    table = rows.table()
    assert table.columns == ("", "x", "y")
    assert table.rows == (("odd", "1", "-"), ("twice", "2", "4"))
    assert table.rules == (1,)


def test_a_terminal_shows_tables_and_notes_and_says_warnings_last():
    lines = [line.rstrip() for line in printed(REPORT).splitlines()]
    assert lines == [
        "Seed 1.",
        "",
        "Rates",
        "who      ┃ GB/s",
        "━━━━━━━━━╇━━━━━",
        "[red]a|b │  1.5",
        "─────────┼─────",
        "<c>      │   22",
        "below the table",
        "warning: too busy",
    ]


def test_markdown_has_parts_one_level_deeper_and_pictures_beside_the_page():
    page = markdown.page(REPORT, "images/")
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == ["# A & B", "## Rates", "## Why", "## A part"]
    assert "![rates](images/part.png)" in page
    assert "- Seed 1.\n" in page
    assert "**Warning: too busy**" in page
    assert [name for name, _ in REPORT.pictures()] == ["part"]


def test_a_page_escapes_cells_and_reads_prose_as_markdown():
    page = html.page(REPORT)
    assert "<title>A &amp; B</title>" in page
    assert "&lt;c&gt;" in page
    assert "<li>one</li>" in page
    assert "<em>More</em> &lt;b&gt;words&lt;/b&gt;." in page
    assert '<p class="warning">Warning: too busy</p>' in page
    assert page.count("<svg") == 1


@pytest.mark.parametrize("mode", Mode)
def test_a_mode_looks_the_same_in_whatever_company(mode: Mode):
    (alone,) = looks([mode.value])
    among = looks(["other", *(one.value for one in Mode)])
    assert among[1 + list(Mode).index(mode)] == alone
    assert looks(["other", mode.value])[0] != alone


def test_names_that_are_no_modes_take_the_looks_in_order():
    assert looks(["a", "b", "c"]) == list(LOOKS[:3])
    many = [str(number) for number in range(len(LOOKS) + 1)]
    assert looks(many)[-1] == LOOKS[0]


@pytest.mark.parametrize("name", ["data-plane", "isolation", "jct-1p1d", "online", "peers-1p2d"])
def test_measured_reports_read_again_give_the_pages_that_are_stored(name: str):
    stored = msgspec.json.decode((LAB / f"{name}.json").read_bytes(), type=ExperimentReport)
    assert markdown.page(as_report(stored)) == (LAB / f"{name}.md").read_text(encoding="utf-8")


def test_without_the_extra_a_page_is_refused_with_the_words_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"--html needs jinja2; pip install 'dualpath\[report\]'"):
        files.require_extra("--html")


@pytest.mark.parametrize(
    "command",
    [
        ["lab", "run", "--nodes", "1P1D", "--out", "runs"],
        ["eval", "fig7", "--out", "runs"],
        ["report", "run.json", "--html", "page.html"],
    ],
)
def test_a_command_says_before_it_runs_that_the_extra_is_missing(command, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "jinja2" else found(name)
    )
    assert main(command) == 2
    assert "pip install 'dualpath[report]'" in capsys.readouterr().err
