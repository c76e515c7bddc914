"""Drives the live system's ``RequestScheduler``: ids, true loads, reports and fetches (§6.1)."""

from collections.abc import Callable

from dualpath.core.agents import AgentTable
from dualpath.core.cluster import Role
from dualpath.core.request import Request
from dualpath.policy.events import Assignment, EngineReport
from dualpath.policy.scheduler import RequestScheduler
from dualpath.sim.costs import next_multiple_ns, to_ns
from dualpath.sim.derived import Limits
from dualpath.sim.layout import ClusterLayout
from dualpath.sim.reference.events import EventQueue
from dualpath.sim.scheduling import engine_specs, scheduler_settings
from dualpath.sim.settings import Setup


class _Account:
    """The true load of one engine; ``dirty`` until it has been reported."""

    def __init__(self, engine: int, hbm_tokens: int) -> None:
        self._engine_id = str(engine)
        self._assign_seq = 0
        self._requests = 0
        self._tokens = 0
        self._free_hbm_tokens = hbm_tokens
        self.read_tokens = 0
        self.dirty = False

    def assigned(self, seq: int, tokens: int, hbm_tokens: int, read_tokens: int) -> None:
        self._assign_seq = seq
        self._requests += 1
        self._tokens += tokens
        self._free_hbm_tokens -= hbm_tokens
        self.read_tokens += read_tokens
        self.dirty = True

    def over(self, tokens: int, hbm_tokens: int) -> None:
        self._requests -= 1
        self._tokens -= tokens
        self._free_hbm_tokens += hbm_tokens
        self.dirty = True

    def report(self) -> EngineReport:
        self.dirty = False
        return EngineReport(
            engine_id=self._engine_id,
            assign_seq=self._assign_seq,
            unfinished_requests=self._requests,
            unfinished_tokens=self._tokens,
            read_queue_tokens=self.read_tokens,
            free_hbm_tokens=self._free_hbm_tokens,
            free_buffer_tokens=0,
        )


class SchedulerDriver:
    """Submits rounds, lets groups fetch while any waits, and hands on the assignments."""

    def __init__(
        self,
        setup: Setup,
        limits: Limits,
        layout: ClusterLayout,
        agents: AgentTable,
        events: EventQueue,
        assigned: Callable[[int, Assignment], None],
    ) -> None:
        self._setup = setup
        self._agents = agents
        self._events = events
        self._assigned = assigned
        self._interval_ns = to_ns(setup.cluster.fetch_interval_s)
        self._fetch_due = False
        self._layout = layout
        self._scheduler = RequestScheduler(scheduler_settings(setup, limits))
        self._accounts: list[_Account] = []
        self._members: list[list[_Account]] = []
        for spec in engine_specs(setup, limits, layout):
            self._scheduler.engine_joined(spec)
            self._accounts.append(_Account(len(self._accounts), spec.hbm_tokens))
        for group in layout.groups:
            self._members.append([self._accounts[e] for e in group.engines])

    def submit(self, round_index: int, stored_tokens: int) -> None:
        """Let a round wait; ``stored_tokens`` of its prompt have to be read from storage."""
        self._scheduler.submit(
            Request(
                request_id=str(round_index),
                prompt_tokens=int(self._agents.prompt_tokens[round_index]),
                hit_tokens=stored_tokens,
                max_new_tokens=int(self._agents.generated_tokens[round_index]),
            )
        )
        self._expect_fetch(self._events.now_ns)

    def part_read(self, engine: int, tokens: int) -> None:
        """One part of a request's reads is over."""
        account = self._accounts[engine]
        account.read_tokens -= tokens
        account.dirty = True

    def read_done(self, round_index: int) -> None:
        """All reads of a request are over."""
        self._scheduler.read_done(str(round_index))

    def prefill_done(self, round_index: int, assignment: Assignment) -> None:
        """The PE is through with a request."""
        self._scheduler.prefill_done(str(round_index))
        self._accounts[int(assignment.prefill_engine)].over(assignment.prefill_tokens, 0)

    def finished(self, round_index: int, assignment: Assignment) -> None:
        """A request is over."""
        self._scheduler.finished(str(round_index))
        tokens = assignment.decode_tokens
        self._accounts[int(assignment.decode_engine)].over(tokens, tokens)

    def _expect_fetch(self, not_before_ns: int) -> None:
        if not self._fetch_due:
            self._fetch_due = True
            self._events.at(next_multiple_ns(not_before_ns, self._interval_ns), self._fetch)

    def _fetch(self) -> None:
        """Let every group report and fetch, PE groups first."""
        self._fetch_due = False
        for group, members in zip(self._layout.groups, self._members, strict=True):
            for account in members:
                if account.dirty:
                    self._scheduler.report(account.report())
            for assignment in self._scheduler.fetch(group.name):
                self._take(assignment)
        if self._scheduler.waiting():
            self._expect_fetch(self._events.now_ns + 1)

    def _take(self, assignment: Assignment) -> None:
        read = {Role.PREFILL: 0, Role.DECODE: 0}
        for part in assignment.reads:
            read[part.side] = part.tokens
        self._accounts[int(assignment.prefill_engine)].assigned(
            assignment.prefill_assign_seq, assignment.prefill_tokens, 0, read[Role.PREFILL]
        )
        tokens = assignment.decode_tokens
        self._accounts[int(assignment.decode_engine)].assigned(
            assignment.decode_assign_seq, tokens, tokens, read[Role.DECODE]
        )
        self._assigned(int(assignment.request_id), assignment)
