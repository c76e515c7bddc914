"""A DE that has a request's hit computes the tokens behind it itself: which one does, and when."""

import pytest

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.modes import Mode
from dualpath.core.request import CachedPrefix, Request
from dualpath.core.runs import BlockRun, HitRun
from dualpath.policy.accounts import COMPUTING
from dualpath.policy.events import (
    Assignment,
    EngineJoined,
    EngineLost,
    EngineReport,
    EngineSpec,
    Fetch,
    Finished,
    PrefillEnded,
    SchedulerSettings,
    SlotsGranted,
    Submitted,
)
from dualpath.policy.read_side import appends_at_decode
from dualpath.policy.scheduler import RequestScheduler

HIT_BLOCKS, HIT_TOKENS = 30, 30 * 64


def scheduler_with(
    limit_tokens: int = 128, *, mode: Mode = Mode.DUALPATH, lockstep: bool = False
) -> RequestScheduler:
    scheduler = RequestScheduler(
        SchedulerSettings(
            mode=mode,
            alpha_tokens=10_000,
            beta_tokens=5000,
            generated_reserve_tokens=0,
            append_at_decode_tokens=limit_tokens,
        )
    )
    for order, (name, role) in enumerate((("p0", Role.PREFILL), ("d0", Role.DECODE))):
        spec = EngineSpec(name, role, name, name, order, 100_000, lockstep=lockstep)
        scheduler.apply(EngineJoined(spec))
    return scheduler


def turn(name: str, *, cached: int = HIT_BLOCKS, append: int = 80, may: bool = True) -> Request:
    """A turn of ``append`` tokens; the DE caches ``cached`` blocks of its hit."""
    prefixes = (CachedPrefix("d0", cached),) if cached else ()
    return Request(name, HIT_TOKENS + append, HIT_TOKENS, 10, prefixes, append_at_decode=may)


def assigned(scheduler: RequestScheduler, request: Request, *groups: str) -> Assignment:
    scheduler.apply(Submitted(request))
    (made,) = [
        one for group in groups or ("p0", "d0") for one in scheduler.apply(Fetch(group)).assignments
    ]
    return made


def computing(scheduler: RequestScheduler, engine: str) -> int:
    return scheduler._ledger.engines[engine].account(COMPUTING)


def idle(scheduler: RequestScheduler) -> bool:
    nothing = all(
        (load.unfinished_requests, load.unfinished_tokens, load.read_queue_tokens) == (0, 0, 0)
        for load in scheduler.loads()
    )
    return nothing and not (computing(scheduler, "p0") or computing(scheduler, "d0"))


def test_a_decode_engine_that_caches_the_hit_computes_a_short_append_without_a_pe() -> None:
    scheduler = scheduler_with()
    made = assigned(scheduler, turn("r"))
    assert (made.prefill_engine, made.decode_engine) == (None, "d0")
    assert (made.pe_reason, made.read_reason) == ("append-at-decode", "kept")
    assert made.reads == (HitRun(Role.DECODE, BlockRun(0, HIT_BLOCKS), cached=True),)
    assert (made.prefill_tokens, made.decode_tokens) == (0, HIT_TOKENS + 80)
    at_pe, at_de = scheduler.loads()
    assert (at_pe.unfinished_requests, at_pe.unfinished_tokens) == (0, 0), "the PE is released"
    assert (at_de.unfinished_requests, computing(scheduler, "d0")) == (1, 80)

    scheduler.apply(PrefillEnded("r"))
    assert computing(scheduler, "d0") == 0
    scheduler.apply(Finished("r"))
    assert idle(scheduler)


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        (turn("off"), {"limit_tokens": 0}),
        (turn("long", append=129), {}),
        (turn("forbidden", may=False), {}),
        (Request("no-hit", 80, 0, 10), {}),
        (turn("lock-step"), {"lockstep": True}),
        (turn("baseline"), {"mode": Mode.BASIC}),
        (turn("elsewhere", cached=0), {}),
    ],
    ids=lambda value: value.request_id if isinstance(value, Request) else "",
)
def test_all_others_have_a_pe(request_: Request, options: dict[str, object]) -> None:
    made = assigned(scheduler_with(**options), request_)  # type: ignore[arg-type]
    assert made.prefill_engine == "p0"
    assert made.pe_reason != "append-at-decode"


