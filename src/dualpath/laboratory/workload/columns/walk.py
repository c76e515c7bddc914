"""Walk through sessions round by round to find what each prompt could reuse (§A.4).

Within a session order is the round number: round i comes after all rounds i - 1, a sub-agent's
rounds counting from the one it starts after, and rounds of one number do not see each other.
Sessions that share are taken *in parallel*, that is by round number as well, or *one after the
other*.  Both are approximations, as agents really run at different speeds; between them lies what
a shared store gives.  A session without sub-agents that shares with nobody has no other order.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from dualpath.laboratory.workload.columns.lanes import Lanes, offsets
from dualpath.laboratory.workload.conversation.stored_prefixes import StoredPrefixes

Sharing = Literal["none", "parallel", "sequential"]


class LaneRound(NamedTuple):
    """One round of a conversation in symbols, each standing for ``symbol_tokens`` tokens.

    ``prompt`` and ``stored`` (prompt and generated tokens whose KV exists afterwards) hold whole
    symbols only.  ``continued_tokens`` leading prompt tokens repeat the round before, known
    beyond symbols.
    """

    prompt: bytes
    stored: bytes
    prompt_tokens: int
    generated_tokens: int
    delay_s: float
    continued_tokens: int = 0


class SymbolLane(Protocol):
    """One run of a conversation, in symbols."""

    width_bytes: int
    symbol_tokens: int

    def next_round(self) -> LaneRound | None:
        """Return the next round, None after the last."""

    def spawned(self) -> "Sequence[SymbolLane]":
        """Return the sub-agents that start after the round returned last."""


class WalkedLane(msgspec.Struct):
    """What the walk found for one conversation; ``parent`` and the round of it, or None."""

    parent: "WalkedLane | None" = None
    parent_round: int = -1
    prompt_tokens: list[int] = []
    reuse_tokens: list[int] = []
    own_reuse_tokens: list[int] = []
    generated_tokens: list[int] = []
    delay_s: list[float] = []

    @property
    def rounds(self) -> int:
        """Rounds walked so far."""
        return len(self.prompt_tokens)


class Limits(NamedTuple):
    """Where conversations end early: rounds, and tokens of prompt plus generation."""

    max_turns: int | None = None
    max_context_tokens: int | None = None

    def reached(self, lane: WalkedLane) -> bool:
        """Tell whether ``lane`` must not go on; ``truncated`` cuts the round that crossed."""
        if self.max_turns is not None and lane.rounds >= self.max_turns:
            return True
        if self.max_context_tokens is None or not lane.rounds:
            return False
        return lane.prompt_tokens[-1] + lane.generated_tokens[-1] > self.max_context_tokens

    def cut(self, turn: LaneRound, lane: SymbolLane) -> bytes:
        """Return what is stored of a round after ``truncated`` has cut or dropped it."""
        limit = self.max_context_tokens
        if limit is None or turn.prompt_tokens + turn.generated_tokens <= limit:
            return turn.stored
        if turn.prompt_tokens >= limit:
            return b""
        return turn.stored[: (limit - 1) // lane.symbol_tokens * lane.width_bytes]


class _Active(NamedTuple):
    """A conversation being walked, with the stores it looks into."""

    session: int
    lane: SymbolLane
    walked: WalkedLane
    own: StoredPrefixes
    shared: StoredPrefixes


def walk(
    sessions: Sequence[SymbolLane], limits: Limits, sharing: Sharing = "none"
) -> list[list[WalkedLane]]:
    """Return the lanes of every session, its own first."""
    found: list[list[WalkedLane]] = []
    active: list[_Active] = []
    common = StoredPrefixes(sessions[0].width_bytes) if sharing != "none" and sessions else None
    for number, lane in enumerate(sessions):
        walked = WalkedLane()
        own = StoredPrefixes(lane.width_bytes)
        found.append([walked])
        active.append(_Active(number, lane, walked, own, common or own))
        while sharing != "parallel" and active:
            active = _step(active, limits, found)
    while active:
        active = _step(active, limits, found)
    return found


def _step(active: list[_Active], limits: Limits, found: list[list[WalkedLane]]) -> list[_Active]:
    """Take all conversations one round further and return those that go on."""
    taken: list[tuple[_Active, LaneRound]] = []
    for one in active:
        if not limits.reached(one.walked) and (turn := one.lane.next_round()) is not None:
            _note(one, turn)
            taken.append((one, turn))
    after: list[_Active] = []
    for one, turn in taken:
        stored = limits.cut(turn, one.lane)
        one.own.add(stored)
        if one.shared is not one.own:
            one.shared.add(stored)
        after.append(one)
        for lane in one.lane.spawned():
            walked = WalkedLane(one.walked, one.walked.rounds - 1)
            found[one.session].append(walked)
            after.append(one._replace(lane=lane, walked=walked))
    return after


def _note(one: _Active, turn: LaneRound) -> None:
    own = one.own.longest_common_symbols(turn.prompt) * one.lane.symbol_tokens
    own = max(own, turn.continued_tokens)
    reuse = own
    if one.shared is not one.own:
        symbols = one.shared.longest_common_symbols(turn.prompt)
        reuse = max(own, symbols * one.lane.symbol_tokens)
    walked = one.walked
    walked.prompt_tokens.append(turn.prompt_tokens)
    walked.own_reuse_tokens.append(own)
    walked.reuse_tokens.append(reuse)
    walked.generated_tokens.append(turn.generated_tokens)
    walked.delay_s.append(turn.delay_s)


def as_lanes(sessions: Sequence[Sequence[WalkedLane]]) -> Lanes:
    """Return walked conversations as columns; those without a round are left out."""
    kept = [[lane for lane in lanes if lane.rounds] for lanes in sessions]
    kept = [lanes for lanes in kept if lanes]
    flat = [lane for lanes in kept for lane in lanes]
    first_round = offsets(np.asarray([lane.rounds for lane in flat], np.int64))
    begin = {id(lane): int(row) for lane, row in zip(flat, first_round, strict=False)}

    def column(name: str) -> list[int]:
        return [value for lane in flat for value in getattr(lane, name)]

    return Lanes(
        first_lane=offsets(np.asarray([len(lanes) for lanes in kept], np.int64)),
        first_round=first_round,
        parent_round=np.asarray(
            [begin[id(x.parent)] + x.parent_round if x.parent else -1 for x in flat], np.int64
        ),
        prompt_tokens=np.asarray(column("prompt_tokens"), np.int64),
        reuse_tokens=np.asarray(column("reuse_tokens"), np.int64),
        own_reuse_tokens=np.asarray(column("own_reuse_tokens"), np.int64),
        generated_tokens=np.asarray(column("generated_tokens"), np.int64),
        delay_s=np.asarray(column("delay_s"), np.float32),
    )
