"""Fig. 11 and §8.2: mean completion time of a trajectory, and the working set it implies."""

from dualpath.core.modes import Mode
from dualpath.report.model import Panel, Series, Table, cell
from dualpath.report.style import MODE_STYLES
from dualpath_sim.evaluation.report import Compared, FigureReport
from dualpath_sim.evaluation.runs import OnlineRun, Runs
from dualpath_sim.evaluation.serving import METHOD, WORKLOAD, online, rate_sweep
from dualpath_sim.evaluation.settings import DS_27B, DS_660B, MAIN_MODES, System

TITLE = "Online serving: completion time of trajectories, working set"
SYSTEMS = (DS_27B, DS_660B)
GIGABYTE = 1e9
LOW_APS, HIGH_APS = 0.1, 0.45
DISCUSSION = """\
The quoted working sets determine mean completion times: with 40,016 bytes per token and 55,958
tokens per trajectory, 69 GB at 0.1 APS is 616 s and 681 GB at 0.45 APS is 1,352 s. The model's
TTFT is too short (Fig. 10), by two minutes per trajectory at 0.4 APS. The rest of the difference
has two possible explanations.

First, the paper's trajectories may generate more tokens than their context holds. The longer time
equals a product of means: 157 turns times (TTFT 1.739 s + 176 generated tokens times TPOT 0.039 s)
is 1,351 s. That is 27,600 generated tokens per trajectory. Together with 157 x 429 appended tokens
they exceed its 55,958 tokens, so either a part of them (for example reasoning) does not stay in
the context, or the means must not be multiplied. If the means of Table 2 are means over
trajectories, as assumed here, a trajectory generates 16,300 tokens. With 1.7 times the generation
and slower prefill the model has 1,160 s at 0.45 APS, but then 870 s at 0.1 APS.

Second, 0.45 APS may be the paper's limit. With 16,300 generated tokens 1,352 s means a TTFT near
4 s and 45 ms per token, as in a system at its capacity; the model's capacity is 0.76. At 0.1 APS
this explanation needs 32 ms per token; the model takes 27 (its TPOT of 33 ms is a mean over
rounds, and short rounds wait longest per token).

Agents that arrived before an experiment's end are followed until they finish; counting only agents
that finished before it would favour short trajectories.
"""

Points = dict[tuple[System, Mode], list[tuple[float, OnlineRun]]]


def build(runs: Runs) -> FigureReport:
    """Reuse the runs of Fig. 10 and add the two rates of §8.2."""
    settings = runs.settings
    points: Points = {
        (system, mode): [
            (rate, online(runs, system, mode, rate))
            for rate in rate_sweep(runs, system, mode).rates
        ]
        for system in SYSTEMS
        for mode in MAIN_MODES
    }
    low, high = (online(runs, DS_660B, Mode.DUALPATH, rate) for rate in (LOW_APS, HIGH_APS))
    return FigureReport(
        name="fig11",
        title=TITLE,
        evaluation=settings,
        settings=(
            f"As Fig. 10, {WORKLOAD}. {METHOD}",
            "Working set: rate times mean completion time times half the mean total length "
            "(§8.2), in units of 1e9 bytes.",
        ),
        tables=(),
        details=tuple(_table(system, points) for system in SYSTEMS),
        panels=tuple(_panel(system, points) for system in SYSTEMS),
        compared=(
            Compared("fig11.working_set_low", _gigabytes(low, LOW_APS)),
            Compared("fig11.working_set_high", _gigabytes(high, HIGH_APS)),
        ),
        discussion=DISCUSSION,
    )


def _gigabytes(run: OnlineRun, rate: float) -> float | None:
    size = run.working_set_bytes(rate)
    return None if size is None else size / GIGABYTE


def _table(system: System, points: Points) -> Table:
    columns = ("system", "APS", "mean completion, s", "agents not done", "working set, GB")
    rows = []
    for mode in MAIN_MODES:
        for rate, run in points[system, mode]:
            rows.append(
                (
                    MODE_STYLES[mode].title,
                    f"{rate:.2f}",
                    cell(run.agent_jct, "{:,.0f}"),
                    f"{run.agents_unfinished:,}",
                    cell(_gigabytes(run, rate), "{:,.0f}"),
                )
            )
    return Table(system.title, columns, tuple(rows))


def _panel(system: System, points: Points) -> Panel:
    series = tuple(
        Series(
            MODE_STYLES[mode].title,
            tuple(rate for rate, _ in points[system, mode]),
            tuple(run.agent_jct for _, run in points[system, mode]),
        )
        for mode in MAIN_MODES
    )
    return Panel(system.title, "lines", "APS", "mean completion, s", series)
