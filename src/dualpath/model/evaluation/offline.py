"""Offline batch inference (§7.3): one run reduced to what the figures need."""

import msgspec

from dualpath.model.evaluation.balance import (
    Balance,
    attention_balance,
    snic_balance,
    tail_begins_s,
)
from dualpath.model.evaluation.settings import EvaluationSettings
from dualpath.model.evaluation.timeline import Timeline, timeline
from dualpath.model.sim.result import SimulationResult

TIMELINE_BINS = 240
#: Windows that the SNIC balance is also taken over, in units of the chosen one.
WINDOW_FACTORS = (1, 5, 10, 30)


class OfflineRun(msgspec.Struct, frozen=True, kw_only=True):
    """One finished task; seconds.

    ``snic_by_window`` gives the mean balance of the storage NICs before the tail, for several
    widths of window.
    """

    jct_s: float
    agent_jct_s: float
    tail_begins_s: float
    rounds: int
    hit_share: float
    snic: Balance
    snic_by_window: tuple[tuple[float, float | None], ...]
    attention: Balance
    timeline: Timeline
    dram_tier_hit_share: float


def offline_run(result: SimulationResult, settings: EvaluationSettings) -> OfflineRun:
    """Reduce a run in which every round has finished."""
    hits = int(result.agents.hit_tokens.sum(dtype="int64"))
    prompts = int(result.agents.prompt_tokens.sum(dtype="int64"))
    tail_s = tail_begins_s(result, settings.tail_share)
    windows_s = [factor * settings.window_s for factor in WINDOW_FACTORS]
    return OfflineRun(
        jct_s=result.jct_s,
        agent_jct_s=float(result.agent_jct_s().mean()),
        tail_begins_s=tail_s,
        rounds=result.agents.rounds,
        hit_share=hits / prompts,
        snic=snic_balance(result.links, settings.window_s),
        snic_by_window=tuple(
            (window_s, snic_balance(result.links, window_s).mean(tail_s)) for window_s in windows_s
        ),
        attention=attention_balance(result.batches),
        timeline=timeline(result, TIMELINE_BINS),
        dram_tier_hit_share=result.dram_tier_hit_tokens / hits if hits else 0.0,
    )
