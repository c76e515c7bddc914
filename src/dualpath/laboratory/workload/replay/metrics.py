"""Computes the metrics of §7 from turns: JCT, TTFT, TTST, TPOT, hits, and means of the trace."""

from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np

from dualpath.laboratory.workload.replay.result import (
    Distribution,
    SessionRecord,
    Summary,
    TraceMeans,
    TraceShape,
    TurnRecord,
)


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Return mean and percentiles of the values except None; None without values."""
    known = np.asarray([value for value in values if value is not None], dtype=float)
    if not len(known):
        return None
    p50, p90, p99 = np.percentile(known, [50, 90, 99])
    return Distribution(
        count=len(known),
        mean=float(known.mean()),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        max=float(known.max()),
    )


def summarise(
    turns: Sequence[TurnRecord], sessions: Sequence[SessionRecord], jct_s: float
) -> Summary:
    """Return the metrics of one run; ``jct_s`` is from the run's start to its last answer."""
    good = [turn for turn in turns if turn.error is None]
    prompt_tokens = sum(turn.prompt_tokens for turn in good)
    ideal = sum(turn.ideal_hit_tokens for turn in good)
    reported = [turn for turn in good if turn.hit_tokens is not None]
    hits = sum(turn.hit_tokens or 0 for turn in reported)
    reported_prompt_tokens = sum(turn.prompt_tokens for turn in reported)
    return Summary(
        jct_s=jct_s,
        sessions=len(sessions),
        sessions_failed=sum(session.failed for session in sessions),
        sessions_truncated=sum(session.truncated for session in sessions),
        sessions_without_turn=sum(session.turns == 0 for session in sessions),
        turns=len(turns),
        turns_failed=len(turns) - len(good),
        prompt_tokens=prompt_tokens,
        generated_tokens=sum(turn.generated_tokens for turn in good),
        ideal_hit_tokens=ideal,
        ideal_hit_rate=ideal / prompt_tokens if prompt_tokens else None,
        hit_tokens=hits if reported else None,
        hit_rate=hits / reported_prompt_tokens if reported_prompt_tokens else None,
        ttft_s=distribution(turn.ttft_s for turn in good),
        ttst_s=distribution(turn.ttst_s for turn in good),
        tpot_s=distribution(turn.tpot_s for turn in good),
        latency_s=distribution(turn.latency_s for turn in good),
        session_jct_s=distribution(s.end_s - s.start_s for s in sessions if not s.failed),
    )


def trace_shape(turns: Iterable[TurnRecord]) -> TraceShape | None:
    """Return the means of the replayed turns, per turn and per trajectory; None without turns."""
    trajectories: dict[str, list[TurnRecord]] = {}
    for turn in turns:
        if turn.error is None:
            trajectories.setdefault(turn.conversation_id, []).append(turn)
    if not trajectories:
        return None
    own_means = [_means(part) for part in trajectories.values()]
    last = [part[-1] for part in trajectories.values()]
    return TraceShape(
        turns_per_trajectory=fmean(map(len, trajectories.values())),
        total_tokens_per_trajectory=fmean(t.prompt_tokens + t.generated_tokens for t in last),
        per_turn=_means([turn for part in trajectories.values() for turn in part]),
        per_trajectory=TraceMeans(
            append_tokens=fmean(means.append_tokens for means in own_means),
            generated_tokens=fmean(means.generated_tokens for means in own_means),
            context_tokens=fmean(means.context_tokens for means in own_means),
            prompt_tokens=fmean(means.prompt_tokens for means in own_means),
        ),
    )


def _means(turns: Sequence[TurnRecord]) -> TraceMeans:
    return TraceMeans(
        append_tokens=fmean(turn.prompt_tokens - turn.context_tokens for turn in turns),
        generated_tokens=fmean(turn.generated_tokens for turn in turns),
        context_tokens=fmean(turn.context_tokens for turn in turns),
        prompt_tokens=fmean(turn.prompt_tokens for turn in turns),
    )
