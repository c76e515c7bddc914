"""Which KV to retain in DRAM, and which to prefetch, while an agent's tool runs.

An agent's turn ends, a tool runs, the next turn comes with the same context and a little more.  In
the pause the KV of the context stays in its DE's buffer until the slots are needed.  A client may
ask to *retain* it; and blocks that were evicted are *prefetched*, read from storage into that
buffer, when the pause is nearly over, so that the turn finds them there.  Both only use memory that
no request needs: retained blocks are evicted last among those that no request holds, and all of
them are evicted for a request.

Only a share of a buffer is used so.  If it is full, a session with an earlier next turn displaces
sessions with later ones, which is optimal if the times are right (Belady); a client's request is
not displaced by a guess.

A session is known by the name that its client gives it, or by its keys: a prompt that begins with
all blocks of an earlier prompt, or of an earlier one and its answer, continues it.

No clock, no I/O: times are arguments, in seconds from any origin, and orders are returned.
"""

import heapq
import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.session_hints import SessionHints

#: A tenant, and the session's name, given by the client or by this module.
SessionName = tuple[str, str]

#: A pause is predicted from at least so many of the session's own pauses, else from all sessions'.
_OWN_PAUSES = 3
_RECENT_PAUSES = 16
_RECENT_PAUSES_OF_ALL = 256
#: The share of pauses that are shorter than the prediction: blocks that are prefetched too early
#: only use idle memory, the turn waits for those that come too late.
_SHORTER = 0.25


class AgentSession:
    """``keys`` are cached at ``engine_id`` since ``ended_s``; None during a turn.

    The first ``assigned_blocks`` of them are those of the last prompt that this DE was assigned.

    ``next_s`` is when the next turn is expected, ``fetch_s`` when they are prefetched for it,
    ``retained_until_s`` until when they count as retained; ``tails`` are the keys that identify it.
    """

    __slots__ = (
        *("assigned_blocks", "ended_s", "engine_id", "fetch_s", "hints", "retained_until_s"),
        *("keys", "name", "next_s", "pauses", "tails"),
    )

    def __init__(self, name: SessionName) -> None:
        self.name = name
        self.hints = SessionHints()
        self.keys: tuple[BlockKey, ...] = ()
        self.tails: tuple[BlockKey, ...] = ()
        self.engine_id = ""
        self.assigned_blocks = 0
        self.ended_s: float | None = None
        self.next_s = 0.0
        self.fetch_s: float | None = None
        self.retained_until_s: float | None = None
        self.pauses: deque[float] = deque(maxlen=_RECENT_PAUSES)


#: A session counts as this many blocks beside its own: its object is as large as their keys.
_BLOCKS_PER_SESSION = 16


