"""Kinds of runs that are compared: each in turn with the others, so that an hour spoils all alike.

What is compared is the ratio of two runs of one round, which stand side by side; of several rounds
the median.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.runs import Engines, LabRun, Measured
from dualpath.laboratory.workload.replay.options import ReplayOptions


class Variant(msgspec.Struct, frozen=True):
    """A kind of run: its name, the mode, the engines."""

    name: str
    mode: Mode
    engines: Engines


Runs = Mapping[str, Sequence[Measured]]


def run_in_turns(
    lab_run: LabRun,
    variants: Sequence[Variant],
    repeat: int,
    options: ReplayOptions,
    progress: Callable[[str], None],
) -> dict[str, list[Measured]]:
    """Run every variant once, ``repeat`` times over; return the runs by the variant's name.

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
    """Return the median, over rounds, of what a variant's run has in proportion to another's."""
    pairs = zip(runs[name], runs[base], strict=True)
    return statistics.median(of(run) / of(other) for run, other in pairs)
