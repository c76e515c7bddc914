"""What a figure becomes: settings, tables, curves, comparison with the paper, discussion."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dualpath.model.evaluation.paper import FITTED, OFFLINE_TARGET, QUOTED, Quoted
from dualpath.model.evaluation.settings import EvaluationSettings

#: Stands for a number that the runs did not yield.
NOTHING = "-"


class Table(msgspec.Struct, frozen=True):
    """Formatted cells; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Series(msgspec.Struct, frozen=True):
    """One curve, or one colour of bars; ``low`` and ``high`` bound the shadow around a curve."""

    name: str
    x: tuple[float, ...] | tuple[str, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


class Panel(msgspec.Struct, frozen=True):
    """One pair of axes.  Bars of ``grouped`` stand side by side, of ``stacked`` on each other."""

    title: str
    kind: Literal["lines", "grouped", "stacked"]
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    limit_y: float | None = None
    """A horizontal line, an SLO for instance."""
    from_zero: bool = True


class Compared(msgspec.Struct, frozen=True):
    """One number of the paper beside the model's; None where the runs did not yield it."""

    key: str
    model: float | None

    @property
    def quoted(self) -> Quoted:
        """The paper's number."""
        return QUOTED[self.key]

    @property
    def relative_error(self) -> float | None:
        """Model over paper, less one; None without a number."""
        return None if self.model is None else self.model / self.quoted.value - 1

    @property
    def within_target(self) -> bool | None:
        """Whether the target is met; None for online numbers, which have none."""
        error = self.relative_error
        if self.quoted.relation == "at most":
            return error is not None and error <= 0
        if not self.quoted.offline:
            return None
        return error is not None and abs(error) <= OFFLINE_TARGET

    @property
    def fitted(self) -> bool:
        """Whether a parameter of the model was fitted to it."""
        return self.key in FITTED


class Statement(msgspec.Struct, frozen=True):
    """Something the text says without a number, whether it holds in the model, and the evidence."""

    section: str
    text: str
    holds: bool
    evidence: str


class FigureReport(msgspec.Struct, frozen=True, kw_only=True):
    """One figure or table of the paper, complete; ``data`` holds further raw numbers."""

    name: str
    title: str
    evaluation: EvaluationSettings
    settings: tuple[str, ...]
    tables: tuple[Table, ...]
    panels: tuple[Panel, ...] = ()
    compared: tuple[Compared, ...] = ()
    statements: tuple[Statement, ...] = ()
    discussion: str = ""
    data: Mapping[str, Any] = {}


def comparison_table(
    compared: Sequence[Compared], title: str = "Beside the paper", *, quick: bool = False
) -> Table:
    """Return model, paper and relative error of each number; ``quick`` says so in the title."""
    if quick:
        title += " (quick run, not its settings: errors mean nothing)"
    columns = ("number", "section", "model", "paper", "relative error", "within 5 %", "origin")
    return Table(title, columns, tuple(_comparison_row(one) for one in compared))


def _comparison_row(one: Compared) -> tuple[str, ...]:
    quoted = one.quoted
    error = one.relative_error
    sign = {"equals": "", "at most": "< ", "comparable": "≈ "}[quoted.relation]
    judged = {True: "yes", False: "no", None: NOTHING}[one.within_target]
    return (
        f"{_figure_name(quoted.figure)}: {quoted.what}",
        quoted.section,
        quantity(one.model, quoted.unit),
        sign + quantity(quoted.value, quoted.unit),
        NOTHING if error is None else f"{error:+.1%}",
        "below" if quoted.relation == "at most" and one.within_target else judged,
        "fitted" if one.fitted else "predicted",
    )


def statement_table(statements: Sequence[Statement]) -> Table:
    """Return what the text says without numbers."""
    rows = tuple((s.text, s.section, "yes" if s.holds else "no", s.evidence) for s in statements)
    return Table("Said without a number", ("statement", "section", "holds", "evidence"), rows)


def _figure_name(figure: str) -> str:
    return figure.replace("fig", "Fig. ").replace("table", "Table ")


def quantity(value: float | None, unit: str) -> str:
    """Return a number with its unit, in as many digits as the paper quotes."""
    if value is None:
        return NOTHING
    forms = {"x": "{:.2f}x", "%": "{:.2f} %", "GB": "{:.0f} GB", "cores": "{:.2f} cores"}
    if unit == "s":
        return f"{value:,.0f} s" if value >= 100 else f"{value:.3f} s"
    return forms[unit].format(value)
