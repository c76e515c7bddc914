"""Job completion time of every mode on shaped links (§7.3, §7.5), measured with real bytes."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.report.model import NOTHING, Panel, Series, Table, cell
from dualpath.report.style import MODE_STYLES
from dualpath.workload.replay.client import ReplayOptions
from dualpath_lab.experiments.engine_nodes import EmulatedEngines, VllmEngines
from dualpath_lab.experiments.runs import (
    DRAWN,
    JUDGED,
    WINDOW_S,
    Engines,
    LabResult,
    LabRun,
    Measured,
    lab_result,
    link_lines,
    load_lines,
    too_busy,
)
from dualpath_lab.experiments.settings import History, JctSettings, VllmNodes, WindowSettings
from dualpath_lab.experiments.workload import Window, windows
from dualpath_lab.nodes.cluster import LinkReport
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Measure,
    Page,
    Progress,
    R,
    RawData,
    Run,
    Stage,
    tolerance_of,
)

#: Tolerances of reruns: ratios of completion times on any machine, times on the same processor.
RATIO_TOLERANCE, TIME_TOLERANCE = 0.05, 0.1

# -------------------------------------------------------------------------------------------- runs
# Runs of variants of one lab, each with its mode and engines.


class Variant(NamedTuple):
    """One variant of a run: the mode, the engines."""

    mode: Mode
    engines: Engines


def lab_stage(
    settings: JctSettings,
    lab: LabSettings,
    cells: Mapping[str, Variant],
    progress: Progress,
    reduce: Callable[[Measured, LabSettings, tuple[LinkReport, ...]], R],
    options: ReplayOptions | None = None,
) -> Stage[Variant, R]:
    """Return variants that run on one lab with the same agents and stored histories."""
    chosen = options or ReplayOptions(seed=settings.seed)

    @contextmanager
    def open_lab() -> Iterator[Measure[Variant, R]]:
        agents = windows(agents_of(settings, lab))
        with lab_run_of(settings, lab, agents, progress) as lab_run:
            yield lambda variant, number: reduce(
                lab_run.run(variant.mode, chosen, variant.engines), lab, lab_run.links
            )

    return Stage(cells, open_lab)


def jct_stages(settings: JctSettings, progress: Progress) -> Iterator[Stage[Variant, LabResult]]:
    """Yield a lab per cluster, on which every mode runs."""
    engines = engines_of(settings)
    for nodes in settings.nodes:
        cells = {cell_of(nodes, mode): Variant(mode, engines) for mode in settings.mode}
        yield lab_stage(settings, settings.lab_of(nodes), cells, progress, lab_result)


def cell_of(nodes: str, mode: Mode) -> str:
    """Return the name of a mode's runs on a cluster."""
    return f"{nodes} {mode.value}"


def spoilt(settings: JctSettings, result: LabResult) -> bool:
    """Return whether a run used links and the machine was too busy for them."""
    return result.mode.moves_bytes and result.busy > settings.busy_limit


def summary_of(result: LabResult) -> str:
    """Describe a run for progress messages."""
    return f"{result.jct_s:.1f} s, machine {result.busy:.0%} busy"


# --------------------------------------------------------------------------------------------- job
# All runs of one cluster, which replayed the same agents in several modes.


