"""The simulator's compiled scheduler behind the calls of the live one.

It numbers engines, groups and requests and keeps tables; here its numbers become names again, so
that a recorded log can be played to it and its answers compared whole.
"""

import heapq

from tests import compiled_scheduler as scheduler

from dualpath.core.cluster import Role
from dualpath.core.request import Request
from dualpath.policy.event_log import EngineJoined, EngineLost, EnginePaused, EventLog, Submitted
from dualpath.policy.events import (
    DE_REASONS,
    PE_REASONS,
    READ_REASONS,
    Assignment,
    EngineReport,
    EngineSpec,
    Granted,
    Thresholds,
)
from dualpath.policy.read_side import hit_runs
from dualpath_sim.simulator.compiled import tables


def before_losses(log: EventLog) -> EventLog:
    """Return the log up to the first engine lost or paused: in the simulator none is."""
    changes = EngineLost, EnginePaused
    losses = (i for i, event in enumerate(log.events) if isinstance(event, changes))
    return EventLog(log.begin, log.events[: next(losses, len(log.events))])


class CompiledScheduler:
    """``policy.event_log.SchedulerCalls`` made on the tables of ``sim.compiled``.

    The simulator's engines are there from the beginning: those that join in the course of ``log``
    are.  Numbers of finished requests are used again, as in the simulator.
    """

    def __init__(self, log: EventLog) -> None:
        joined = [event.spec for event in log.events if isinstance(event, EngineJoined)]
        submitted = sum(isinstance(event, Submitted) for event in log.events)
        self._block_tokens = log.begin.settings.block_tokens
        self._specs = _numbered(joined)
        self._engines = {spec.engine_id: number for number, spec in enumerate(self._specs)}
        self._groups = list(dict.fromkeys(spec.group for spec in self._specs))
        self._roles = {spec.group: spec.role for spec in self._specs}
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._free = list(range(submitted))
        self._state = tables.new_scheduler(log.begin.settings, self._specs, submitted)

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """The simulator's engines never change, and so do its thresholds: its tables are new."""
        rules = self._state.rules._replace(
            alpha_tokens=thresholds.alpha_tokens,
            beta_tokens=thresholds.beta_tokens,
        )
        self._state = self._state._replace(rules=rules)

    def engine_joined(self, spec: EngineSpec) -> None:
        """Nothing is left to do."""
        assert spec in self._specs

    def engine_lost(self, engine_id: str) -> list[str]:
        """The simulator has no word for it."""
        raise NotImplementedError(f"engine {engine_id} is lost; play the log before_losses")

    def engine_paused(self, engine_id: str) -> None:
        """The simulator has no word for it."""
        raise NotImplementedError(f"engine {engine_id} is paused; play the log before_losses")

    def engine_resumed(self, engine_id: str) -> None:
        """As ``engine_paused``."""
        raise NotImplementedError(f"engine {engine_id} resumes; play the log before_losses")

    def report(self, report: EngineReport) -> None:
        """An engine reported its load."""
        scheduler.report(
            self._state,
            self._engines[report.engine_id],
            report.assign_seq,
            report.unfinished_requests,
            report.unfinished_tokens,
            report.read_queue_tokens,
            report.free_hbm_tokens,
        )

    def submit(self, request: Request) -> None:
        """A request waits for engines."""
        number = heapq.heappop(self._free)
        self._numbers[request.request_id] = number
        self._names[number] = request.request_id
        scheduler.submit(
            self._state, number, request.prompt_tokens, request.hit_tokens, request.max_new_tokens
        )
        assert not request.cached, "the compiled scheduler plays the paper's system"

    def fetch(self, group: str) -> list[Assignment]:
        """A group asks for work."""
        if group not in self._roles:
            return []
        prefill = self._roles[group] is Role.PREFILL
        fetch = scheduler.fetch_prefill if prefill else scheduler.fetch_decode
        count = fetch(self._state, self._groups.index(group))
        return [self._assignment(row) for row in self._state.assigned[:count].tolist()]

    def granted(self, grant: Granted) -> list[Assignment]:
        """A DE has granted a request's slots: without a DRAM cache nothing is re-planned."""
        return []

    def read_done(self, request_id: str) -> None:
        """A request's storage reads are over."""
        if (number := self._numbers.get(request_id)) is not None:
            scheduler.read_done(self._state, number)

    def prefill_done(self, request_id: str) -> None:
        """A request's PE is through with it."""
        if (number := self._numbers.get(request_id)) is not None:
            scheduler.prefill_done(self._state, number)

    def finished(self, request_id: str) -> None:
        """A request is over."""
        if (number := self._numbers.pop(request_id, None)) is not None:
            scheduler.finished(self._state, number)
            heapq.heappush(self._free, number)

    def cancel(self, request_id: str) -> None:
        """A request was given up."""
        self.finished(request_id)

    def _assignment(self, row: list[int]) -> Assignment:
        number = row[tables.A_REQUEST]
        head, tail = row[tables.A_PE_READ], row[tables.A_DE_READ]
        return Assignment(
            request_id=self._names[number],
            prefill_engine=self._specs[row[tables.A_PE]].engine_id,
            decode_engine=self._specs[row[tables.A_DE]].engine_id,
            prefill_assign_seq=row[tables.A_PE_SEQ],
            decode_assign_seq=row[tables.A_DE_SEQ],
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
