"""All quoted numbers with three rates of the hardware fitted, and nothing else."""

from dualpath.report.model import Table, cell
from dualpath_sim.evaluation.figures import FIGURES
from dualpath_sim.evaluation.report import (
    FigureReport,
    exact,
    figure_name,
    paper_quantity,
    quantity,
)
from dualpath_sim.evaluation.runs import Runs

TITLE = "Three fitted rates"
#: What the three rates were fitted to, one number each.
FITTED_TO = frozenset(
    {"fig7.660b.speedup_max", "fig12.round_robin", "table3.2p4d.jct", "table3.2p4d.tpot"}
)
DISCUSSION = """\
DISCUSSION
"""


def build(runs: Runs) -> FigureReport:
    """Take the quoted numbers of every figure from runs with the three rates."""
    compared = [one for build in FIGURES.values() for one in build(runs).compared]
    rows = tuple(
        (
            f"{figure_name(one.quoted.figure)}: {one.quoted.what}",
            quantity(one.model, one.quoted.unit),
            paper_quantity(one.quoted),
            cell(one.relative_error, "{:+.1%}"),
            "yes" if one.within_target else "no",
            "fitted" if one.key in FITTED_TO else "predicted",
        )
        for one in compared
    )
    columns = ("number", "model", "paper", "relative error", "within target", "origin")
    return FigureReport(
        name="three-rates",
        title=TITLE,
        evaluation=runs.settings,
        settings=(f"Fitted, and to what: {runs.calibration.fitted}",),
        tables=(Table("All quoted numbers", columns, rows),),
        results=exact({f"{one.quoted.figure}: {one.quoted.what}": one.model for one in compared}),
        discussion=DISCUSSION,
    )
