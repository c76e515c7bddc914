"""One figure of the paper: its runs as tables and curves, beside what the paper says of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dualpath.model.evaluation.paper import (
    FITTED,
    OFFLINE_TARGET,
    ONLINE_TARGET,
    QUOTED,
    Quoted,
)
from dualpath.model.evaluation.settings import EvaluationSettings
from dualpath.report.model import Block, Notes, Panel, Plots, Report, Table, Text, cell


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
    def within_target(self) -> bool:
        """Whether the target is met: 5 % offline, 15 % online."""
        error = self.relative_error
        if self.quoted.relation == "at most":
            return error is not None and error <= 0
        target = OFFLINE_TARGET if self.quoted.offline else ONLINE_TARGET
        return error is not None and abs(error) <= target

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
    """One figure or table of the paper, complete; ``data`` holds further raw numbers.

    ``compared_at_48k`` are the same numbers under the second calibration, empty if not made.
    """

    name: str
    title: str
    evaluation: EvaluationSettings
    settings: tuple[str, ...]
    tables: tuple[Table, ...]
    details: tuple[Table, ...] = ()
    """Tables that only the figure's own page has."""
    panels: tuple[Panel, ...] = ()
    compared: tuple[Compared, ...] = ()
    compared_at_48k: tuple[Compared, ...] = ()
    statements: tuple[Statement, ...] = ()
    discussion: str = ""
    data: Mapping[str, Any] = {}


def as_report(figure: FigureReport, *, alone: bool = True) -> Report:
    """Return the figure as it is read: setting, numbers beside the paper's, plots, all numbers.

    Not ``alone``, it is part of the page over all figures, which has the comparison, the statements
    and the workload once for all of them, and leaves out the details.
    """
    blocks: list[Block] = [Notes(_setting_lines(figure, alone=alone))]
    if alone and figure.compared:
        blocks.append(
            comparison_table(
                figure.compared, quick=figure.evaluation.quick, at_48k=figure.compared_at_48k
            )
        )
    if alone and figure.statements:
        blocks.append(statement_table(figure.statements))
    if figure.panels:
        blocks.append(Plots(figure.title, figure.panels))
    blocks += figure.tables
    if alone:
        blocks += figure.details
    if figure.discussion:
        blocks.append(Text(figure.discussion, "Discussion"))
    return Report(name=figure.name, title=_heading(figure), blocks=tuple(blocks))


def _heading(figure: FigureReport) -> str:
    """Return "Fig. 7. Title", or the title alone of what is no figure."""
    if not figure.name.startswith(("fig", "table")):
        return figure.title
    return f"{_figure_name(figure.name)}. {figure.title}"


def _setting_lines(figure: FigureReport, *, alone: bool) -> tuple[str, ...]:
    """Return the settings, the workload, and a warning where the run was a quick one."""
    workload = (workload_line(figure.evaluation),) if alone else ()
    quick = ("Quick: small grids, not the paper's settings.",) if figure.evaluation.quick else ()
    return (*figure.settings, *workload, *quick)


def workload_line(chosen: EvaluationSettings) -> str:
    """Return seed and distribution of the generated trajectories."""
    return (
        f"Seed {chosen.seed}. Generated trajectories have the means of Table 2; their turns follow "
        f"a {chosen.tail} distribution, which the table leaves open."
    )


def comparison_table(
    compared: Sequence[Compared],
    title: str = "Beside the paper",
    *,
    quick: bool = False,
    at_48k: Sequence[Compared] = (),
) -> Table:
    """Return model, paper and relative error of each number; ``quick`` says so in the title.

    With ``at_48k``, the numbers of the second calibration, they have columns of their own.
    """
    if quick:
        title += " (quick run, not its settings: errors mean nothing)"
    columns = ("number", "section", "model", "paper", "relative error", "within target", "origin")
    if not at_48k:
        return Table(title, columns, tuple(_comparison_row(one) for one in compared))
    second = {one.key: one for one in at_48k}
    return Table(
        title,
        (*columns, "at 48K: model", "error", "within target"),
        tuple(
            (*_comparison_row(one), *_judged(second.get(one.key, Compared(one.key, None))))
            for one in compared
        ),
    )


def _comparison_row(one: Compared) -> tuple[str, ...]:
    quoted = one.quoted
    sign = {"equals": "", "at most": "< ", "comparable": "≈ "}[quoted.relation]
    model, error, judged = _judged(one)
    return (
        f"{_figure_name(quoted.figure)}: {quoted.what}",
        quoted.section,
        model,
        sign + quantity(quoted.value, quoted.unit),
        error,
        judged,
        "fitted" if one.fitted else "predicted",
    )


def _judged(one: Compared) -> tuple[str, str, str]:
    """Return the model's number, its error, and whether the target is met."""
    met = "below" if one.quoted.relation == "at most" else "yes"
    return (
        quantity(one.model, one.quoted.unit),
        cell(one.relative_error, "{:+.1%}"),
        met if one.within_target else "no",
    )


def statement_table(statements: Sequence[Statement]) -> Table:
    """Return what the text says without numbers."""
    rows = tuple((s.text, s.section, "yes" if s.holds else "no", s.evidence) for s in statements)
    return Table("Statements without a number", ("statement", "section", "holds", "evidence"), rows)


def _figure_name(figure: str) -> str:
    return figure.replace("fig", "Fig. ").replace("table", "Table ")


def quantity(value: float | None, unit: str) -> str:
    """Return a number with its unit, in as many digits as the paper quotes."""
    forms = {"x": "{:.2f}x", "%": "{:.2f} %", "GB": "{:.0f} GB", "cores": "{:.2f} cores"}
    if unit == "s":
        forms["s"] = "{:,.0f} s" if value is not None and value >= 100 else "{:.3f} s"
    return cell(value, forms[unit])
