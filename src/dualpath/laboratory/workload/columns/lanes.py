"""Conversations as columns, before hits are rounded to blocks: scaled, cut and multiplied here.

A *lane* is one conversation: a session's own, or that of one of its sub-agents.  Lanes of a
session lie together, its own first and every parent before its sub-agents.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import TraceError
from dualpath.laboratory.workload.columns.agent_table import AgentTable, IntArray

#: Tokens of the synthetic round that its server generates (§A.3: g_1 = 1).
SYNTHETIC_GENERATED_TOKENS = 1


class Lanes(NamedTuple):
    """L lanes of S sessions with R rounds in all.

    ``first_round`` (L + 1) delimits the lanes' rounds and ``first_lane`` (S + 1) the sessions'
    lanes.  ``parent_round`` (L) is the round after which a sub-agent starts, -1 for a session's
    own lane.  Per round (R): prompt and generated tokens, recorded tool delay, and the longest
    prefix of the prompt, in tokens, whose KV exists when the round is sent: ``own_reuse_tokens``
    from the session's own earlier rounds, ``reuse_tokens`` from all sessions that share.
    """

    first_lane: IntArray
    first_round: IntArray
    parent_round: IntArray
    prompt_tokens: IntArray
    reuse_tokens: IntArray
    own_reuse_tokens: IntArray
    generated_tokens: IntArray
    delay_s: NDArray[np.float32]

    @property
    def sessions(self) -> int:
        """S."""
        return self.first_lane.size - 1

    def first_round_of_session(self) -> IntArray:
        """Return the rounds (S + 1) at which the sessions begin."""
        return self.first_round[self.first_lane]


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Return start, start + 1, … (count of them) for every pair, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    rows: IntArray = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return rows


def offsets(counts: IntArray) -> IntArray:
    """Return the running total of ``counts``, beginning with 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def multiplied(lanes: Lanes, agents: int | None, seed: int, synthetic_append_tokens: int) -> Lanes:
    """Return the first ``agents`` sessions, or more made as §A.3 does; all of them if None.

    An additional agent is a sampled session behind one synthetic round of random tokens that
    generates one token.  The sample is the one ``agents.make_agents`` draws for ``dualpath
    replay``.
    """
    if agents is None or agents == lanes.sessions:
        return lanes
    known = min(agents, lanes.sessions)
    sampled = np.random.default_rng([seed, 1]).integers(0, lanes.sessions, agents - known)
    chosen = np.concatenate([np.arange(known), sampled]).astype(np.int64)
    additional = np.arange(agents) >= known
    return _gathered(lanes, chosen, additional, synthetic_append_tokens)


def _gathered(
    lanes: Lanes, chosen: IntArray, additional: NDArray[np.bool_], synthetic_append_tokens: int
) -> Lanes:
    """Return the ``chosen`` sessions, the ``additional`` ones behind a synthetic round."""
    begin = lanes.first_round_of_session()
    extra = additional.astype(np.int64)
    counts = np.diff(begin)[chosen] + extra
    out_begin = offsets(counts)
    # The synthetic round comes before the session's first: at one less than its index.
    source = ranges(begin[chosen] - extra, counts)
    behind = np.repeat(additional, counts)
    synthetic = out_begin[:-1][additional]
    source[synthetic] = 0

    lane_counts = np.diff(lanes.first_lane)[chosen]
    lane = ranges(lanes.first_lane[chosen], lane_counts)
    shift = np.repeat(out_begin[:-1] - begin[chosen] + extra, lane_counts)
    first_lane = offsets(lane_counts)
    first_round = np.append(lanes.first_round[lane] + shift, out_begin[-1])
    first_round[first_lane[:-1]] = out_begin[:-1]
    parent = lanes.parent_round[lane]

    prefix = synthetic_append_tokens + SYNTHETIC_GENERATED_TOKENS
    own_reuse = lanes.own_reuse_tokens[source] + prefix * behind
    # Right after the synthetic round the token it generated has no KV yet.
    own_reuse[synthetic + 1] = synthetic_append_tokens
    own_reuse[synthetic] = 0
    prompt = lanes.prompt_tokens[source] + prefix * behind
    prompt[synthetic] = synthetic_append_tokens
    generated = lanes.generated_tokens[source]
    generated[synthetic] = SYNTHETIC_GENERATED_TOKENS
    delay_s = lanes.delay_s[source]
    delay_s[synthetic] = 0
    reuse = own_reuse
    if lanes.reuse_tokens is not lanes.own_reuse_tokens:
        reuse = np.where(behind, own_reuse, lanes.reuse_tokens[source])
    return Lanes(
        first_lane=first_lane,
        first_round=first_round,
        parent_round=np.where(parent >= 0, parent + shift, -1),
        prompt_tokens=prompt,
        reuse_tokens=reuse,
        own_reuse_tokens=own_reuse,
        generated_tokens=generated,
        delay_s=delay_s,
    )


