"""Job completion time of every mode on shaped links (§7.3, §7.5), measured with real bytes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.emulated_nodes import EmulatedEngines, EmulatedNodes
from dualpath.laboratory.experiments.jct_report import (
    IDEAL_SHARE,
    REAL_IDEAL_SHARE,
    Job,
    jct_report,
)
from dualpath.laboratory.experiments.report import ExperimentReport
from dualpath.laboratory.experiments.runs import Engines, LabRun, Measured
from dualpath.laboratory.experiments.vllm_nodes import VllmEngines, VllmNodes
from dualpath.laboratory.experiments.workload import WindowSettings, windows
from dualpath.laboratory.lab.settings import LabSettings, parse_shape
from dualpath.laboratory.workload.replay.options import ReplayOptions

#: The ablation of §7.5 in its order, the split read and the bound.
ALL_MODES = (
    Mode.BASIC,
    Mode.LAYERWISE,
    Mode.ROUND_ROBIN,
    Mode.DUALPATH,
    Mode.SPLIT,
    Mode.ORACLE,
)

#: Links that two cores can keep full at 1P2D, in the paper's proportion of SNIC to CNIC.
BENCH_LAB = LabSettings(
    name="bench", snic_bytes_per_s=25e6, cnic_bytes_per_s=200e6, image_bytes=4 << 30
)


class JctSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which clusters, modes and agents; every mode runs ``repeat`` times, in turns with the others.

    ``agents_per_node`` of a cluster's P + D nodes replay ``windows`` (whose ``agents`` is
    replaced) on links of ``lab`` (whose nodes are replaced).  Engines are real ones if ``vllm`` is
    given, else emulated ``nodes``.  ``name`` names the report.
    """

    name: str = "jct"
    shapes: tuple[str, ...] = ("1P1D", "2P1D", "1P2D", "2P4D")
    modes: tuple[Mode, ...] = ALL_MODES
    repeat: int = 3
    agents_per_node: int = 8
    windows: WindowSettings = WindowSettings()
    lab: LabSettings = BENCH_LAB
    nodes: EmulatedNodes = EmulatedNodes()
    vllm: VllmNodes | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise ``ConfigError`` for the first value out of range."""
        if self.repeat < 1 or self.agents_per_node < 1:
            raise ConfigError(
                f"repeat is {self.repeat}, agents_per_node {self.agents_per_node}; both must be at "
                "least 1"
            )
        if not self.shapes or not self.modes:
            raise ConfigError(
                "no shapes or no modes; name at least one of each, like 1P2D and basic"
            )
        for shape in self.shapes:
            parse_shape(shape)
        self.windows.check()
        (self.vllm or self.nodes).check()

    @property
    def engines(self) -> Engines:
        """The kind of engines."""
        return EmulatedEngines(self.nodes) if self.vllm is None else VllmEngines(self.vllm)


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
    settings.check()
    jobs = []
    for shape in settings.shapes:
        lab = shaped(settings, shape)
        agents = windows(agents_of(settings, lab))
        with LabRun(lab, settings.engines, agents, progress) as lab_run:
            runs = _runs(lab_run, settings, progress)
            jobs.append(
                Job(lab=lab_run.state.settings, links=lab_run.links, agents=agents, runs=runs)
            )
    return jobs


def shaped(settings: JctSettings, shape: str) -> LabSettings:
    """Return the lab of a shape."""
    prefill, decode = parse_shape(shape)
    return msgspec.structs.replace(settings.lab, prefill=prefill, decode=decode)


def agents_of(settings: JctSettings, lab: LabSettings) -> WindowSettings:
    """Return the windows for all agents of a lab."""
    agents = settings.agents_per_node * (lab.prefill + lab.decode)
    return msgspec.structs.replace(settings.windows, agents=agents, seed=settings.seed)


def setting_lines(settings: JctSettings) -> tuple[str, ...]:
    """Say what was measured on what."""
    nodes, chosen = settings.nodes, settings.windows
    engines = (
        f"Emulated engines: times of {nodes.model} on {nodes.gpu}, {nodes.speedup:g} times as "
        f"fast; {nodes.layers} layers, Layer Blocks of {nodes.layer_block_bytes:,} bytes, "
        f"{nodes.block_tokens} tokens a block; verification {nodes.verify}."
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
    runs: dict[Mode, list[Measured]] = {mode: [] for mode in settings.modes}
    for repetition in range(settings.repeat):
        for mode, done in runs.items():
            measured = lab_run.run(mode, ReplayOptions(seed=settings.seed))
            done.append(measured)
            progress(
                f"{lab_run.settings.shape} {repetition + 1}/{settings.repeat} {mode.value}: "
                f"{measured.jct_s:.1f} s, machine {measured.busy:.0%} busy"
            )
    return runs
