"""Ratios between runs that several figures need."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from dualpath.core.modes import Mode
from dualpath.report.model import Panel, Series, Table
from dualpath.report.style import MODE_STYLES
from dualpath_sim.evaluation.report import quantity
from dualpath_sim.evaluation.runs import Runs
from dualpath_sim.evaluation.settings import MAIN_MODES, RunSpec


class JctTriple(msgspec.Struct, frozen=True):
    """JCT in seconds of one setting under Basic, DualPath and Oracle."""

    label: tuple[str, ...]
    basic_s: float
    dualpath_s: float
    oracle_s: float

    @property
    def speedup(self) -> float:
        """Basic over DualPath."""
        return self.basic_s / self.dualpath_s

    @property
    def to_oracle(self) -> float:
        """DualPath over Oracle."""
        return self.dualpath_s / self.oracle_s


def triple(runs: Runs, spec: RunSpec, label: Sequence[str]) -> JctTriple:
    """Run ``spec`` in the three modes."""
    jcts = [runs.offline(msgspec.structs.replace(spec, mode=mode)).jct_s for mode in MAIN_MODES]
    return JctTriple(tuple(label), *jcts)


def jct_table(title: str, label_columns: Sequence[str], triples: Iterable[JctTriple]) -> Table:
    """Return JCTs, speed-up and distance from Oracle, one setting per row."""
    modes = [f"{MODE_STYLES[mode].title}, s" for mode in MAIN_MODES]
    columns = (*label_columns, *modes, "Basic / DualPath", "DualPath / Oracle")
    rows = tuple(
        (
            *one.label,
            f"{one.basic_s:,.0f}",
            f"{one.dualpath_s:,.0f}",
            f"{one.oracle_s:,.0f}",
            quantity(one.speedup, "x"),
            quantity(one.to_oracle, "x"),
        )
        for one in triples
    )
    return Table(title, columns, rows)


def jct_panel(
    title: str,
    kind: Literal["lines", "grouped"],
    x_label: str,
    x: Sequence[float | str],
    triples: Iterable[JctTriple],
) -> Panel:
    """Return JCTs over ``x``, one series per mode."""
    jcts = zip(*((one.basic_s, one.dualpath_s, one.oracle_s) for one in triples), strict=True)
    series = tuple(
        Series(MODE_STYLES[mode].title, tuple(x), seconds)
        for mode, seconds in zip(MAIN_MODES, jcts, strict=True)
    )
    return Panel(title, kind, x_label, "JCT, s", series)


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean of at least one value."""
    numbers = list(values)
    return sum(numbers) / len(numbers)


def with_mode(spec: RunSpec, mode: Mode) -> RunSpec:
    """Return the same run in another mode."""
    return msgspec.structs.replace(spec, mode=mode)
