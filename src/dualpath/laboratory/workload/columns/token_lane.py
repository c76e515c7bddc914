"""Rounds of token counts for the simulator: what ``TokenConversation`` sends, by length.

Appended tokens are random, so a prompt shares with earlier rounds exactly what it was made from:
the conversation keeps track of that, and no token is needed.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpath.core.request import Round
from dualpath.laboratory.workload.columns.agent_table import IntArray
from dualpath.laboratory.workload.columns.lanes import Lanes, offsets
from dualpath.laboratory.workload.columns.walk import Limits, WalkedLane
from dualpath.laboratory.workload.conversation.session import SessionSettings, scaled
from dualpath.laboratory.workload.conversation.token_session import TokenSession


class RoundColumns(NamedTuple):
    """Trajectories of pure appends (§A.3): N + 1 delimiters and R rounds of [append, generated].

    ``append_tokens`` ≥ 0, at least 1 in first rounds; ``generated_tokens`` ≥ 1.
    """

    first_round: IntArray
    append_tokens: IntArray
    generated_tokens: IntArray
    delay_s: NDArray[np.float32]


def pure_append_lanes(columns: RoundColumns, settings: SessionSettings, limits: Limits) -> Lanes:
    """Return trajectories as lanes, scaled; all context except its last token has KV."""
    if limits.max_turns is not None:
        columns = _first_rounds(columns, limits.max_turns)
    append = scaled_tokens(columns.append_tokens, settings.scale_append)
    generated = scaled_tokens(columns.generated_tokens, settings.scale_generate)
    before = offsets(append + generated)
    counts = np.diff(columns.first_round)
    context = before[:-1] - np.repeat(before[columns.first_round[:-1]], counts)
    reuse = np.maximum(context - 1, 0)
    agents = counts.size
    return Lanes(
        first_lane=np.arange(agents + 1, dtype=np.int64),
        first_round=columns.first_round,
        parent_round=np.full(agents, -1, np.int64),
        prompt_tokens=context + append,
        reuse_tokens=reuse,
        own_reuse_tokens=reuse,
        generated_tokens=generated,
        delay_s=columns.delay_s,
    )


def scaled_tokens(tokens: IntArray, factor: float) -> IntArray:
    """Return ``session.scaled`` of every number."""
    if factor == 1.0:
        return tokens
    grown = np.maximum(np.rint(tokens * factor), 1).astype(np.int64)
    return np.where(tokens > 0, grown, 0)


def _first_rounds(columns: RoundColumns, max_turns: int) -> RoundColumns:
    counts = np.diff(columns.first_round)
    place = np.arange(columns.append_tokens.size) - np.repeat(columns.first_round[:-1], counts)
    kept = place < max_turns
    return RoundColumns(
        offsets(np.minimum(counts, max_turns)),
        columns.append_tokens[kept],
        columns.generated_tokens[kept],
        columns.delay_s[kept],
    )


class _Sent(NamedTuple):
    """A prompt with its answer: tokens really sent, and as many as the trace recorded."""

    tokens: int
    recorded_tokens: int


def walked_token_session(
    session: TokenSession, settings: SessionSettings, limits: Limits
) -> WalkedLane:
    """Return what every round of a session with edits sends and may reuse."""
    lane = WalkedLane()
    previous = longest = _Sent(0, 0)
    for index, recorded in enumerate(session.trajectory.rounds):
        if limits.reached(lane):
            break
        kept = session.kept_tokens[index] if index < len(session.kept_tokens) else None
        source = previous
        if kept is not None and kept > source.recorded_tokens:
            source = longest
        context = source.tokens
        if kept is not None and kept < source.recorded_tokens:
            context = kept * source.tokens // source.recorded_tokens
        prompt = context + scaled(recorded.append_tokens, settings.scale_append)
        generated = scaled(recorded.generated_tokens, settings.scale_generate)
        _note(lane, recorded, prompt, generated, min(context, max(source.tokens - 1, 0)))
        before = source.recorded_tokens if kept is None else min(kept, source.recorded_tokens)
        in_trace = before + recorded.append_tokens + recorded.generated_tokens
        previous = _Sent(prompt + generated, in_trace)
        if previous.recorded_tokens > longest.recorded_tokens:
            longest = previous
    return lane


def _note(lane: WalkedLane, recorded: Round, prompt: int, generated: int, reuse: int) -> None:
    lane.prompt_tokens.append(prompt)
    lane.own_reuse_tokens.append(reuse)
    lane.reuse_tokens.append(reuse)
    lane.generated_tokens.append(generated)
    lane.delay_s.append(recorded.delay_s)
