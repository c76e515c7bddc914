"""Job completion time of every mode on shaped links (§7.3, §7.5), measured with real bytes."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dualpath.core.modes import Mode
from dualpath.report.model import NOTHING, Panel, Series, Table
from dualpath.report.style import MODE_STYLES
from dualpath.workload.replay.client import ReplayOptions
from dualpath_lab.experiments.engine_nodes import EmulatedEngines, VllmEngines
from dualpath_lab.experiments.metered_replay import NodeBytes
from dualpath_lab.experiments.report import ExperimentReport, Target
from dualpath_lab.experiments.runs import (
    JUDGED,
    Engines,
    Job,
    LabRun,
    Measured,
    Variant,
    engine_cpu_s,
    link_line,
    machine_lines,
    run_data,
    run_interleaved,
    too_busy,
)
from dualpath_lab.experiments.settings import History, JctSettings, VllmNodes, WindowSettings
from dualpath_lab.experiments.workload import Window, windows
from dualpath_lab.nodes.settings import LabSettings

# ------------------------------------------------------------------------------------- jct targets
# Targets of job completion times: relative to what the links allow, or to Oracle.

#: Shares of the ideal ratio (P + D) / P with emulated and with real engines; limit of JCT /
#: Oracle's; share of the SNIC's rate.
IDEAL_SHARE, REAL_IDEAL_SHARE, ORACLE_RATIO, SNIC_USE = 0.97, 0.9, 1.02, 0.95
#: A job is I/O-bound if reading takes this many times Oracle's JCT; I/O suffices below the second.
_IO_BOUND, _IO_SUFFICES = 2.0, 0.9


def targets(job: Job, ideal_share: float) -> Iterator[Target]:
    """Yield the targets of each mode of DualPath: ``ideal_share`` of (P + D) / P, or Oracle's JCT.

    There is none if the share of reading is unknown, or neither high nor low.
    """
    share = job.reading_share
    if share is None:
        return
    for mode in JUDGED:
        if mode in job.runs and share >= _IO_BOUND:
            yield from _of_links(job, mode, ideal_share)
        if mode in job.runs and share <= _IO_SUFFICES:
            yield _of_oracle(job, mode, share)


def _of_links(job: Job, mode: Mode, ideal_share: float) -> Iterator[Target]:
    basic, jct_s, typical = job.jct_s(Mode.BASIC), job.jct_s(mode), job.typical(mode)
    if basic is None or jct_s is None or typical is None:
        return
    shape, title = job.lab.nodes, MODE_STYLES[mode].title
    ideal = ideal_share * job.ideal_ratio
    note = f"ideal {job.ideal_ratio:g}"
    yield Target(f"{shape}: Basic / {title}, I/O-bound", basic / jct_s, ideal, True, note)
    use = min(typical.snic_use(job.lab.snic_bytes_per_s))
    what = f"{shape}: use of the least used SNIC, {title}"
    yield Target(what, use, SNIC_USE, True, "middle half of the run")


def _of_oracle(job: Job, mode: Mode, share: float) -> Target:
    oracle, jct_s = job.jct_s(Mode.ORACLE), job.jct_s(mode)
    assert oracle is not None
    assert jct_s is not None
    what = f"{job.lab.nodes}: {MODE_STYLES[mode].title} / Oracle, SNICs suffice"
    note = f"reading needs {share:.0%} of Oracle's time"
    return Target(what, jct_s / oracle, ORACLE_RATIO, False, note)


# -------------------------------------------------------------------------------------- node lines
# Plot lines of nodes over a run; many nodes are merged to one line per role.

#: More nodes than this are drawn as the mean and the range of each role.
_MOST_NODES = 4


def merged_by_role(nodes: Sequence[Series]) -> tuple[Series, ...]:
    """Return the lines of few nodes unchanged, those of many merged to one per role.

    Nodes are named as in a lab, like ``pe0`` or ``de1``, and all have the same ``x``.
    """
    if len(nodes) <= _MOST_NODES:
        return tuple(nodes)
    roles = {"PEs": "pe", "DEs": "de"}
    lines = {role: [n for n in nodes if n.name.startswith(name)] for role, name in roles.items()}
    return tuple(_mean(f"mean of {len(of)} {role}", of) for role, of in lines.items() if of)


def _mean(name: str, nodes: Sequence[Series]) -> Series:
    known = [[y for y in at if y is not None] for at in zip(*(n.y for n in nodes), strict=True)]
    return Series(
        name,
        nodes[0].x,
        tuple(statistics.fmean(at) if at else None for at in known),
        low=tuple(min(at, default=None) for at in known),
        high=tuple(max(at, default=None) for at in known),
    )


# -------------------------------------------------------------------------------------- jct report
# The report on job completion times: ratios, use of links, balance, targets.

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


def measure_jct(
    settings: JctSettings, command: str, progress: Callable[[str], None] = lambda text: None
) -> ExperimentReport:
    """Run every mode on every cluster and return the report.

    Raises ``ConfigError`` for invalid settings, ``EngineLostError`` if a run fails: a wrong block
    in any run ends the experiment.
    """
    jobs = jobs_of(settings, progress)
    share = IDEAL_SHARE if settings.vllm is None else REAL_IDEAL_SHARE
    lines = setting_lines(settings, _missing(settings.mode))
    return jct_report(settings.name, command, lines, jobs, share)


def jobs_of(
    settings: JctSettings, progress: Callable[[str], None] = lambda text: None
) -> list[Job]:
    """Run every mode on every cluster; raises as ``measure_jct``."""
    jobs = []
    for nodes in settings.nodes:
        lab = settings.lab_of(nodes)
        agents = windows(agents_of(settings, lab))
        with lab_run_of(settings, lab, agents, progress) as lab_run:
            runs = _runs(lab_run, settings, progress)
            jobs.append(
                Job(lab=lab_run.state.settings, links=lab_run.links, agents=agents, runs=runs)
            )
    return jobs


def lab_run_of(
    settings: JctSettings,
    lab: LabSettings,
    agents: Sequence[Window],
    progress: Callable[[str], None],
) -> LabRun:
    """Return the lab for agents with their histories, in DRAM if the settings require it."""
    warm = settings.windows.history is History.DRAM
    engines, limit = engines_of(settings), settings.busy_limit
    return LabRun(lab, engines, agents, progress, warm=warm, busy_limit=limit)


def engines_of(settings: JctSettings) -> Engines:
    """Return the kind of engines."""
    emulated, vllm = settings.emulated, settings.vllm
    return EmulatedEngines(emulated) if vllm is None else VllmEngines(vllm)


def agents_of(settings: JctSettings, lab: LabSettings) -> WindowSettings:
    """Return the windows for all agents of a lab."""
    agents = settings.agents_per_node * (lab.prefill + lab.decode)
    return msgspec.structs.replace(settings.windows, agents=agents, seed=settings.seed)


def setting_lines(settings: JctSettings, suffix: str = "") -> tuple[str, ...]:
    """Describe engines, agents and repetitions; ``suffix`` is appended to the last line."""
    nodes, chosen = settings.emulated, settings.windows
    engines = (
        f"Emulated engines: times of {nodes.model} on {nodes.gpu}, {nodes.speedup:g} times as "
        f"fast; {nodes.layers} layers, Layer Blocks of {nodes.layer_block_bytes:,} bytes, "
        f"{nodes.block_tokens} tokens a block; verification {nodes.verify}."
    )
    if nodes.prefill_tp > 1:
        engines += (
            f" Each has {nodes.prefill_tp} ranks, processes with a CNIC each, with "
            f"{nodes.kv_heads} KV heads in total."
        )
    if nodes.dp > 1:
        engines += (
            f" The {nodes.dp} engines of a node, a data-parallel group, share the node's links."
        )
    if nodes.recompute_limit_s:
        limit_s = nodes.recompute_limit_s
        engines += (
            f" Hits that take longer to load than to recompute are recomputed, up to {limit_s:g} s."
        )
    return (
        engines if settings.vllm is None else _vllm_line(settings.vllm),
        f"Agents: {settings.agents_per_node} per node, windows of {chosen.turns} turns of "
        f"{Path(chosen.trace).name}{', all equal' if chosen.even else ''}, token counts times "
        f"{chosen.scale:g}, those of turns in addition times {chosen.scale_append:g} (append) and "
        f"{chosen.scale_generate:g} (generate); {chosen.history.description}. "
        f"Seed {settings.seed}.",
        f"Every mode {settings.repeat} times, interleaved; medians.{suffix}",
    )


def _missing(modes: Sequence[Mode]) -> str:
    """Name the systems of the paper's comparison that were not run."""
    missing = [m.value for m in (Mode.BASIC, Mode.DUALPATH, Mode.ORACLE) if m not in modes]
    return f" Not run: {', '.join(missing)}." if missing else ""


def _vllm_line(vllm: VllmNodes) -> str:
    return (
        f"Real vLLM engines on CPU: {Path(vllm.model).name}, {vllm.dtype}, "
        f"{vllm.kv_bytes_per_token:,.0f} bytes of KV per token, {vllm.block_tokens} tokens a block."
    )


def _runs(
    lab_run: LabRun, settings: JctSettings, progress: Callable[[str], None]
) -> Mapping[Mode, Sequence[Measured]]:
    kinds = [Variant(mode.value, mode, engines_of(settings)) for mode in settings.mode]
    options = ReplayOptions(seed=settings.seed)
    runs = run_interleaved(lab_run, kinds, settings.repeat, options, progress)
    return {Mode(name): done for name, done in runs.items()}
