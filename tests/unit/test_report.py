"""Reports: one model, rendered for each medium."""

import re
import sys
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from dualpath.cli.main import main
from dualpath.core.modes import Mode
from dualpath.report import files, html, markdown, plots
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
from dualpath.report.style import (
    MODE_SERIES_STYLES,
    MODE_STYLES,
    OTHER_SERIES_STYLES,
    series_styles,
)
from dualpath.report.text import print_report
from dualpath_sim.harness.files import read

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


def test_columns_of_numbers_are_right_aligned_unless_the_table_sets_align():
    assert TABLE.right == (False, True)
    assert msgspec.structs.replace(TABLE, align="rl").right == (True, False)
    assert Table("", ("a",), ()).right == (False,)


def test_quantities_that_no_run_has_are_omitted():
    rows = SideBySide(("x", "y"), (1, 2))
    rows.add("one", "odd", lambda run: str(run) if run % 2 else None)
    rows.add("one", "nothing", lambda run: None)
    rows.add("two", "twice", lambda run: str(2 * run))
    table = rows.table()
    assert table.columns == ("", "x", "y")
    assert table.rows == (("odd", "1", "-"), ("twice", "2", "4"))
    assert table.rules == (1,)


def test_a_terminal_shows_tables_notes_and_finally_warnings():
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
def test_a_mode_has_the_same_style_in_every_plot(mode: Mode):
    (alone,) = series_styles([mode.value])
    among = series_styles(["other", *(one.value for one in Mode)])
    assert among[1 + list(Mode).index(mode)] == alone
    assert series_styles(["other", mode.value])[0] != alone


def test_a_mode_has_its_style_by_value_and_by_title():
    for mode, style in MODE_STYLES.items():
        assert series_styles([mode.value, style.title]) == [style.series_style] * 2


def test_other_names_have_styles_that_no_mode_has():
    assert series_styles(["a", "basic", "b"]) == [
        OTHER_SERIES_STYLES[0],
        MODE_SERIES_STYLES[0],
        OTHER_SERIES_STYLES[1],
    ]
    assert not {look.colour for look in OTHER_SERIES_STYLES} & {
        look.colour for look in MODE_SERIES_STYLES
    }
    many = [str(number) for number in range(len(OTHER_SERIES_STYLES) + 1)]
    assert series_styles(many)[-1] == OTHER_SERIES_STYLES[0]


def test_a_headline_is_first_in_every_medium():
    report = msgspec.structs.replace(REPORT, headline=("Twice as fast.", "The ceiling is 3."))
    assert printed(report).startswith("Twice as fast.\nThe ceiling is 3.\n\nSeed 1.")
    assert "# A & B\n\n**Twice as fast.** The ceiling is 3.\n" in markdown.page(report)
    assert '<p class="first headline">Twice as fast.</p>' in html.page(report)


def test_pictures_of_one_report_have_distinct_names():
    report = Report(name="r", title="R", blocks=(PLOTS, TABLE, PLOTS))
    assert [name for name, _ in report.pictures()] == ["r", "r-2"]
    assert [part for part in markdown.page(report).split() if "png" in part] == [
        "![rates](r.png)",
        "![rates](r-2.png)",
    ]


def words(panel: Panel) -> list[str]:
    """Return the texts of a drawing."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", plots.svg(panel, "p"))


def test_all_names_of_bars_are_shown_unless_they_are_numbers():
    def below(names):
        bars = Series("basic", names, tuple(2.5 for _ in names))
        return [word for word in words(Panel("", "grouped", "", "s", (bars,))) if word in names]

    clusters = tuple(f"{number}P1D" for number in range(1, 13))
    assert below(clusters) == list(clusters)
    agents = tuple(f"1,{number}00" for number in range(10, 22))
    assert below(agents) == list(agents[::2])


def test_bars_have_their_values_and_one_beyond_the_limit_is_marked():
    series = Series("basic", ("a", "b", "c"), (1.25, 50.0, 1234.0), low=(1.0, 49.0, 1.0), high=())
    assert {"1.25", "50", "1,234"} <= set(words(Panel("", "grouped", "", "s", (series,))))
    stack = (series, msgspec.structs.replace(series, name="other"))
    assert {"2.5", "100", "2,468"} <= set(words(Panel("", "stacked", "", "s", stack)))
    cut = Panel("", "grouped", "", "s", (series,), limit_y=20.0)
    assert {"1.25", "50", "▲1.23e+03"} <= set(words(cut))


@pytest.mark.parametrize("name", ["data-plane", "isolation", "jct-1p1d", "online", "peers-1p2d"])
def test_stored_reports_can_be_written_as_pages(name: str):
    # What docs/evaluation shows of them is compared by test_docs.py.
    stored = read(LAB / f"{name}.json")
    report = stored.report()
    page = markdown.page(report)
    assert page.startswith(f"# {report.title}\n")
    assert stored.tables
    shown = re.sub(r"[\s|-]+", " ", page)
    for table in stored.tables:
        for row in table.rows:
            assert re.sub(r"[\s|-]+", " ", " | ".join(row)).strip() in shown


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "dualpath.report.plots", raising=False)


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_everything_but_pictures_is_written(tmp_path: Path):
    written = files.write_report(REPORT, b"{}", tmp_path, html=True)
    assert [path.suffix for path in written] == [".html", ".json", ".md"]
    why = "rates: no plots, as matplotlib is not installed; pip install 'matplotlib>=3.11'"
    assert f"\n{why}\n" in (tmp_path / "whole.md").read_text()
    page = (tmp_path / "whole.html").read_text()
    assert "rates: no plots" in page
    assert "<svg" not in page
    assert "<em>More</em>" in page


@pytest.mark.usefixtures("without_matplotlib")
def test_a_command_warns_before_it_runs_that_plots_will_be_missing(capsys):
    assert main(["report", "run.json", "--html", "page.html"]) == 2
    output = capsys.readouterr().err.splitlines()
    assert output[0].startswith("dualpath: page.html: no plots, as matplotlib is not installed")
    assert "run.json" in output[1]


@pytest.mark.usefixtures("without_matplotlib")
def test_a_page_that_needs_pictures_is_refused(capsys):
    assert main(["eval", "fig7", "--docs", "page.md"]) == 2
    assert "--docs needs matplotlib; pip install 'matplotlib>=3.11'" in capsys.readouterr().err
