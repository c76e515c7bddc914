"""Compared variants of a run, interleaved, so that changes of the machine affect all of them.

Compared are the two runs of one round, which follow each other; reported is the median ratio over
the rounds.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.runs import Engines, LabRun, Measured
from dualpath.laboratory.workload.replay.options import ReplayOptions


class Variant(msgspec.Struct, frozen=True):
    """One variant: its name, the mode, the engines."""

    name: str
    mode: Mode
    engines: Engines


Runs = Mapping[str, Sequence[Measured]]


def run_interleaved(
    lab_run: LabRun,
    variants: Sequence[Variant],
    repeat: int,
    options: ReplayOptions,
    progress: Callable[[str], None],
) -> dict[str, list[Measured]]:
    """Run all variants in each of ``repeat`` rounds; return the runs by the variant's name.

    Raises as ``LabRun.run``.
    """
    runs: dict[str, list[Measured]] = {variant.name: [] for variant in variants}
    for repetition in range(repeat):
        for variant in variants:
            measured = lab_run.run(variant.mode, options, variant.engines)
            runs[variant.name].append(measured)
            progress(
                f"{lab_run.settings.nodes} {repetition + 1}/{repeat} {variant.name}: "
                f"{measured.jct_s:.1f} s, machine {measured.busy:.0%} busy"
            )
    return runs


def paired_ratio(
    runs: Runs, name: str, base: str, of: Callable[[Measured], float] = lambda run: run.jct_s
) -> float:
    """Return the median, over rounds, of the ratio of one variant's run to another's."""
    pairs = zip(runs[name], runs[base], strict=True)
    return statistics.median(of(run) / of(other) for run, other in pairs)
