"""Fig. 14: balance of attention time over the engines of an expert-parallel group, DS 660B."""

from dualpath.core.modes import Mode
from dualpath.report.model import Panel, Table, cell
from dualpath.report.style import MODE_STYLES
from dualpath_sim.evaluation.figures.fig13 import curve
from dualpath_sim.evaluation.report import Compared, FigureReport, Statement
from dualpath_sim.evaluation.runs import OfflineRun, Runs
from dualpath_sim.evaluation.settings import DS_660B, RunSpec

TITLE = "Balance of attention time (DS 660B)"
WORKLOAD = "64K"
MODES = (Mode.ROUND_ROBIN, Mode.DUALPATH)
FIRST_SHARE = 0.05
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
        mode: runs.offline(RunSpec(system=DS_660B, mode=mode, workload=WORKLOAD, agents=agents))
        for mode in MODES
    }
    early = {mode: _early(run) for mode, run in made.items()}
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
                    curve(MODE_STYLES[mode].title, run.attention, run.tail_begins_s)
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
        data={MODE_STYLES[mode].title: {"first_5_percent": value} for mode, value in early.items()},
    )


def _early(run: OfflineRun) -> float | None:
    return run.attention.mean(FIRST_SHARE * run.jct_s)


def _table(made: dict[Mode, OfflineRun]) -> Table:
    rows = tuple(
        (
            MODE_STYLES[mode].title,
            cell(_early(run), "{:.3f}"),
            cell(run.attention.mean(run.tail_begins_s), "{:.3f}"),
            f"{run.attention.time_s.size:,}",
        )
        for mode, run in made.items()
    )
    columns = ("system", "first 5 %", "until the tail", "forward passes")
    return Table("Largest over average attention time", columns, rows)
