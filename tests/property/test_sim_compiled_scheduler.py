"""The compiled scheduler beside the live one: the same events, the same decisions and loads."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.modes import Mode
from dualpath.core.request import Request
from dualpath.policy.accounts import (
    FREE_HBM,
    HELD_TOKENS,
    NODE,
    READS,
    SEQ,
    TOK,
    UNCOUNTED_TOKENS,
)
from dualpath.policy.events import (
    DE_REASONS,
    PE_REASONS,
    Assignment,
    EngineJoined,
    EngineReport,
    EngineSpec,
    Fetch,
    Finished,
    PrefillEnded,
    ReadsDone,
    SchedulerSettings,
    Submitted,
)
from dualpath.policy.read_side import READ_REASONS
from dualpath.policy.scheduler import RequestScheduler

pytest.importorskip("numba")

from tests import compiled_scheduler as scheduler

from dualpath_sim.simulator.compiled import tables

LONGEST_PROMPT_TOKENS = 900
GENERATED_RESERVE_TOKENS = 100
LEAST_HBM_TOKENS = 400
REQUESTS = 64

#: (groups, engines per group, engines per node) of each role.
SHAPES = (
    ((1, 1, 1), (1, 1, 1)),
    ((1, 3, 2), (1, 4, 2)),
    ((2, 2, 2), (3, 2, 1)),
    ((3, 1, 1), (2, 3, 6)),
)
BY_LOAD = (Mode.DUALPATH, Mode.SPLIT, Mode.ORACLE)


def specs(draw: Any, shape: Any, interleaved: bool) -> list[EngineSpec]:
    """Engines as the tables number them; ``interleaved`` orders them across groups."""
    engines = []
    hbm = st.sampled_from([LEAST_HBM_TOKENS, LONGEST_PROMPT_TOKENS + 100, 2500])
    for role, (groups, per_group, per_node) in zip(Role, shape, strict=True):
        for group in range(groups):
            for rank in range(per_group):
                number = group * per_group + rank
                order = rank * groups + group if interleaved else number
                engines.append(
                    EngineSpec(
                        engine_id=f"{role}-{number}",
                        role=role,
                        node=f"{role}-node-{number // per_node}",
                        group=f"{role}-group-{group}",
                        order=order if role is Role.PREFILL else 1000 + order,
                        hbm_tokens=2500 if number == 0 else draw(hbm),
                        snic_tokens_per_s=draw(st.sampled_from([100.0, 100.0, 300.0])),
                    )
                )
    return engines


class Engine:
    """What an engine was assigned and has not finished: tokens and reads of requests."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.assigned: dict[str, tuple[int, int]] = {}

    def report(self, uncounted: tuple[str, ...] = ()) -> EngineReport:
        """The truth, without the requests that the engine does not count yet."""
        known = [entry for name, entry in self.assigned.items() if name not in uncounted]
        tokens = sum(tokens for tokens, _ in known)
        load = Load(
            unfinished_requests=len(known),
            unfinished_tokens=tokens,
            read_queue_tokens=sum(reads for _, reads in known),
            free_hbm_tokens=self.spec.hbm_tokens - tokens,
            free_buffer_tokens=0,
        )
        return EngineReport(self.spec.engine_id, load, uncounted)


