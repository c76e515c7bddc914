"""What to keep in DRAM, and what to bring back, while an agent's tool runs.

An agent's turn ends, a tool runs, the next turn comes with the same context and a little more.  In
the pause the KV of the context lies in its DE's buffer until somebody needs the slots.  A client
may ask to *retain* it; and what has left is *prefetched*, read from storage into that buffer, when
the pause is nearly over, so that the turn finds it there.  Both only use memory that no request
wants: retained blocks leave last among those that no request holds, and all of them leave for a
request.

No clock, no I/O: times are arguments, in seconds from any origin, and orders come back.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.session_hints import SessionHints
from dualpath.policy.agent_sessions import AgentSession, SessionMemory, SessionName

#: What is brought back stays for so many usual pauses more, then leaves as everything else.
_STAY_PAUSES = 4.0
_SHORTEST_STAY_S = 1.0
#: Plans that no longer hold are swept when there are so many times more plans than sessions.
_PLANS_PER_SESSION = 4
_FEW_PLANS = 64

#: Why an order is given.
RETAIN, EXPECTED, ASKED, DONE = REASONS = "retain", "expected", "asked", "done"


class WarmthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much may be remembered and kept.

    ``most_blocks`` of all sessions' contexts are remembered, the latest used.  ``budget_share`` of
    a DE's buffer may be retained or brought back, 0 to 1.  ``prefetch`` False: only what a client
    asks for is brought back.
    """

    most_blocks: int = 1 << 20
    budget_share: float = 0.5
    prefetch: bool = True


class DecodeBuffer(NamedTuple):
    """A live DE's DRAM buffer: all its blocks, and what it reads from storage, 0: not known."""

    blocks: int
    blocks_per_s: float = 0.0


Buffers = Mapping[str, DecodeBuffer]


class Order(msgspec.Struct, frozen=True):
    """To a DE: keep the blocks of ``keys`` for ``retain_s``; 0: they may leave before others.

    ``fetch``: read those that are not there.  ``reason`` is one of ``REASONS``.
    """

    engine_id: str
    keys: tuple[BlockKey, ...]
    retain_s: float
    fetch: bool
    reason: str