def truncated(lanes: Lanes, max_context_tokens: int | None) -> Lanes:
    """Cut every lane at ``max_context_tokens`` of prompt plus generation, as a replay does.

    The round that crosses the limit generates up to it, or is left out where not even one token
    fits; later rounds and sub-agents of rounds left out do not happen.  Sessions without a round
    disappear.
    """
    if max_context_tokens is None:
        return lanes
    room = max_context_tokens - lanes.prompt_tokens
    crossing = np.flatnonzero(room < lanes.generated_tokens)
    if not crossing.size:
        return lanes
    lane_of = np.searchsorted(lanes.first_round, crossing, side="right") - 1
    cut_lanes, first = np.unique(lane_of, return_index=True)
    cut = crossing[first]
    ends = lanes.first_round[1:].copy()
    ends[cut_lanes] = cut + (room[cut] >= 1)
    generated = lanes.generated_tokens.copy()
    generated[cut] = room[cut]
    return _kept(lanes._replace(generated_tokens=generated), ends)


def _kept(lanes: Lanes, ends: IntArray) -> Lanes:
    """Return every lane's rounds before ``ends``, without lanes that never start."""
    starts = lanes.first_round[:-1]
    counts = ends - starts
    for lane in np.flatnonzero(lanes.parent_round >= 0):
        # Parents come first, so a parent that never starts is known by now.
        parent_round = lanes.parent_round[lane]
        parent = np.searchsorted(lanes.first_round, parent_round, side="right") - 1
        if parent_round >= starts[parent] + counts[parent]:
            counts[lane] = 0
    alive = counts > 0
    source = ranges(starts, counts)
    new_index = offsets(np.bincount(source, minlength=lanes.prompt_tokens.size))
    per_session = np.add.reduceat(alive.astype(np.int64), lanes.first_lane[:-1])
    parent = lanes.parent_round[alive]
    own_reuse = lanes.own_reuse_tokens[source]
    reuse = own_reuse
    if lanes.reuse_tokens is not lanes.own_reuse_tokens:
        reuse = lanes.reuse_tokens[source]
    return Lanes(
        first_lane=offsets(per_session[per_session > 0]),
        first_round=offsets(counts[alive]),
        parent_round=np.where(parent >= 0, new_index[parent], -1),
        prompt_tokens=lanes.prompt_tokens[source],
        reuse_tokens=reuse,
        own_reuse_tokens=own_reuse,
        generated_tokens=lanes.generated_tokens[source],
        delay_s=lanes.delay_s[source],
    )


def refuse_beyond(lanes: Lanes, context_limit_tokens: int | None) -> None:
    """Raise ``TraceError`` naming the first round longer than the model's context."""
    if context_limit_tokens is None:
        return
    needed = lanes.prompt_tokens + lanes.generated_tokens
    beyond = np.flatnonzero(needed > context_limit_tokens)
    if beyond.size:
        row = int(beyond[0])
        lane = int(np.searchsorted(lanes.first_round, row, side="right")) - 1
        raise TraceError(
            f"round {row - lanes.first_round[lane]} of agent {lane} needs {needed[row]} tokens, "
            f"above the context limit of {context_limit_tokens}; {beyond.size} rounds are: "
            "truncate the trajectories (max_context_tokens) or choose a model with more context"
        )


def agent_table(lanes: Lanes, block_tokens: int, tool_delay_scale: float) -> AgentTable:
    """Return the lanes as agents, all starting at 0; a hit is made of full blocks.

    At least the last prompt token is computed, as in ``BlockGeometry.max_hit_blocks``.
    """
    most = np.minimum(lanes.reuse_tokens, lanes.prompt_tokens - 1)
    return AgentTable(
        first_round=lanes.first_round,
        start_s=np.zeros(lanes.parent_round.size, np.float64),
        start_after_round=lanes.parent_round,
        prompt_tokens=lanes.prompt_tokens.astype(np.int32),
        hit_tokens=(most // block_tokens * block_tokens).astype(np.int32),
        generated_tokens=lanes.generated_tokens.astype(np.int32),
        delay_s=lanes.delay_s * np.float32(tool_delay_scale),
    )
