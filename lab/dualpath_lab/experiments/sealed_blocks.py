"""Cost of sealing stored blocks for a job: its JCT and engines' CPU time, compared with plain."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dualpath.core.modes import Mode
from dualpath.report.model import NOTHING, Table
from dualpath.workload.replay.client import ReplayOptions
from dualpath_lab.experiments.engine_nodes import EmulatedEngines
from dualpath_lab.experiments.jct import agents_of, lab_run_of, setting_lines
from dualpath_lab.experiments.report import ExperimentReport
from dualpath_lab.experiments.runs import (
    Measured,
    Variant,
    engine_cpu_s,
    link_line,
    machine_lines,
    paired_ratio,
    run_data,
    run_interleaved,
    too_busy,
)
from dualpath_lab.experiments.settings import EmulatedNodes, JctSettings
from dualpath_lab.experiments.workload import windows

PLAIN = "none"
KINDS = (PLAIN, "authenticated", "encrypted")
#: Name of the router's counter, in bytes by engine.
_WRITTEN = "snic_write_bytes"


def measure_sealed_blocks(
    settings: JctSettings, command: str, progress: Callable[[str], None] = lambda text: None
) -> ExperimentReport:
    """Run every mode with every kind of blocks; raises as ``measure_jct``."""
    lab = settings.lab_of(settings.nodes[0])
    agents = windows(agents_of(settings, lab))
    variants = [
        Variant(_name(mode, kind), mode, EmulatedEngines(_sealed(settings, kind)))
        for mode in settings.mode
        for kind in KINDS
    ]
    with lab_run_of(settings, lab, agents, progress) as lab_run:
        options = ReplayOptions(seed=settings.seed)
        runs = run_interleaved(lab_run, variants, settings.repeat, options, progress)
        lines = (link_line(lab_run.links), *machine_lines(_all(runs)))
    return ExperimentReport(
        name=settings.name,
        title="Sealed blocks on shaped links",
        command=command,
        settings=(
            *setting_lines(settings),
            "Ratios and differences are of runs of one round, which follow each other; medians "
            "over rounds. CPU time is that of all engines, verification included, per GB read "
            "from or written to storage.",
            *lines,
        ),
        tables=(sealed_table(settings.mode, runs),),
        data={"runs": {name: [_data(run) for run in done] for name, done in runs.items()}},
        too_busy=too_busy(_all(runs)),
    )


def sealed_table(modes: Sequence[Mode], runs: Mapping[str, Sequence[Measured]]) -> Table:
    """Return JCT and CPU time of each mode and kind of blocks, compared with plain blocks."""
    rows = []
    for mode in modes:
        base = _name(mode, PLAIN)
        for kind in KINDS:
            name = _name(mode, kind)
            done = runs[name]
            jct_s = [run.jct_s for run in done]
            more = [
                cpu_s_per_gb(a) - cpu_s_per_gb(b) for a, b in zip(done, runs[base], strict=True)
            ]
            rows.append(
                (
                    mode.value,
                    "plain" if kind == PLAIN else kind,
                    f"{statistics.median(jct_s):.2f}",
                    f"{min(jct_s):.2f} - {max(jct_s):.2f}",
                    f"{paired_ratio(runs, name, base):.3f}",
                    f"{statistics.median(stored_bytes(run) for run in done) / 1e9:.2f}",
                    f"{statistics.median(map(cpu_s_per_gb, done)):.2f}",
                    NOTHING if kind == PLAIN else f"{statistics.median(more):+.2f}",
                    f"{max(run.busy for run in done):.0%}",
                )
            )
    columns = (
        *("mode", "blocks", "JCT s", "range s", "x plain", "GB", "engines, CPU-s per GB"),
        *("more than plain", "machine busy"),
    )
    return Table("Kinds of stored blocks", columns, tuple(rows))


def stored_bytes(run: Measured) -> int:
    """Return the bytes that all engines read from and wrote to storage."""
    server = run.client.replay.server
    written = {} if server is None else server.other.get(_WRITTEN, {})
    return run.storage_bytes + int(sum(written.values()))


def cpu_s_per_gb(run: Measured) -> float:
    """Return the engines' CPU time per GB read and written."""
    return engine_cpu_s(run) / stored_bytes(run) * 1e9


def _name(mode: Mode, kind: str) -> str:
    return f"{mode.value}, {kind}"


def _sealed(settings: JctSettings, kind: str) -> EmulatedNodes:
    return msgspec.structs.replace(settings.emulated, storage_protection=kind)


def _all(runs: Mapping[str, Sequence[Measured]]) -> list[Measured]:
    return [run for done in runs.values() for run in done]


def _data(run: Measured) -> dict[str, object]:
    return {**run_data(run), "stored_bytes": stored_bytes(run)}
