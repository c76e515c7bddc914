"""The report on job completion times: ratios, use of links, balance, targets."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.jct_targets import IDEAL_SHARE, targets
from dualpath.laboratory.experiments.job import JUDGED, Job
from dualpath.laboratory.experiments.meters import NodeBytes
from dualpath.laboratory.experiments.node_lines import merged_by_role
from dualpath.laboratory.experiments.report import ExperimentReport
from dualpath.laboratory.experiments.run_lines import (
    engine_cpu_s,
    link_line,
    machine_lines,
    run_data,
    too_busy,
)
from dualpath.laboratory.experiments.runs import Measured
from dualpath.report.model import NOTHING, Panel, Series, Table
from dualpath.report.style import MODE_STYLES

#: Length of the windows for the balance of storage NICs and for plotted rates, and the minimum
#: number of them in a run.
WINDOW_S, _LEAST_WINDOWS = 1.0, 8


def jct_report(
    name: str,
    command: str,
    settings: tuple[str, ...],
    jobs: Sequence[Job],
    ideal_share: float = IDEAL_SHARE,
) -> ExperimentReport:
    """Return the report; link rates over time are drawn for the last job.

    ``ideal_share`` of the ratio (P + D) / P is the target of an I/O-bound job.
    """
    return ExperimentReport(
        name=name,
        title="Job completion time on shaped links",
        command=command,
        settings=(*settings, link_line(jobs[-1].links), *machine_lines(_all_runs(jobs))),
        tables=(
            *(_table(job) for job in jobs),
            _balance_table(jobs),
            *(_rank_table(job) for job in jobs if job.lab.cnics > 1),
            _cost_table(jobs),
            *_thread_tables(jobs),
        ),
        panels=(_jct_panel(jobs), *_link_panels(jobs[-1])),
        targets=tuple(target for job in jobs for target in targets(job, ideal_share)),
        data={"jobs": [_data(job) for job in jobs]},
        too_busy=too_busy(_all_runs(jobs)),
    )


def _all_runs(jobs: Sequence[Job]) -> list[Measured]:
    return [run for job in jobs for done in job.runs.values() for run in done]


def _table(job: Job) -> Table:
    basic, oracle = job.jct_s(Mode.BASIC), job.jct_s(Mode.ORACLE)
    rows = []
    for mode in job.runs:
        jct_s = job.jct_s(mode)
        assert jct_s is not None
        times = [run.jct_s for run in job.runs[mode]]
        run = job.typical(mode)
        assert run is not None
        ttft = run.client.replay.summary.ttft_s
        use = sorted(run.snic_use(job.lab.snic_bytes_per_s))
        rows.append(
            (
                mode.value,
                f"{jct_s:.2f}",
                f"{min(times):.2f} - {max(times):.2f}",
                NOTHING if basic is None else f"{basic / jct_s:.2f}",
                NOTHING if oracle is None else f"{jct_s / oracle:.2f}",
                NOTHING if ttft is None else f"{ttft.mean:.2f}",
                f"{run.storage_bytes / 1e9:.2f}",
                f"{use[-1]:.0%}" if use and run.storage_bytes > 0 else NOTHING,
                f"{statistics.fmean(use):.0%}" if use and run.storage_bytes > 0 else NOTHING,
                f"{max(r.busy for r in job.runs[mode]):.0%}",
            )
        )
    columns = (
        *("mode", "JCT s", "range s", "speed-up over basic", "x oracle", "mean TTFT s"),
        *("read GB", "SNIC use, busiest", "SNIC use, mean", "machine busy"),
    )
    title = (
        f"{job.lab.nodes}: {len(job.agents)} agents, {job.ideal_ratio:g}x is ideal, "
        "SNIC use over the middle half"
    )
    return Table(title, columns, tuple(rows))


def _balance_table(jobs: Sequence[Job]) -> Table:
    modes = [m for m in (Mode.ROUND_ROBIN, *JUDGED) if m in jobs[0].runs]
    rows = tuple(
        (
            job.lab.nodes,
            *(f"{job.median(m, lambda run: run.snic_balance(window_s(run))):.2f}" for m in modes),
        )
        for job in jobs
    )
    title = f"Balance of storage NICs: max/avg of bytes read in windows of {WINDOW_S:g} s (Fig. 13)"
    return Table(title, ("cluster", *(mode.value for mode in modes)), rows)


def _rank_table(job: Job) -> Table:
    """Return the bytes over each rank's CNIC by direction, from the kernel's counters."""
    rows = []
    for mode in job.runs:
        run = job.typical(mode)
        assert run is not None
        first, last = run.samples[0].nodes, run.samples[-1].nodes
        for node in first if mode.moves_bytes else ():
            pairs = enumerate(zip(first[node].rails, last[node].rails, strict=True))
            for rank, (before, after) in pairs:
                out, into = ((b - a) / 1e6 for a, b in zip(before, after, strict=True))
                rows.append((mode.value, node, str(rank), f"{into:,.1f}", f"{out:,.1f}"))
    title = f"{job.lab.nodes}: bytes over the CNIC of each rank"
    return Table(title, ("mode", "node", "rank", "in, MB", "out, MB"), tuple(rows))


def _cost_table(jobs: Sequence[Job]) -> Table:
    rows = []
    for job in jobs:
        for mode, runs in job.runs.items():
            if not mode.moves_bytes:
                continue
            engines = statistics.median(engine_cpu_s(run) / run.storage_bytes * 1e9 for run in runs)
            router = statistics.median(run.cpu_s["router"] for run in runs)
            rows.append((job.lab.nodes, mode.value, f"{engines:.2f}", f"{router:.2f}"))
    columns = ("cluster", "mode", "engines, CPU-s per GB read", "router, CPU-s")
    return Table("CPU time, including verification of every block", columns, tuple(rows))


def _thread_tables(jobs: Sequence[Job]) -> list[Table]:
    """Return the CPU time of DualPath's engines by thread, if they report it."""
    tables = []
    for job, mode in itertools.product(jobs, JUDGED):
        runs = [run for run in job.runs.get(mode, ()) if run.client.thread_cpu_s]
        if not runs:
            continue
        names = {name for run in runs for name in run.client.thread_cpu_s}
        per_gb = {
            name: statistics.median(
                run.client.thread_cpu_s.get(name, 0.0) / run.storage_bytes * 1e9 for run in runs
            )
            for name in names
        }
        rows = [(name, f"{per_gb[name]:.2f}") for name in sorted(names, key=per_gb.__getitem__)]
        title = f"{job.lab.nodes}: CPU time by thread of the engines, {MODE_STYLES[mode].title}"
        tables.append(Table(title, ("thread", "CPU-s per GB read"), tuple(reversed(rows))))
    return tables


