"""Applies events to ``RequestScheduler`` and carries out its effects.

§6.1 lets engine groups fetch regularly.  Live, every connected group has an open fetch like a
long poll: after each report, submission or end of a request, the open fetches of all groups are
answered at once, PE groups first and in turn.  The decisions are those of groups that fetch after
every event; fetches that can place nothing are left out.

*What a report counts.*  A request is sent to its engines after it was assigned to them: to its PE
only after its DE has granted buffer space.  A report counts a request if its envelope acknowledges
the ``Assign``, which has a number in the engine's session like every message, or if it names the
request, of which the call has brought the assignment.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.errors import BadRequestError, EngineLostError, IncompatibleError
from dualpath.core.request import Request
from dualpath.policy.events import (
    DE_GIVEN,
    DE_REASONS,
    Assignment,
    Charge,
    Effects,
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineReport,
    EngineResumed,
    EngineSpec,
    Event,
    Fetch,
    Finished,
    MoveBegun,
    MoveEnded,
    PrefillEnded,
    ReadsBegin,
    ReadsDone,
    SetThresholds,
    SlotsGranted,
    Submitted,
)
from dualpath.policy.rebalance import RoleQueue
from dualpath.policy.scheduler import RequestScheduler
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.event_recorder import EventLogWriter
from dualpath.router.scheduler.roles import LiveRolePolicy

logger = logging.getLogger(__name__)

_RECENT_ASSIGNMENTS = 256


class Share:
    """An assignment at one of its engines: what it is charged there, and its progress.

    ``assign_number`` is that of its ``Assign`` in the engine's session, None before it is sent;
    ``reading`` whether the engine counts its reads.
    """

    def __init__(self, charge: Charge) -> None:
        self.charge = charge
        self.assign_number: int | None = None
        self.reading = False


class EngineAssignments:
    """Assignments of one engine in one session; ``open`` are those that have not ended there."""

    def __init__(self, engine_id: str) -> None:
        self.open: dict[str, Share] = {}
        self._engine_id = engine_id

    def decided(self, request_id: str, charge: Charge) -> None:
        """The scheduler has assigned a request to the engine, or planned its reads again."""
        if (share := self.open.get(request_id)) is not None:
            share.charge = charge
            return
        self.open[request_id] = Share(charge)

    def event(self, load: Load, received: int, called: Collection[str] = ()) -> EngineReport:
        """Return the event of a report; its envelope acknowledges messages up to ``received``.

        Requests without an ``Assign`` among these messages are uncounted, unless their assignment
        came with their call and the report names them (``called``).  Reads of counted
        requests that wait for buffer space are added: the engine cannot know them.
        """
        uncounted, to_be_read = [], 0
        for request_id, share in self.open.items():
            number = share.assign_number
            if (number is None or number > received) and request_id not in called:
                uncounted.append(request_id)
                continue
            if not share.reading:
                to_be_read += share.charge.read_tokens
        full_load = msgspec.structs.replace(
            load, read_queue_tokens=load.read_queue_tokens + to_be_read
        )
        return EngineReport(self._engine_id, full_load, tuple(uncounted))


class Placement:
    """A request at the scheduler, from its submission on; without an assignment while it waits.

    ``moving_to`` is the DE that fetches its KV, empty if none does.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.moving_to = ""
        self.assignment: Assignment | None = None
        self.decided: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()


