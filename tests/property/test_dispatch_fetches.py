"""Groups that nothing waits for do not fetch: decisions are as if all groups always fetched."""

import asyncio
from collections.abc import Collection, Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dualpath.core.cluster import HostProcess, Role
from dualpath.core.control import Load
from dualpath.core.errors import BadRequestError
from dualpath.core.modes import Mode
from dualpath.core.request import CachedPrefix, Request
from dualpath.policy.events import (
    Assignment,
    Effects,
    Event,
    Fetch,
    SchedulerSettings,
    SlotsGranted,
)
from dualpath.policy.scheduler import RequestScheduler, fetch_order
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.dispatch import Dispatch

BLOCK_TOKENS = 64


class AllFetch(RequestScheduler):
    """Every group fetches after every event."""

    def fetching_groups(
        self, rounds: int, engine_ids: Collection[str] | None = None
    ) -> Iterator[str]:
        prefill, decode = (
            [group.name for group in self._ledger.groups_of(role)]
            for role in (Role.PREFILL, Role.DECODE)
        )
        yield from fetch_order(prefill, decode, rounds % max(len(prefill), 1))


class Driven:
    """A dispatcher that is driven by a list of operations, and its decisions."""

    def __init__(self, scheduler: RequestScheduler) -> None:
        self.fetches = 0
        self.decisions: list[Assignment] = []
        self.now_s = 0.0
        self.dispatch = Dispatch(
            scheduler, None, 1, self.decisions.append, lambda s, n: None, lambda: self.now_s
        )
        self._scheduler = scheduler
        self._tasks: dict[str, asyncio.Task[Assignment]] = {}
        apply = scheduler.apply

        def counting(event: Event) -> Effects:
            self.fetches += isinstance(event, Fetch)
            return apply(event)

        scheduler.apply = counting  # type: ignore[method-assign]

    async def do(self, operation: tuple[str, int, int]) -> None:
        kind, number, size = operation
        self.now_s += size / 1000
        dispatch = self.dispatch
        engine = ENGINES[number % len(ENGINES)]
        here = engine.engine_id in dispatch._engines
        name = f"r{number}"
        if kind == "submit" and name not in self._tasks:
            cached = (CachedPrefix(engine.engine_id, 1 + size % 5),) if size % 3 == 0 else ()
            request = Request(name, 100 + size, 64 * (size // 100), 10, cached)
            self._tasks[name] = asyncio.create_task(dispatch.place(request))
            await asyncio.sleep(0)
        elif kind == "report" and here:
            load = Load(size % 3, size, size // 2, engine.hbm_tokens - size, 0)
            dispatch.report(engine.engine_id, load, number)
        elif kind == "granted" and dispatch._assignment(name) is not None:
            dispatch.slots_granted(SlotsGranted(name, 0, 0))
        elif kind == "read":
            dispatch.reads_done(name)
        elif kind == "prefilled" and (known := dispatch._assignment(name)) is not None:
            assert known.prefill_engine is not None
            dispatch.prefill_done(name, known.prefill_engine)
        elif kind == "end" and name in self._tasks:
            self._tasks[name].cancel()
            await asyncio.gather(self._tasks[name], return_exceptions=True)
            dispatch.ended(name)
        elif kind == "lose":
            dispatch.lost(engine.engine_id)
        elif kind == "join" and not here:
            dispatch.joined(engine)
        elif kind in ("pause", "resume") and here:
            dispatch.pause(engine.engine_id, paused=kind == "pause")
        await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        ends = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for end in ends:
            assert isinstance(end, Assignment | asyncio.CancelledError | BadRequestError), end


def engine(number: int, role: Role) -> EngineInfo:
    node = f"{role.value} node {number // 2}"
    return EngineInfo(
        engine_id=f"{role.value}-{number}", epoch="1", role=role, node=node, group=node,
        api_url="", process=HostProcess(), order=number + 1000 * (role is Role.DECODE),
        hbm_tokens=2000, buffer_tokens=10**6,
    )  # fmt: skip


ENGINES = [engine(number, role) for role in Role for number in range(6)]
#: Mostly what requests do; sizes above the threshold and the HBM let requests wait.
KINDS = [
    *("submit",) * 6, *("report",) * 6, *("end",) * 3, *("read",) * 2, *("prefilled",) * 3,
    *("granted",) * 2, "lose", "join", "pause", "resume",
]  # fmt: skip
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 1500)), max_size=60
)


def scheduler_settings(mode: Mode) -> SchedulerSettings:
    return SchedulerSettings(
        mode=mode, alpha_tokens=500, beta_tokens=600, block_tokens=BLOCK_TOKENS
    )


@pytest.mark.parametrize("mode", [Mode.DUALPATH, Mode.BASIC])
@given(operations=OPERATIONS)
@settings(max_examples=150, deadline=None)
def test_the_decisions_are_those_of_groups_that_all_fetch_after_every_event(
    mode: Mode, operations: list[tuple[str, int, int]]
) -> None:
    async def run() -> None:
        every, some = (kind(scheduler_settings(mode)) for kind in (AllFetch, RequestScheduler))
        both = Driven(every), Driven(some)
        for driven in both:
            for info in ENGINES:
                driven.dispatch.joined(info)
        for operation in operations:
            for driven in both:
                await driven.do(operation)
            # With the next event that lets all groups fetch: a plan that has changed fetches late.
            assert both[1].decisions == both[0].decisions
            assert both[1].fetches <= both[0].fetches
        for driven in both:
            await driven.close()

    asyncio.run(run())


async def test_fetches_of_a_turn_and_of_a_report_do_not_grow_with_the_groups() -> None:
    counts = []
    for nodes in (4, 40):
        driven = Driven(RequestScheduler(scheduler_settings(Mode.DUALPATH)))
        for number in range(2 * nodes):
            for role in Role:
                driven.dispatch.joined(engine(number, role))
        await driven.do(("submit", 1, 0))
        turn, driven.fetches = driven.fetches, 0
        for number in range(2, 8 * nodes):  # until requests wait
            await driven.do(("submit", number, 1000))
        assert driven.dispatch.waiting > 0
        driven.fetches = 0
        await driven.do(("report", 0, 1500))
        counts.append((turn, driven.fetches))
        await driven.close()
    assert counts[0] == counts[1]
    assert max(counts[0]) <= 3