def test_a_hit_that_the_decode_engine_reads_is_no_reason_for_a_pe() -> None:
    scheduler = scheduler_with()
    scheduler.apply(EngineReport("p0", Load(0, 0, 5000, 100_000, 0)))  # a long reading queue
    made = assigned(scheduler, turn("r", cached=0))
    assert made.prefill_engine is None
    assert made.reads == (HitRun(Role.DECODE, BlockRun(0, HIT_BLOCKS)),)
    assert (made.read_reason, made.decode_read_tokens) == ("shorter-queue", HIT_TOKENS)
    assert scheduler.loads()[1].read_queue_tokens == HIT_TOKENS
    scheduler.apply(Finished("r"))
    assert [load.read_queue_tokens for load in scheduler.loads()] == [5000, 0]


def test_an_append_that_many_requests_would_wait_for_goes_to_the_pe_unless_that_is_busy() -> None:
    scheduler = scheduler_with()
    for name in ("a", "b"):
        scheduler.apply(Submitted(Request(name, 500, 0, 10)))
        scheduler.apply(Fetch("p0"))
        scheduler.apply(Fetch("d0"))
        scheduler.apply(PrefillEnded(name))
    assert assigned(scheduler, turn("stalls-two")).prefill_engine == "p0"
    assert computing(scheduler, "p0") == 80
    assert assigned(scheduler, turn("third", append=100)).prefill_engine == "p0"
    scheduler.apply(Submitted(Request("long", 1000, 0, 10)))
    scheduler.apply(Fetch("p0"))
    scheduler.apply(Fetch("d0"))
    assert assigned(scheduler, turn("behind-it")).prefill_engine is None


@pytest.mark.parametrize(
    ("before_at_pe", "before_at_de", "others", "expected"),
    [(0, 0, 0, True), (0, 0, 1, True), (0, 0, 2, False), (80, 0, 2, True), (80, 100, 1, False)],
)
def test_the_time_at_the_pe_is_compared_with_what_the_append_costs_at_the_de(
    before_at_pe: int, before_at_de: int, others: int, expected: bool
) -> None:
    assert appends_at_decode(80, 80, before_at_pe, before_at_de, others) is expected
    assert not appends_at_decode(79, 80, before_at_pe, before_at_de, others)


def test_a_request_does_not_wait_for_an_overloaded_pe_if_its_decode_engine_caches_the_hit() -> None:
    scheduler = scheduler_with()
    scheduler.apply(Submitted(Request("long", 6000, 0, 10)))
    scheduler.apply(Fetch("p0"))
    scheduler.apply(Fetch("d0"))  # The PE is above beta now.
    made = assigned(scheduler, turn("r"))
    assert made.prefill_engine is None
    assert scheduler.waiting == 0
    assert scheduler.queue_lengths() == (0, 0, 0)
    scheduler.apply(Submitted(turn("partly", cached=HIT_BLOCKS - 1)))
    assert not scheduler.apply(Fetch("p0")).assignments
    assert not scheduler.apply(Fetch("d0")).assignments, "it waits for a PE: its hit is not cached"


def test_what_the_decode_engine_has_evicted_of_the_hit_it_reads() -> None:
    scheduler = scheduler_with()
    assigned(scheduler, turn("r"))
    assert scheduler.apply(SlotsGranted("r", HIT_BLOCKS, 0)).assignments == ()
    (again,) = scheduler.apply(SlotsGranted("r", 10, 0)).assignments
    assert again.prefill_engine is None
    assert again.reads == (
        HitRun(Role.DECODE, BlockRun(0, 10), cached=True),
        HitRun(Role.DECODE, BlockRun(10, HIT_BLOCKS - 10)),
    )
    assert scheduler.loads()[1].read_queue_tokens == 20 * 64
    assert scheduler.apply(SlotsGranted("r", 10, 0)).assignments == ()
    scheduler.apply(Finished("r"))
    assert idle(scheduler)


def test_a_lost_decode_engine_loses_its_appends_and_a_lost_pe_none() -> None:
    scheduler = scheduler_with()
    assigned(scheduler, turn("r"))
    assert scheduler.apply(EngineLost("p0")).lost_requests == ()
    assert scheduler.apply(EngineLost("d0")).lost_requests == ("r",)
    assert scheduler.waiting == 0
