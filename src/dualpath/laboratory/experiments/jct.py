"""Job completion time of every mode on shaped links (§7.3, §7.5), measured with real bytes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.emulated_nodes import EmulatedEngines
from dualpath.laboratory.experiments.in_turns import Variant, run_interleaved
from dualpath.laboratory.experiments.jct_report import jct_report
from dualpath.laboratory.experiments.jct_targets import IDEAL_SHARE, REAL_IDEAL_SHARE
from dualpath.laboratory.experiments.job import Job
from dualpath.laboratory.experiments.report import ExperimentReport
from dualpath.laboratory.experiments.runs import Engines, LabRun, Measured
from dualpath.laboratory.experiments.settings import (
    History,
    JctSettings,
    VllmNodes,
    WindowSettings,
)
from dualpath.laboratory.experiments.vllm_nodes import VllmEngines
from dualpath.laboratory.experiments.workload import Window, windows
from dualpath.laboratory.lab.settings import LabSettings
from dualpath.laboratory.workload.replay.options import ReplayOptions


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
