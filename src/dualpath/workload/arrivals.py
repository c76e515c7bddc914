"""Arrival times of agents: all at once (§7.3), at random (§7.4), or as recorded."""

import csv
import lzma
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError, TraceError
from dualpath.workload.columns.agent_table import AgentTable
from dualpath.workload.conversation.sessions import MAX_AGENTS

FloatArray = NDArray[np.float64]


def with_arrivals(table: AgentTable, times_s: Sequence[float] | FloatArray) -> AgentTable:
    """Return ``table`` with its agents starting at ``times_s``; sub-agents follow their parents.

    Raises ``ConfigError`` unless there is one finite time ≥ 0 for each agent except sub-agents.
    """
    times = np.asarray(times_s, np.float64)
    own = table.start_after_round < 0
    agents = int(own.sum())
    if times.shape != (agents,):
        raise ConfigError(
            f"{times.size} arrival times for {agents} agents; give one time per agent"
        )
    wrong = np.flatnonzero(~((times >= 0) & np.isfinite(times)))
    if wrong.size:
        raise ConfigError(
            f"arrival {wrong[0]} is at {times[wrong[0]]} s; it must be finite and at least 0"
        )
    start_s = table.start_s.copy()
    start_s[own] = times
    return table._replace(start_s=start_s)


def arrival_times_s(agents: int, agents_per_s: float | None, seed: int) -> list[float]:
    """Return the start time of each agent: all 0, or Poisson with ``agents_per_s`` (§7.4)."""
    if agents_per_s is None:
        return [0.0] * agents
    if not 0 < agents_per_s <= 1e6:
        raise ConfigError(
            f"agents per second is {agents_per_s}; it must be above 0 and at most 1e6"
        )
    gaps = np.random.default_rng([seed, 2]).exponential(1 / agents_per_s, agents)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def poisson_times_s(agents: int, agents_per_s: float, seed: int) -> FloatArray:
    """Return random arrival times of ``agents`` agents, as with ``replay --agents-per-s``."""
    return np.asarray(arrival_times_s(agents, agents_per_s, seed))


def poisson_times_for_s(duration_s: float, agents_per_s: float, seed: int) -> FloatArray:
    """Return all random arrival times before ``duration_s``, possibly none.

    They are the first times that ``poisson_times_s`` returns for the same rate and seed.
    """
    expected = duration_s * agents_per_s
    if not duration_s > 0 or expected > MAX_AGENTS / 2:
        raise ConfigError(
            f"{duration_s} s at {agents_per_s} agents per second are {expected:g} agents; the "
            f"number must be above 0 and at most {MAX_AGENTS // 2}; shorten the duration or lower "
            "the rate"
        )
    # Ten standard deviations above the mean; doubled if that is not enough.
    agents = int(expected + 10 * expected**0.5 + 10)
    while (times := poisson_times_s(agents, agents_per_s, seed))[-1] < duration_s:
        agents *= 2
    return times[times < duration_s]


def recorded_times_s(path: str | Path) -> FloatArray:
    """Return the arrival times, relative to the first, of a CSV file with a TIMESTAMP column.

    This is the form of Azure's traces.  Times are ISO 8601 or seconds; ``.xz`` files are
    decompressed.  Raises ``TraceError`` with file and line for a time that cannot be read.
    """
    place = Path(path)
    try:
        with lzma.open(place, "rt") if place.suffix == ".xz" else place.open() as file:
            times = np.asarray(list(_times(place, file)), np.float64)
    except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{place}: cannot be read ({error}); check path and file") from None
    if not times.size:
        raise TraceError(f"{place}: has no arrivals; check the file")
    times.sort()
    since_first: FloatArray = times - times.min()
    return since_first


def _times(place: Path, lines: Iterable[str]) -> Iterable[float]:
    reader = csv.DictReader(lines)
    for row in reader:
        text = row.get("TIMESTAMP") or ""
        try:
            yield _seconds(text)
        except ValueError:
            raise TraceError(
                f"{place}, line {reader.line_num}: TIMESTAMP {text!r} is not a time; give ISO 8601 "
                "times or seconds in the column TIMESTAMP"
            ) from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Azure writes seven decimals, one more than Python reads before 3.11.
        return datetime.fromisoformat(text).timestamp()