class SessionMemory:
    """The sessions used last, of at most ``most_blocks`` blocks together; one owner.

    A session counts as its blocks and ``_BLOCKS_PER_SESSION`` more, so that short prompts, and
    turns that fail, are bounded as well.
    """

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._sessions: OrderedDict[SessionName, AgentSession] = OrderedDict()
        self._by_tail: dict[BlockKey, AgentSession] = {}
        self._blocks = 0
        self._unnamed = 0
        self._pauses: deque[float] = deque(maxlen=_RECENT_PAUSES_OF_ALL)

    def __len__(self) -> int:
        """Return the number of known sessions."""
        return len(self._sessions)

    def __iter__(self) -> Iterator[AgentSession]:
        """Iterate, from the least recently used one on."""
        return iter(self._sessions.values())

    def get(self, name: SessionName) -> AgentSession | None:
        """Return a session by its name."""
        return self._sessions.get(name)

    def find(self, tenant: str, session_id: str, keys: Sequence[BlockKey]) -> AgentSession:
        """Return the session that a turn continues, or a new one; it becomes the last used."""
        session = self._known(tenant, session_id, keys)
        self._sessions.move_to_end(session.name)
        return session

    def note_pause(self, session: AgentSession, pause_s: float) -> None:
        """Record how long a session's tools ran."""
        session.pauses.append(pause_s)
        self._pauses.append(pause_s)

    def usual_pause_s(self, session: AgentSession) -> float | None:
        """Return a pause that most of the session's exceed; None while none is known."""
        own = session.pauses
        return _shorter_than_most(own if len(own) >= _OWN_PAUSES else self._pauses)

    def remember(
        self, session: AgentSession, keys: tuple[BlockKey, ...], prompt_blocks: int
    ) -> None:
        """Record a session's context: the first ``prompt_blocks`` keys are its last prompt's."""
        self._drop_tails(session)
        self._blocks += len(keys) - len(session.keys)
        session.keys = keys
        # The next prompt may encode the answer in other tokens than it was generated in.
        tails = keys[-1:], keys[max(prompt_blocks - 1, 0) : prompt_blocks]
        session.tails = tuple(dict.fromkeys(key for tail in tails for key in tail))
        self._by_tail.update(dict.fromkeys(session.tails, session))

    def over_capacity(self) -> AgentSession | None:
        """Return the session to remove next, None while the capacity suffices."""
        count = len(self._sessions)
        if self._blocks + _BLOCKS_PER_SESSION * count <= self._most_blocks or count < 2:
            return None
        return next(iter(self._sessions.values()))

    def remove(self, session: AgentSession) -> None:
        """Remove a session; its pauses stay among all others'."""
        self._sessions.pop(session.name, None)
        self._drop_tails(session)
        self._blocks -= len(session.keys)

    def _known(self, tenant: str, session_id: str, keys: Sequence[BlockKey]) -> AgentSession:
        if not session_id:
            for key in reversed(keys):
                if (session := self._by_tail.get(key)) is not None:
                    return session
            self._unnamed += 1
            # No client can give a name with a line end.
            session_id = f"\n{self._unnamed}"
        name = tenant, session_id
        return self._sessions.setdefault(name, AgentSession(name))

    def _drop_tails(self, session: AgentSession) -> None:
        for key in session.tails:
            if self._by_tail.get(key) is session:
                del self._by_tail[key]
        session.tails = ()


def _shorter_than_most(pauses: Iterable[float]) -> float | None:
    known = sorted(pauses)
    return known[int(len(known) * _SHORTER)] if known else None


#: Prefetched blocks are retained for so many usual pauses more, then evicted as others.
_STAY_PAUSES = 4.0
_SHORTEST_STAY_S = 1.0
#: A prefetch begins so many times earlier than an idle storage NIC would need: it only continues
#: while no request waits for the NIC.
_HEAD_STARTS = 2.0
#: Stale plans are removed when there are so many times more plans than sessions.
_PLANS_PER_SESSION = 4
_FEW_PLANS = 64

#: Reasons of orders.
RETAIN, EXPECTED, ASKED, DISPLACED, DONE = REASONS = (
    *("retain", "expected", "asked", "displaced", "done"),
)


class WarmthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of remembered sessions and retained blocks.

    ``budget_share`` of a DE's buffer may be retained or prefetched, 0 to 1.  ``most_blocks`` of all
    sessions' contexts are remembered, the latest used; see ``SessionMemory``.  ``prefetch`` False:
    only a client's request is prefetched.
    """

    budget_share: float
    most_blocks: int = 1 << 20
    prefetch: bool = True


class DecodeBuffer(NamedTuple):
    """A live DE's DRAM buffer: all its blocks, and its read speed from storage, 0: not known."""

    blocks: int
    blocks_per_s: float = 0.0


Buffers = Mapping[str, DecodeBuffer]


class Order(msgspec.Struct, frozen=True):
    """To a DE: retain the blocks of ``keys`` for ``retain_s``; 0: evict them before others.

    ``fetch``: read those that are not cached.  ``reason`` is one of ``REASONS``.  The turn that
    they are retained for is expected in ``expected_s``.  The first ``assigned_blocks`` keys are
    those of the last prompt of the session that the DE was assigned.
    """

    engine_id: str
    keys: tuple[BlockKey, ...]
    retain_s: float
    fetch: bool
    reason: str
    expected_s: float = 0.0
    assigned_blocks: int = 0


