"""Conversations as arrays, before hits are rounded to blocks; agents are added and cut here.

The conversations of a session are consecutive: its own first, then those of its sub-agents, with
every parent before its children.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import TraceError
from dualpath.workload.columns.agent_table import AgentTable, IntArray
from dualpath.workload.conversation.sessions import (
    SYNTHETIC_APPEND_TOKENS,
    SYNTHETIC_GENERATED_TOKENS,
    AgentSettings,
    sampled_sessions,
)
from dualpath.workload.conversation.spans import hit_tokens
from dualpath.workload.conversation.token_session import TokenSession


class ConversationColumns(NamedTuple):
    """C conversations of S sessions with R rounds in total.

    ``first_round`` (C + 1) delimits the rounds of each conversation and ``first_conversation``
    (S + 1) the conversations of each session.  ``parent_round`` (C) is the round after which a
    sub-agent starts, -1 for a session's own conversation.  Arrays of size R: prompt and generated
    tokens, recorded tool delay, and the longest prefix of the prompt, in tokens, that has KV when
    the round is sent: ``own_reuse_tokens`` from the session's own earlier rounds,
    ``reuse_tokens`` from all sessions that share KV.
    """

    first_conversation: IntArray
    first_round: IntArray
    parent_round: IntArray
    prompt_tokens: IntArray
    reuse_tokens: IntArray
    own_reuse_tokens: IntArray
    generated_tokens: IntArray
    delay_s: NDArray[np.float32]

    @property
    def sessions(self) -> int:
        """The number of sessions."""
        return self.first_conversation.size - 1

    def first_round_of_session(self) -> IntArray:
        """Return the rounds (S + 1) at which the sessions begin."""
        return self.first_round[self.first_conversation]


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Return start, start + 1, … (count of them) for every pair, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    rows: IntArray = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return rows


def offsets(counts: IntArray) -> IntArray:
    """Return the running total of ``counts``, beginning with 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def multiplied(columns: ConversationColumns, agents: int | None, seed: int) -> ConversationColumns:
    """Return the first ``agents`` sessions (None: all), with additional agents as in §A.3.

    An additional agent is a sampled session after one synthetic round of random tokens that
    generates one token.  The sample is the same as in ``dualpath replay``.
    """
    if agents is None or agents == columns.sessions:
        return columns
    known = min(agents, columns.sessions)
    sampled = sampled_sessions(columns.sessions, agents - known, seed)
    chosen = np.concatenate([np.arange(known), sampled]).astype(np.int64)
    additional = np.arange(agents) >= known
    return _gathered(columns, chosen, additional)


def _gathered(
    columns: ConversationColumns, chosen: IntArray, additional: NDArray[np.bool_]
) -> ConversationColumns:
    """Return the ``chosen`` sessions, the ``additional`` ones after a synthetic round."""
    begin = columns.first_round_of_session()
    extra = additional.astype(np.int64)
    counts = np.diff(begin)[chosen] + extra
    out_begin = offsets(counts)
    # The synthetic round comes before the session's first: at one less than its index.
    source = ranges(begin[chosen] - extra, counts)
    behind = np.repeat(additional, counts)
    synthetic = out_begin[:-1][additional]
    source[synthetic] = 0

    conversation_counts = np.diff(columns.first_conversation)[chosen]
    conversation = ranges(columns.first_conversation[chosen], conversation_counts)
    shift = np.repeat(out_begin[:-1] - begin[chosen] + extra, conversation_counts)
    first_conversation = offsets(conversation_counts)
    first_round = np.append(columns.first_round[conversation] + shift, out_begin[-1])
    first_round[first_conversation[:-1]] = out_begin[:-1]
    parent = columns.parent_round[conversation]

    prefix = SYNTHETIC_APPEND_TOKENS + SYNTHETIC_GENERATED_TOKENS
    own_reuse = columns.own_reuse_tokens[source] + prefix * behind
    # In the round after the synthetic one, the token that it generated has no KV yet.
    own_reuse[synthetic + 1] = SYNTHETIC_APPEND_TOKENS
    own_reuse[synthetic] = 0
    prompt = columns.prompt_tokens[source] + prefix * behind
    prompt[synthetic] = SYNTHETIC_APPEND_TOKENS
    generated = columns.generated_tokens[source]
    generated[synthetic] = SYNTHETIC_GENERATED_TOKENS
    delay_s = columns.delay_s[source]
    delay_s[synthetic] = 0
    reuse = own_reuse
    if columns.reuse_tokens is not columns.own_reuse_tokens:
        reuse = np.where(behind, own_reuse, columns.reuse_tokens[source])
    return ConversationColumns(
        first_conversation=first_conversation,
        first_round=first_round,
        parent_round=np.where(parent >= 0, parent + shift, -1),
        prompt_tokens=prompt,
        reuse_tokens=reuse,
        own_reuse_tokens=own_reuse,
        generated_tokens=generated,
        delay_s=delay_s,
    )