class Job(NamedTuple):
    """All runs of one cluster; ``agents`` is their number."""

    lab: LabSettings
    agents: int
    runs: Mapping[Mode, Sequence[LabResult]]

    def jct_s(self, mode: Mode) -> float | None:
        """Median over repetitions."""
        return self.median(mode, lambda run: run.jct_s)

    def median(self, mode: Mode, of: Callable[[LabResult], float]) -> float | None:
        """Return the median of ``of`` over a mode's runs; None without runs."""
        runs = self.runs.get(mode)
        return statistics.median(of(run) for run in runs) if runs else None

    def typical(self, mode: Mode) -> LabResult | None:
        """Return the run of median JCT, the later of two."""
        runs = sorted(self.runs.get(mode, ()), key=lambda run: run.jct_s)
        return runs[len(runs) // 2] if runs else None

    @property
    def ideal_ratio(self) -> float:
        """Ideal speed-up over Basic if only storage limits: all SNICs read instead of P of them."""
        return (self.lab.prefill + self.lab.decode) / self.lab.prefill

    @property
    def reading_share(self) -> float | None:
        """Time that all SNICs together need for the bytes, relative to Oracle's JCT."""
        oracle = self.jct_s(Mode.ORACLE)
        run = next(filter(None, map(self.typical, JUDGED)), None)
        if oracle is None or run is None:
            return None
        nodes = self.lab.prefill + self.lab.decode
        return run.storage_bytes / (nodes * self.lab.snic_bytes_per_s) / oracle


def jobs_of(raw: RawData[JctSettings, LabResult]) -> list[Job]:
    """Return the clusters that have runs."""
    jobs = []
    for nodes in raw.settings.nodes:
        runs = {mode: raw.of(cell_of(nodes, mode)) for mode in raw.settings.mode}
        lab = raw.settings.lab_of(nodes)
        found = {mode: done for mode, done in runs.items() if done}
        if found:
            jobs.append(Job(lab, agents_of(raw.settings, lab).agents, found))
    return jobs


# ------------------------------------------------------------------------------------- jct targets
# Targets of job completion times: relative to what the links allow, or to Oracle.

#: Shares of the ideal ratio (P + D) / P with emulated and with real engines; limit of JCT /
#: Oracle's; share of the SNIC's rate.
IDEAL_SHARE, REAL_IDEAL_SHARE, ORACLE_RATIO, SNIC_USE = 0.97, 0.9, 1.02, 0.95
#: A job is I/O-bound if reading takes this many times Oracle's JCT; I/O suffices below the second.
_IO_BOUND, _IO_SUFFICES = 2.0, 0.9


def targets(job: Job, ideal_share: float) -> Iterator[KeyResult]:
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


def _of_links(job: Job, mode: Mode, ideal_share: float) -> Iterator[KeyResult]:
    basic, jct_s, typical = job.jct_s(Mode.BASIC), job.jct_s(mode), job.typical(mode)
    if basic is None or jct_s is None or typical is None:
        return
    shape, title = job.lab.nodes, MODE_STYLES[mode].title
    ideal = ideal_share * job.ideal_ratio
    note = f"ideal {job.ideal_ratio:g}"
    what = f"{shape}: Basic / {title}, I/O-bound"
    yield KeyResult(what, basic / jct_s, ideal, True, note)
    if typical.snic_use:
        what = f"{shape}: use of the least used SNIC, {title}"
        yield KeyResult(
            *(what, min(typical.snic_use), SNIC_USE, True, "middle half of the run"),
            tolerance=RATIO_TOLERANCE,
            any_machine=True,
        )


def _of_oracle(job: Job, mode: Mode, share: float) -> KeyResult:
    oracle, jct_s = job.jct_s(Mode.ORACLE), job.jct_s(mode)
    assert oracle is not None
    assert jct_s is not None
    what = f"{job.lab.nodes}: {MODE_STYLES[mode].title} / Oracle, SNICs suffice"
    note = f"reading needs {share:.0%} of Oracle's time"
    return KeyResult(what, jct_s / oracle, ORACLE_RATIO, False, note)


def repeatable(job: Job) -> Iterator[KeyResult]:
    """Yield what a rerun is compared with: times, ratios to Basic or Oracle, balance."""
    basic, oracle = job.jct_s(Mode.BASIC), job.jct_s(Mode.ORACLE)
    for mode in job.runs:
        jct_s = job.jct_s(mode)
        assert jct_s is not None
        name, runs = f"{job.lab.nodes} {mode.value}", len(job.runs[mode])
        time, ratio = (tolerance_of(base, runs) for base in (TIME_TOLERANCE, RATIO_TOLERANCE))
        yield KeyResult(f"{name}: JCT, s", jct_s, tolerance=time)
        for base, base_s in (("Basic", basic), ("Oracle", oracle)):
            if base_s is not None and base.lower() != mode.value:
                what = f"{name}: {base} / JCT"
                yield KeyResult(what, base_s / jct_s, tolerance=ratio, any_machine=True)


# ------------------------------------------------------------------------------------------- page
# The page on job completion times: ratios, use of links, balance, targets.


def draw_jct(raw: RawData[JctSettings, LabResult]) -> Page:
    """Draw the page; link rates over time are those of the last cluster.

    A share of the ratio (P + D) / P is the target of an I/O-bound job.
    """
    settings, jobs = raw.settings, jobs_of(raw)
    share = REAL_IDEAL_SHARE if settings.vllm else IDEAL_SHARE
    return Page(
        settings=(
            *setting_lines(settings, _missing(settings.mode)),
            *link_lines(raw.results),
            *load_lines(raw, raw.results),
        ),
        tables=(
            *(_table(job) for job in jobs),
            *(_ablation_table(job) for job in jobs if _has_ablation(job)),
            _balance_table(jobs),
            *(_rank_table(job) for job in jobs if job.lab.cnics > 1),
            _cost_table(jobs),
            *_thread_tables(jobs),
        ),
        panels=(_jct_panel(jobs), *_link_panels(jobs[-1])),
        results=(
            *(target for job in jobs for target in targets(job, share)),
            *(result for job in jobs for result in repeatable(job)),
        ),
        too_busy=too_busy(raw.results),
    )


def _table(job: Job) -> Table:
    basic, oracle = job.jct_s(Mode.BASIC), job.jct_s(Mode.ORACLE)
    rows = []
    for mode in job.runs:
        jct_s = job.jct_s(mode)
        assert jct_s is not None
        times = [run.jct_s for run in job.runs[mode]]
        run = job.typical(mode)
        assert run is not None
        ttft = None if run.summary is None else run.summary.ttft_s
        use = sorted(run.snic_use)
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
        f"{job.lab.nodes}: {job.agents} agents, {job.ideal_ratio:g}x is ideal, "
        "SNIC use over the middle half"
    )
    return Table(title, columns, tuple(rows))