class SessionWarmth:
    """Orders for the DEs of one router; one owner.

    ``over_budget`` counts what was not kept or brought back as the DE's share was used up.
    """

    def __init__(self, settings: WarmthSettings) -> None:
        self.over_budget = 0
        self._settings = settings
        self._memory = SessionMemory(settings.most_blocks)
        self._numbers = itertools.count()
        #: When a session is to be looked at; a plan that it no longer has says nothing.
        self._agenda: list[tuple[float, int, AgentSession]] = []
        self._kept_blocks: Counter[str] = Counter()

    def __len__(self) -> int:
        """Sessions that are remembered."""
        return len(self._memory)

    def __contains__(self, name: SessionName) -> bool:
        """Whether a session is remembered."""
        return self._memory.get(name) is not None

    def kept_blocks(self, engine_id: str) -> int:
        """Return the blocks that count as kept at a DE."""
        return self._kept_blocks[engine_id]

    def turn_began(
        self, tenant: str, hints: SessionHints, keys: Sequence[BlockKey], now_s: float
    ) -> SessionName:
        """Note a turn whose prompt has these keys; return the session's name, new or known."""
        session = self._memory.find(tenant, hints.session_id, keys)
        if session.ended_s is not None:
            self._memory.note_pause(session, max(now_s - session.ended_s, 0.0))
        self._end_pause(session)
        session.hints = hints
        return session.name

    def turn_ended(
        self,
        name: SessionName,
        prompt_blocks: int,
        keys: Sequence[BlockKey],
        engine_id: str,
        now_s: float,
        buffers: Buffers,
    ) -> list[Order]:
        """Note an answer: ``keys`` of prompt and answer, whose blocks lie at a DE now.

        The first ``prompt_blocks`` are the prompt's.  ``buffers`` are those of all live DEs.
        """
        session = self._memory.get(name)
        if session is None:
            return []
        self._end_pause(session)  # Another turn of it may have ended while this one ran.
        self._memory.remember(session, tuple(keys), prompt_blocks)
        session.engine_id, session.ended_s = engine_id, now_s
        if session.hints.done:
            return self.done(name)
        orders = self._hinted(session, now_s, buffers)
        while (oldest := self._memory.too_many()) is not None:
            self._forget(oldest)
        return orders

    def hint(
        self, name: SessionName, hints: SessionHints, now_s: float, buffers: Buffers
    ) -> list[Order]:
        """Take what a client says while its tool runs; ``next_turn_s`` counts from now."""
        session = self._memory.get(name)
        if session is None or session.ended_s is None:
            return []
        if hints.done:
            return self.done(name)
        session.hints = hints
        return self._hinted(session, now_s, buffers)

    def due(self, now_s: float, buffers: Buffers) -> list[Order]:
        """Return what is to be brought back by now."""
        orders = []
        while self._agenda and self._agenda[0][0] <= now_s:
            session = heapq.heappop(self._agenda)[2]
            if session.fetch_s is not None and session.fetch_s <= now_s:
                orders += self._fetch(session, now_s, buffers)
            elif session.kept_until_s is not None and session.kept_until_s <= now_s:
                self._count_out(session)
        return orders

    def next_s(self) -> float | None:
        """Return when to ask ``due`` again, None while nothing is planned."""
        return self._agenda[0][0] if self._agenda else None

    def done(self, name: SessionName) -> list[Order]:
        """Forget a session; its blocks may leave before those of others."""
        session = self._memory.get(name)
        if session is None:
            return []
        self._forget(session)
        if not session.keys or not session.engine_id:
            return []
        return [Order(session.engine_id, session.keys, 0.0, fetch=False, reason=DONE)]

    def engine_lost(self, engine_id: str) -> None:
        """Nothing lies at a DE any more."""
        for session in self._memory:
            if session.engine_id == engine_id:
                self._count_out(session)
                session.engine_id, session.fetch_s = "", None

    def _hinted(self, session: AgentSession, now_s: float, buffers: Buffers) -> list[Order]:
        """Retain a session as its hints say, and plan its coming back."""
        retain_s = session.hints.retain_s
        orders = self._keep(session, now_s, retain_s, RETAIN, buffers) if retain_s else []
        session.fetch_s = self._fetch_s(session, now_s, buffers)
        if session.fetch_s is not None and session.fetch_s <= now_s:
            return orders + self._fetch(session, now_s, buffers)
        self._plan(session, session.fetch_s)
        return orders

    def _fetch(self, session: AgentSession, now_s: float, buffers: Buffers) -> list[Order]:
        session.fetch_s = None
        stay_s = max(_STAY_PAUSES * (self._expected_pause_s(session) or 0.0), _SHORTEST_STAY_S)
        retain_s = max(stay_s, session.hints.retain_s or 0.0)
        reason = EXPECTED if session.hints.next_turn_s is None else ASKED
        return self._keep(session, now_s, retain_s, reason, buffers)

    def _keep(
        self, session: AgentSession, now_s: float, retain_s: float, reason: str, buffers: Buffers
    ) -> list[Order]:
        """Count a session's blocks as kept at its DE, if a share of the buffer is left for them."""
        buffer = buffers.get(session.engine_id)
        if buffer is None or not session.keys:
            return []
        self._count_out(session)
        kept = self._kept_blocks[session.engine_id] + len(session.keys)
        if kept > self._settings.budget_share * buffer.blocks:
            self.over_budget += 1
            return []
        self._kept_blocks[session.engine_id] = kept
        session.kept_until_s = now_s + retain_s
        self._plan(session, session.kept_until_s)
        fetch = reason != RETAIN
        return [Order(session.engine_id, session.keys, retain_s, fetch=fetch, reason=reason)]

    def _fetch_s(self, session: AgentSession, now_s: float, buffers: Buffers) -> float | None:
        """Return when a session's KV is to be brought back so that it is there in time."""
        asked = session.hints.next_turn_s is not None
        if not session.hints.prefetch or not (self._settings.prefetch or asked):
            return None
        pause_s = self._expected_pause_s(session)
        buffer = buffers.get(session.engine_id)
        if pause_s is None or buffer is None:
            return None
        read_s = len(session.keys) / buffer.blocks_per_s if buffer.blocks_per_s > 0 else 0.0
        return now_s + max(pause_s - read_s, 0.0)

    def _expected_pause_s(self, session: AgentSession) -> float | None:
        if session.hints.next_turn_s is not None:
            return session.hints.next_turn_s
        return self._memory.usual_pause_s(session)

    def _plan(self, session: AgentSession, when_s: float | None) -> None:
        if when_s is None:
            return
        heapq.heappush(self._agenda, (when_s, next(self._numbers), session))
        if len(self._agenda) > _FEW_PLANS + _PLANS_PER_SESSION * len(self._memory):
            self._agenda = [plan for plan in self._agenda if _still_holds(plan)]
            heapq.heapify(self._agenda)

    def _forget(self, session: AgentSession) -> None:
        self._end_pause(session)
        self._memory.forget(session)

    def _end_pause(self, session: AgentSession) -> None:
        """Nothing more is to be done in a session's pause, and nothing kept for it."""
        session.ended_s = session.fetch_s = None
        self._count_out(session)

    def _count_out(self, session: AgentSession) -> None:
        if session.kept_until_s is not None:
            session.kept_until_s = None
            self._kept_blocks[session.engine_id] -= len(session.keys)


def _still_holds(plan: tuple[float, int, AgentSession]) -> bool:
    when_s, _, session = plan
    return when_s in (session.fetch_s, session.kept_until_s)
