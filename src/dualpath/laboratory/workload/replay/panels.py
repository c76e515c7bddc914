"""The plots of a comparison: completion times, latency distributions, turns and bytes."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dualpath.laboratory.workload.replay.result import ReplayResult, TurnRecord
from dualpath.laboratory.workload.replay.rows import (
    MEGA,
    byte_keys,
    byte_label,
    counted_bytes,
    labels,
)
from dualpath.report.model import Panel, Series


def panels(results: Sequence[ReplayResult]) -> tuple[Panel, ...]:
    """Return the plots of the runs; those without data are left out."""
    names = labels(results)
    jct = tuple(
        Series(name, ("all agents",), (result.summary.jct_s,))
        for name, result in zip(names, results, strict=True)
    )
    drawn = (
        Panel("Job completion time", "grouped", "", "JCT, s", jct),
        _distribution("Time to first token (TTFT)", "TTFT, ms", results, lambda t: t.ttft_s),
        _distribution("Time per output token (TPOT)", "TPOT, ms", results, lambda t: t.tpot_s),
        _turns(results),
        _bytes("Bytes moved, by path", results, "path_bytes"),
        _bytes("Bytes read per storage NIC", results, "snic_read_bytes"),
        _parts_of_turns(results),
    )
    return tuple(panel for panel in drawn if panel.series)


def _distribution(
    title: str,
    label: str,
    results: Sequence[ReplayResult],
    of: Callable[[TurnRecord], float | None],
) -> Panel:
    """Return the cumulative distribution of a latency of turns, one line per run."""

    def curve(result: ReplayResult) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        known_ms = np.sort([v * 1000 for turn in result.turns if (v := of(turn)) is not None])
        return known_ms, np.arange(1, len(known_ms) + 1) / max(len(known_ms), 1)

    return Panel(title, "steps", label, "share of turns", _curves(results, curve))


def _turns(results: Sequence[ReplayResult]) -> Panel:
    """Return the number of answered turns over time, one line per run."""

    def curve(result: ReplayResult) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        ends_s = [t.start_s + t.latency_s for t in result.turns if t.latency_s is not None]
        time_s = np.concatenate([[0.0], np.sort(ends_s)]) if ends_s else np.zeros(0)
        return time_s, np.arange(len(time_s), dtype=np.float64)

    title = "Turns finished over time"
    return Panel(title, "steps", "time since start, s", "turns answered", _curves(results, curve))


def _parts_of_turns(results: Sequence[ReplayResult]) -> Panel:
    """Return the mean time of a turn, split at the first and second token: one bar per run."""
    answered = [[t for t in run.turns if t.latency_s and t.ttft_s] for run in results]
    names = tuple(labels(results))
    cuts: tuple[tuple[str, Callable[[TurnRecord], float]], ...] = (
        ("until the first token", lambda t: t.ttft_s or 0.0),
        ("until the second", lambda t: t.ttst_s or 0.0),
        ("further tokens", lambda t: (t.latency_s or 0.0) - (t.ttft_s or 0.0) - (t.ttst_s or 0.0)),
    )
    series = tuple(
        Series(name, names, tuple(sum(map(of, turns)) / max(len(turns), 1) for turns in answered))
        for name, of in cuts
    )
    known = series if any(answered) else ()
    return Panel("Where the time of a turn goes", "stacked", "", "mean of turns, s", known)


def _curves(
    results: Sequence[ReplayResult],
    curve: Callable[[ReplayResult], tuple[NDArray[np.float64], NDArray[np.float64]]],
) -> tuple[Series, ...]:
    """Return the curve of every run that has one."""
    series = []
    for name, result in zip(labels(results), results, strict=True):
        x, y = curve(result)
        if len(x):
            series.append(Series(name, tuple(x.tolist()), tuple(y.tolist())))
    return tuple(series)


def _bytes(title: str, results: Sequence[ReplayResult], field: str) -> Panel:
    """Return one bar per run that stacks the bytes of each path or SNIC."""
    counted = [counted_bytes(result, field) for result in results]
    keys = byte_keys(results, field) if any(sum(values.values()) for values in counted) else []
    names = tuple(labels(results))
    series = tuple(
        Series(byte_label(key), names, tuple(values.get(key, 0) / MEGA for values in counted))
        for key in keys
    )
    return Panel(title, "stacked", "", "MB", series)
