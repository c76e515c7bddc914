"""The baselines of DualPath: engines in turn, read sides in turn, no reads (§7.2, §7.5).

The paper does not describe how Basic, its unmodified framework, places requests.  Decided here:
Basic and Layerwise place in turn like Round robin does, so that every step of the ablation adds one
thing.  ``SchedulerSettings.balanced_baselines`` gives them Algorithm 1 without the reading queue (α
= ∞) and both decode phases instead, which makes a stronger baseline.
"""

from bisect import bisect_right
from collections.abc import Iterable

from dualpath.core.cluster import Role
from dualpath.policy.accounts import FREE_HBM, EngineAccount, Ledger
from dualpath.policy.placement import LiveRequest, WaitQueues


class InTurnPlacer:
    """Round robin over all engines of a role, in order, whatever group they are in.

    Every request is dealt to the next engine and waits in that engine's queue until its group
    fetches; a paused engine loses its turn.  Only at the DE is there a limit: HBM (an engine that
    could never hold the request loses its turn); a head that does not fit yet holds up the queue of
    that engine alone.
    """

    def __init__(self, ledger: Ledger, role: Role) -> None:
        self._ledger = ledger
        self._role = role
        self._queues = WaitQueues()
        self._last_order = -(1 << 62)

    def add(self, live: LiveRequest) -> None:
        """Let a request wait until it is dealt to an engine."""
        self._queues.add(live)

    def discard(self, request_id: str) -> None:
        """Remove a waiting request; does nothing if it does not wait here."""
        self._queues.take(request_id)

    def waiting(self) -> int:
        """Return how many requests wait, dealt or not."""
        return len(self._queues)

    def requeue(self, requests: Iterable[LiveRequest] = ()) -> None:
        """Take back all requests, with ``requests``; the next fetch deals them again."""
        self._queues.requeue(requests)

    def may_place(self, group: str) -> bool:
        """Whether a request waits to be dealt, or for an engine of this group."""
        if self._queues.common:
            return True
        engines = self._ledger.groups[group].engines
        return any(self._queues.private(engine.spec.engine_id) for engine in engines)

    def waits_for_kv(self, group: str) -> bool:
        """Return False: no request waits for a certain engine."""
        return False

    def set_thresholds(self, alpha_tokens: int, beta_tokens: int) -> None:
        """Do nothing: turns know no thresholds."""

    def fetch(self, group: str, now_s: float) -> list[LiveRequest]:
        """Deal all requests to engines, then place those of the engines of ``group``."""
        for live in list(self._queues.common.values()):
            engine = self._next_engine(self._tokens(live))
            if engine is not None:
                self._queues.deal(live, engine.spec.engine_id)
        placed: list[LiveRequest] = []
        for engine in self._ledger.groups[group].engines:
            placed += self._place(engine)
        return sorted(placed, key=lambda live: live.number)

    def _next_engine(self, tokens: int) -> EngineAccount | None:
        ring = self._ledger.ring(self._role)
        start = bisect_right(ring, self._last_order, key=lambda engine: engine.spec.order)
        for step in range(len(ring)):
            engine = ring[(start + step) % len(ring)]
            if engine.paused:
                continue
            if self._role is Role.PREFILL or engine.spec.hbm_tokens >= tokens:
                self._last_order = engine.spec.order
                return engine
        return None

    def _place(self, engine: EngineAccount) -> list[LiveRequest]:
        engine_id = engine.spec.engine_id
        placed = []
        for live in list(self._queues.private(engine_id)):
            tokens = self._tokens(live)
            if self._role is Role.DECODE and engine.account(FREE_HBM) < tokens:
                break
            self._queues.take(live.request_id)
            self._ledger.hold(engine_id, live.request_id, tokens)
            live.place(self._role, engine_id, "round-robin")
            placed.append(live)
        return placed

    def _tokens(self, live: LiveRequest) -> int:
        return live.prefill_tokens if self._role is Role.PREFILL else live.decode_tokens


class SidesInTurn:
    """PE, DE, PE, DE …, for every pair of engines on its own.

    One common turn would beat in time with the turns of the engines: with an even number of PEs
    every other PE would read always and the rest never.  Pairs of one PE start on alternate
    sides, and so do PEs, lest all of a young cluster's reads begin on the same side.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[str, str], int] = {}
        self._first: dict[str, int] = {}

    def take(self, prefill_engine: str, decode_engine: str) -> int:
        """Return the next side in turn; call it only for requests with tokens to read."""
        pair = prefill_engine, decode_engine
        side = self._next.get(pair, NO_TURN)
        if side == NO_TURN:
            side = first_turn(self._first.get(prefill_engine, NO_TURN), len(self._first))
            self._first[prefill_engine] = other_side(side)
        self._next[pair] = other_side(side)
        return side


#: The next side of a pair or of a PE that have not read yet.
NO_TURN = -1


def first_turn(of_engine: int, engines_so_far: int) -> int:
    """Return the first side of a new pair.

    ``of_engine`` is where the PE's next new pair starts, ``NO_TURN`` for its first; so many PEs
    have read in turn so far.
    """
    return engines_so_far % 2 if of_engine == NO_TURN else of_engine


def other_side(side: int) -> int:
    """Return the side that is not ``side`` (``read_side.PE_SIDE``, ``DE_SIDE``)."""
    return 1 - side
