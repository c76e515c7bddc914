"""One module per figure or table of §3 and §7, each with ``TITLE``, ``DISCUSSION`` and ``build``.

``candidates`` is none of the paper's: it asks what the model lacks.
"""

from collections.abc import Callable

from dualpath_sim.evaluation.figures import (
    fig3,
    fig7,
    fig8,
    fig9,
    fig10,
    fig11,
    fig12,
    fig13,
    fig14,
    fig15,
    table1,
    table2,
    table3,
)
from dualpath_sim.evaluation.report import FigureReport
from dualpath_sim.evaluation.runs import Runs

#: In the order of the paper.
FIGURES: dict[str, Callable[[Runs], FigureReport]] = {
    "table1": table1.build,
    "fig3": fig3.build,
    "table2": table2.build,
    "fig7": fig7.build,
    "fig8": fig8.build,
    "fig9": fig9.build,
    "fig10": fig10.build,
    "fig11": fig11.build,
    "fig12": fig12.build,
    "fig13": fig13.build,
    "fig14": fig14.build,
    "table3": table3.build,
    "fig15": fig15.build,
}