#: What each step of the ablation adds, with the reduction of Basic's JCT that the paper measures on
#: DS 660B (§7.5, Fig. 12).
ABLATION = {
    Mode.LAYERWISE: ("layerwise prefill", 0.1721),
    Mode.ROUND_ROBIN: ("dual-path loading", 0.3819),
    Mode.DUALPATH: ("scheduling", 0.4562),
}


def _has_ablation(job: Job) -> bool:
    return all(mode in job.runs for mode in (Mode.BASIC, *ABLATION))


def _ablation_table(job: Job) -> Table:
    """Return how much less than Basic's each step's JCT is; steps add to each other."""
    basic_s, rows = job.jct_s(Mode.BASIC), []
    assert basic_s is not None
    for mode in (*ABLATION, Mode.SPLIT, Mode.ORACLE):
        added, paper = ABLATION.get(mode, (NOTHING, None))
        if (jct_s := job.jct_s(mode)) is not None:
            less = f"{1 - jct_s / basic_s:.1%}"
            rows.append((mode.value, added, f"{jct_s:.2f}", less, cell(paper, "{:.1%}")))
    columns = ("mode", "added", "JCT s", "less than Basic", "in the paper, DS 660B")
    title = f"{job.lab.nodes}: ablation (§7.5), Basic takes {basic_s:.2f} s"
    return Table(title, columns, tuple(rows))


