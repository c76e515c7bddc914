"""A run over time (Fig. 15): token rates, and how many rounds are where."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.model.sim.result import NS_PER_S, IntArray, SimulationResult

FloatArray = NDArray[np.float64]


class Timeline(msgspec.Struct, frozen=True):
    """Means over equal bins, ``time_s`` being their middles.

    ``prompt_tokens_per_s`` counts whole prompts, hits included, at their first token;
    ``generated_tokens_per_s`` spreads generation evenly over each round.  The counts of rounds are
    taken at the end of a bin.
    """

    time_s: FloatArray
    prompt_tokens_per_s: FloatArray
    computed_tokens_per_s: FloatArray
    generated_tokens_per_s: FloatArray
    ttft_s: FloatArray
    queued: IntArray
    reading: IntArray
    prefilling: IntArray
    decoding: IntArray


def timeline(result: SimulationResult, bins: int) -> Timeline:
    """Return the timeline of a run whose rounds have all finished."""
    turns, agents = result.turns, result.agents
    width_ns = max(-(-int(turns.finished_ns.max() + 1) // bins), 1)
    first = _bins(turns.first_token_ns, width_ns)
    done = _bins(turns.finished_ns, width_ns)
    width_s = width_ns / NS_PER_S
    prompt = np.bincount(first, weights=agents.prompt_tokens, minlength=bins)
    hits = np.bincount(first, weights=agents.hit_tokens, minlength=bins)
    count = np.bincount(first, minlength=bins)
    ttft = np.bincount(first, weights=result.ttft_s(), minlength=bins)
    lasts_ns = np.maximum(turns.finished_ns - turns.first_token_ns, 1)
    rate = agents.generated_tokens * (NS_PER_S / lasts_ns)
    rising = np.bincount(first, weights=rate, minlength=bins)
    falling = np.bincount(done, weights=rate, minlength=bins)
    generated = np.maximum(np.cumsum(rising - falling), 0.0)
    counts = {
        name: _between(_bins(start, width_ns), _bins(end, width_ns), bins)
        for name, start, end in (
            ("queued", turns.submitted_ns, turns.granted_ns),
            ("reading", turns.granted_ns, turns.loaded_ns),
            ("prefilling", turns.loaded_ns, turns.first_token_ns),
            ("decoding", turns.first_token_ns, turns.finished_ns),
        )
    }
    return Timeline(
        time_s=np.asarray((np.arange(bins) + 0.5) * width_s, np.float64),
        prompt_tokens_per_s=prompt / width_s,
        computed_tokens_per_s=(prompt - hits) / width_s,
        generated_tokens_per_s=generated,
        ttft_s=np.divide(ttft, count, out=np.zeros(bins), where=count > 0),
        **counts,
    )


def _bins(times_ns: IntArray, width_ns: int) -> IntArray:
    return times_ns // width_ns


def _between(start: IntArray, end: IntArray, bins: int) -> IntArray:
    entered = np.cumsum(np.bincount(start, minlength=bins)[:bins])
    left = np.cumsum(np.bincount(end, minlength=bins)[:bins])
    return entered - left