class Twins(RuleBasedStateMachine):
    """Every event goes to both; requests are named by the number they have in the tables."""

    modes = tuple(Mode)

    @initialize(
        data=st.data(),
        shape=st.sampled_from(SHAPES),
        interleaved=st.booleans(),
        balanced=st.booleans(),
        alpha_tokens=st.sampled_from([0, 200, 5000]),
        beta_tokens=st.sampled_from([0, 700, 5000, 1_000_000]),
    )
    def start(
        self,
        data: st.DataObject,
        shape: Any,
        interleaved: bool,
        balanced: bool,
        alpha_tokens: int,
        beta_tokens: int,
    ) -> None:
        self.mode = data.draw(st.sampled_from(self.modes))
        rules = SchedulerSettings(
            mode=self.mode,
            alpha_tokens=alpha_tokens,
            beta_tokens=beta_tokens,
            generated_reserve_tokens=GENERATED_RESERVE_TOKENS,
            balanced_baselines=balanced,
        )
        self.by_load = self.mode in BY_LOAD or (balanced and not self.mode.dual_path)
        self.specs = specs(data.draw, shape, interleaved)
        self.live = RequestScheduler(rules)
        for spec in self.specs:
            self.live.apply(EngineJoined(spec))
        self.tables = tables.new_scheduler(rules, self.specs, REQUESTS)
        self.numbers = {spec.engine_id: number for number, spec in enumerate(self.specs)}
        self.groups = list(dict.fromkeys(spec.group for spec in self.specs))
        self.engines = {spec.engine_id: Engine(spec) for spec in self.specs}
        self.free = list(range(REQUESTS))
        self.submitted: dict[str, int] = {}
        self.assigned: dict[str, Assignment] = {}
        self.reading: set[str] = set()
        self.latest_in_line: dict[tuple[str, ...], int] = {}
        self.count = 0

    @rule(
        burst=st.lists(
            st.tuples(
                st.integers(1, LONGEST_PROMPT_TOKENS),
                st.sampled_from([0.0, 0.5, 0.98, 1.0]),
                st.integers(1, 300),
            ),
            min_size=1,
            max_size=8,
        )
    )
    def submit_burst(self, burst: list[tuple[int, float, int]]) -> None:
        for prompt, share, new in burst[: len(self.free)]:
            self.submit(prompt, share, new)

    def submit(self, prompt: int, share: float, new: int) -> None:
        number, hit = self.free.pop(), int((prompt - 1) * share)
        self.submitted[str(number)] = self.count
        self.count += 1
        self.live.apply(Submitted(Request(str(number), prompt, hit, new)))
        scheduler.submit(self.tables, number, prompt, hit, new)

    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        self.fetch_group(data.draw(st.sampled_from(self.groups)))

    def fetch_group(self, name: str) -> None:
        expected = self.live.apply(Fetch(name)).assignments
        group = self.groups.index(name)
        prefill = name.startswith(Role.PREFILL)
        compiled_fetch = scheduler.fetch_prefill if prefill else scheduler.fetch_decode
        count = compiled_fetch(self.tables, group)
        rows = self.tables.assigned[:count].tolist()
        assert rows == [self.row_of(assignment) for assignment in expected]
        for assignment in expected:
            self.accept(assignment)

    def row_of(self, assignment: Assignment) -> list[int]:
        return [
            int(assignment.request_id),
            self.numbers[assignment.at(Role.PREFILL).engine_id],
            self.numbers[assignment.decode_engine],
            assignment.prefill_read_tokens,
            assignment.decode_read_tokens,
            PE_REASONS.index(assignment.pe_reason),
            DE_REASONS.index(assignment.de_reason),
            READ_REASONS.index(assignment.read_reason),
        ]

    def accept(self, assignment: Assignment) -> None:
        request_id = assignment.request_id
        self.assigned[request_id] = assignment
        self.reading.add(request_id)
        prefill = self.engines[assignment.at(Role.PREFILL).engine_id]
        decode = self.engines[assignment.decode_engine]
        at_prefill, at_decode = assignment.prefill_read_tokens, assignment.decode_read_tokens
        prefill.assigned[request_id] = assignment.prefill_tokens, at_prefill
        decode.assigned[request_id] = assignment.decode_tokens, at_decode
        line: tuple[str, ...] = (decode.spec.group,)
        if not self.by_load:
            line = assignment.engines
        assert self.submitted[request_id] > self.latest_in_line.get(line, -1), "first come first"
        self.latest_in_line[line] = self.submitted[request_id]

    @rule(data=st.data(), true=st.booleans())
    def report(self, data: st.DataObject, true: bool) -> None:
        """One engine reports the truth, late or without some requests, or anything at all."""
        engine = self.engines[data.draw(st.sampled_from(sorted(self.engines)))]
        # A request that was counted in makes the report a late one; others have ended here.
        names = st.sampled_from(sorted(self.assigned) or [""])
        uncounted = tuple(data.draw(st.lists(names, max_size=3, unique=True)))
        if not self.assigned:
            uncounted = ()
        amount = st.integers(0, 1500)
        load = Load(*(data.draw(amount) for _ in range(5)))
        self.take(
            engine.report(uncounted)
            if true
            else EngineReport(engine.spec.engine_id, load, uncounted)
        )

    @rule(data=st.data())
    def group_reports_and_fetches(self, data: st.DataObject) -> None:
        """As in the simulator: all engines of a group report the truth, then the group fetches."""
        group = data.draw(st.sampled_from(self.groups))
        for engine in self.engines.values():
            if engine.spec.group == group:
                self.take(engine.report())
        self.fetch_group(group)

    def take(self, report: EngineReport) -> None:
        self.live.apply(report)
        scheduler.report(
            self.tables,
            self.numbers[report.engine_id],
            np.array([int(name) for name in report.uncounted], np.int64),
            report.load.unfinished_requests,
            report.load.unfinished_tokens,
            report.load.read_queue_tokens,
            report.load.free_hbm_tokens,
            report.load.unallocated_hbm_tokens,
        )

    @rule(data=st.data(), steps=st.integers(1, 3))
    @precondition(lambda self: self.assigned)
    def work(self, data: st.DataObject, steps: int) -> None:
        self.advance(data.draw(st.sampled_from(sorted(self.assigned))), steps)

    def advance(self, request_id: str, steps: int) -> None:
        assignment = self.assigned[request_id]
        self.reading.discard(request_id)
        self.live.apply(ReadsDone(request_id))
        scheduler.read_done(self.tables, int(request_id))
        for engine_id in assignment.engines:
            assigned = self.engines[engine_id].assigned
            if request_id in assigned:
                assigned[request_id] = assigned[request_id][0], 0
        if steps > 1:
            self.live.apply(PrefillEnded(request_id))
            scheduler.prefill_done(self.tables, int(request_id))
            self.engines[assignment.at(Role.PREFILL).engine_id].assigned.pop(request_id, None)
        if steps > 2:
            self.live.apply(Finished(request_id))
            self.remove(request_id)

    @rule(data=st.data())
    @precondition(lambda self: self.assigned)
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.assigned)))
        self.live.apply(Finished(request_id))
        self.remove(request_id)

    def remove(self, request_id: str) -> None:
        scheduler.finished(self.tables, int(request_id))
        del self.submitted[request_id]
        self.assigned.pop(request_id, None)
        self.reading.discard(request_id)
        for engine in self.engines.values():
            engine.assigned.pop(request_id, None)
        self.free.append(int(request_id))

    @invariant()
    def loads_are_the_same(self) -> None:
        if not hasattr(self, "tables"):
            return
        engines, nodes = self.tables.engines, self.tables.nodes
        assert self.tables.counters[tables.UNASSIGNED] == self.live.waiting
        for number, load in enumerate(self.live.loads()):
            assert engines[TOK, number] == load.unfinished_tokens
            assert engines[SEQ, number] == load.unfinished_requests
            assert engines[FREE_HBM, number] == load.free_hbm_tokens
            assert nodes[tables.READ_Q, engines[NODE, number]] == load.read_queue_tokens

    @invariant()
    def uncounted_tokens_are_those_of_uncounted_requests(self) -> None:
        if not hasattr(self, "tables"):
            return
        engines, requests = self.tables.engines, self.tables.requests
        for number, spec in enumerate(self.specs):
            role = tables.PREFILL if spec.role is Role.PREFILL else tables.DECODE
            rows = [requests[int(name)] for name in self.engines[spec.engine_id].assigned]
            uncounted = [
                int(row[tables.CHARGE + role])
                for row in rows
                if row[tables.NOT_IN_REPORT + role] == engines[tables.REPORTS, number]
            ]
            assert engines[UNCOUNTED_TOKENS, number] == sum(uncounted)

    def teardown(self) -> None:
        """With honest reports everything is served in the end, and nothing stays on the tables."""
        if not hasattr(self, "tables"):
            return
        self.report_the_truth()
        while self.submitted:
            before = len(self.submitted)
            for group in self.groups:
                self.fetch_group(group)
            for request_id in sorted(self.assigned):
                self.advance(request_id, 3)
            self.report_the_truth()
            self.loads_are_the_same()
            assert len(self.submitted) < before, "no progress: starvation"
        engines, groups = self.tables.engines, self.tables.groups
        for row in (TOK, SEQ, READS, HELD_TOKENS, UNCOUNTED_TOKENS):
            assert not engines[row].any()
        assert (engines[FREE_HBM] == engines[tables.HBM]).all()
        assert not groups[tables.PRIVATE_TOKENS].any()
        assert not self.tables.nodes[tables.READ_Q].any()
        ends = self.tables.queues[:, [tables.QUEUE_FIRST, tables.QUEUE_LAST]]
        assert (ends == tables.NONE).all()

    def report_the_truth(self) -> None:
        for engine in self.engines.values():
            self.take(engine.report())


