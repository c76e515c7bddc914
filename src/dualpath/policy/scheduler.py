"""``RequestScheduler``: events in, assignments out (§6.1).  No clock, no I/O, no randomness.

A submitted request waits in two queues at once, for a PE and for a DE; when both are known the
read side is chosen and the assignment handed out.  Engines fetch by group.

What the driver (router or simulator) has to do:

- send an engine its assignments at once and in the order of ``assign_seq``, and pass on
  reports that echo the last one sent;
- let ``EngineReport.read_queue_tokens`` include reads that the engine was assigned but not sent
  yet (they wait for buffer space), because its assignment counts as reported from then on;
- say what a DE keeps once it has ``granted`` a request's slots, and only then let its PE know of a
  request of whose hit engines were believed to keep a part;
- after ``engine_lost`` submit the returned requests again, or fail them.

*Order.*  First come, first served by ``submit``, in both queues; ``arrival_seq`` is a label.  A
request submitted again after a loss queues at the end.  This is what keeps the two queues free of
deadlock: whenever a request holds a PE and waits for HBM at a DE, everything that holds that
HBM is older and so has a PE as well, and finishes.  What is given back where engines come, go or
are paused, so that this stays true, is in ``policy.flights``.

*What a request weighs.*  tokens(r) at the PE is its prompt, and more from its assignment on if hits
are computed again (``recompute``); len_r at the DE its prompt and, at most
``generated_reserve_tokens``, what it may generate.
"""

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.core.modes import Mode
from dualpath.core.request import Request
from dualpath.policy.accounts import decode_tokens
from dualpath.policy.assigning import Assigner
from dualpath.policy.baselines import InTurnPlacer
from dualpath.policy.decode import TwoPhaseDecodePlacer
from dualpath.policy.events import (
    UNLIMITED_TOKENS,
    Assignment,
    EngineReport,
    EngineSpec,
    Granted,
    SchedulerSettings,
    Thresholds,
)
from dualpath.policy.flights import Flights
from dualpath.policy.hit_sources import HitSources
from dualpath.policy.load import EngineLoad, Ledger
from dualpath.policy.placement import Placer, Ticket
from dualpath.policy.prefill import FifoPrefillPlacer


class QueueLengths(msgspec.Struct, frozen=True):
    """Requests that wait: for a PE, for a DE (a request may be in both), and at all."""

    prefill: int
    decode: int
    total: int


