"""Fig. 13: balance of storage NIC traffic, DualPath against round robin."""

from dualpath.core.modes import Mode
from dualpath.report.model import Panel, Series, Table, cell
from dualpath.report.style import MODE_STYLES
from dualpath_sim.evaluation.report import Compared, FigureReport
from dualpath_sim.evaluation.runs import BalanceOverTime, OfflineRun, Runs
from dualpath_sim.evaluation.settings import DS_27B, DS_660B, RunSpec
from dualpath_sim.evaluation.speedups import with_mode

TITLE = "Balance of storage NIC traffic"
WORKLOAD = "64K"
MODES = (Mode.ROUND_ROBIN, Mode.DUALPATH)
DISCUSSION = """\
The text measures "all storage NICs on three machines", while the ablation around it runs on six
(2P4D). Taken literally, the figure is of one prefill and two decode nodes (DS 27B, 1P2D); these
are compared with the paper, and DS 660B on 2P4D is listed beside them. Round robin sends half of
all reads to each side whatever the number of nodes there, so at P:D = 1:2 a prefill node carries
1.5 times the average. That is nearly the paper's 1.53, without any model.

Nothing of this figure was fitted. Queue lengths are exact when a group fetches and a storage NIC
always reads at its rate, so the choice of sides is the only cause of imbalance. On 2P4D the ratio
is larger: a read of 33K tokens of DS 660B is 1.3 GB, so that only a few reads per node fit into a
second. The text does not give the width of its "small time window"; the table has several.
"""


def build(runs: Runs) -> FigureReport:
    """Run both readings of the figure's cluster with both ways of choosing a side."""
    settings = runs.settings
    agents = settings.ablation_agents[-1]
    readings = {
        "DS 27B, 1P2D": RunSpec(
            system=DS_27B,
            mode=Mode.DUALPATH,
            workload=WORKLOAD,
            agents=settings.ablation_agents[0],
            nodes=(1, 2),
            curves="balance",
        ),
        "DS 660B, 2P4D": RunSpec(
            system=DS_660B, mode=Mode.DUALPATH, workload=WORKLOAD, agents=agents, curves="balance"
        ),
    }
    made = {
        (name, mode): runs.offline(with_mode(spec, mode))
        for name, spec in readings.items()
        for mode in MODES
    }
    literal = next(iter(readings))
    return FigureReport(
        name="fig13",
        title=TITLE,
        evaluation=settings,
        settings=(
            f"{WORKLOAD}; {readings[literal].agents} agents on DS 27B, {agents} on DS 660B, all "
            "at once.",
            f"Bytes read and written per SNIC in windows of {settings.window_s:g} s; largest over "
            "average of the nodes, windows without traffic left out; mean until fewer than "
            f"{settings.tail_share:.0%} of the agents are left.",
        ),
        tables=(_table(made),),
        panels=tuple(_panel(name, made) for name in readings),
        compared=(
            Compared("fig13.round_robin", _mean(made[literal, Mode.ROUND_ROBIN])),
            Compared("fig13.dualpath", _mean(made[literal, Mode.DUALPATH])),
        ),
        discussion=DISCUSSION,
    )


def _mean(run: OfflineRun) -> float | None:
    return run.snic_by_window[0][1]


def _table(made: dict[tuple[str, Mode], OfflineRun]) -> Table:
    rows = tuple(
        (
            name,
            MODE_STYLES[mode].title,
            *(cell(ratio, "{:.3f}") for _, ratio in run.snic_by_window),
            f"{run.tail_begins_s:,.0f}",
            f"{run.jct_s:,.0f}",
        )
        for (name, mode), run in made.items()
    )
    windows = [f"{width_s:g} s" for width_s, _ in next(iter(made.values())).snic_by_window]
    columns = ("cluster", "system", *windows, "tail begins, s", "JCT, s")
    return Table("Largest over average SNIC traffic, by width of window", columns, rows)


def _panel(name: str, made: dict[tuple[str, Mode], OfflineRun]) -> Panel:
    return Panel(
        name,
        "lines",
        "time, s",
        "max/avg",
        tuple(Series(MODE_STYLES[mode].title, *balance(made[name, mode]).snic) for mode in MODES),
        from_zero=False,
    )


def balance(run: OfflineRun) -> BalanceOverTime:
    """Return the balance of a run that was asked for it."""
    assert run.balance is not None
    return run.balance
