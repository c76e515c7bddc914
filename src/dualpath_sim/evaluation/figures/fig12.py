"""Fig. 12: parts of TTFT against arrival rate (left), ablation (right), DS 660B."""

from dualpath.core.modes import Mode
from dualpath.report.model import NOTHING, Panel, Series, Table
from dualpath.report.style import MODE_STYLES
from dualpath_sim.evaluation.report import Compared, FigureReport, Statement
from dualpath_sim.evaluation.runs import OnlineRun, Runs
from dualpath_sim.evaluation.serving import METHOD, online, rate_sweep
from dualpath_sim.evaluation.settings import DS_660B, RunSpec
from dualpath_sim.evaluation.speedups import mean

TITLE = "Parts of TTFT, and ablation (DS 660B)"
WORKLOAD = "64K"
STEPS = (Mode.BASIC, Mode.LAYERWISE, Mode.ROUND_ROBIN, Mode.DUALPATH)
PARTS = ("scheduling", "allocating", "reading", "prefill")
PAIR = (Mode.DUALPATH, Mode.BASIC)
DISCUSSION = """\
Each step adds one technique; the compute quota belongs to the last (§A.4 sets it for DualPath and
Oracle). The reductions are means of two percentages, as in the paper. All three were fitted,
through the HBM and batch cap of Basic's prefill, the rate of a CNIC and the overhead of a pass.
They determine how much of Basic's time is spent waiting for HBM, for storage and for the slowest
engine; they do not test this division.

Parts of TTFT: scheduling is the interval at which groups fetch; reading is that of an unloaded
SNIC. DualPath is stable as in the paper, except for prefill, which doubles from a nearly idle
machine at 0.05 APS to one with batches to fill. In the model the growth of Basic is in prefill as
well, which includes the wait for a pass to begin; in the paper it is in queuing and attributed to
storage. In the model storage is no bottleneck at these rates (Fig. 10), which may be its error: at
0.2 APS, where the paper's Basic fails, its agents need 41 GB/s of two SNICs of 50 GB/s each.
"""

Jcts = dict[int, dict[Mode, float]]
Breakdown = list[tuple[float, Mode, OnlineRun]]


def build(runs: Runs) -> FigureReport:
    """Run the ablation, and reuse the online runs of Fig. 10."""
    settings = runs.settings
    jcts: Jcts = {agents: _ablation(runs, agents) for agents in settings.ablation_agents}
    breakdown = _breakdown(runs)
    return FigureReport(
        name="fig12",
        title=TITLE,
        evaluation=settings,
        settings=(
            f"DS 660B on 2P4D, {WORKLOAD}. Ablation: "
            f"{' and '.join(map(str, settings.ablation_agents))} agents at once.",
            f"Parts of TTFT: {METHOD}",
            "Scheduling: submitted to assigned; allocating: to buffers granted; reading: to the "
            "hit KV in DRAM; prefill: to the first token.",
        ),
        tables=(_ablation_table(jcts), _breakdown_table(breakdown)),
        panels=(*_breakdown_panels(breakdown), _ablation_panel(jcts)),
        compared=(
            Compared("fig12.layerwise", _reduction(jcts, Mode.LAYERWISE)),
            Compared("fig12.round_robin", _reduction(jcts, Mode.ROUND_ROBIN)),
            Compared("fig12.dualpath", _reduction(jcts, Mode.DUALPATH)),
        ),
        statements=_statements(breakdown),
        discussion=DISCUSSION,
    )


def _ablation(runs: Runs, agents: int) -> dict[Mode, float]:
    return {
        mode: runs.offline(
            RunSpec(system=DS_660B, mode=mode, workload=WORKLOAD, agents=agents)
        ).jct_s
        for mode in (*STEPS, Mode.ORACLE)
    }


def _reduction(jcts: Jcts, mode: Mode) -> float:
    return mean(100 * (1 - row[mode] / row[Mode.BASIC]) for row in jcts.values())


def _ablation_table(jcts: Jcts) -> Table:
    modes = (*STEPS, Mode.ORACLE)
    rows = [
        (f"JCT, s, {agents:,} agents", *(f"{row[mode]:,.0f}" for mode in modes))
        for agents, row in jcts.items()
    ]
    rows.append(
        (
            "mean reduction",
            NOTHING,
            *(f"{_reduction(jcts, mode):.2f} %" for mode in modes[1:]),
        )
    )
    return Table("Ablation", ("", *(MODE_STYLES[mode].title for mode in modes)), tuple(rows))


def _ablation_panel(jcts: Jcts) -> Panel:
    names = tuple(f"{agents:,}" for agents in jcts)
    series = tuple(
        Series(MODE_STYLES[mode].title, names, tuple(row[mode] for row in jcts.values()))
        for mode in STEPS
    )
    return Panel("Ablation", "grouped", "agents", "JCT, s", series)


def _breakdown(runs: Runs) -> Breakdown:
    """Return both systems at every rate that Basic was tried at."""
    rates = rate_sweep(runs, DS_660B, Mode.BASIC).rates
    return [(rate, mode, online(runs, DS_660B, mode, rate)) for rate in rates for mode in PAIR]


def _breakdown_table(breakdown: Breakdown) -> Table:
    rows = tuple(
        (
            f"{rate:.2f}",
            MODE_STYLES[mode].title,
            *(f"{part:.3f}" for part in run.ttft_parts or ()),
            f"{sum(run.ttft_parts):.3f}",
            run.ending.rule,
        )
        for rate, mode, run in breakdown
        if run.ttft_parts
    )
    columns = ("APS", "system", *(f"{part}, s" for part in PARTS), "TTFT, s", "ended")
    return Table("Parts of TTFT", columns, rows)


def _breakdown_panels(breakdown: Breakdown) -> tuple[Panel, ...]:
    panels = []
    for wanted in PAIR:
        points = [
            (f"{rate:.2f}", run.ttft_parts)
            for rate, mode, run in breakdown
            if mode is wanted and run.ttft_parts
        ]
        series = tuple(
            Series(part, tuple(rate for rate, _ in points), tuple(p[index] for _, p in points))
            for index, part in enumerate(PARTS)
        )
        title = f"Parts of TTFT, {MODE_STYLES[wanted].title}"
        panels.append(Panel(title, "stacked", "APS", "mean, s", series))
    return tuple(panels)


def _statements(breakdown: Breakdown) -> tuple[Statement, ...]:
    growth = {}
    for wanted in PAIR:
        sums = [sum(run.ttft_parts) for _, mode, run in breakdown if mode is wanted]
        growth[wanted] = sums[-1] / sums[0] if sums[0] else 0.0
    last = [run for _, mode, run in breakdown if mode is Mode.BASIC][-1].ttft_parts
    reading = sum(last[1:3]) / sum(last) if last else 0.0
    return (
        Statement(
            "§7.4",
            "DualPath keeps TTFT's parts stable, Basic's queuing grows dramatically",
            growth[Mode.DUALPATH] < 1.5 < growth[Mode.BASIC],
            f"over these rates TTFT grows {growth[Mode.DUALPATH]:.2f}x with DualPath and "
            f"{growth[Mode.BASIC]:.2f}x with Basic, {reading:.0%} of the latter at the highest "
            "rate being allocating and reading",
        ),
    )
