"""Drives the live system's ``RequestScheduler``: its ids, engines' reports and fetches (§6.1)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from dualpath.core.blocks import holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.request import CachedPrefix, Request
from dualpath.policy.events import (
    Assignment,
    EngineJoined,
    EngineLost,
    EngineReport,
    Fetch,
    Finished,
    PrefillEnded,
    ReadsDone,
    SlotsGranted,
    Submitted,
)
from dualpath.policy.rebalance import RoleQueue
from dualpath.policy.scheduler import RequestScheduler, fetch_order
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator.derived import ClusterLayout, Limits, engine_specs, scheduler_settings
from dualpath_sim.simulator.reference.machine import EventQueue
from dualpath_sim.simulator.result import NS_PER_S
from dualpath_sim.simulator.rules import first_group, next_multiple_ns, to_ns
from dualpath_sim.simulator.settings import Setup


class SimulatedLoad:
    """The true load of one engine; ``dirty`` until it has been reported."""

    def __init__(self, engine: int, hbm_tokens: int) -> None:
        self._engine_id = str(engine)
        self.requests = 0
        self.tokens = 0
        self.free_hbm_tokens = hbm_tokens
        self.unallocated_hbm_tokens = 0
        self.read_tokens = 0
        self.dirty = False

    def assigned(self, tokens: int, hbm_tokens: int, read_tokens: int) -> None:
        """Count a request; the engine allocates ``hbm_tokens`` of HBM for it later."""
        self.requests += 1
        self.tokens += tokens
        self.unallocated_hbm_tokens += hbm_tokens
        self.read_tokens += read_tokens
        self.dirty = True

    def allocated(self, hbm_tokens: int) -> None:
        """Allocate HBM for a request."""
        # Nothing to report: the ledger subtracts one from the other.
        self.free_hbm_tokens -= hbm_tokens
        self.unallocated_hbm_tokens -= hbm_tokens

    def over(self, tokens: int, hbm_tokens: int) -> None:
        """Remove a request and free its HBM."""
        self.requests -= 1
        self.tokens -= tokens
        self.free_hbm_tokens += hbm_tokens
        self.dirty = True

    def report(self) -> EngineReport:
        """Return the load for the scheduler."""
        self.dirty = False
        return EngineReport(
            self._engine_id,
            Load(
                unfinished_requests=self.requests,
                unfinished_tokens=self.tokens,
                read_queue_tokens=self.read_tokens,
                free_hbm_tokens=self.free_hbm_tokens,
                free_buffer_tokens=0,
                unallocated_hbm_tokens=self.unallocated_hbm_tokens,
            ),
        )


class RoundWatch(Protocol):
    """Is notified of the progress of rounds, right after the scheduler."""

    def loaded(self, round_index: int) -> None:
        """All hits of a round are in DRAM."""

    def prefilled(self, round_index: int, assignment: Assignment) -> None:
        """The PE has prefilled a round, or its DE has computed the append."""

    def finished(self, round_index: int, assignment: Assignment) -> None:
        """A round is over."""


class _Group(NamedTuple):
    """Engines that fetch together."""

    name: str
    role: Role
    members: list[SimulatedLoad]


class SchedulerDriver:
    """Submits rounds, lets groups fetch while any round waits, and passes on the assignments."""

    def __init__(
        self,
        setup: Setup,
        limits: Limits,
        layout: ClusterLayout,
        agents: AgentTable,
        events: EventQueue,
        assigned: Callable[[int, Assignment], None],
    ) -> None:
        self._block_tokens = setup.cluster.block_tokens
        # Lists, which Python reads faster than arrays.
        self._prompt_tokens = agents.prompt_tokens.tolist()
        self._hit_tokens = agents.hit_tokens.tolist()
        self._generated_tokens = agents.generated_tokens.tolist()
        self._events = events
        self._assigned = assigned
        self._interval_ns = to_ns(setup.cluster.fetch_interval_s)
        self._fetch_due = False
        self._scheduler = RequestScheduler(scheduler_settings(setup, limits))
        self._waiting: dict[int, Request] = {}
        self.watch: RoundWatch | None = None
        self._specs = engine_specs(setup, limits, layout)
        self._accounts: list[SimulatedLoad] = []
        for spec in self._specs:
            self._scheduler.apply(EngineJoined(spec))
            self._accounts.append(SimulatedLoad(len(self._accounts), spec.hbm_tokens))
        self._groups = [
            _Group(group.name, group.role, [self._accounts[e] for e in group.engines])
            for group in layout.groups
        ]

    def submit(self, round_index: int, cached_blocks: dict[int, int]) -> None:
        """Let a round wait; engines' DRAM holds ``cached_blocks`` at the head of its context."""
        hit_tokens = self._hit_tokens[round_index]
        hit_blocks = holding_blocks(hit_tokens, self._block_tokens)
        request = Request(
            request_id=str(round_index),
            prompt_tokens=self._prompt_tokens[round_index],
            hit_tokens=hit_tokens,
            max_new_tokens=self._generated_tokens[round_index],
            cached=tuple(
                [
                    CachedPrefix(self._specs[engine].engine_id, min(blocks, hit_blocks))
                    for engine, blocks in cached_blocks.items()
                ]
                if hit_blocks
                else ()
            ),
        )
        self._scheduler.apply(Submitted(request))
        self._waiting[round_index] = request
        self._expect_fetch(self._events.now_ns)

    def granted(
        self,
        assignment: Assignment,
        cached_blocks: Mapping[Role, int],
        others: Mapping[int, int],
        *,
        third_reads: bool = True,
        use_thirds: bool = True,
    ) -> Assignment:
        """A DE has granted a round's slots; return its assignment, maybe re-planned.

        ``others`` are the blocks that any engine caches; for the flags see ``SlotsGranted``.
        """
        grant = SlotsGranted(
            assignment.request_id,
            decode_blocks=cached_blocks[Role.DECODE],
            prefill_blocks=cached_blocks[Role.PREFILL],
            others=tuple(
                CachedPrefix(self._specs[engine].engine_id, blocks)
                for engine, blocks in others.items()
            ),
            third_reads=third_reads,
            use_thirds=use_thirds,
        )
        if not (replanned := self._scheduler.apply(grant).assignments):
            return assignment
        (changed,) = replanned
        for role in changed.sides:
            before, after = assignment.at(role), changed.at(role)
            self._accounts[int(after.engine_id)].tokens += after.tokens - before.tokens
            self.read_more(int(after.engine_id), after.read_tokens - before.read_tokens)
        for third in assignment.thirds:
            self.part_read(int(third.engine_id), third.read_tokens)
        for third in changed.thirds:
            self.read_more(int(third.engine_id), third.read_tokens)
        return changed

    def read_more(self, engine: int, tokens: int) -> None:
        """An engine has to read so many tokens more than it was assigned."""
        self.part_read(engine, -tokens)

    def part_read(self, engine: int, tokens: int) -> None:
        """One part of a request's reads is over."""
        account = self._accounts[engine]
        account.read_tokens -= tokens
        account.dirty = True

    def read_done(self, round_index: int, assignment: Assignment) -> None:
        """All reads of a request are over."""
        self._scheduler.apply(ReadsDone(str(round_index)))
        if self.watch is not None and assignment.prefill_engine is not None:
            self.watch.loaded(round_index)

    def prefill_done(self, round_index: int, assignment: Assignment) -> None:
        """The PE has prefilled a request, or the DE has computed its append."""
        self._scheduler.apply(PrefillEnded(str(round_index)))
        if assignment.prefill_engine is not None:
            self._accounts[int(assignment.prefill_engine)].over(assignment.prefill_tokens, 0)
        if self.watch is not None:
            self.watch.prefilled(round_index, assignment)

    def hbm_allocated(self, assignment: Assignment) -> None:
        """The DE has allocated HBM for a request: for its whole length at once."""
        self._accounts[int(assignment.decode_engine)].allocated(assignment.decode_tokens)

    def finished(self, round_index: int, assignment: Assignment) -> None:
        """A request is over; the DE has allocated HBM for it."""
        self._scheduler.apply(Finished(str(round_index), self._events.now_ns / NS_PER_S))
        tokens = assignment.decode_tokens
        self._accounts[int(assignment.decode_engine)].over(tokens, tokens)
        if self.watch is not None:
            self.watch.finished(round_index, assignment)

    def unfinished(self, engines: range) -> tuple[int, int]:
        """Return the unfinished tokens and requests of engines."""
        accounts = [self._accounts[engine] for engine in engines]
        return sum(a.tokens for a in accounts), sum(a.requests for a in accounts)

    def queue(self, role: Role) -> RoleQueue:
        """Return a role's queue; a request that waits counts as the mean of those that wait."""
        lengths, waiting = self._scheduler.queue_lengths(), len(self._waiting)
        count = lengths.prefill if role is Role.PREFILL else lengths.decode
        mean = sum(self._scheduler.request_tokens(r, role) for r in self._waiting.values())
        mean = mean // waiting if waiting else 0
        accounts = [a for group in self._groups if group.role is role for a in group.members]
        placed = sum(account.tokens for account in accounts)
        return RoleQueue(placed + (waiting - count) * mean, count, count * mean)

    def retire(self, engines: range) -> None:
        """Assign nothing more to engines; what they were assigned continues and stays counted.

        The scheduler removes the requests of a lost engine, also from the load of their other
        engine, unless that has reported them: so all engines report first.  Requests that had this
        PE but no DE yet are on no engine; they are submitted again and wait behind the others.
        """
        for group in self._groups:
            self._report(group)
        lost: set[int] = set()
        for engine in engines:
            effects = self._scheduler.apply(EngineLost(str(engine)))
            lost.update(map(int, effects.lost_requests))
        for round_index in [r for r in self._waiting if r in lost]:
            request = self._waiting.pop(round_index)
            self._scheduler.apply(Submitted(request))
            self._waiting[round_index] = request
        retired = {id(self._accounts[engine]) for engine in engines}
        for group in self._groups:
            group.members[:] = [a for a in group.members if id(a) not in retired]
        self._groups = [group for group in self._groups if group.members]

    def join(self, engines: range, role: Role) -> None:
        """Let idle retired engines serve in a role, as a group of their own."""
        name = f"{role}-node-{self._specs[engines[0]].node}"
        for engine in engines:
            spec = msgspec.structs.replace(self._specs[engine], role=role, group=name)
            self._scheduler.apply(EngineJoined(spec))
            self._accounts[engine] = SimulatedLoad(engine, spec.hbm_tokens)
        self._groups.append(_Group(name, role, [self._accounts[engine] for engine in engines]))

    def _expect_fetch(self, not_before_ns: int) -> None:
        if not self._fetch_due:
            self._fetch_due = True
            self._events.at(next_multiple_ns(not_before_ns, self._interval_ns), self._fetch)

    def _fetch(self) -> None:
        """Let every group report and fetch, PE groups first and in turn."""
        self._fetch_due = False
        for group in self._in_turn():
            self._report(group)
            fetch = Fetch(group.name, self._events.now_ns / NS_PER_S)
            for assignment in self._scheduler.apply(fetch).assignments:
                self._take(assignment)
        if self._scheduler.waiting:
            self._expect_fetch(self._events.now_ns + 1)

    def _in_turn(self) -> list[_Group]:
        """Return the PE groups, with another one first at every tick, then the DE groups."""
        prefill = [group for group in self._groups if group.role is Role.PREFILL]
        decode = [group for group in self._groups if group.role is Role.DECODE]
        first = first_group(self._events.now_ns, self._interval_ns, max(len(prefill), 1))
        return fetch_order(prefill, decode, first)

    def _report(self, group: _Group) -> None:
        for account in group.members:
            if account.dirty:
                self._scheduler.apply(account.report())

    def _take(self, assignment: Assignment) -> None:
        for side in assignment.sides:
            charge = assignment.at(side)
            hbm_tokens = charge.tokens if side is Role.DECODE else 0
            account = self._accounts[int(charge.engine_id)]
            account.assigned(charge.tokens, hbm_tokens, charge.read_tokens)
        for third in assignment.thirds:
            self.read_more(int(third.engine_id), third.read_tokens)
        del self._waiting[int(assignment.request_id)]
        self._assigned(int(assignment.request_id), assignment)
