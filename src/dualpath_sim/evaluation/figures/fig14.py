"""Fig. 14: balance of attention time over the engines of an expert-parallel group, DS 660B."""

from dualpath.core.modes import Mode
from dualpath.report.model import Panel, Series, Table, cell
from dualpath.report.style import MODE_STYLES
from dualpath_sim.evaluation.figures.fig13 import balance
from dualpath_sim.evaluation.report import Compared, FigureReport, Statement
from dualpath_sim.evaluation.runs import OfflineRun, Runs
from dualpath_sim.evaluation.settings import DS_660B, RunSpec

TITLE = "Balance of attention time (DS 660B)"
WORKLOAD = "64K"
MODES = (Mode.ROUND_ROBIN, Mode.DUALPATH)
DISCUSSION = """\
At the start every engine has a full queue and fills its compute quota to within one chunk, so the
model's ratio is nearer to 1 than a real machine's. On a real machine kernels also vary from GPU to
GPU, which the paper's 1.06 includes. Later the ratio grows as queues become short.
"""


def build(runs: Runs) -> FigureReport:
    """Compare the passes of the first 5 % of the task with those up to its tail."""
    settings = runs.settings
    agents = settings.ablation_agents[-1]
    made = {
        mode: runs.offline(
            RunSpec(system=DS_660B, mode=mode, workload=WORKLOAD, agents=agents, curves="balance")
        )
        for mode in MODES
    }
    early = {mode: balance(run).attention_first for mode, run in made.items()}
    ours, others = early[Mode.DUALPATH], early[Mode.ROUND_ROBIN]
    return FigureReport(
        name="fig14",
        title=TITLE,
        evaluation=settings,
        settings=(
            f"DS 660B on 2P4D, {WORKLOAD}, {agents:,} agents at once. Largest over average "
            "attention time of the engines that step together, mean over forward passes.",
        ),
        tables=(_table(made),),
        panels=(
            Panel(
                "Attention time",
                "lines",
                "time, s",
                "max/avg",
                tuple(
                    Series(MODE_STYLES[mode].title, *balance(run).attention)
                    for mode, run in made.items()
                ),
                from_zero=False,
            ),
        ),
        compared=(Compared("fig14.dualpath", ours),),
        statements=(
            Statement(
                "§7.5",
                "DualPath's scheduling improves the balance of attention",
                ours is not None and others is not None and ours < others,
                f"in the first 5 % {cell(ours, '{:.3f}')}, round robin {cell(others, '{:.3f}')}",
            ),
        ),
        discussion=DISCUSSION,
    )


def _table(made: dict[Mode, OfflineRun]) -> Table:
    rows = tuple(
        (
            MODE_STYLES[mode].title,
            cell(balance(run).attention_first, "{:.3f}"),
            cell(balance(run).attention_mean, "{:.3f}"),
            f"{balance(run).passes:,}",
        )
        for mode, run in made.items()
    )
    columns = ("system", "first 5 %", "until the tail", "forward passes")
    return Table("Largest over average attention time", columns, rows)
