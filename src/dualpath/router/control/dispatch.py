"""Feeds ``RequestScheduler`` and hands out what it decides.

§6.1 lets engine groups fetch regularly.  Live, every connected group keeps a fetch open like a
long poll: whenever a report arrives, a request is submitted or something ends, the open fetches of
all groups are answered at once, PE groups first.  The decisions are those of groups that fetch
after every event.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from dualpath.core.blocks import BlockKey
from dualpath.core.cluster import Role
from dualpath.core.control import Assign, Report
from dualpath.core.errors import BadRequestError, EngineLostError, IncompatibleError
from dualpath.core.request import Request
from dualpath.policy.events import Assignment, EngineSpec, Granted, Thresholds
from dualpath.policy.role_loads import RoleQueue
from dualpath.policy.scheduler import RequestScheduler
from dualpath.router.control.assign_log import AssignLog, AssignmentNote
from dualpath.router.control.event_recorder import RecordedScheduler
from dualpath.router.engines import EngineInfo

logger = logging.getLogger(__name__)

_ASSIGNMENTS_KEPT = 256


class RequestWatch(Protocol):
    """Told how far requests are, right after the scheduler was."""

    def loaded(self, request_id: str, prefill_tokens: int) -> None:
        """All reads of a request are over."""

    def prefilled(self, request_id: str, decode_tokens: int) -> None:
        """The PE is done with a request."""

    def over(self, request_id: str) -> None:
        """A request has ended; told also of those that never had an engine, and twice."""


class _Placement:
    def __init__(self, request: Request, decided: asyncio.Future[Assignment]) -> None:
        self.request = request
        self.decided = decided


class Dispatch:
    """Owns the scheduler, one ``AssignLog`` per live engine and the requests that wait.

    ``on_scheduled`` gets, per round of fetches, the seconds it took and how much it decided.
    """

    def __init__(
        self,
        scheduler: RequestScheduler | RecordedScheduler,
        bytes_per_token: int,
        block_tokens: int,
        on_assigned: Callable[[Assignment], None],
        on_scheduled: Callable[[float, int], None],
    ) -> None:
        self._scheduler = scheduler
        self._on_assigned = on_assigned
        self._on_scheduled = on_scheduled
        self._engines: dict[str, EngineInfo] = {}
        self._logs: dict[str, AssignLog] = {}
        self._waiting: dict[str, _Placement] = {}
        self._bytes_per_token = bytes_per_token
        self._block_tokens = block_tokens
        self._usual_snic: float | None = None
        self.watch: RequestWatch | None = None
        self._assigned: dict[str, Assignment] = {}
        self.recent: deque[AssignmentNote] = deque(maxlen=_ASSIGNMENTS_KEPT)

    @property
    def waiting(self) -> int:
        """Requests without an assignment."""
        return len(self._waiting)

    def queue(self, role: Role) -> RoleQueue:
        """Return what a role has and what waits for it; requests that wait count as their mean."""
        lengths = self._scheduler.queue_lengths()
        count = lengths.prefill if role is Role.PREFILL else lengths.decode
        requests = [p.request for p in self._waiting.values() if not p.decided.done()]
        waiting = [self._scheduler.request_tokens(request, role) for request in requests]
        mean = sum(waiting) // len(waiting) if waiting else 0
        loads = self._scheduler.loads()
        placed = sum(load.unfinished_tokens for load in loads if load.role is role)
        return RoleQueue(placed, count, count * mean)

    def idle(self) -> bool:
        """Whether no request waits or counts anywhere."""
        counted = any(log.open for log in self._logs.values())
        return not (self._waiting or counted or self._scheduler.waiting())

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """Go on with another α and β."""
        self._scheduler.set_thresholds(thresholds)
        self.answer_fetches()

    def joined(self, info: EngineInfo) -> None:
        """An engine (or a new process of it) may get requests."""
        self._engines[info.engine_id] = info
        self._logs[info.engine_id] = AssignLog(info.engine_id)
        self._usual_snic = self._usual_snic or info.snic_bytes_per_s
        self._scheduler.engine_joined(
            EngineSpec(
                engine_id=info.engine_id,
                role=info.role,
                node=info.node,
                group=info.group,
                order=info.order,
                hbm_tokens=info.hbm_tokens,
                snic_tokens_per_s=self._snic_tokens_per_s(info),
            )
        )
        self._refuse_unplaceable()
        self.answer_fetches()

    def lost(self, *engine_ids: str) -> None:
        """Engines are gone; requests that had only half an assignment wait again."""
        known = [engine_id for engine_id in engine_ids if engine_id in self._engines]
        if not known:
            return
        waiting: list[str] = []
        for engine_id in known:
            del self._engines[engine_id], self._logs[engine_id]
            waiting += self._scheduler.engine_lost(engine_id)
        for request_id in waiting:
            placement = self._waiting.get(request_id)
            if placement is not None and not placement.decided.done():
                self._submit_again(placement)
        self._refuse_unplaceable()
        self.answer_fetches()

    def paused(self, engine_id: str) -> None:
        """Give an engine nothing new."""
        if engine_id in self._engines:
            self._scheduler.engine_paused(engine_id)
            self.answer_fetches()

    def resumed(self, engine_id: str) -> None:
        """Give a paused engine requests again."""
        if engine_id in self._engines:
            self._scheduler.engine_resumed(engine_id)
            self.answer_fetches()

    def report(self, engine_id: str, report: Report) -> None:
        """An engine reported; its group fetches with it."""
        if (log := self._logs.get(engine_id)) is None:
            return
        try:
            self._scheduler.report(log.translate(report))
        except IncompatibleError as error:
            logger.warning("report ignored: %s", error)
        self.answer_fetches()

    async def place(self, request: Request) -> Assignment:
        """Wait until the scheduler has found a PE, a DE and the read sides for a request.

        Cancelling the wait withdraws the request.
        """
        placement = _Placement(request, asyncio.get_running_loop().create_future())
        self._waiting[request.request_id] = placement
        try:
            self._scheduler.submit(request)
            self.answer_fetches()
            return await placement.decided
        except BaseException:
            self.over(request.request_id)
            raise
        finally:
            self._waiting.pop(request.request_id, None)

    def assign(
        self, engine_id: str, request_id: str, reserve_blocks: int, keys: tuple[BlockKey, ...]
    ) -> Assign:
        """Return the message that assigns a request to the engine it was placed on.

        Raises ``EngineLostError`` if the engine is gone.
        """
        log = self._logs.get(engine_id)
        if log is None:
            raise EngineLostError(f"engine {engine_id} is lost; restart it")
        assign_seq, tokens = log.sent(request_id)
        return Assign(
            assign_seq=assign_seq,
            request_id=request_id,
            tokens=tokens,
            reserve_blocks=reserve_blocks,
            keys=keys,
        )

    def granted(self, grant: Granted) -> Assignment | None:
        """Return an assignment whose reads are chosen anew, None if they are as they were.

        Its PE must not have been sent it yet.
        """
        anew = next(iter(self._scheduler.granted(grant)), None)
        if anew is not None:
            self._assigned[anew.request_id] = anew
            for role in Role:
                engine_id, _, tokens, read_tokens = anew.at(role)
                if (log := self._logs.get(engine_id)) is not None:
                    log.changed(anew.request_id, tokens, read_tokens)
            self._note_anew(anew)
        return anew

    def reading(self, request_id: str, engine_id: str) -> None:
        """An engine is about to be asked to read for a request."""
        if (log := self._logs.get(engine_id)) is not None:
            log.reading(request_id)

    def kv_in_hbm(self, request_id: str, engine_id: str) -> None:
        """The DE holds a request's KV in its HBM now."""
        if (log := self._logs.get(engine_id)) is not None:
            log.in_hbm(request_id)

    def read_done(self, request_id: str) -> None:
        """All storage reads of a request are over."""
        for log in self._logs_of(request_id):
            log.read_done(request_id)
        self._scheduler.read_done(request_id)
        if self.watch is not None and (known := self._assigned.get(request_id)) is not None:
            self.watch.loaded(request_id, known.prefill_tokens)
        self.answer_fetches()

    def prefill_done(self, request_id: str, engine_id: str) -> None:
        """The PE is done with a request."""
        if (log := self._logs.get(engine_id)) is not None:
            log.over(request_id)
        self._scheduler.prefill_done(request_id)
        if self.watch is not None and (known := self._assigned.get(request_id)) is not None:
            self.watch.prefilled(request_id, known.decode_tokens)
        self.answer_fetches()

    def over(self, request_id: str) -> None:
        """A request (or one attempt of it) has ended, well or not; idempotent."""
        for log in self._logs_of(request_id):
            log.over(request_id)
        self._scheduler.finished(request_id)
        self._assigned.pop(request_id, None)
        if self.watch is not None:
            self.watch.over(request_id)
        self.answer_fetches()

    def answer_fetches(self) -> None:
        """Answer the open fetch of every group that has a live engine, if anything waits."""
        if not self._scheduler.waiting():
            return
        start_ns, decisions = time.perf_counter_ns(), 0
        for role in (Role.PREFILL, Role.DECODE):
            groups = dict.fromkeys(e.group for e in self._engines.values() if e.role is role)
            for group in groups:
                for assignment in self._scheduler.fetch(group):
                    self._hand_out(assignment)
                    decisions += 1
        self._on_scheduled((time.perf_counter_ns() - start_ns) / 1e9, decisions)

    def _logs_of(self, request_id: str) -> Iterable[AssignLog]:
        """Return those of the engines that a request was placed on and that still live."""
        if (placed := self._assigned.get(request_id)) is None:
            return ()
        logs = map(self._logs.get, (placed.prefill_engine, placed.decode_engine))
        return [log for log in logs if log is not None]

    def _submit_again(self, placement: _Placement) -> None:
        try:
            self._scheduler.submit(placement.request)
        except BadRequestError as error:
            placement.decided.set_exception(error)

    def _refuse_unplaceable(self) -> None:
        """Fail what no DE can hold any more; it would wait, and others behind it."""
        for request_id in self._scheduler.unplaceable():
            self._scheduler.finished(request_id)
            placement = self._waiting.get(request_id)
            if placement is not None and not placement.decided.done():
                self._submit_again(placement)

    def _hand_out(self, assignment: Assignment) -> None:
        for role in Role:
            engine_id, seq, tokens, read_tokens = assignment.at(role)
            self._logs[engine_id].decided(assignment.request_id, seq, tokens, read_tokens)
        placement = self._waiting[assignment.request_id]
        note = AssignmentNote.of(placement.request, assignment, self._block_tokens)
        self.recent.append(note)
        logger.debug("assigned %s", note)
        self._assigned[assignment.request_id] = assignment
        self._on_assigned(assignment)
        if not placement.decided.done():
            placement.decided.set_result(assignment)

    def _note_anew(self, anew: Assignment) -> None:
        for place in range(len(self.recent) - 1, -1, -1):
            if self.recent[place].request_id == anew.request_id:
                self.recent[place] = self.recent[place].read_anew(anew, self._block_tokens)
                logger.debug("chosen anew %s", self.recent[place])
                return

    def _snic_tokens_per_s(self, info: EngineInfo) -> float:
        # Only ratios matter: an engine that does not know its storage NIC counts as a usual one.
        snic_bytes_per_s = info.snic_bytes_per_s or self._usual_snic
        return snic_bytes_per_s / self._bytes_per_token if snic_bytes_per_s else 1.0