def truncated(columns: ConversationColumns, max_context_tokens: int | None) -> ConversationColumns:
    """Cut every conversation at ``max_context_tokens``, like ``Conversation.next_turn``.

    The round that crosses the limit generates up to the limit, or is removed if not even one token
    fits.  Later rounds and sub-agents of removed rounds are removed, and sessions without rounds.
    """
    if max_context_tokens is None:
        return columns
    room = max_context_tokens - columns.prompt_tokens
    crossing = np.flatnonzero(room < columns.generated_tokens)
    if not crossing.size:
        return columns
    conversation_of = np.searchsorted(columns.first_round, crossing, side="right") - 1
    cut_conversations, first = np.unique(conversation_of, return_index=True)
    cut = crossing[first]
    ends = columns.first_round[1:].copy()
    ends[cut_conversations] = cut + (room[cut] >= 1)
    generated = columns.generated_tokens.copy()
    generated[cut] = room[cut]
    return _cut_at(columns._replace(generated_tokens=generated), ends)


def _cut_at(columns: ConversationColumns, ends: IntArray) -> ConversationColumns:
    """Return the rounds before ``ends``, without conversations that never start."""
    starts = columns.first_round[:-1]
    counts = ends - starts
    for conversation in np.flatnonzero(columns.parent_round >= 0):
        # Parents come first, so a parent without rounds has already been handled.
        parent_round = columns.parent_round[conversation]
        parent = np.searchsorted(columns.first_round, parent_round, side="right") - 1
        if parent_round >= starts[parent] + counts[parent]:
            counts[conversation] = 0
    alive = counts > 0
    source = ranges(starts, counts)
    new_index = offsets(np.bincount(source, minlength=columns.prompt_tokens.size))
    per_session = np.add.reduceat(alive.astype(np.int64), columns.first_conversation[:-1])
    parent = columns.parent_round[alive]
    own_reuse = columns.own_reuse_tokens[source]
    reuse = own_reuse
    if columns.reuse_tokens is not columns.own_reuse_tokens:
        reuse = columns.reuse_tokens[source]
    return ConversationColumns(
        first_conversation=offsets(per_session[per_session > 0]),
        first_round=offsets(counts[alive]),
        parent_round=np.where(parent >= 0, new_index[parent], -1),
        prompt_tokens=columns.prompt_tokens[source],
        reuse_tokens=reuse,
        own_reuse_tokens=own_reuse,
        generated_tokens=columns.generated_tokens[source],
        delay_s=columns.delay_s[source],
    )


def check_context_limit(columns: ConversationColumns, context_limit_tokens: int | None) -> None:
    """Raise ``TraceError`` for the first round longer than the model's context."""
    if context_limit_tokens is None:
        return
    needed = columns.prompt_tokens + columns.generated_tokens
    beyond = np.flatnonzero(needed > context_limit_tokens)
    if beyond.size:
        row = int(beyond[0])
        conversation = int(np.searchsorted(columns.first_round, row, side="right")) - 1
        raise TraceError(
            f"round {row - columns.first_round[conversation]} of agent {conversation} needs "
            f"{needed[row]} tokens, above the context limit of {context_limit_tokens}; "
            f"{beyond.size} rounds exceed it: "
            "truncate the trajectories ({max_context_tokens}) or choose a model with more context"
        )


def agent_table(
    columns: ConversationColumns, block_tokens: int, tool_delay_scale: float
) -> AgentTable:
    """Return the conversations as agents that start at 0, with hits rounded to full blocks."""
    hit = hit_tokens(columns.reuse_tokens, columns.prompt_tokens, block_tokens)
    return AgentTable(
        first_round=columns.first_round,
        start_s=np.zeros(columns.parent_round.size, np.float64),
        start_after_round=columns.parent_round,
        prompt_tokens=columns.prompt_tokens.astype(np.int32),
        hit_tokens=hit.astype(np.int32),
        generated_tokens=columns.generated_tokens.astype(np.int32),
        delay_s=columns.delay_s * np.float32(tool_delay_scale),
    )


# ------------------------------------------------------------------------------------------ rounds
# Trajectories of token counts as arrays, for millions of rounds.


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