class SessionWarmth:
    """Orders for the DEs of one router; one owner.

    ``over_budget`` counts orders that were not given because the DE's share was used up.
    """

    def __init__(self, settings: WarmthSettings) -> None:
        self.over_budget = 0
        self._settings = settings
        self._memory = SessionMemory(settings.most_blocks)
        self._numbers = itertools.count()
        #: When to act on a session; a plan that differs from the session's times is stale.
        self._agenda: list[tuple[float, int, AgentSession]] = []
        self._retained_blocks: Counter[str] = Counter()
        self._retained: defaultdict[str, dict[AgentSession, None]] = defaultdict(dict)

    def __len__(self) -> int:
        """Return the number of known sessions."""
        return len(self._memory)

    def __contains__(self, name: SessionName) -> bool:
        """Whether a session is known."""
        return self._memory.get(name) is not None

    def retained_blocks(self, engine_id: str) -> int:
        """Return the blocks that count as retained at a DE."""
        return self._retained_blocks[engine_id]

    def turn_began(
        self, tenant: str, hints: SessionHints, keys: Sequence[BlockKey], now_s: float
    ) -> SessionName:
        """Note a turn with a prompt of these keys; return its session's name, new or known."""
        session = self._memory.find(tenant, hints.session_id, keys)
        if session.ended_s is not None:
            self._memory.note_pause(session, max(now_s - session.ended_s, 0.0))
        self._end_pause(session)
        session.hints = hints
        self._limit()
        return session.name

    def turn_ended(
        self,
        name: SessionName,
        prompt_blocks: int,
        keys: Sequence[BlockKey],
        engine_id: str,
        now_s: float,
        buffers: Buffers,
        assigned_blocks: int | None = None,
    ) -> list[Order]:
        """Note an answer: ``keys`` of prompt and answer, which a DE caches now.

        The first ``prompt_blocks`` are the prompt's.  ``buffers`` are those of all live DEs.  The
        DE was assigned ``assigned_blocks`` of them, None: ``prompt_blocks``; more after a retry.
        """
        session = self._memory.get(name)
        if session is None:
            return []
        self._end_pause(session)  # Another turn of it may have ended while this one ran.
        moved = bool(session.engine_id) and session.engine_id != engine_id
        # The blocks at the DE of its last turn are no longer useful: they are cached here as well.
        orders = [_release_order(session, DISPLACED)] if moved and session.keys else []
        self._memory.remember(session, tuple(keys), prompt_blocks)
        session.engine_id, session.ended_s = engine_id, now_s
        assigned_blocks = prompt_blocks if assigned_blocks is None else assigned_blocks
        session.assigned_blocks = min(assigned_blocks, len(session.keys))
        if session.hints.done:
            return orders + self.done(name)
        orders += self._hinted(session, now_s, buffers)
        self._limit()
        return orders

    def hint(
        self, name: SessionName, hints: SessionHints, now_s: float, buffers: Buffers
    ) -> list[Order]:
        """Apply a client's hints while its tool runs; ``next_turn_s`` counts from now."""
        session = self._memory.get(name)
        if session is None or session.ended_s is None:
            return []
        if hints.done:
            return self.done(name)
        session.hints = hints
        return self._hinted(session, now_s, buffers)

    def due(self, now_s: float, buffers: Buffers) -> list[Order]:
        """Return the prefetches that are due."""
        orders = []
        while self._agenda and self._agenda[0][0] <= now_s:
            session = heapq.heappop(self._agenda)[2]
            if session.fetch_s is not None and session.fetch_s <= now_s:
                orders += self._fetch(session, now_s, buffers)
            elif session.retained_until_s is not None and session.retained_until_s <= now_s:
                self._count_out(session)
        return orders

    def next_s(self) -> float | None:
        """Return when to call ``due`` again, None without plans."""
        return self._agenda[0][0] if self._agenda else None

    def done(self, name: SessionName) -> list[Order]:
        """Remove a session; its blocks may be evicted before those of others."""
        session = self._memory.get(name)
        if session is None:
            return []
        self._remove(session)
        if not session.keys or not session.engine_id:
            return []
        return [_release_order(session, DONE)]

    def engine_lost(self, engine_id: str) -> None:
        """A DE caches nothing any more."""
        for session in self._memory:
            if session.engine_id == engine_id:
                self._count_out(session)
                session.engine_id, session.fetch_s = "", None
        self._retained.pop(engine_id, None)
        del self._retained_blocks[engine_id]

    def _hinted(self, session: AgentSession, now_s: float, buffers: Buffers) -> list[Order]:
        """Retain a session by its hints, and plan its prefetch."""
        pause_s = self._expected_pause_s(session)
        retain_s = session.hints.retain_s
        session.fetch_s = self._fetch_s(session, now_s, buffers)
        session.next_s = now_s + (retain_s or 0.0 if pause_s is None else pause_s)
        if session.fetch_s is not None and session.hints.next_turn_s and retain_s is None:
            # Meanwhile blocks of others should be evicted, because their turns come later.
            retain_s = session.hints.next_turn_s + _stay_s(session.hints.next_turn_s)
        orders = self._retain(session, now_s, retain_s, RETAIN, buffers) if retain_s else []
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
        return self._retain(session, now_s, retain_s, reason, buffers)

    def _retain(
        self, session: AgentSession, now_s: float, retain_s: float, reason: str, buffers: Buffers
    ) -> list[Order]:
        """Count a session's blocks as retained at its DE, if its share of the buffer allows it."""
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
        self._retained_blocks[session.engine_id] += len(session.keys)
        self._retained[session.engine_id][session] = None
        session.retained_until_s = now_s + retain_s
        self._plan(session, session.retained_until_s)
        retain = Order(
            *(session.engine_id, session.keys, retain_s, reason != RETAIN, reason),
            expected_s=max(session.next_s - now_s, 0.0),
            assigned_blocks=session.assigned_blocks,
        )
        return [*(_release_order(other, DISPLACED) for other in displaced), retain]

    def _displaced_by(self, session: AgentSession, budget: float) -> list[AgentSession] | None:
        """Return the sessions to displace so that this one fits; None if it is less urgent."""
        room = budget - self._retained_blocks[session.engine_id] - len(session.keys)
        displaced: list[AgentSession] = []
        for other in sorted(self._retained[session.engine_id], key=_urgency) if room < 0 else ():
            if room >= 0 or _urgency(other) >= _urgency(session):
                break
            displaced.append(other)
            room += len(other.keys)
        return displaced if room >= 0 else None

    def _fetch_s(self, session: AgentSession, now_s: float, buffers: Buffers) -> float | None:
        """Return when to prefetch a session's KV so that it is there in time."""
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

    def _limit(self) -> None:
        while (oldest := self._memory.over_capacity()) is not None:
            self._remove(oldest)

    def _remove(self, session: AgentSession) -> None:
        self._end_pause(session)
        self._memory.remove(session)

    def _end_pause(self, session: AgentSession) -> None:
        """A session's pause has ended: drop its plans and what it retains."""
        session.ended_s = session.fetch_s = None
        self._count_out(session)

    def _count_out(self, session: AgentSession) -> None:
        if session.retained_until_s is not None:
            session.retained_until_s = None
            self._retained_blocks[session.engine_id] -= len(session.keys)
            assert self._retained_blocks[session.engine_id] >= 0, "retained blocks count once"
            del self._retained[session.engine_id][session]


def _urgency(session: AgentSession) -> tuple[bool, float]:
    """Return a key that is larger for sessions with more urgent blocks."""
    asked = session.hints.next_turn_s is not None or session.hints.retain_s is not None
    return asked, -session.next_s


def _stay_s(pause_s: float) -> float:
    """Return how long blocks are retained for a turn that is late."""
    return max(_STAY_PAUSES * pause_s, _SHORTEST_STAY_S)


def _release_order(session: AgentSession, reason: str) -> Order:
    return Order(
        *(session.engine_id, session.keys, 0.0),
        fetch=False,
        reason=reason,
        assigned_blocks=session.assigned_blocks,
    )


def _still_holds(plan: tuple[float, int, AgentSession]) -> bool:
    when_s, _, session = plan
    return when_s in (session.fetch_s, session.retained_until_s)
