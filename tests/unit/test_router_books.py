"""The router's bookkeeping: what reports count, and when slots may be released."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core import control
from dualpath.core.cluster import HostProcess, Role, Writer
from dualpath.core.modes import Mode
from dualpath.core.request import CachedPrefix, Request
from dualpath.policy.events import Assignment, Charge, SchedulerSettings
from dualpath.policy.scheduler import RequestScheduler
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.dispatch import Dispatch, EngineAssignments
from dualpath.router.scheduler.releases import Releases


def assignments_of(engine_id: str) -> EngineAssignments:
    return EngineAssignments(engine_id)


def load(requests: int, tokens: int, read_queue: int = 0) -> control.Load:
    return control.Load(
        unfinished_requests=requests,
        unfinished_tokens=tokens,
        read_queue_tokens=read_queue,
        free_hbm_tokens=1000,
        free_buffer_tokens=0,
    )


def test_a_request_sent_out_of_order_is_counted_once():
    assigned = assignments_of("p0")
    assigned.decided("first", Charge("p0", 10, 0))
    assigned.decided("second", Charge("p0", 20, 0))
    assigned.open["second"].assign_number = 5
    assert assigned.event(load(1, 20), received=4).uncounted == ("first", "second")
    event = assigned.event(load(1, 20), received=5)
    assert (event.uncounted, event.load.unfinished_tokens) == (("first",), 20)
    assigned.open["first"].assign_number = 6
    event = assigned.event(load(2, 30), received=6)
    assert (event.uncounted, event.load.unfinished_tokens) == ((), 30)


def test_a_request_that_was_assigned_with_its_call_is_counted_once_the_report_names_it():
    assigned = assignments_of("p0")
    assigned.decided("a", Charge("p0", 10, 0))
    assert assigned.event(load(0, 0), received=9).uncounted == ("a",)
    assert assigned.event(load(1, 10), received=9, called=("a",)).uncounted == ()


def test_reads_that_wait_for_buffer_space_are_in_the_queue():
    assigned = assignments_of("d0")
    assigned.decided("a", Charge("d0", 100, 64))
    assigned.open["a"].assign_number = 1
    assert assigned.event(load(1, 100), 1).load.read_queue_tokens == 64
    assigned.open["a"].reading = True
    assert assigned.event(load(1, 100, read_queue=64), 1).load.read_queue_tokens == 64
    assigned.decided("a", Charge("d0", 100, 0))
    assert assigned.event(load(1, 100), 1).load.read_queue_tokens == 0


@given(st.data())
def test_report_and_ledger_together_count_every_live_request_once(data):
    """Whatever the order of sending, reporting and ending, tok_e comes out exact."""
    assigned = assignments_of("p0")
    sent: dict[str, int] = {}
    live: dict[str, int] = {}
    for step in range(1, data.draw(st.integers(1, 30)) + 1):
        action = data.draw(st.sampled_from(["decide", "send", "end"]))
        if action == "decide":
            live[f"r{step}"] = step * 10
            assigned.decided(f"r{step}", Charge("p0", step * 10, 0))
        elif action == "send" and (unsent := [r for r in live if r not in sent]):
            request_id = data.draw(st.sampled_from(unsent))
            sent[request_id] = assigned.open[request_id].assign_number = len(sent) + 1
        elif action == "end" and live:
            request_id = data.draw(st.sampled_from(sorted(live)))
            del live[request_id]
            del assigned.open[request_id]
        received = data.draw(st.integers(0, len(sent)))
        counted = [r for r in live if sent.get(r, received + 1) <= received]
        event = assigned.event(load(len(counted), sum(live[r] for r in counted)), received)
        added = sum(live[r] for r in event.uncounted)
        assert event.load.unfinished_tokens + added == sum(live.values())
        assert event.load.unfinished_requests + len(event.uncounted) == len(live)


class SentMessages(list[tuple[str, str, bool]]):
    def __call__(self, engine_id, message):
        self.append((engine_id, message.request_id, message.writer_certain))


P0 = Writer("p0", "1")


def joins(releases: Releases, name: str, epoch: str = "1", **in_doubt) -> None:
    """Let an engine begin a session, leaving in doubt what it says."""
    releases.engine_joined(
        EngineInfo(
            engine_id=name,
            epoch=epoch,
            role=Role.PREFILL,
            node="",
            group="",
            api_url="",
            process=HostProcess(),
            order=0,
            hbm_tokens=1,
            buffer_tokens=1,
            **in_doubt,
        )
    )


@pytest.fixture
def sent() -> SentMessages:
    return SentMessages()


@pytest.fixture
def releases(sent: SentMessages) -> Releases:
    made = Releases(sent, wait_s=1000, is_dead=lambda writer: writer.epoch == "buried")
    joins(made, "p0")
    return made


async def test_a_certainly_dead_writer_lets_slots_go_at_once(sent, releases):
    releases.writer_started("a", P0, "d0")
    releases.release_when_safe("d0", "a", "test")
    assert sent == []
    releases.engine_dead(P0)
    assert sent == [("d0", "a", True)]


async def test_a_writer_lost_from_sight_means_quarantine_until_it_is_dead(sent, releases):
    releases.writer_started("a", P0, "d0")
    releases.engine_lost(P0)
    releases.release_when_safe("d0", "a", "test")
    assert sent == [("d0", "a", False)]
    assert releases.in_doubt() == [P0]
    releases.engine_dead(P0)
    assert sent[1:] == [("d0", "a", True)]
    assert releases.held == 0
    assert releases.in_doubt() == []


async def test_a_returning_writer_reports_the_slots_it_may_still_write_to(sent, releases):
    for attempt in ("a", "b"):
        releases.writer_started(attempt, P0, "d0")
        releases.release_when_safe("d0", attempt, "test")
    releases.engine_lost(P0)
    assert sent == [("d0", "a", False), ("d0", "b", False)]
    joins(releases, "p0", unsettled=("b",))
    assert sent[2:] == [("d0", "a", True)]
    releases.writer_done("b", P0)
    assert sent[3:] == [("d0", "b", True)]


async def test_only_the_writer_can_report_its_end(sent, releases):
    releases.writer_started("a", P0, "d0")
    releases.release_when_safe("d0", "a", "test")
    releases.writer_done("a", Writer("p0", "2"))
    releases.engine_dead(Writer("p1", "1"))
    assert sent == []
    releases.writer_done("a", P0)
    assert sent == [("d0", "a", True)]


async def test_in_doubt_slots_of_a_former_router_wait_for_all_possible_writers(sent, releases):
    """It is unknown which PE wrote; each of them has to report its end, in any order."""
    p1, p2 = Writer("p1", "1"), Writer("p2", "1")
    joins(releases, "d0", quarantined=("old",), writers=(P0, p1, p2))
    assert sent == []
    joins(releases, "p1", unsettled=("old",))
    assert releases.in_doubt() == [p2]
    releases.engine_dead(p2)
    assert sent == []
    releases.writer_done("old", p1)
    assert sent == [("d0", "old", True)]


async def test_in_doubt_slots_with_known_writers_are_freed_at_once(sent, releases):
    joins(releases, "d0", quarantined=("old",), writers=(P0, Writer("p1", "buried")))
    assert sent == [("d0", "old", True)]
    joins(releases, "d1", quarantined=("other",))
    assert sent[1:] == [("d1", "other", True)]


async def test_groups_of_prefill_engines_fetch_in_turn():
    """§6.1: while each is below β, neither gets all requests."""
    scheduler = RequestScheduler(SchedulerSettings(Mode.DUALPATH, 10**6, 10**6))
    chosen: list[str] = []
    dispatch = Dispatch(
        *(scheduler, None, 1, lambda made: chosen.append(made.engines[0]), lambda s, n: None),
        clock=lambda: 0.0,
    )
    groups = [("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)]
    for order, (name, role) in enumerate(groups):
        dispatch.joined(
            EngineInfo(
                engine_id=name,
                epoch="1",
                role=role,
                node=name,
                group=f"group of {name}",
                api_url="",
                process=HostProcess(),
                order=order,
                hbm_tokens=10**6,
                buffer_tokens=10**6,
            )
        )
    for number in range(20):
        request = Request(f"r{number}", 1000, 640, 10)
        await dispatch.place(request)
        dispatch.reads_done(request.request_id)
        dispatch.prefill_done(request.request_id, chosen[-1])
        dispatch.ended(request.request_id)
    assert Counter(chosen) == {"p0": 10, "p1": 10}


class ClusterOfThree:
    """A dispatcher with p0, d0 and d1; decode engines hold two prompts of 1,000 tokens each.

    A storage NIC reads 100 tokens/s.  Four requests have had their decode engines for 2 s; then d0
    gets two requests and d1 one.
    """

    def __init__(self) -> None:
        self.now_s = 1.0
        settings = SchedulerSettings(Mode.DUALPATH, 300, 10**6, generated_reserve_tokens=0)
        scheduler = RequestScheduler(settings)
        clock = lambda: self.now_s  # noqa: E731
        self.dispatch = Dispatch(scheduler, None, 1, lambda made: None, lambda s, n: None, clock)
        for order, (name, role) in enumerate(
            (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE))
        ):
            self.dispatch.joined(
                EngineInfo(
                    engine_id=name, epoch="1", role=role, node=name, group=role.value, api_url="",
                    process=HostProcess(), order=order, hbm_tokens=2000, buffer_tokens=10**6,
                )
            )  # fmt: skip

    def start(self, name: str, cached_at: str = "") -> asyncio.Task[Assignment]:
        cached = (CachedPrefix(cached_at, 14),) if cached_at else ()
        return asyncio.create_task(self.dispatch.place(Request(name, 1000, 896, 1, cached)))

    async def fill(self) -> None:
        for number in range(4):
            await self.start(f"w{number}")
        self.now_s = 3.0
        for number in range(4):
            self.dispatch.ended(f"w{number}")
        for name, engine in (("b0", "d0"), ("b1", "d0"), ("b2", "d1")):
            assert (await self.start(name, engine)).decode_engine == engine


async def test_a_request_waits_for_the_decode_engine_that_caches_it_and_gets_it():
    cluster = ClusterOfThree()
    await cluster.fill()
    waiting = cluster.start("kv", "d0")
    await asyncio.sleep(0)
    assert cluster.dispatch.waiting == 1
    cluster.now_s = 4.0
    cluster.dispatch.ended("b0")
    placed = await waiting
    assert (placed.decode_engine, placed.de_reason) == ("d0", "waited")


async def test_a_report_ends_a_wait_that_has_lasted_as_long_as_the_read_is_worth():
    """896 tokens take 8.96 s, which counts twice."""
    cluster = ClusterOfThree()
    await cluster.fill()
    waiting = cluster.start("kv", "d0")
    await asyncio.sleep(0)
    cluster.now_s = 3.0 + 17.9
    cluster.dispatch.report("p0", load(0, 0), received=0)
    assert cluster.dispatch.waiting == 1
    cluster.now_s = 3.0 + 18.0
    cluster.dispatch.report("p0", load(0, 0), received=0)
    assert (await waiting).decode_engine == "d1"
