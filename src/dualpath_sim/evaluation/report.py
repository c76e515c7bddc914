"""One figure of the paper: its runs as tables and curves, beside the paper's numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from dualpath.report.model import Block, Notes, Plots, Report, Table, Text, cell
from dualpath_sim.evaluation.settings import EvaluationSettings
from dualpath_sim.harness.experiment import KeyResult, Page

Relation = Literal["equals", "at most", "comparable"]


class Quoted(msgspec.Struct, frozen=True):
    """One number of the paper.

    ``relation`` is how to compare: the model should equal the value; stay below it; or, where
        the paper only calls two systems comparable, their ratio should be near 1.  ``offline`` is
        the part with a target of 5 %.
    """

    key: str
    figure: str
    section: str
    what: str
    value: float
    unit: str
    offline: bool
    relation: Relation = "equals"


def _ratio(key: str, section: str, what: str, value: float, *, offline: bool = True) -> Quoted:
    return Quoted(key, key.split(".")[0], section, what, value, "x", offline)


def _comparable(key: str, section: str, what: str) -> Quoted:
    return Quoted(key, key.split(".")[0], section, what, 1.0, "x", True, "comparable")


def _seconds(key: str, section: str, what: str, value: float, *, offline: bool) -> Quoted:
    return Quoted(key, key.split(".")[0], section, what, value, "s", offline)


def _percent(key: str, what: str, value: float) -> Quoted:
    return Quoted(key, "fig12", "§7.5", what, value, "%", True)


_QUOTED = (
    _ratio("fig7.660b.speedup_max", "§7.3", "DS 660B, largest speed-up over Basic", 1.87),
    _comparable("fig7.660b.to_oracle", "§7.3", "DS 660B, mean DualPath JCT to Oracle's"),
    _ratio("fig7.27b.speedup_max", "§7.3", "DS 27B, largest speed-up over Basic", 1.78),
    _ratio("fig7.27b.to_oracle_low", "§7.3", "DS 27B, least DualPath JCT to Oracle's", 1.09),
    _ratio("fig7.27b.to_oracle_high", "§7.3", "DS 27B, largest DualPath JCT to Oracle's", 1.85),
    _ratio("fig8.speedup_mean", "§7.3", "DS 27B, mean speed-up over P:D ratios", 1.64),
    _ratio("fig8.speedup_max", "§7.3", "DS 27B, largest speed-up over P:D ratios", 2.46),
    _comparable("fig8.basic_1p1d_1p2d", "§7.3", "Basic 1P1D to Basic 1P2D"),
    _comparable("fig8.dualpath_1p1d_basic_2p1d", "§7.3", "DualPath 1P1D to Basic 2P1D"),
    _comparable("fig8.dualpath_2p1d_1p2d", "§7.3", "DualPath 2P1D to DualPath 1P2D"),
    _ratio("fig9.append_speedup_low", "§7.3", "append scales, least speed-up", 1.82),
    _ratio("fig9.append_speedup_high", "§7.3", "append scales, largest speed-up", 1.99),
    _ratio("fig10.27b.capacity", "§7.4", "DS 27B, APS DualPath to Basic", 1.67, offline=False),
    _ratio("fig10.660b.capacity", "§7.4", "DS 660B, APS DualPath to Basic", 2.25, offline=False),
    _ratio("fig10.capacity_mean", "abstract", "mean of both models' ratios", 1.96, offline=False),
    Quoted(
        "fig11.working_set_low",
        "fig11",
        "§8.2",
        "DS 660B, working set at 0.1 APS",
        69.0,
        "GB",
        False,
    ),
    Quoted(
        "fig11.working_set_high",
        "fig11",
        "§8.2",
        "DS 660B, working set at 0.45 APS",
        681.0,
        "GB",
        False,
    ),
    _percent("fig12.layerwise", "JCT below Basic: layerwise prefill", 17.21),
    _percent("fig12.round_robin", "JCT below Basic: and dual-path loading", 38.19),
    _percent("fig12.dualpath", "JCT below Basic: and scheduling", 45.62),
    _ratio("fig13.round_robin", "§7.5", "SNIC traffic max/avg, round robin", 1.53),
    _ratio("fig13.dualpath", "§7.5", "SNIC traffic max/avg, DualPath", 1.18),
    _ratio("fig14.dualpath", "§7.5", "attention time max/avg, first 5 %", 1.06),
    _seconds("table3.2p4d.jct", "§7.6", "2P4D, 2K agents, JCT", 3167.0, offline=True),
    _seconds("table3.48p96d.jct", "§7.6", "48P96D, 48K agents, JCT", 3201.0, offline=True),
    _seconds("table3.2p4d.ttft", "§7.6", "2P4D, 0.4 APS, TTFT", 1.739, offline=False),
    _seconds("table3.2p4d.ttst", "§7.6", "2P4D, 0.4 APS, TTST", 0.228, offline=False),
    _seconds("table3.2p4d.tpot", "§7.6", "2P4D, 0.4 APS, TPOT", 0.039, offline=False),
    _seconds("table3.44p88d.ttft", "§7.6", "44P88D, 8.8 APS, TTFT", 1.847, offline=False),
    _seconds("table3.44p88d.ttst", "§7.6", "44P88D, 8.8 APS, TTST", 0.194, offline=False),
    _seconds("table3.44p88d.tpot", "§7.6", "44P88D, 8.8 APS, TPOT", 0.036, offline=False),
    Quoted(
        "table3.scheduler_cores",
        "table3",
        "§7.6",
        "CPU cores of the scheduler (placement alone)",
        10.0,
        "cores",
        False,
        "at most",
    ),
)

#: The paper's numbers by key, in the order of its text.
QUOTED = {quoted.key: quoted for quoted in _QUOTED}

#: What the model's parameters were fitted to, by the catalog's files; every other number is a
#: prediction.  Kernel rates, the overhead of a pass, the cap of a batch and what a CNIC reaches:
#: five numbers of DS 660B on 2P4D, 64K, offline.  DS 27B's efficiency: one of Fig. 7.  Admission to
#: decode: the TTST of 2P4D.  The cost of one more request in a decode step: both TPOT of Table 3.
FITTED = frozenset(
    {
        "fig7.660b.speedup_max",
        "fig7.27b.speedup_max",
        "fig12.layerwise",
        "fig12.round_robin",
        "fig12.dualpath",
        "table3.2p4d.jct",
        "table3.2p4d.ttst",
        "table3.2p4d.tpot",
        "table3.44p88d.tpot",
    }
)

#: Largest relative error meant to remain, for offline and online numbers.
OFFLINE_TARGET = 0.05
ONLINE_TARGET = 0.15


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
    """A statement of the paper without a number, and whether it holds in the model."""

    section: str
    text: str
    holds: bool
    evidence: str


class FigureReport(Page, frozen=True, kw_only=True):
    """One figure or table of the paper as a page.

    ``compared_at_48k`` are the same numbers under the second calibration, empty if not made.
    ``with_three_rates`` are all quoted numbers under the calibration of that name, which only its
    own report has.
    """

    html: ClassVar[bool] = True
    evaluation: EvaluationSettings
    details: tuple[Table, ...] = ()
    """Tables that only the figure's own page has."""
    compared: tuple[Compared, ...] = ()
    compared_at_48k: tuple[Compared, ...] = ()
    with_three_rates: tuple[Compared, ...] = ()
    statements: tuple[Statement, ...] = ()

    def report(self, *, alone: bool = True) -> Report:
        """Return the figure as it is read: setting, numbers beside the paper's, plots, all numbers.

        Not ``alone``, it is part of the page over all figures, which has the comparison, the
        statements and the workload once for all of them, and leaves out the details.
        """
        blocks: list[Block] = [Text(f"Simulated by `{self.command}`.")] if self.command else []
        blocks.append(Notes(self._setting_lines(alone=alone)))
        if alone and self.compared:
            quick, second = self.evaluation.quick, self.compared_at_48k
            blocks.append(comparison_table(self.compared, quick=quick, at_48k=second))
        if alone and self.statements:
            blocks.append(statement_table(self.statements))
        if self.panels:
            blocks.append(Plots(self.title, self.panels))
        blocks += self.tables
        if alone:
            blocks += self.details
        if self.discussion:
            blocks.append(Text(self.discussion, "Discussion"))
        return Report(name=self.name, title=self._heading(), blocks=tuple(blocks))

    def _heading(self) -> str:
        """Return "Fig. 7. Title", or the title alone of what is no figure."""
        if not self.name.startswith(("fig", "table")):
            return self.title
        return f"{figure_name(self.name)}. {self.title}"

    def _setting_lines(self, *, alone: bool) -> tuple[str, ...]:
        """Return the settings, the workload, and a warning where the run was a quick one."""
        workload = (workload_line(self.evaluation),) if alone else ()
        quick = ("Quick: small grids, not the paper's settings.",) if self.evaluation.quick else ()
        return (*self.settings, *workload, *quick)

    def content(self) -> dict[str, Any]:
        """Return what the JSON file holds: also the paper's numbers and the errors."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        content["compared"] = [
            {
                "key": one.key,
                "what": one.quoted.what,
                "section": one.quoted.section,
                "unit": one.quoted.unit,
                "relation": one.quoted.relation,
                "model": one.model,
                "paper": one.quoted.value,
                "relative_error": one.relative_error,
                "fitted": one.fitted,
            }
            for one in self.compared
        ]
        return content


def exact(numbers: Mapping[str, float | None]) -> tuple[KeyResult, ...]:
    """Return numbers that a rerun on any machine must give exactly."""
    return tuple(
        KeyResult(what, found, tolerance=0.0, any_machine=True) for what, found in numbers.items()
    )


def with_key_results(figure: FigureReport) -> FigureReport:
    """Return a figure with what a rerun must give exactly: numbers and statements as well."""
    numbers = {
        f"{one.quoted.what}{calibration}": one.model
        for compared, calibration in (
            (figure.compared, ""),
            (figure.compared_at_48k, ", at 48K"),
        )
        for one in compared
    }
    numbers |= {one.text: float(one.holds) for one in figure.statements}
    return msgspec.structs.replace(figure, results=(*figure.results, *exact(numbers)))


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
    """Return model, paper and relative error of each number; ``quick`` is noted in the title.

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
    model, error, judged = _judged(one)
    return (
        f"{figure_name(quoted.figure)}: {quoted.what}",
        quoted.section,
        model,
        paper_quantity(quoted),
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
    """Return the paper's statements without numbers."""
    rows = tuple((s.text, s.section, "yes" if s.holds else "no", s.evidence) for s in statements)
    return Table("Statements without a number", ("statement", "section", "holds", "evidence"), rows)


def figure_name(figure: str) -> str:
    """Return a figure's name as the paper writes it."""
    return figure.replace("fig", "Fig. ").replace("table", "Table ")


def paper_quantity(quoted: Quoted) -> str:
    """Return the paper's number with its unit and relation."""
    sign = {"equals": "", "at most": "< ", "comparable": "≈ "}[quoted.relation]
    return sign + quantity(quoted.value, quoted.unit)


def quantity(value: float | None, unit: str) -> str:
    """Return a number with its unit, in as many digits as the paper quotes."""
    forms = {"x": "{:.2f}x", "%": "{:.2f} %", "GB": "{:.0f} GB", "cores": "{:.2f} cores"}
    if unit == "s":
        forms["s"] = "{:,.0f} s" if value is not None and value >= 100 else "{:.3f} s"
    return cell(value, forms[unit])


#: Why numbers are missed, by key; the page states which of them have no reason here.
REASONS = {
    "fig8.speedup_mean": "The paper's three equal pairs and its largest speed-up of 2.46x allow no "
    "mean below 1.87x in any one setting, so its average is over settings that the text does not "
    "name.",
    "fig8.dualpath_2p1d_1p2d": "80 GB of DE buffer per node (§A.4) bound what the one decode "
    "node of 2P1D can have on the way.",
    "fig9.append_speedup_low": "In the model longer appends cost DualPath computation and Basic "
    "hardly anything, so that the ratio falls, as the text also says; its least value of 1.82x "
    "does not follow from that, and the factors are not named.",
    "fig9.append_speedup_high": "No factor, above or below 1, gives the model more than its "
    "unscaled 1.81x at 1,024 agents; the paper's 1.99x also exceeds its own 1.87x of Fig. 7.",
}


def missed(compared: Sequence[Compared]) -> Table | None:
    """Return the offline numbers beyond the target, each with its reason; None if there is none."""
    rows = tuple(
        (
            one.quoted.what,
            cell(one.relative_error, "{:+.1%}"),
            REASONS.get(one.key, "Not explained."),
        )
        for one in compared
        if one.quoted.offline and one.within_target is False
    )
    return Table("Offline numbers beyond 5 %", ("number", "error", "why"), rows) if rows else None
