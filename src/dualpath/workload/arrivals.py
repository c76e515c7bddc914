"""Arrival times of agents: all at once (§7.3) or at random (§7.4)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError
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
