"""Online serving (§7.4): when an experiment ends, what it measures, and whether it meets the SLO.

A run is simulated over the whole horizon and the rule is applied to it afterwards; the past of a
run does not depend on its future, so this equals stopping it.
"""

from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.model.sim.result import NS_PER_S, SimulationResult

FloatArray = NDArray[np.float64]

TTFT_LIMIT_S = 4.0
TPOT_LIMIT_S = 0.05
WINDOW_S = 150.0
LOOKBACK_S = 1800.0
VARIATION = 0.05
#: The rule is looked at this often.
STEP_S = 1.0
#: Shadows of Fig. 10: the lowest and highest mean over pieces of the last window.
PIECE_S = 10.0

Rule = Literal["TTFT above limit", "steady", "horizon"]


class Ending(msgspec.Struct, frozen=True):
    """When and by which rule an experiment ended."""

    at_s: float
    rule: Rule


class Measured(msgspec.Struct, frozen=True):
    """Mean over the last window, and the fluctuation in it; None without any round."""

    mean: float | None
    low: float | None
    high: float | None


class OnlineRun(msgspec.Struct, frozen=True, kw_only=True):
    """One online experiment; seconds.

    ``ttft_parts`` are the means, over the rounds of the last window, of scheduling, allocating,
    reading and prefill (Fig. 12).  ``agent_jct`` is the mean completion time of the agents that
    arrived before the end, followed to their own (Fig. 11); ``agents_unfinished`` of them were
    not done at the horizon and are left out.
    """

    ending: Ending
    ttft: Measured
    ttst: Measured
    tpot: Measured
    ttft_parts: tuple[float, ...]
    agent_jct: float | None
    agents_unfinished: int
    total_tokens_mean: float
    kv_bytes_per_token: float

    @property
    def meets_slo(self) -> bool:
        """TTFT ≤ 4 s and TPOT ≤ 50 ms, measured at the end."""
        return (
            self.ending.rule != "TTFT above limit"
            and self.ttft.mean is not None
            and self.ttft.mean <= TTFT_LIMIT_S
            and (self.tpot.mean or 0.0) <= TPOT_LIMIT_S
        )

    def working_set_bytes(self, agents_per_s: float) -> float | None:
        """λ · mean JCT · mean total length / 2, in bytes of KV (§8.2)."""
        if self.agent_jct is None:
            return None
        tokens = agents_per_s * self.agent_jct * self.total_tokens_mean / 2
        return tokens * self.kv_bytes_per_token


def ending(first_token_s: FloatArray, ttft_s: FloatArray, horizon_s: float) -> Ending:
    """Return when the rule of §7.4 ends an experiment.

    Every second from the first full window on: the mean TTFT of the first tokens of the last
    ``WINDOW_S`` exceeds ``TTFT_LIMIT_S``, or is within ``VARIATION`` of what it was
    ``LOOKBACK_S`` before.  Windows without a first token decide nothing.
    """
    order = np.argsort(first_token_s, kind="stable")
    times = first_token_s[order]
    sums = np.concatenate([[0.0], np.cumsum(ttft_s[order])])
    steps = int((horizon_s - WINDOW_S) / STEP_S) + 1
    ends_s = WINDOW_S + STEP_S * np.arange(max(steps, 0))
    last = np.searchsorted(times, ends_s, side="right")
    first = np.searchsorted(times, ends_s - WINDOW_S, side="right")
    counts = last - first
    means = np.full(ends_s.size, np.nan)
    np.divide(sums[last] - sums[first], counts, out=means, where=counts > 0)
    back = int(LOOKBACK_S / STEP_S)
    steady = np.zeros(ends_s.size, dtype=bool)
    steady[back:] = np.abs(means[back:] - means[:-back]) < VARIATION * means[:-back]
    above = means > TTFT_LIMIT_S
    reached = np.flatnonzero(above | steady)
    if not reached.size:
        return Ending(horizon_s, "horizon")
    index = int(reached[0])
    return Ending(float(ends_s[index]), "TTFT above limit" if above[index] else "steady")


def measured(at_s: FloatArray, values: FloatArray, end_s: float) -> Measured:
    """Return the mean of ``values`` whose time lies in the last window, and their fluctuation."""
    chosen = (at_s > end_s - WINDOW_S) & (at_s <= end_s) & ~np.isnan(values)
    if not chosen.any():
        return Measured(None, None, None)
    pieces = ((end_s - at_s[chosen]) // PIECE_S).astype(np.int64)
    counts = np.bincount(pieces)
    sums = np.bincount(pieces, weights=values[chosen])
    means = sums[counts > 0] / counts[counts > 0]
    return Measured(float(values[chosen].mean()), float(means.min()), float(means.max()))


def online_run(result: SimulationResult, horizon_s: float) -> OnlineRun:
    """Reduce a run with Poisson arrivals."""
    turns = result.turns
    first_s = _seconds(turns.first_token_ns)
    answered = ~np.isnan(first_s)
    ttft_s = result.ttft_s()
    end = ending(first_s[answered], ttft_s[answered], horizon_s)
    agent_jct, unfinished = _agent_jct(result, end.at_s)
    first, last = result.agents.first_round[:-1], result.agents.first_round[1:] - 1
    started = turns.submitted_ns[first] >= 0
    final = last[started] if started.any() else last
    total = result.agents.prompt_tokens[final].astype(np.int64)
    total = total + result.agents.generated_tokens[final]
    return OnlineRun(
        ending=end,
        ttft=measured(first_s, ttft_s, end.at_s),
        ttst=measured(_seconds(turns.second_token_ns), result.ttst_s(), end.at_s),
        tpot=measured(_seconds(turns.finished_ns), result.tpot_s(), end.at_s),
        ttft_parts=_parts(result, end.at_s),
        agent_jct=agent_jct,
        agents_unfinished=unfinished,
        total_tokens_mean=float(total.mean()),
        kv_bytes_per_token=result.setup.model.kv_bytes_per_token,
    )


def _parts(result: SimulationResult, end_s: float) -> tuple[float, ...]:
    turns = result.turns
    first_s = _seconds(turns.first_token_ns)
    chosen = (first_s > end_s - WINDOW_S) & (first_s <= end_s)
    if not chosen.any():
        return ()
    marks = (
        turns.submitted_ns,
        turns.assigned_ns,
        turns.granted_ns,
        turns.loaded_ns,
        turns.first_token_ns,
    )
    return tuple(float((b[chosen] - a[chosen]).mean() / NS_PER_S) for a, b in pairwise(marks))


def _agent_jct(result: SimulationResult, end_s: float) -> tuple[float | None, int]:
    arrived = result.turns.submitted_ns[result.agents.first_round[:-1]]
    chosen = (arrived >= 0) & (arrived <= end_s * NS_PER_S)
    times = result.agent_jct_s()[chosen]
    done = times[~np.isnan(times)]
    return (float(done.mean()) if done.size else None), int(times.size - done.size)


def _seconds(times_ns: NDArray[np.int64]) -> FloatArray:
    return np.where(times_ns >= 0, times_ns / NS_PER_S, np.nan)
