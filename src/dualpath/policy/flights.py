"""The live requests of a scheduler: where each is placed, and what is taken back from engines.

Where engines come or go, requests that hold only a DE give it back and queue anew, in order;
where an engine is paused, those that hold only a PE as well.  That keeps the two queues free of
deadlock (``policy.scheduler``).
"""

from collections.abc import Mapping

from dualpath.core.cluster import Role
from dualpath.policy.events import Assignment, EngineSpec
from dualpath.policy.load import Ledger
from dualpath.policy.placement import Placement, Placer, Ticket


class Flight:
    """A live request: where it is placed, and the ``assignment`` that the driver knows, if any.

    ``reading`` are the engines whose read of it the ledger has on account, ``computing_tokens``
    what it has on that of its PE to compute.
    """

    __slots__ = (
        "assignment",
        "computing_tokens",
        "decode",
        "prefill",
        "prefilled",
        "reading",
        "ticket",
    )

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.prefill: Placement | None = None
        self.decode: Placement | None = None
        self.assignment: Assignment | None = None
        self.prefilled = False
        self.reading: tuple[str, ...] = ()
        self.computing_tokens = 0

    @property
    def assigned(self) -> bool:
        """Whether the driver knows both engines."""
        return self.assignment is not None


class Flights:
    """Keeps requests, ``placers`` and ``ledger`` in step; ``live`` are all requests, by id."""

    def __init__(self, ledger: Ledger, placers: Mapping[Role, Placer]) -> None:
        self._ledger = ledger
        self._placers = placers
        self.live: dict[str, Flight] = {}
        self.unassigned = 0
        self._decode_only: dict[str, Flight] = {}
        self._placed: dict[str, dict[str, None]] = {}

    # ------------------------------------------------------------------ one request

    def submit(self, ticket: Ticket) -> None:
        """Let a request wait for both of its engines."""
        self.unassigned += 1
        self.live[ticket.request_id] = Flight(ticket)
        for placer in self._placers.values():
            placer.add(ticket)

    def place(self, role: Role, placement: Placement) -> Flight:
        """Note one of a request's engines, which the ledger has charged; return the request."""
        flight = self.live[placement.ticket.request_id]
        if role is Role.PREFILL:
            flight.prefill = placement
            self._decode_only.pop(placement.ticket.request_id, None)
        else:
            flight.decode = placement
            if flight.prefill is None:
                self._decode_only[placement.ticket.request_id] = flight
        self._placed[placement.engine_id][placement.ticket.request_id] = None
        return flight

    def assign(self, flight: Flight, assignment: Assignment, reading: tuple[str, ...]) -> None:
        """The driver gets to know both engines: nothing of it is recalled from here on."""
        flight.assignment, flight.reading = assignment, reading
        self.unassigned -= 1

    def read_anew(self, flight: Flight, anew: Assignment) -> None:
        """The driver gets to know that an assigned request's hit comes from elsewhere."""
        flight.assignment = anew
        flight.reading = anew.prefill_engine, anew.decode_engine

    def set_computing(self, flight: Flight, tokens: int) -> None:
        """Let the account of a request's PE say that so much of it is to be computed."""
        if flight.prefill is not None:
            change = tokens - flight.computing_tokens
            self._ledger.charge_computing(flight.prefill.engine_id, change)
        flight.computing_tokens = tokens

    def end_reads(self, flight: Flight) -> None:
        """Strike the reads of a request that no report has counted in yet."""
        for engine_id in flight.reading:
            self._ledger.release_read(engine_id, flight.ticket.request_id)
        flight.reading = ()

    def end_prefill(self, flight: Flight) -> None:
        """The PE of an assigned request is through with it; nothing happens the second time."""
        if flight.prefill is None or not flight.assigned or flight.prefilled:
            return
        flight.prefilled = True
        self.set_computing(flight, 0)
        self._take_back(flight.prefill)

    def forget(self, flight: Flight) -> None:
        """Drop a request in whatever state, with everything on its account."""
        request_id = flight.ticket.request_id
        del self.live[request_id]
        self._decode_only.pop(request_id, None)
        if not flight.assigned:
            self.unassigned -= 1
            for placer in self._placers.values():
                placer.discard(request_id)
        self.end_reads(flight)
        self.set_computing(flight, 0)
        for placement in (flight.prefill, flight.decode):
            if placement is not None:
                self._take_back(placement)

    def unplaceable(self) -> list[str]:
        """Return unassigned requests too large for every joined DE, oldest first."""
        largest = self._ledger.largest_decode_hbm_tokens
        if not largest or not self.unassigned:
            return []
        return [
            request_id
            for request_id, flight in self.live.items()
            if flight.decode is None and flight.ticket.decode_tokens > largest
        ]

    # ------------------------------------------------------------------ engines

    def engine_joined(self, spec: EngineSpec) -> None:
        """Open an engine's account; raises ``ConfigError`` as ``Ledger.join``."""
        self._ledger.join(spec)
        self._placed[spec.engine_id] = {}
        self._recall(spec.role)

    def engine_lost(self, engine_id: str) -> list[str]:
        """Forget what an engine had and return it, oldest first; raises ``EngineLostError``."""
        spec = self._ledger.leave(engine_id)
        hit = [self.live[request_id] for request_id in self._placed.pop(engine_id)]
        lost = [f for f in hit if spec.role is Role.PREFILL or f.prefill is not None]
        for flight in lost:
            self.forget(flight)
        self._recall(spec.role)
        return [f.ticket.request_id for f in sorted(lost, key=lambda f: f.ticket.number)]

    def engine_paused(self, engine_id: str) -> None:
        """Let half an assignment be given back everywhere; raises ``EngineLostError``."""
        self._ledger.pause(engine_id, paused=True)
        self._recall_halves()

    def engine_resumed(self, engine_id: str) -> None:
        """Let waiting requests find an engine again; raises ``EngineLostError``."""
        self._recall(self._ledger.pause(engine_id, paused=False).role)

    def _recall(self, role: Role) -> None:
        """Let waiting requests of a role queue anew after its engines changed."""
        tickets = []
        if role is Role.DECODE:
            for flight in self._decode_only.values():
                if flight.decode is not None:
                    self._take_back(flight.decode)
                flight.decode = None
                tickets.append(flight.ticket)
            self._decode_only.clear()
        self._placers[role].recall(tickets)

    def _recall_halves(self) -> None:
        """Let all waiting requests queue anew for both of their engines."""
        tickets = []
        for flight in self.live.values():
            if flight.prefill is not None and not flight.assigned:
                self._take_back(flight.prefill)
                flight.prefill = None
                tickets.append(flight.ticket)
        self._placers[Role.PREFILL].recall(tickets)
        self._recall(Role.DECODE)

    def _take_back(self, placement: Placement) -> None:
        """Strike a request from an engine, which may be lost by now."""
        request_id = placement.ticket.request_id
        self._ledger.release(placement.engine_id, request_id)
        self._placed.get(placement.engine_id, {}).pop(request_id, None)
