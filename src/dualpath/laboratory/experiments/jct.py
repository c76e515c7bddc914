"""Job completion time of every mode on shaped links (§7.3, §7.5), measured with real bytes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.emulated_nodes import EmulatedEngines
from dualpath.laboratory.experiments.jct_report import (
    IDEAL_SHARE,
    REAL_IDEAL_SHARE,
    Job,
    jct_report,
)
from dualpath.laboratory.experiments.report import ExperimentReport
from dualpath.laboratory.experiments.runs import Engines, LabRun, Measured
from dualpath.laboratory.experiments.settings import JctSettings, VllmNodes, WindowSettings
from dualpath.laboratory.experiments.vllm_nodes import VllmEngines
from dualpath.laboratory.experiments.workload import windows
from dualpath.laboratory.lab.settings import LabSettings
from dualpath.laboratory.workload.replay.options import ReplayOptions


def measure_jct(
    settings: JctSettings, command: str, progress: Callable[[str], None] = lambda text: None
) -> ExperimentReport:
    """Run every mode on every shape and return the report.

    Raises ``ConfigError`` for settings that cannot be, ``EngineLostError`` if a run fails: a wrong
    block in any of them ends the experiment.
    """
    jobs = jobs_of(settings, progress)
    share = IDEAL_SHARE if settings.vllm is None else REAL_IDEAL_SHARE
    return jct_report(settings.name, command, setting_lines(settings), jobs, share)


def jobs_of(
    settings: JctSettings, progress: Callable[[str], None] = lambda text: None
) -> list[Job]:
    """Run every mode on every shape; raises as ``measure_jct``."""
    jobs = []
    for nodes in settings.nodes:
        lab = settings.lab_of(nodes)
        agents = windows(agents_of(settings, lab))
        with LabRun(lab, engines_of(settings), agents, progress) as lab_run:
            runs = _runs(lab_run, settings, progress)
            jobs.append(
                Job(lab=lab_run.state.settings, links=lab_run.links, agents=agents, runs=runs)
            )
    return jobs


def engines_of(settings: JctSettings) -> Engines:
    """Return the kind of engines."""
    emulated, vllm = settings.emulated, settings.vllm
    return EmulatedEngines(emulated) if vllm is None else VllmEngines(vllm)


def agents_of(settings: JctSettings, lab: LabSettings) -> WindowSettings:
    """Return the windows for all agents of a lab."""
    agents = settings.agents_per_node * (lab.prefill + lab.decode)
    return msgspec.structs.replace(settings.windows, agents=agents, seed=settings.seed)


def setting_lines(settings: JctSettings) -> tuple[str, ...]:
    """Say what was measured on what."""
    nodes, chosen = settings.emulated, settings.windows
    engines = (
        f"Emulated engines: times of {nodes.model} on {nodes.gpu}, {nodes.speedup:g} times as "
        f"fast; {nodes.layers} layers, Layer Blocks of {nodes.layer_block_bytes:,} bytes, "
        f"{nodes.block_tokens} tokens a block; verification {nodes.verify}."
    )
    if nodes.prefill_tp > 1:
        engines += (
            f" Each has {nodes.prefill_tp} ranks, processes with a CNIC each, which share "
            f"{nodes.kv_heads} KV heads."
        )
    return (
        engines if settings.vllm is None else _vllm_line(settings.vllm),
        f"Agents: {settings.agents_per_node} per node, windows of {chosen.turns} turns of "
        f"{Path(chosen.trace).name}{', all alike' if chosen.even else ''}, token counts times "
        f"{chosen.scale:g}, those of turns besides times {chosen.scale_append:g} (append) and "
        f"{chosen.scale_generate:g} (generate); what was before a window is stored. "
        f"Seed {settings.seed}.",
        f"Every mode {settings.repeat} times, in turns; medians.",
    )


def _vllm_line(vllm: VllmNodes) -> str:
    return (
        f"Real vLLM engines on CPU: {Path(vllm.model).name}, {vllm.dtype}, "
        f"{vllm.kv_bytes_per_token:,.0f} bytes of KV per token, {vllm.block_tokens} tokens a block."
    )


def _runs(
    lab_run: LabRun, settings: JctSettings, progress: Callable[[str], None]
) -> Mapping[Mode, Sequence[Measured]]:
    runs: dict[Mode, list[Measured]] = {mode: [] for mode in settings.mode}
    for repetition in range(settings.repeat):
        for mode, done in runs.items():
            measured = lab_run.run(mode, ReplayOptions(seed=settings.seed))
            done.append(measured)
            progress(
                f"{lab_run.settings.nodes} {repetition + 1}/{settings.repeat} {mode.value}: "
                f"{measured.jct_s:.1f} s, machine {measured.busy:.0%} busy"
            )
    return runs
