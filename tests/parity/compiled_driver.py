"""The simulator's compiled scheduler behind ``apply``, as the live one.

It numbers engines, groups and requests and keeps tables; here its numbers become names again, so
that a recorded log can be played to it and its answers compared whole.
"""

import heapq

import numpy as np
from tests import compiled_scheduler as scheduler

from dualpath.core.cluster import Role
from dualpath.core.request import Request
from dualpath.policy.event_log import EventLog
from dualpath.policy.events import (
    DE_REASONS,
    NO_EFFECTS,
    PE_REASONS,
    Assignment,
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
from dualpath.policy.read_side import READ_REASONS, hit_runs
from dualpath_sim.simulator.compiled import tables


def before_losses(log: EventLog) -> EventLog:
    """Return the log up to the first engine lost or paused: in the simulator none is."""
    changes = EngineLost, EnginePaused
    losses = (i for i, entry in enumerate(log.entries) if isinstance(entry.event, changes))
    return EventLog(log.begin, log.entries[: next(losses, len(log.entries))])


class CompiledScheduler:
    """``RequestScheduler.apply`` on the tables of ``sim.compiled``.

    The simulator's engines are there from the beginning: those that join in the course of ``log``
    are.  Numbers of finished requests are used again, as in the simulator.
    """

    def __init__(self, log: EventLog) -> None:
        events = [entry.event for entry in log.entries]
        joined = [event.spec for event in events if isinstance(event, EngineJoined)]
        submitted = sum(isinstance(event, Submitted) for event in events)
        self._block_tokens = log.begin.settings.block_tokens
        self._specs = _numbered(joined)
        self._engines = {spec.engine_id: number for number, spec in enumerate(self._specs)}
        self._groups = list(dict.fromkeys(spec.group for spec in self._specs))
        self._roles = {spec.group: spec.role for spec in self._specs}
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._free = list(range(submitted))
        self._state = tables.new_scheduler(log.begin.settings, self._specs, submitted)

    def apply(self, event: Event) -> Effects:
        """As ``RequestScheduler.apply``."""
        match event:
            case EngineReport():
                self._report(event)
            case Submitted():
                self._submit(event.request)
            case Fetch():
                return Effects(self._fetch(event.group))
            case SlotsGranted():
                pass  # Without a DRAM cache nothing is re-planned.
            case ReadsBegin():
                pass  # Nothing is recomputed.
            case ReadsDone():
                if (number := self._numbers.get(event.request_id)) is not None:
                    scheduler.read_done(self._state, number)
            case PrefillEnded():
                if (number := self._numbers.get(event.request_id)) is not None:
                    scheduler.prefill_done(self._state, number)
            case Finished():
                self._finish(event.request_id)
            case EngineJoined():
                assert event.spec in self._specs
            case SetThresholds():
                self._set_thresholds(event)
            case EngineLost() | EnginePaused() | EngineResumed() | MoveBegun() | MoveEnded():
                raise NotImplementedError(f"the simulator has no {event}; play before_losses")
        return NO_EFFECTS

    def _set_thresholds(self, thresholds: SetThresholds) -> None:
        """The simulator's engines and thresholds never change: its tables are new."""
        rules = self._state.rules._replace(
            alpha_tokens=thresholds.alpha_tokens,
            beta_tokens=thresholds.beta_tokens,
        )
        self._state = self._state._replace(rules=rules)

    def _report(self, report: EngineReport) -> None:
        numbers = (self._numbers.get(request_id) for request_id in report.uncounted)
        left_out = [number for number in numbers if number is not None]
        scheduler.report(
            self._state,
            self._engines[report.engine_id],
            np.array(left_out, np.int64),
            report.load.unfinished_requests,
            report.load.unfinished_tokens,
            report.load.read_queue_tokens,
            report.load.free_hbm_tokens,
            report.load.unallocated_hbm_tokens,
        )

    def _submit(self, request: Request) -> None:
        number = heapq.heappop(self._free)
        self._numbers[request.request_id] = number
        self._names[number] = request.request_id
        scheduler.submit(
            self._state, number, request.prompt_tokens, request.hit_tokens, request.max_new_tokens
        )
        assert not request.cached, "the compiled scheduler plays the paper's system"

    def _fetch(self, group: str) -> tuple[Assignment, ...]:
        if group not in self._roles:
            return ()
        prefill = self._roles[group] is Role.PREFILL
        fetch = scheduler.fetch_prefill if prefill else scheduler.fetch_decode
        count = fetch(self._state, self._groups.index(group))
        return tuple(map(self._assignment, self._state.assigned[:count].tolist()))

    def _finish(self, request_id: str) -> None:
        if (number := self._numbers.pop(request_id, None)) is not None:
            scheduler.finished(self._state, number)
            heapq.heappush(self._free, number)

    def _assignment(self, row: list[int]) -> Assignment:
        number = row[tables.A_REQUEST]
        head, tail = row[tables.A_PE_READ], row[tables.A_DE_READ]
        return Assignment(
            request_id=self._names[number],
            prefill_engine=self._specs[row[tables.A_PE]].engine_id,
            decode_engine=self._specs[row[tables.A_DE]].engine_id,
            reads=hit_runs(0, 0, head, tail, self._block_tokens),
            pe_reason=PE_REASONS[row[tables.A_PE_REASON]],
            de_reason=DE_REASONS[row[tables.A_DE_REASON]],
            read_reason=READ_REASONS[row[tables.A_READ_REASON]],
            prefill_tokens=int(self._state.requests[number, tables.LENGTH + tables.PREFILL]),
            decode_tokens=int(self._state.requests[number, tables.LENGTH + tables.DECODE]),
            prefill_read_tokens=head,
            decode_read_tokens=tail,
        )


def _numbered(joined: list[EngineSpec]) -> list[EngineSpec]:
    """Return engines as the tables number them: by role, group's joining, and order."""
    groups = list(dict.fromkeys(spec.group for spec in joined))
    return sorted(
        joined,
        key=lambda spec: (spec.role is Role.DECODE, groups.index(spec.group), spec.order),
    )
