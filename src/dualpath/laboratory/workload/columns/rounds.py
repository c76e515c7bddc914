"""Trajectories of token counts as arrays, for millions of rounds."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpath.laboratory.workload.columns.agent_table import IntArray
from dualpath.laboratory.workload.columns.conversations import ConversationColumns, offsets
from dualpath.laboratory.workload.conversation.session import AgentSettings
from dualpath.laboratory.workload.conversation.token_session import TokenSession


class RoundColumns(NamedTuple):
    """N pure-append trajectories (§A.3) with R rounds of [append, generated] in total.

    ``first_round`` (N + 1) delimits each trajectory's rounds.  ``append_tokens`` ≥ 0, at least 1 in
    first rounds; ``generated_tokens`` ≥ 1.
    """

    first_round: IntArray
    append_tokens: IntArray
    generated_tokens: IntArray
    delay_s: NDArray[np.float32]


def rounds_of(sessions: Sequence[TokenSession]) -> RoundColumns:
    """Return pure-append sessions as arrays."""
    rounds = [session.trajectory.rounds for session in sessions]
    flat = [one for part in rounds for one in part]
    return RoundColumns(
        first_round=offsets(np.asarray([len(part) for part in rounds], np.int64)),
        append_tokens=np.asarray([one.append_tokens for one in flat], np.int64),
        generated_tokens=np.asarray([one.generated_tokens for one in flat], np.int64),
        delay_s=np.asarray([one.delay_s for one in flat], np.float32),
    )


def pure_appends(columns: RoundColumns, settings: AgentSettings) -> ConversationColumns:
    """Return the rounds of ``TokenSession.planned`` for all pure-append trajectories at once.

    All of the context except its last token has KV.
    """
    if settings.max_turns is not None:
        columns = _first_rounds(columns, settings.max_turns)
    append = _scaled(columns.append_tokens, settings.scale_append)
    generated = _scaled(columns.generated_tokens, settings.scale_generate)
    before = offsets(append + generated)
    counts = np.diff(columns.first_round)
    context = before[:-1] - np.repeat(before[columns.first_round[:-1]], counts)
    reuse = np.maximum(context - 1, 0)
    agents = counts.size
    return ConversationColumns(
        first_conversation=np.arange(agents + 1, dtype=np.int64),
        first_round=columns.first_round,
        parent_round=np.full(agents, -1, np.int64),
        prompt_tokens=context + append,
        reuse_tokens=reuse,
        own_reuse_tokens=reuse,
        generated_tokens=generated,
        delay_s=columns.delay_s,
    )


def _scaled(tokens: IntArray, factor: float) -> IntArray:
    """Apply ``session.scaled`` to every number."""
    if factor == 1.0:
        return tokens
    grown = np.maximum(np.rint(tokens * factor), 1).astype(np.int64)
    return np.where(tokens > 0, grown, 0)


def _first_rounds(columns: RoundColumns, max_turns: int) -> RoundColumns:
    counts = np.diff(columns.first_round)
    place = np.arange(columns.append_tokens.size) - np.repeat(columns.first_round[:-1], counts)
    first_rounds = place < max_turns
    return RoundColumns(
        offsets(np.minimum(counts, max_turns)),
        columns.append_tokens[first_rounds],
        columns.generated_tokens[first_rounds],
        columns.delay_s[first_rounds],
    )