def _balance_table(jobs: Sequence[Job]) -> Table:
    modes = [m for m in (Mode.ROUND_ROBIN, *JUDGED) if m in jobs[0].runs]
    rows = tuple(
        (
            job.lab.nodes,
            *(cell(job.median(m, lambda run: run.snic_balance), "{:.2f}") for m in modes),
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
        for node, rails in run.rails.items() if mode.moves_bytes else ():
            for rank, (out, into) in enumerate(rails):
                moved = (f"{into / 1e6:,.1f}", f"{out / 1e6:,.1f}")
                rows.append((mode.value, node, str(rank), *moved))
    title = f"{job.lab.nodes}: bytes over the CNIC of each rank"
    return Table(title, ("mode", "node", "rank", "in, MB", "out, MB"), tuple(rows))


def _cost_table(jobs: Sequence[Job]) -> Table:
    rows = []
    for job in jobs:
        for mode, runs in job.runs.items():
            if not mode.moves_bytes:
                continue
            engines = statistics.median(run.engine_cpu_s / run.storage_bytes * 1e9 for run in runs)
            router = statistics.median(run.cpu_s["router"] for run in runs)
            rows.append((job.lab.nodes, mode.value, f"{engines:.2f}", f"{router:.2f}"))
    columns = ("cluster", "mode", "engines, CPU-s per GB read", "router, CPU-s")
    return Table("CPU time, including verification of every block", columns, tuple(rows))


def _thread_tables(jobs: Sequence[Job]) -> list[Table]:
    """Return the CPU time of DualPath's engines by thread, if they report it."""
    tables = []
    for job, mode in itertools.product(jobs, JUDGED):
        runs = [run for run in job.runs.get(mode, ()) if run.thread_cpu_s]
        if not runs:
            continue
        names = {name for run in runs for name in run.thread_cpu_s}
        per_gb = {
            name: statistics.median(
                run.thread_cpu_s.get(name, 0.0) / run.storage_bytes * 1e9 for run in runs
            )
            for name in names
        }
        rows = [(name, f"{per_gb[name]:.2f}") for name in sorted(names, key=per_gb.__getitem__)]
        title = f"{job.lab.nodes}: CPU time by thread of the engines, {MODE_STYLES[mode].title}"
        tables.append(Table(title, ("thread", "CPU-s per GB read"), tuple(reversed(rows))))
    return tables


def _jct_panel(jobs: Sequence[Job]) -> Panel:
    modes = dict.fromkeys(mode for job in jobs for mode in job.runs)

    def bound(mode: Mode, least_or_most: Callable[..., float]) -> tuple[float | None, ...]:
        return tuple(
            least_or_most((run.jct_s for run in job.runs.get(mode, ())), default=None)
            for job in jobs
        )

    series = tuple(
        Series(
            mode.value,
            tuple(job.lab.nodes for job in jobs),
            tuple(job.jct_s(mode) for job in jobs),
            low=bound(mode, min),
            high=bound(mode, max),
        )
        for mode in modes
    )
    return Panel("Job completion time", "grouped", "cluster", "JCT (s)", series)


def _link_panels(job: Job) -> list[Panel]:
    typical = [(mode, job.typical(mode)) for mode in DRAWN]
    return [
        Panel(f"{job.lab.nodes}, {mode.value}: {title}", "lines", "s", "MB/s", series)
        for mode, run in typical
        if run is not None
        for title, series in run.rates.items()
    ]


def lab_run_of(
    settings: JctSettings,
    lab: LabSettings,
    agents: Sequence[Window],
    progress: Callable[[str], None],
) -> LabRun:
    """Return the lab for agents with their histories, in DRAM if the settings require it."""
    warm = settings.windows.history is History.DRAM
    return LabRun(lab, engines_of(settings), agents, progress, warm=warm)


def engines_of(settings: JctSettings) -> Engines:
    """Return the kind of engines."""
    if settings.vllm:
        groups = settings.emulated.engine_groups
        return VllmEngines(VllmNodes(model=settings.vllm, engine_groups=groups))
    return EmulatedEngines(settings.emulated)


def agents_of(settings: JctSettings, lab: LabSettings) -> WindowSettings:
    """Return the windows for all agents of a lab."""
    agents = settings.agents_per_node * (lab.prefill + lab.decode)
    return msgspec.structs.replace(settings.windows, agents=agents, seed=settings.seed)


def setting_lines(
    settings: JctSettings, suffix: str = "", *, arriving: bool = False
) -> tuple[str, ...]:
    """Describe engines, agents and repetitions; ``suffix`` is appended to the last line.

    ``arriving``: the number of agents follows from a rate.
    """
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
            f" The {nodes.dp} engines of a node, a data-parallel group, share the node's links"
            f"{' and compute prefill passes in lock step' if nodes.dp_lock_step else ''}."
        )
    if nodes.recompute_limit_s:
        limit_s = nodes.recompute_limit_s
        engines += (
            f" Hits that take longer to load than to recompute are recomputed, up to {limit_s:g} s."
        )
    return (
        _vllm_line(settings.vllm) if settings.vllm else engines,
        *(
            ["The engines of a node fetch requests together."]
            if nodes.engine_groups == "node"
            else []
        ),
        f"Agents: {'' if arriving else f'{settings.agents_per_node} per node, '}"
        f"{_replayed(chosen)} of "
        f"{Path(chosen.trace).name}{', all equal' if chosen.even else ''}, token counts times "
        f"{chosen.scale:g}, those of turns in addition times {chosen.scale_append:g} (append) and "
        f"{chosen.scale_generate:g} (generate){_history(chosen)}. "
        f"Seed {settings.seed}.",
        f"Every mode {settings.repeat} times, interleaved; medians.{suffix}",
    )


def _replayed(chosen: WindowSettings) -> str:
    return "whole trajectories" if chosen.whole else f"windows of {chosen.turns} turns"


def _history(chosen: WindowSettings) -> str:
    return "" if chosen.whole else f"; {chosen.history.description}"


def _missing(modes: Sequence[Mode]) -> str:
    """Name the systems of the paper's comparison that were not run."""
    missing = [m.value for m in (Mode.BASIC, Mode.DUALPATH, Mode.ORACLE) if m not in modes]
    return f" Not run: {', '.join(missing)}." if missing else ""


def _vllm_line(model: str) -> str:
    try:
        vllm = VllmNodes(model=model)
    except ConfigError:  # the page is drawn where the model is not
        return f"Real vLLM engines on CPU: {Path(model).name}."
    return (
        f"Real vLLM engines on CPU: {Path(vllm.model).name}, {vllm.dtype}, "
        f"{vllm.kv_bytes_per_token:,.0f} bytes of KV per token, {vllm.block_tokens} tokens a block."
    )


def published_results(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], kind: type[R], modes: Mapping[str, Mode]
) -> list[Run[R]]:
    """Return the runs of a file in an older format, given by cell; ``modes`` are those of cells."""
    return [
        Run(
            cell=name,
            round=number,
            result=msgspec.convert({**result, "mode": modes[name]}, kind),
            rejected=result.get("rejected", 0),
        )
        for name, results in runs.items()
        for number, result in enumerate(results)
    ]