TestTwins = Twins.TestCase
TestTwins.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)


class DualPathTwins(Twins):
    """The same with the modes that choose a side by load."""

    modes = (Mode.DUALPATH, Mode.SPLIT)


TestDualPathTwins = DualPathTwins.TestCase
TestDualPathTwins.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, derandomize=True
)


class InTurnTwins(Twins):
    """The same with the modes that deal engines in turn."""

    modes = (Mode.BASIC, Mode.LAYERWISE, Mode.ROUND_ROBIN)


TestInTurnTwins = InTurnTwins.TestCase
TestInTurnTwins.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_long_wait_queue_is_dealt_alike(mode: Mode) -> None:
    """More requests than any look ahead, at once, on a cluster that takes them in bits."""
    twins = Twins()
    engines = [
        EngineSpec(
            engine_id=f"e{number}",
            role=Role.PREFILL if number < 8 else Role.DECODE,
            node=f"n{number // 4}",
            group=f"{Role.PREFILL if number < 8 else Role.DECODE}-{number // 4}",
            order=number,
            hbm_tokens=20_000,
        )
        for number in range(24)
    ]
    rules = SchedulerSettings(mode, alpha_tokens=2000, beta_tokens=30_000)
    twins.mode, twins.specs, twins.by_load = mode, engines, mode in BY_LOAD
    twins.live = RequestScheduler(rules)
    for spec in engines:
        twins.live.apply(EngineJoined(spec))
    twins.tables = tables.new_scheduler(rules, engines, 1500)
    twins.numbers = {spec.engine_id: number for number, spec in enumerate(engines)}
    twins.groups = list(dict.fromkeys(spec.group for spec in engines))
    twins.engines = {spec.engine_id: Engine(spec) for spec in engines}
    twins.free, twins.submitted, twins.assigned = list(range(1500)), {}, {}
    twins.reading = set()
    twins.latest_in_line, twins.count = {}, 0
    for number in range(1500):
        twins.submit(1 + number * 7919 % 900, 0.9, 50)
    twins.teardown()