def _jct_panel(jobs: Sequence[Job]) -> Panel:
    shapes = tuple(job.lab.nodes for job in jobs)

    def bound(mode: Mode, least_or_most: Callable[[Iterable[float]], float]) -> tuple[float, ...]:
        return tuple(least_or_most(run.jct_s for run in job.runs[mode]) for job in jobs)

    series = tuple(
        Series(
            mode.value,
            shapes,
            tuple(job.jct_s(mode) for job in jobs),
            low=bound(mode, min),
            high=bound(mode, max),
        )
        for mode in jobs[0].runs
    )
    return Panel("Job completion time", "grouped", "cluster", "JCT (s)", series)


def _link_panels(job: Job) -> list[Panel]:
    panels = []
    for mode in (Mode.BASIC, *JUDGED):
        run = job.typical(mode)
        if run is None:
            continue
        for title, count in (("storage reads", "snic"), ("CNIC in", "cnic_in")):
            nodes = run.samples[0].nodes
            series = merged_by_role(
                [rate_series(run, node, count, window_s(run)) for node in nodes]
            )
            panels.append(
                Panel(f"{job.lab.nodes}, {mode.value}: {title}", "lines", "s", "MB/s", series)
            )
    return panels


def window_s(run: Measured) -> float:
    """Return the length of a run's windows: ``WINDOW_S``, or less in a short run."""
    return min(WINDOW_S, run.jct_s / _LEAST_WINDOWS)


def rate_series(run: Measured, node: str, count: str, width_s: float) -> Series:
    """Return a node's rate in MB/s over windows of a run; ``count`` names a field of NodeBytes."""
    x: list[float] = []
    y: list[float | None] = []
    begin = run.samples[0]
    for sample in run.samples:
        passed_s = sample.time_s - begin.time_s
        if passed_s < width_s:
            continue
        moved = _counted(sample.nodes[node], count) - _counted(begin.nodes[node], count)
        x.append((sample.time_s + begin.time_s) / 2)
        y.append(moved / passed_s / 1e6)
        begin = sample
    return Series(node, tuple(x), tuple(y))


def _counted(bytes_of_node: NodeBytes, count: str) -> int:
    value = getattr(bytes_of_node, count)
    assert isinstance(value, int)
    return value


def _data(job: Job) -> dict[str, Any]:
    return {
        "lab": job.lab,
        "runs": {mode.value: [_run_data(run) for run in runs] for mode, runs in job.runs.items()},
    }


def _run_data(run: Measured) -> dict[str, Any]:
    return {**run_data(run), "snic_balance": run.snic_balance(window_s(run))}
