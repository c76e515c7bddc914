"""What to keep in DRAM, and what to bring back, while an agent's tool runs.

An agent's turn ends, a tool runs, the next turn comes with the same context and a little more.  In
the pause the KV of the context lies in its DE's buffer until somebody needs the slots.  A client
may ask to *retain* it; and what has left is *prefetched*, read from storage into that buffer, when
the pause is nearly over, so that the turn finds it there.  Both only use memory that no request
wants: retained blocks leave last among those that no request holds, and all of them leave for a
request.

Only a share of a buffer is kept so.  Where it is used up, a session whose turn comes sooner takes
the place of those whose turns come later, which is the best that can be done where the times are
right (Belady); what a client asked for does not give way to a guess.

No clock, no I/O: times are arguments, in seconds from any origin, and orders come back.
"""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.session_hints import SessionHints
from dualpath.policy.agent_sessions import AgentSession, SessionMemory, SessionName

#: What is brought back stays for so many usual pauses more, then leaves as everything else.
_STAY_PAUSES = 4.0
_SHORTEST_STAY_S = 1.0
#: Reading back begins so many times earlier than a storage NIC needs that reads nothing else: it
#: only reads on while no request waits for it.
_HEAD_STARTS = 2.0
#: Plans that no longer hold are swept when there are so many times more plans than sessions.
_PLANS_PER_SESSION = 4
_FEW_PLANS = 64

#: Why an order is given.
RETAIN, EXPECTED, ASKED, DISPLACED, DONE = REASONS = (
    *("retain", "expected", "asked", "displaced", "done"),
)


class WarmthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much may be remembered and kept.

    ``budget_share`` of a DE's buffer may be retained or brought back, 0 to 1.  ``most_blocks`` of
    all sessions' contexts are remembered, the latest used.  ``prefetch`` False: only what a client
    asks for is brought back.
    """

    budget_share: float
    most_blocks: int = 1 << 20
    prefetch: bool = True


class DecodeBuffer(NamedTuple):
    """A live DE's DRAM buffer: all its blocks, and what it reads from storage, 0: not known."""

    blocks: int
    blocks_per_s: float = 0.0


Buffers = Mapping[str, DecodeBuffer]


class Order(msgspec.Struct, frozen=True):
    """To a DE: keep the blocks of ``keys`` for ``retain_s``; 0: they may leave before others.

    ``fetch``: read those that are not there.  ``reason`` is one of ``REASONS``.  The turn that they
    are kept for is expected in ``expected_s``.
    """

    engine_id: str
    keys: tuple[BlockKey, ...]
    retain_s: float
    fetch: bool
    reason: str
    expected_s: float = 0.0


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
        self._kept: defaultdict[str, dict[AgentSession, None]] = defaultdict(dict)

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
        moved = bool(session.engine_id) and session.engine_id != engine_id
        # What lies at the DE of its last turn is of no more use: it lies here as well.
        orders = [_let_go(session, DISPLACED)] if moved and session.keys else []
        self._memory.remember(session, tuple(keys), prompt_blocks)
        session.engine_id, session.ended_s = engine_id, now_s
        if session.hints.done:
            return orders + self.done(name)
        orders += self._hinted(session, now_s, buffers)
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
        return [_let_go(session, DONE)]

    def engine_lost(self, engine_id: str) -> None:
        """Nothing lies at a DE any more."""
        for session in self._memory:
            if session.engine_id == engine_id:
                self._count_out(session)
                session.engine_id, session.fetch_s = "", None

    def _hinted(self, session: AgentSession, now_s: float, buffers: Buffers) -> list[Order]:
        """Retain a session as its hints say, and plan its coming back."""
        pause_s = self._expected_pause_s(session)
        retain_s = session.hints.retain_s
        session.fetch_s = self._fetch_s(session, now_s, buffers)
        session.next_s = now_s + (retain_s or 0.0 if pause_s is None else pause_s)
        if session.fetch_s is not None and session.hints.next_turn_s and retain_s is None:
            # What leaves meanwhile should be that of others, whose turns come later.
            retain_s = session.hints.next_turn_s + _stay_s(session.hints.next_turn_s)
        orders = self._keep(session, now_s, retain_s, RETAIN, buffers) if retain_s else []
        if session.fetch_s is not None and session.fetch_s <= now_s:
            return orders + self._fetch(session, now_s, buffers)
        self._plan(session, session.fetch_s)
        return orders

    def _fetch(self, session: AgentSession, now_s: float, buffers: Buffers) -> list[Order]:
        session.fetch_s = None
        left_s = max(session.next_s - now_s, 0.0)
        stay_s = left_s + _stay_s(self._expected_pause_s(session) or 0.0)
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
        displaced = self._displaced_by(session, self._settings.budget_share * buffer.blocks)
        if displaced is None:
            self.over_budget += 1
            return []
        for other in displaced:
            self._count_out(other)
        self._kept_blocks[session.engine_id] += len(session.keys)
        self._kept[session.engine_id][session] = None
        session.kept_until_s = now_s + retain_s
        self._plan(session, session.kept_until_s)
        kept = Order(
            *(session.engine_id, session.keys, retain_s, reason != RETAIN, reason),
            expected_s=max(session.next_s - now_s, 0.0),
        )
        return [*(_let_go(other, DISPLACED) for other in displaced), kept]

    def _displaced_by(self, session: AgentSession, budget: float) -> list[AgentSession] | None:
        """Return who has to give way so that a session fits; None if it is less urgent itself."""
        room = budget - self._kept_blocks[session.engine_id] - len(session.keys)
        displaced: list[AgentSession] = []
        for other in sorted(self._kept[session.engine_id], key=_urgency) if room < 0 else ():
            if room >= 0 or _urgency(other) >= _urgency(session):
                break
            displaced.append(other)
            room += len(other.keys)
        return displaced if room >= 0 else None

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
        return now_s + max(pause_s - _HEAD_STARTS * read_s, 0.0)

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
            del self._kept[session.engine_id][session]


def _urgency(session: AgentSession) -> tuple[bool, float]:
    """Return what is the larger, the more a session's blocks would be missed."""
    asked = session.hints.next_turn_s is not None or session.hints.retain_s is not None
    return asked, -session.next_s


def _stay_s(pause_s: float) -> float:
    """Return how long what is kept waits for a turn that is late."""
    return max(_STAY_PAUSES * pause_s, _SHORTEST_STAY_S)


def _let_go(session: AgentSession, reason: str) -> Order:
    return Order(session.engine_id, session.keys, 0.0, fetch=False, reason=reason)


def _still_holds(plan: tuple[float, int, AgentSession]) -> bool:
    when_s, _, session = plan
    return when_s in (session.fetch_s, session.kept_until_s)
