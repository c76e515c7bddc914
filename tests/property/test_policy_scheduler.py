"""The scheduler against honest engines that come, go, report late and finish in any order."""

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.errors import EngineLostError
from dualpath.core.modes import Handover, Mode
from dualpath.core.request import CachedPrefix, Request
from dualpath.policy.events import (
    Assignment,
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineReport,
    EngineResumed,
    EngineSpec,
    Fetch,
    Finished,
    MoveBegun,
    MoveEnded,
    PrefillEnded,
    ReadsDone,
    SchedulerSettings,
    SlotsGranted,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler

BLOCK_TOKENS = 64
BETA_TOKENS = 600
LONGEST_PROMPT_TOKENS = 900
DECODE_HBM_TOKENS = 1300


class Engine:
    """The assignments of an engine that have not ended there, and those that it has received."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.tokens: dict[str, int] = {}
        self.reads: dict[str, int] = {}
        self.received: set[str] = set()

    def report(self) -> EngineReport:
        counted = {r: tokens for r, tokens in self.tokens.items() if r in self.received}
        tokens = sum(counted.values())
        # A third DE reads for requests that it was not assigned.
        at_third = sum(tokens for r, tokens in self.reads.items() if r not in self.tokens)
        return EngineReport(
            self.spec.engine_id,
            Load(
                unfinished_requests=len(counted),
                unfinished_tokens=tokens,
                read_queue_tokens=at_third + sum(self.reads.get(r, 0) for r in counted),
                free_hbm_tokens=self.spec.hbm_tokens - tokens,
                free_buffer_tokens=0,
            ),
            uncounted=tuple(r for r in self.tokens if r not in self.received),
        )


def specs() -> list[EngineSpec]:
    """Two PE groups and two DE groups with two engines each, one node per group."""
    return [
        EngineSpec(
            engine_id=f"{role}-{group}-{rank}",
            role=role,
            node=f"{role}-node-{group}",
            group=f"{role}-group-{group}",
            order=number * 4 + group * 2 + rank,
            hbm_tokens=DECODE_HBM_TOKENS,
        )
        for number, role in enumerate(Role)
        for group in range(2)
        for rank in range(2)
    ]


class Cluster(RuleBasedStateMachine):
    """Any interleaving of events; the model beside it is a plain dictionary of requests."""

    modes = tuple(Mode)

    @initialize(
        data=st.data(),
        balanced=st.booleans(),
        append=st.sampled_from([0, 100, 1000]),
        handover=st.sampled_from(Handover),
        thirds=st.integers(0, 2),
    )
    def start(
        self,
        data: st.DataObject,
        balanced: bool,
        append: int,
        handover: Handover,
        thirds: int,
    ) -> None:
        self.mode = data.draw(st.sampled_from(self.modes))
        self.scheduler = RequestScheduler(
            SchedulerSettings(
                mode=self.mode,
                alpha_tokens=500,
                beta_tokens=BETA_TOKENS,
                block_tokens=BLOCK_TOKENS,
                balanced_baselines=balanced,
                append_at_decode_tokens=append,
                handover=handover,
                third_engine_reads=thirds,
            )
        )
        self.handover, self.thirds = handover, thirds
        self.append_tokens = append if self.mode in (Mode.DUALPATH, Mode.SPLIT) else 0
        self.limited = balanced or self.mode in (Mode.DUALPATH, Mode.SPLIT, Mode.ORACLE)
        if self.mode is Mode.ROUND_ROBIN:
            self.limited = False
        self.engines: dict[str, Engine] = {}
        self.paused: set[str] = set()
        self.requests: dict[str, Request] = {}
        self.assigned: dict[str, Assignment] = {}
        #: The engines that had joined when a request was submitted.
        self.known: dict[str, frozenset[str]] = {}
        #: Requests whose slots are granted, or that are further.
        self.reading: set[str] = set()
        self.prefilled: set[str] = set()
        #: Requests of which the KV is being moved, and the DE that it is moved to.
        self.moving: dict[str, str] = {}
        self.count = 0
        self.now_s = 0.0
        self.reports: dict[str, EngineReport] = {}
        for spec in specs():
            self.join(spec)

    def join(self, spec: EngineSpec) -> None:
        self.scheduler.apply(EngineJoined(spec))
        self.engines[spec.engine_id] = Engine(spec)

    def accept(self, assignment: Assignment) -> None:
        request = self.requests[assignment.request_id]
        assert assignment.request_id not in self.assigned
        self.assigned[assignment.request_id] = assignment
        # A request that came with an engine keeps it, if the engine is paused afterwards.
        given = {request.given_prefill, request.only_decode}
        assert (self.paused - given).isdisjoint(assignment.engines)
        assert request.given_prefill in ("", assignment.prefill_engine)
        assert request.only_decode in ("", assignment.decode_engine)
        if assignment.prefill_engine is None:
            hit_tokens = request.hit_tokens + assignment.unstored_tokens
            assert hit_tokens > 0
            assert request.prompt_tokens - hit_tokens <= self.append_tokens
            assert not request.only_decode, "a request that came with engines has a PE"
        in_hbm = {Handover.BUFFER: False, Handover.HBM: True}.get(self.handover)
        if assignment.prefill_engine is None or self.mode not in (Mode.DUALPATH, Mode.SPLIT):
            in_hbm = False
        assert in_hbm is None or (assignment.handover is Handover.HBM) == in_hbm
        known = self.known[assignment.request_id]
        cached_blocks = {p.engine_id: p.blocks for p in request.cached if p.engine_id in known}
        usable = [
            assignment.at(side).engine_id
            for side in assignment.sides
            if self.mode.dual_path or (side is Role.PREFILL and self.mode is not Mode.ORACLE)
        ]
        longest = max((cached_blocks.get(name, 0) for name in usable), default=0)
        self.charge(assignment, longest)

    def charge(self, assignment: Assignment, longest: int) -> None:
        """Check and note an assignment whose engines cache the first ``longest`` blocks."""
        request = self.requests[assignment.request_id]
        for side in assignment.sides:
            charge = assignment.at(side)
            self.engines[charge.engine_id].tokens[assignment.request_id] = charge.tokens
        hit_tokens = request.hit_tokens + assignment.unstored_tokens
        expected = 0 if self.mode is Mode.ORACLE else hit_tokens
        assert hit_tokens == max(request.hit_tokens, longest * BLOCK_TOKENS), (
            "what is stored or what its own engines cache"
        )
        position = 0
        read_tokens = {
            Role.PREFILL: assignment.prefill_read_tokens,
            Role.DECODE: assignment.decode_read_tokens,
        }
        for run in assignment.reads:
            tokens = run.tokens(BLOCK_TOKENS, hit_tokens)
            assert run.blocks.first * BLOCK_TOKENS == position
            position += tokens
            if run.third:
                assert run.third not in assignment.engines
                assert run.third not in self.paused
                reads = self.engines[run.third].reads
                before = reads.get(assignment.request_id, 0)
                reads[assignment.request_id] = before + (0 if run.cached else tokens)
                continue
            if run.cached:
                continue
            assert tokens == read_tokens.pop(run.side) > 0
            reader = self.engines[assignment.at(run.side).engine_id]
            reader.reads[assignment.request_id] = tokens
        assert not any(read_tokens.values())
        assert position == expected
        thirds = {run.third for run in assignment.reads} - {""}
        assert thirds == {third.engine_id for third in assignment.thirds}
        assert len(thirds) <= self.thirds
        for third in assignment.thirds:
            read = self.engines[third.engine_id].reads[assignment.request_id]
            assert read == third.read_tokens

    def remove(self, request_id: str) -> None:
        del self.requests[request_id]
        self.assigned.pop(request_id, None)
        self.reading.discard(request_id)
        self.prefilled.discard(request_id)
        self.moving.pop(request_id, None)
        for engine in self.engines.values():
            engine.tokens.pop(request_id, None)
            engine.reads.pop(request_id, None)
            engine.received.discard(request_id)

    def submit_again(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.known[request.request_id] = frozenset(self.engines)
        try:
            effects = self.scheduler.apply(Submitted(request))
        except EngineLostError:
            assert request.given_prefill or request.only_decode, "only given engines may be missing"
            del self.requests[request.request_id]
            return
        for assignment in effects.assignments:
            self.accept(assignment)

    @rule(
        prompt=st.integers(1, LONGEST_PROMPT_TOKENS),
        share=st.floats(0, 1),
        new=st.integers(1, 500),
        keepers=st.dictionaries(st.sampled_from(specs()), st.floats(0, 1), max_size=3),
        given=st.sets(st.sampled_from(specs()), max_size=2),
    )
    def submit(
        self,
        prompt: int,
        share: float,
        new: int,
        keepers: dict[EngineSpec, float],
        given: set[EngineSpec],
    ) -> None:
        """``keepers``: what share of the prompt engines cache, lost ones perhaps among them.

        That may be more than is stored.  ``given`` are engines that the request comes with, lost
        ones perhaps among them.
        """
        engines = {spec.role: spec.engine_id for spec in given}
        blocks, most = int((prompt - 1) * share) // BLOCK_TOKENS, (prompt - 1) // BLOCK_TOKENS
        cached = tuple(
            CachedPrefix(spec.engine_id, round(part * most))
            for spec, part in keepers.items()
            if round(part * most)
        )
        hit = blocks * BLOCK_TOKENS
        request = Request(
            f"r{self.count}",
            *(prompt, hit, new, cached),
            prefill_engine=engines.get(Role.PREFILL, msgspec.UNSET),
            decode_engine=engines.get(Role.DECODE, msgspec.UNSET),
        )
        self.submit_again(request)
        self.count += 1

    @rule(seconds=st.floats(0.1, 10))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(spec=st.sampled_from(specs()))
    def fetch(self, spec: EngineSpec) -> None:
        for assignment in self.scheduler.apply(Fetch(spec.group, self.now_s)).assignments:
            self.accept(assignment)

    @rule(data=st.data())
    @precondition(lambda self: self.assigned)
    def send(self, data: st.DataObject) -> None:
        """An engine receives an assignment, in whatever order they were decided."""
        assignment = self.assigned[data.draw(st.sampled_from(sorted(self.assigned)))]
        moving_to = self.moving.get(assignment.request_id)
        engines = (*assignment.engines, *([moving_to] if moving_to else ()))
        engine_id = data.draw(st.sampled_from(engines))
        engine = self.engines.get(engine_id)  # it may be lost
        if engine is not None and assignment.request_id in engine.tokens:
            engine.received.add(assignment.request_id)

    @rule(data=st.data(), resent=st.booleans())
    @precondition(lambda self: self.engines)
    def report(self, data: st.DataObject, resent: bool) -> None:
        """An engine reports; the report before it comes late, if it is ``resent``."""
        engine_id = data.draw(st.sampled_from(sorted(self.engines)))
        report = self.engines[engine_id].report()
        before, self.reports[engine_id] = self.reports.get(engine_id, report), report
        self.scheduler.apply(report)
        loads = self.scheduler.loads()
        live = self.engines[engine_id].received
        if resent and live & set(before.uncounted):
            self.scheduler.apply(before)
            assert self.scheduler.loads() == loads, "a late report changes nothing"
        if resent:
            self.scheduler.apply(report)
            assert self.scheduler.loads() == loads, "a report may come twice"
        (load,) = [load for load in loads if load.engine_id == engine_id]
        mine = self.engines[engine_id].tokens
        held = load.unfinished_tokens - sum(mine.values())
        assert held >= 0, "each assigned request counts, received or not"
        if len(self.assigned) == len(self.requests):
            assert (held, load.unfinished_requests) == (0, len(mine)), "and it counts once"

    @rule(
        data=st.data(),
        parts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
        others=st.dictionaries(st.sampled_from(specs()), st.integers(1, 20), max_size=2),
        refused=st.sampled_from([{}, {"third_reads": False}, {"use_thirds": False}]),
    )
    @precondition(lambda self: self.assigned.keys() - self.reading)
    def grant(
        self,
        data: st.DataObject,
        parts: tuple[float, float],
        others: dict[EngineSpec, int],
        refused: dict[str, bool],
    ) -> None:
        """A DE grants slots; its engines have evicted some of the blocks they cached.

        ``others`` are further engines that cache blocks; third DEs have perhaps refused slots.
        """
        names = sorted(self.assigned.keys() - self.reading)
        old = self.assigned[data.draw(st.sampled_from(names))]
        self.reading.add(old.request_id)
        left = {
            side: round(part * old.cached_end(side))
            for side, part in zip((Role.DECODE, Role.PREFILL), parts, strict=True)
        }
        cached = tuple(
            CachedPrefix(spec.engine_id, blocks)
            for spec, blocks in others.items()
            if spec.engine_id in self.engines and spec.role is Role.DECODE
        )
        grant = SlotsGranted(old.request_id, left[Role.DECODE], left[Role.PREFILL], cached)
        effects = self.scheduler.apply(grant)
        evicted = any(left[s] < old.cached_end(s) for s in Role)
        may_change = self.thirds > 0 and any(not run.cached for run in old.reads)
        assert bool(effects.assignments) == (
            evicted or (may_change and old.prefill_engine is not None)
        )
        self.replanned(old, effects.assignments, left)
        if refused:
            now = self.assigned[old.request_id]
            effects = self.scheduler.apply(msgspec.structs.replace(grant, **refused))
            reads = any(third.read_tokens for third in now.thirds)
            if now.thirds and (reads or not refused.get("use_thirds", True)):
                assert effects.assignments, "third DEs have refused slots"
            self.replanned(now, effects.assignments, left)
            now = self.assigned[old.request_id]
            assert not any(third.read_tokens for third in now.thirds)
            assert not now.thirds or refused.get("use_thirds", True)

    def replanned(
        self, old: Assignment, changed: tuple[Assignment, ...], left: dict[Role, int]
    ) -> None:
        """The reads of a request are planned again; its engines cache ``left`` blocks."""
        for new in changed:
            assert new.engines == old.engines
            assert new.handover is old.handover
            if new.handover is Handover.HBM:
                assert new.blocks_at(Role.DECODE) <= old.blocks_at(Role.DECODE)
            for engine_id in (*old.engines, *(third.engine_id for third in old.thirds)):
                self.engines[engine_id].reads.pop(old.request_id, None)
            self.assigned[old.request_id] = new
            self.charge(new, max(left.values()))

    @rule(data=st.data(), steps=st.integers(1, 3))
    @precondition(lambda self: self.assigned)
    def work(self, data: st.DataObject, steps: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.assigned)))
        self.advance(request_id, steps)

    def advance(self, request_id: str, steps: int) -> None:
        self.reading.add(request_id)
        self.scheduler.apply(ReadsDone(request_id))
        for engine in self.engines.values():
            engine.reads.pop(request_id, None)
        if steps > 1:
            self.scheduler.apply(PrefillEnded(request_id))
            self.prefilled.add(request_id)
            prefill = self.engines.get(self.assigned[request_id].prefill_engine or "")
            if prefill is not None:
                prefill.tokens.pop(request_id, None)
                prefill.received.discard(request_id)
        if steps > 2:
            self.scheduler.apply(Finished(request_id, self.now_s))
            self.remove(request_id)

    @rule(data=st.data(), spec=st.sampled_from(specs()))
    @precondition(lambda self: self.prefilled - self.moving.keys())
    def begin_move(self, data: st.DataObject, spec: EngineSpec) -> None:
        """A DE is to fetch the KV of a request whose prompt is computed."""
        name = data.draw(st.sampled_from(sorted(self.prefilled - self.moving.keys())))
        old, target = self.assigned[name], self.engines.get(spec.engine_id)
        before = self.scheduler.loads()
        room = {load.engine_id: load.free_hbm_tokens for load in before}.get(spec.engine_id, 0)
        waiting = self.scheduler.queue_lengths().decode
        takes = target is not None and spec.engine_id not in self.paused and not waiting
        takes = takes and spec.role is Role.DECODE and spec.engine_id != old.decode_engine
        try:
            self.scheduler.apply(MoveBegun(name, spec.engine_id))
        except EngineLostError:
            assert not takes or room < old.decode_tokens
            assert self.scheduler.loads() == before
            return
        assert takes
        assert target is not None
        self.moving[name] = spec.engine_id
        target.tokens[name] = old.decode_tokens

    @rule(data=st.data(), moved=st.booleans())
    @precondition(lambda self: self.moving)
    def end_move(self, data: st.DataObject, moved: bool) -> None:
        """A move is over; its report may come twice."""
        name = data.draw(st.sampled_from(sorted(self.moving)))
        old, target = self.assigned[name], self.moving.pop(name)
        for _ in range(2):
            self.scheduler.apply(MoveEnded(name, moved, self.now_s))
        left = self.engines[old.decode_engine if moved else target]
        left.tokens.pop(name)
        left.received.discard(name)
        if moved:
            self.assigned[name] = msgspec.structs.replace(old, decode_engine=target)

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.scheduler.apply(Finished(request_id))
        self.scheduler.apply(Finished(request_id))
        self.remove(request_id)

    @rule(data=st.data())
    @precondition(lambda self: self.engines)
    def lose(self, data: st.DataObject) -> None:
        engine = self.engines.pop(data.draw(st.sampled_from(sorted(self.engines))))
        self.paused.discard(engine.spec.engine_id)
        lost = self.scheduler.apply(EngineLost(engine.spec.engine_id)).lost_requests
        held_here = set(engine.tokens)
        held_here |= {
            name
            for name, made in self.assigned.items()
            if any(third.engine_id == engine.spec.engine_id for third in made.thirds)
            and name not in self.prefilled
        }
        assert held_here <= set(lost)
        assert all(request_id not in self.assigned for request_id in set(lost) - held_here)
        for request_id in lost:
            request = self.requests[request_id]
            self.remove(request_id)
            self.submit_again(request)

    @rule(data=st.data())
    @precondition(lambda self: len(self.engines) < len(specs()))
    def rejoin(self, data: st.DataObject) -> None:
        gone = [spec for spec in specs() if spec.engine_id not in self.engines]
        self.join(data.draw(st.sampled_from(gone)))

    @rule(data=st.data())
    @precondition(lambda self: self.engines)
    def pause(self, data: st.DataObject) -> None:
        engine_id = data.draw(st.sampled_from(sorted(self.engines)))
        self.scheduler.apply(EnginePaused(engine_id))
        self.paused.add(engine_id)

    @rule(data=st.data())
    @precondition(lambda self: self.paused)
    def resume(self, data: st.DataObject) -> None:
        engine_id = data.draw(st.sampled_from(sorted(self.paused)))
        self.scheduler.apply(EngineResumed(engine_id))
        self.paused.remove(engine_id)

    @invariant()
    def requests_are_conserved(self) -> None:
        if hasattr(self, "scheduler"):
            assert self.scheduler.waiting == len(self.requests) - len(self.assigned)

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for load in self.scheduler.loads():
            if load.role is Role.DECODE:
                assert load.free_hbm_tokens >= 0
            elif self.limited and not self.any_given(load.engine_id):
                assert load.unfinished_tokens <= BETA_TOKENS + LONGEST_PROMPT_TOKENS
            assert load.read_queue_tokens >= 0
            assert load.unfinished_tokens >= sum(self.engines[load.engine_id].tokens.values())

    def any_given(self, prefill_engine: str) -> bool:
        """Whether a request came with this PE, for which β does not hold."""
        return any(request.given_prefill == prefill_engine for request in self.requests.values())

    def teardown(self) -> None:
        """While both roles have an engine that takes requests, and load finishes, all is served."""
        if not hasattr(self, "scheduler"):
            return
        for role in Role:
            if not any(engine.spec.role is role for engine in self.engines.values()):
                self.join(next(spec for spec in specs() if spec.role is role))
        for role in Role:
            mine = {e.spec.engine_id for e in self.engines.values() if e.spec.role is role}
            if mine <= self.paused:
                self.scheduler.apply(EngineResumed(min(mine)))
                self.paused.remove(min(mine))
        self.report_all()
        while self.requests:
            before = len(self.requests)
            for group in sorted({spec.group for spec in specs()}):
                for assignment in self.scheduler.apply(Fetch(group, self.now_s)).assignments:
                    self.accept(assignment)
            for request_id in sorted(self.assigned):
                self.advance(request_id, 3)
            self.report_all()
            assert len(self.requests) < before or not self.requests, "no progress: deadlock"
        for load in self.scheduler.loads():
            assert load.unfinished_tokens == 0
            assert load.unfinished_requests == 0
            assert load.read_queue_tokens == 0
            assert load.free_hbm_tokens == self.engines[load.engine_id].spec.hbm_tokens
        assert self.scheduler.waiting == 0
        assert self.scheduler.queue_lengths().decode == 0

    def report_all(self) -> None:
        for engine in self.engines.values():
            engine.received.update(engine.tokens)
            self.scheduler.apply(engine.report())


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)


class DualPathCluster(Cluster):
    """The same with the mode that matters most."""

    modes = (Mode.DUALPATH, Mode.SPLIT)


TestDualPathCluster = DualPathCluster.TestCase
TestDualPathCluster.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None, derandomize=True
)