class RequestScheduler:
    """Queues, ledger and rules of one cluster; not thread-safe, one owner calls it."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._ledger = Ledger()
        self._placers = _placers(settings, self._ledger)
        self._hits = HitSources(settings, self._ledger)
        self._flights = Flights(self._ledger, self._placers)
        self._assigner = Assigner(self._ledger, self._hits, self._flights)
        self._submitted = 0

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """Go on with another α and β; what is placed stays where it is."""
        self._settings = msgspec.structs.replace(
            self._settings,
            alpha_tokens=thresholds.alpha_tokens,
            beta_tokens=thresholds.beta_tokens,
            computed_weight=thresholds.computed_weight,
        )
        self._hits.settings = self._settings
        placer = self._placers[Role.PREFILL]
        if isinstance(placer, FifoPrefillPlacer):
            alpha_tokens = effective_alpha_tokens(self._settings)
            placer.set_thresholds(alpha_tokens, thresholds.beta_tokens)

    def engine_joined(self, spec: EngineSpec) -> None:
        """Count an engine in, empty; the same id may join again after ``engine_lost``.

        Raises ``ConfigError`` for an id or order in use or a group of the other role.
        """
        self._flights.engine_joined(spec)

    def engine_lost(self, engine_id: str) -> list[str]:
        """Count an engine out and return the unfinished requests it had, oldest first.

        They are forgotten: submit them again or fail them.  A PE has a request until
        ``prefill_done``, a DE from its assignment until ``finished``.  Requests that merely wait,
        even for this very engine, stay and are placed elsewhere.
        Raises ``EngineLostError`` if the engine has not joined.
        """
        return self._flights.engine_lost(engine_id)

    def engine_paused(self, engine_id: str) -> None:
        """Give an engine nothing new; what it was assigned goes on, and so does its account.

        Requests with only half an assignment give it back, wherever it is, and queue anew in
        order.  Raises ``EngineLostError`` if the engine has not joined.
        """
        self._flights.engine_paused(engine_id)

    def engine_resumed(self, engine_id: str) -> None:
        """Let a paused engine get requests again; raises ``EngineLostError`` as ``engine_paused``.

        An engine that joins is not paused.
        """
        self._flights.engine_resumed(engine_id)

    def report(self, report: EngineReport) -> None:
        """Take over an engine's load.

        Late reports are dropped; raises ``EngineLostError`` for an engine that has not joined,
        ``IncompatibleError`` for a report that cannot be true.
        """
        self._ledger.report(report)

    def submit(self, request: Request) -> None:
        """Let a request wait for a PE and a DE.

        Raises ``BadRequestError`` for absurd lengths, an id in use, or a length that no joined DE
        can ever hold.  While no DE has joined any length waits; see ``unplaceable``.
        """
        ticket = Ticket(
            request_id=request.request_id,
            request=request,
            number=self._submitted,
            prefill_tokens=self.request_tokens(request, Role.PREFILL),
            decode_tokens=self.request_tokens(request, Role.DECODE),
            kept_tokens=self._hits.kept_tokens(request),
        )
        self._check(ticket)
        self._submitted += 1
        self._flights.submit(ticket)

    def request_tokens(self, request: Request, role: Role) -> int:
        """Return what a request that waits weighs at a role, as the module says."""
        if role is Role.PREFILL:
            return request.prompt_tokens
        reserve = self._settings.generated_reserve_tokens
        return decode_tokens(request.prompt_tokens, request.max_new_tokens, reserve)

    def fetch(self, group: str) -> list[Assignment]:
        """Serve a group; return the assignments whose second engine was found in this call.

        Algorithm 1 for a PE group, phases 1 and 2 for a DE group (§6.1).  A group without a live
        engine gets nothing.
        """
        state = self._ledger.groups.get(group)
        if state is None:
            return []
        assignments = []
        for placement in self._placers[state.role].fetch(group):
            flight = self._flights.place(state.role, placement)
            if flight.prefill is not None and flight.decode is not None:
                assignments.append(self._assigner.assign(flight, flight.prefill, flight.decode))
        return assignments

    def granted(self, grant: Granted) -> list[Assignment]:
        """The DE has granted an assigned request's slots, before anything of it is read.

        Where its engines keep less of the hit than was believed, that has been pushed out since:
        where the hit comes from is chosen anew, with the queues of now.  Returns the assignment
        with its new reads, or nothing.  Its engines stay; hits that were to be computed again are.
        """
        flight = self._flights.live.get(grant.request_id)
        if flight is None or flight.assignment is None or flight.prefilled:
            return []
        kept = {Role.PREFILL: grant.prefill_blocks, Role.DECODE: grant.decode_blocks}
        if all(kept[side] >= flight.assignment.kept_end(side) for side in Role):
            return []
        return [self._assigner.choose_anew(flight, flight.assignment, kept)]

    def read_done(self, request_id: str) -> None:
        """All storage reads of a request are over; unknown requests are ignored."""
        flight = self._flights.live.get(request_id)
        if flight is not None:
            self._flights.end_reads(flight)

    def prefill_done(self, request_id: str) -> None:
        """The PE is through with an assigned request; any other is ignored."""
        flight = self._flights.live.get(request_id)
        if flight is not None:
            self._flights.end_prefill(flight)

    def finished(self, request_id: str) -> None:
        """A request is over, well or not; unknown requests are ignored."""
        flight = self._flights.live.get(request_id)
        if flight is not None:
            self._flights.forget(flight)

    def cancel(self, request_id: str) -> None:
        """Drop a request in whatever state; unknown requests are ignored."""
        self.finished(request_id)

    def waiting(self) -> int:
        """Requests submitted and not assigned yet."""
        return self._flights.unassigned

    def queue_lengths(self) -> QueueLengths:
        """How many requests wait for what."""
        return QueueLengths(
            prefill=self._placers[Role.PREFILL].waiting(),
            decode=self._placers[Role.DECODE].waiting(),
            total=self._flights.unassigned,
        )

    def loads(self) -> tuple[EngineLoad, ...]:
        """The load of every engine as the rules see it, in order of joining."""
        return self._ledger.snapshot()

    def unplaceable(self) -> list[str]:
        """Unassigned requests that none of the joined DEs can ever hold, oldest first.

        They appear when an engine is lost or none was known at ``submit``, and wait for a larger
        one to join, others behind them; a live driver refuses them.  Empty while no DE has joined.
        """
        return self._flights.unplaceable()

    def _check(self, ticket: Ticket) -> None:
        request = ticket.request
        if request.request_id in self._flights.live:
            raise BadRequestError(
                f"request id {request.request_id!r} is in use by a live request; "
                "submit it under another id or cancel the first"
            )
        prompt, hit, new = request.prompt_tokens, request.hit_tokens, request.max_new_tokens
        if prompt < 1 or not 0 <= hit < prompt or new < 1:
            raise BadRequestError(
                f"request {request.request_id!r} has {prompt} prompt, {hit} hit and {new} new "
                "tokens; it needs at least 1 prompt token, 0 ≤ hit < prompt and at least 1 new "
                "token"
            )
        largest = self._ledger.largest_decode_hbm_tokens
        if largest and ticket.decode_tokens > largest:
            raise BadRequestError(
                f"request {request.request_id!r} needs {ticket.decode_tokens} tokens of KV-cache "
                f"({prompt} of them its prompt), the largest decode engine holds {largest}; "
                "shorten the prompt or start a decode engine with more memory"
            )


def places_in_turn(settings: SchedulerSettings) -> bool:
    """Return whether engines get requests in turn (``baselines``), not by §6.1."""
    by_load = settings.mode in (Mode.DUALPATH, Mode.SPLIT, Mode.ORACLE)
    return not by_load and not _balanced_baseline(settings)


def effective_alpha_tokens(settings: SchedulerSettings) -> int:
    """Return α; a baseline placed by load does not look at reading queues."""
    return UNLIMITED_TOKENS if _balanced_baseline(settings) else settings.alpha_tokens


def _balanced_baseline(settings: SchedulerSettings) -> bool:
    return settings.balanced_baselines and not settings.mode.dual_path


def _placers(settings: SchedulerSettings, ledger: Ledger) -> dict[Role, Placer]:
    """Return the placement rules of a mode."""
    if places_in_turn(settings):
        return {role: InTurnPlacer(ledger, role) for role in Role}
    alpha_tokens = effective_alpha_tokens(settings)
    return {
        Role.PREFILL: FifoPrefillPlacer(ledger, alpha_tokens, settings.beta_tokens),
        Role.DECODE: TwoPhaseDecodePlacer(ledger, settings.threshold_factor),
    }