class Dispatch:
    """Owns the scheduler and its driver's state: engines, requests, recent decisions.

    ``log`` records all events.  ``on_scheduled`` gets, per round of fetches, the seconds it took
    and the number of decisions.  ``clock`` returns seconds from any origin.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        log: EventLogWriter | None,
        bytes_per_token: int,
        on_assigned: Callable[[Assignment], None],
        on_scheduled: Callable[[float, int], None],
        clock: Callable[[], float],
        role_policy: LiveRolePolicy | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._log = log
        self._on_assigned = on_assigned
        self._on_scheduled = on_scheduled
        self._clock = clock
        self._role_policy = role_policy
        self._engines: dict[str, EngineAssignments] = {}
        self._placements: dict[str, Placement] = {}
        self._bytes_per_token = bytes_per_token
        self._usual_snic: float | None = None
        #: Rounds of fetches with an assignment: PE groups begin in turn.
        self._rounds = 0
        #: Whether reads were planned again since all groups have fetched.
        self._replanned = False
        #: The latest placements with an assignment, which may have ended.
        self.recent: deque[Placement] = deque(maxlen=_RECENT_ASSIGNMENTS)

    # ------------------------------------------------------------------ state

    @property
    def waiting(self) -> int:
        """Requests without an assignment."""
        return sum(placement.assignment is None for placement in self._placements.values())

    def queue(self, role: Role, held: int = 0) -> RoleQueue:
        """Return the load and the queue of a role; each waiting request counts as their mean.

        ``held`` requests wait for both roles and are not submitted yet.
        """
        lengths = self._scheduler.queue_lengths()
        count = held + (lengths.prefill if role is Role.PREFILL else lengths.decode)
        requests = [p.request for p in self._placements.values() if not p.decided.done()]
        waiting = [self._scheduler.request_tokens(request, role) for request in requests]
        mean = sum(waiting) // len(waiting) if waiting else 0
        loads = self._scheduler.loads()
        placed = sum(load.unfinished_tokens for load in loads if load.role is role)
        return RoleQueue(placed, count, count * mean)

    def idle(self) -> bool:
        """Return whether no request waits or counts at any engine."""
        counted = any(assigned.open for assigned in self._engines.values())
        return not (self._placements or counted or self._scheduler.waiting)

    # ------------------------------------------------------------------ engines

    def set_thresholds(self, thresholds: SetThresholds) -> None:
        """Use another α and β from now on."""
        self._apply(thresholds)
        self._fetch_all()

    def joined(self, info: EngineInfo, *, paused: bool = False) -> None:
        """An engine (or a new process of it) may get requests, unless it is ``paused``."""
        self._engines[info.engine_id] = EngineAssignments(info.engine_id)
        self._usual_snic = self._usual_snic or info.snic_bytes_per_s
        self._apply(
            EngineJoined(
                EngineSpec(
                    engine_id=info.engine_id,
                    role=info.role,
                    node=info.node,
                    group=info.group,
                    order=info.order,
                    hbm_tokens=info.hbm_tokens,
                    snic_tokens_per_s=self._snic_tokens_per_s(info),
                    lockstep=info.dp is not None and info.dp.size > 1,
                )
            )
        )
        if paused:
            self._apply(EnginePaused(info.engine_id))
        self._refuse_unplaceable()
        self._fetch_all()

    def lost(self, *engine_ids: str) -> None:
        """Engines are gone; requests that had only one of their engines wait again."""
        known = [engine_id for engine_id in engine_ids if engine_id in self._engines]
        if not known:
            return
        lost_requests: list[str] = []
        for engine_id in known:
            del self._engines[engine_id]
            lost_requests += self._apply(EngineLost(engine_id)).lost_requests
        for request_id in lost_requests:
            self._submit_again(request_id)
        self._refuse_unplaceable()
        self._fetch_all()

    def pause(self, engine_id: str, *, paused: bool) -> None:
        """Stop dispatching new requests to an engine, or dispatch to it again."""
        if engine_id in self._engines:
            self._apply(EnginePaused(engine_id) if paused else EngineResumed(engine_id))
            self._fetch_all()

    def report(
        self, engine_id: str, load: Load, received: int, called: Collection[str] = ()
    ) -> None:
        """An engine that has received the messages up to this number reported; all groups fetch."""
        if (assigned := self._engines.get(engine_id)) is None:
            return
        try:
            self._apply(assigned.event(load, received, called))
        except IncompatibleError as error:
            logger.warning("report ignored: %s", error)
        self._fetch_changed(engine_id)

    # ------------------------------------------------------------------ requests

    async def place(self, request: Request) -> Assignment:
        """Wait until the scheduler has assigned a request to a PE and a DE.

        Cancelling the wait withdraws the request.
        """
        placement = self._placements[request.request_id] = Placement(request)
        try:
            self._submit(request)
            self._fetch_all()
            return await placement.decided
        except BaseException:
            self.ended(request.request_id)
            raise

    def assign_sent(self, engine_id: str, request_id: str, number: int) -> None:
        """An engine was sent the ``Assign`` of a request, as the message of this number.

        Or, as a third DE, its ``ReserveThird``.
        """
        if (share := self._share(request_id, engine_id)) is not None:
            share.assign_number = number

    def slots_granted(self, grant: SlotsGranted) -> Assignment | None:
        """Return the assignment if its reads are planned again, None if they stay.

        Its PE must not have been sent it yet.
        """
        replanned = self._apply(grant).assignments
        if not replanned:
            return None
        (new,) = replanned
        # Its PE may be below β now; nothing fetches here, as the request is about to be read.
        self._replanned = True
        self._note(new)
        logger.debug("planned again %s", new)
        return new

    def reading(self, request_id: str, engine_id: str, *, begins: bool = True) -> None:
        """An engine is about to count the reads of a request, or they wait for its slots."""
        if (share := self._share(request_id, engine_id)) is not None:
            share.reading = begins
        assignment = self._assignment(request_id)
        if assignment is not None and engine_id == assignment.decode_engine:
            self.slots_known(request_id, late=not begins)

    def slots_known(self, request_id: str, *, late: bool = False) -> None:
        """A request's DE has granted its slots, or waits for them (``late``)."""
        if self._scheduler.recomputes:
            self._apply(ReadsBegin(request_id, late))

    def reads_done(self, request_id: str) -> None:
        """All storage reads of a request are done."""
        assignment = self._assignment(request_id)
        for engine_id in _engines_of(assignment):
            if (share := self._share(request_id, engine_id)) is not None:
                share.charge = share.charge._replace(read_tokens=0)
        self._apply(ReadsDone(request_id))
        waits_for_pe = assignment is not None and assignment.prefill_engine is not None
        if self._role_policy is not None and assignment is not None and waits_for_pe:
            self._role_policy.loaded(request_id, assignment.prefill_tokens)
        self._fetch_all()

    def prefill_done(self, request_id: str, engine_id: str) -> None:
        """The PE has finished a request, and third DEs have released it."""
        self._end_at(request_id, engine_id)
        if (assignment := self._assignment(request_id)) is not None:
            for third in assignment.thirds:
                self._end_at(request_id, third.engine_id)
        self.prompt_computed(request_id, engine_id)

    def prompt_computed(self, request_id: str, engine_id: str) -> None:
        """A request's prompt is computed, by its PE, or by its DE if it has no PE; idempotent."""
        self._apply(PrefillEnded(request_id))
        if self._role_policy is not None and (known := self._assignment(request_id)) is not None:
            self._role_policy.prefilled(request_id, known.decode_tokens)
        self._fetch_changed(engine_id)

    def move_begins(self, request_id: str, engine_id: str) -> None:
        """Another DE is about to fetch a request's KV.

        Raises ``EngineLostError`` with the reason if that DE has no room for the request.
        """
        self._apply(MoveBegun(request_id, engine_id))
        placement = self._placements[request_id]
        assert placement.assignment is not None, "its prompt is computed"
        placement.moving_to = engine_id
        tokens = placement.assignment.decode_tokens
        self._engines[engine_id].decided(request_id, Charge(engine_id, tokens, 0))

    def move_ended(self, request_id: str, *, moved: bool) -> None:
        """A move is over, successfully or not; idempotent."""
        placement = self._placements.get(request_id)
        if placement is None or not placement.moving_to:
            return
        known = placement.assignment
        assert known is not None, "its prompt is computed"
        left, placement.moving_to = placement.moving_to, ""
        if moved:
            placement.assignment = msgspec.structs.replace(
                known, decode_engine=left, de_reason=DE_REASONS[DE_GIVEN]
            )
            left = known.decode_engine
        self._end_at(request_id, left)
        self._apply(MoveEnded(request_id, moved, self._clock()))
        self._fetch_all()

    def ended(self, request_id: str) -> None:
        """A request (or one attempt of it) has ended, successfully or not; idempotent."""
        self.move_ended(request_id, moved=False)
        for engine_id in _engines_of(self._assignment(request_id)):
            self._end_at(request_id, engine_id)
        self._apply(Finished(request_id, self._clock()))
        self._placements.pop(request_id, None)
        if self._role_policy is not None:
            self._role_policy.over(request_id)
        self._fetch_all()

    # ------------------------------------------------------------------ the scheduler

    def _apply(self, event: Event) -> Effects:
        if self._log is None:
            return self._scheduler.apply(event)
        return self._log.apply(self._scheduler, event)

    def _fetch_changed(self, engine_id: str) -> None:
        """Answer the fetch of an engine's group, if no other account has changed."""
        self._fetch_all([engine_id] if engine_id in self._engines and not self._replanned else None)

    def _fetch_all(self, engine_ids: Collection[str] | None = None) -> None:
        """Answer the open fetches of all groups with a live engine, while any request waits.

        With ``engine_ids`` only those of these engines' groups, see ``fetching_groups``.
        """
        if engine_ids is None:
            self._replanned = False
        if not self._scheduler.waiting:
            return
        start_ns, decisions = time.perf_counter_ns(), 0
        for group in self._scheduler.fetching_groups(self._rounds, engine_ids):
            if not self._scheduler.waiting:
                break
            for assignment in self._apply(Fetch(group, self._clock())).assignments:
                self._assigned(assignment)
                decisions += 1
        self._rounds += decisions > 0
        self._on_scheduled((time.perf_counter_ns() - start_ns) / 1e9, decisions)

    def _assigned(self, assignment: Assignment) -> None:
        placement = self._placements[assignment.request_id]
        self._note(assignment)
        self.recent.append(placement)
        logger.debug("assigned %s", assignment)
        self._on_assigned(assignment)
        if not placement.decided.done():
            placement.decided.set_result(assignment)

    def _note(self, assignment: Assignment) -> None:
        placement = self._placements[assignment.request_id]
        for engine_id in set(_engines_of(placement.assignment)) - set(_engines_of(assignment)):
            self._end_at(assignment.request_id, engine_id)
        placement.assignment = assignment
        for charge in (*map(assignment.at, assignment.sides), *assignment.thirds):
            if (assigned := self._engines.get(charge.engine_id)) is not None:
                assigned.decided(assignment.request_id, charge)

    def _assignment(self, request_id: str) -> Assignment | None:
        placement = self._placements.get(request_id)
        return placement.assignment if placement is not None else None

    def _share(self, request_id: str, engine_id: str) -> Share | None:
        assigned = self._engines.get(engine_id)
        return assigned.open.get(request_id) if assigned is not None else None

    def _end_at(self, request_id: str, engine_id: str) -> None:
        """A request no longer counts at an engine, which may be lost; idempotent."""
        if (assigned := self._engines.get(engine_id)) is not None:
            assigned.open.pop(request_id, None)

    def _submit(self, request: Request) -> None:
        for assignment in self._apply(Submitted(request)).assignments:
            self._assigned(assignment)

    def _submit_again(self, request_id: str) -> None:
        placement = self._placements.get(request_id)
        if placement is None or placement.decided.done():
            return
        try:
            self._submit(placement.request)
        except (BadRequestError, EngineLostError) as error:
            placement.decided.set_exception(error)

    def _refuse_unplaceable(self) -> None:
        """Fail requests that no DE can hold any more; they would wait, and others behind them."""
        for request_id in self._scheduler.unplaceable():
            self._apply(Finished(request_id))
            self._submit_again(request_id)

    def _snic_tokens_per_s(self, info: EngineInfo) -> float:
        # Only ratios matter: an engine that does not know its storage NIC counts as a usual one.
        snic_bytes_per_s = info.snic_bytes_per_s or self._usual_snic
        return snic_bytes_per_s / self._bytes_per_token if snic_bytes_per_s else 1.0


def _engines_of(assignment: Assignment | None) -> tuple[str, ...]:
    """Return the engines of an assignment, third DEs included; none while there is none."""
    if assignment is None:
        return ()
    return (*assignment.engines, *(third.engine_id for third in assignment.thirds))
