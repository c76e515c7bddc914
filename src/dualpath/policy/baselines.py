"""What DualPath is compared with: engines in turn, read sides in turn, no reads (§7.2, §7.5).

The paper does not say how Basic, its unmodified framework, places requests.  Decided here: Basic
and Layerwise place in turn like Round robin does, so that every step of the ablation adds one
thing.  ``SchedulerSettings.balanced_baselines`` gives them Algorithm 1 without the reading queue
(α = ∞) and both decode phases instead, which makes a stronger baseline.
"""

from bisect import bisect_right
from collections.abc import Iterable

from dualpath.core.cluster import Role
from dualpath.policy.accounts import FREE_HBM
from dualpath.policy.load import EngineState, Ledger
from dualpath.policy.placement import Placement, Ticket, WaitQueues


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

    def add(self, ticket: Ticket) -> None:
        """Let a ticket wait until it is dealt."""
        self._queues.add(ticket)

    def discard(self, request_id: str) -> None:
        """Forget a waiting ticket."""
        self._queues.take(request_id)

    def waiting(self) -> int:
        """How many tickets wait, dealt or not."""
        return len(self._queues)

    def recall(self, tickets: Iterable[Ticket] = ()) -> None:
        """Take all tickets back, with ``tickets``; they are dealt anew at the next fetch."""
        self._queues.recall(tickets)

    def fetch(self, group: str) -> list[Placement]:
        """Deal, then place what waits for the engines of ``group``."""
        for ticket in list(self._queues.common.values()):
            engine = self._next_engine(self._tokens(ticket))
            if engine is not None:
                self._queues.deal(ticket, engine.spec.engine_id)
        placements = []
        for engine in self._ledger.groups[group].engines:
            placements += self._place(engine)
        return sorted(placements, key=lambda placement: placement.ticket.number)

    def _next_engine(self, tokens: int) -> EngineState | None:
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

    def _place(self, engine: EngineState) -> list[Placement]:
        engine_id = engine.spec.engine_id
        placements = []
        for ticket in list(self._queues.private(engine_id)):
            tokens = self._tokens(ticket)
            if self._role is Role.DECODE and engine.account(FREE_HBM) < tokens:
                break
            self._queues.take(ticket.request_id)
            self._ledger.hold(engine_id, ticket.request_id, tokens)
            placements.append(Placement(ticket, engine_id, "round-robin"))
        return placements

    def _tokens(self, ticket: Ticket) -> int:
        return ticket.prefill_tokens if self._role is Role.PREFILL else ticket.decode_tokens


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
        """Return the side whose turn it is; ask only for requests with something to read."""
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