def _published(page: Page, settings: JctSettings) -> RawData[JctSettings, LabResult]:
    """Convert ``{"jobs": [{"lab": …, "runs": {mode: [result, …]}}, …]}``."""
    runs: list[Run[LabResult]] = []
    for job in page.data["jobs"]:
        cells = {cell_of(job["lab"]["nodes"], Mode(mode)): mode for mode in job["runs"]}
        found = {name: job["runs"][mode] for name, mode in cells.items()}
        runs += published_results(found, LabResult, {n: Mode(mode) for n, mode in cells.items()})
    return RawData(experiment=JCT.name, settings=settings, runs=runs)


JCT = Experiment(
    name="jct",
    title="Job completion time on shaped links",
    settings=JctSettings(),
    result=LabResult,
    stages=jct_stages,
    draw=draw_jct,
    summary=summary_of,
    too_busy=spoilt,
    published=_published,
)


def _on_its_lab(settings: JctSettings) -> JctSettings:
    """Return the settings for the cluster of their lab alone."""
    return msgspec.structs.replace(settings, nodes=(settings.lab.nodes,))


#: The experiment of `dualpath lab run`: a quick look at one cluster.
RUN = msgspec.structs.replace(
    JCT,
    name="run",
    settings=JctSettings(mode=(Mode.BASIC, Mode.DUALPATH, Mode.ORACLE), repeat=1),
    stages=lambda settings, progress: jct_stages(_on_its_lab(settings), progress),
    draw=lambda raw: draw_jct(msgspec.structs.replace(raw, settings=_on_its_lab(raw.settings))),
    fixed=("nodes",),
)
