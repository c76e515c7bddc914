"""Where a DE receives a prompt's KV, in its buffer or in its HBM, and what follows from it."""

import pytest

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.modes import Handover, Mode
from dualpath.core.request import CachedPrefix, Request
from dualpath.core.runs import BlockRun, HitRun
from dualpath.policy.events import (
    Assignment,
    EngineJoined,
    EngineReport,
    EngineSpec,
    Fetch,
    SchedulerSettings,
    SlotsGranted,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler

HBM_TOKENS = 10_000
HIT_BLOCKS, HIT_TOKENS = 30, 30 * 64


def scheduler_with(
    handover: Handover, mode: Mode = Mode.DUALPATH, append_tokens: int = 0
) -> RequestScheduler:
    scheduler = RequestScheduler(
        SchedulerSettings(
            mode=mode,
            alpha_tokens=100_000,
            beta_tokens=100_000,
            generated_reserve_tokens=0,
            handover=handover,
            append_at_decode_tokens=append_tokens,
        )
    )
    for order, (name, role) in enumerate((("p0", Role.PREFILL), ("d0", Role.DECODE))):
        scheduler.apply(EngineJoined(EngineSpec(name, role, name, name, order, HBM_TOKENS)))
    return scheduler


def turn(*, cached: int = 0) -> Request:
    """A turn of 80 tokens behind its hit; the DE caches the first ``cached`` blocks of it."""
    prefixes = (CachedPrefix("d0", cached),) if cached else ()
    return Request("r", HIT_TOKENS + 80, HIT_TOKENS, 10, prefixes)


def queue_reads(scheduler: RequestScheduler, engine: str, tokens: int) -> None:
    scheduler.apply(EngineReport(engine, Load(0, 0, tokens, HBM_TOKENS, 0)))


def assigned(scheduler: RequestScheduler, request: Request) -> Assignment:
    scheduler.apply(Submitted(request))
    (made,) = [one for group in ("p0", "d0") for one in scheduler.apply(Fetch(group)).assignments]
    return made


def free_hbm(scheduler: RequestScheduler) -> int:
    return scheduler.loads()[1].free_hbm_tokens


@pytest.mark.parametrize("mode", list(Mode))
def test_without_the_setting_every_prompt_passes_the_buffer(mode: Mode) -> None:
    made = assigned(scheduler_with(Handover.BUFFER, mode), turn())
    assert (made.handover, made.handover_reason) == (Handover.BUFFER, "setting")


@pytest.mark.parametrize("mode", list(Mode))
def test_with_hbm_all_but_baselines_use_it(mode: Mode) -> None:
    made = assigned(scheduler_with(Handover.HBM, mode), turn())
    if mode in (Mode.DUALPATH, Mode.SPLIT):
        assert (made.handover, made.handover_reason) == (Handover.HBM, "setting")
    else:
        assert (made.handover, made.handover_reason) == (Handover.BUFFER, "baseline")


def test_a_request_without_a_pe_is_handed_nothing() -> None:
    scheduler = scheduler_with(Handover.HBM, append_tokens=100)
    made = assigned(scheduler, turn(cached=HIT_BLOCKS))
    assert made.prefill_engine is None
    assert (made.handover, made.handover_reason) == (Handover.BUFFER, "append-at-decode")


@pytest.mark.parametrize("handover", list(Handover))
def test_hbm_is_booked_from_the_assignment_on_in_any_case(handover: Handover) -> None:
    scheduler = scheduler_with(handover)
    made = assigned(scheduler, turn())
    assert free_hbm(scheduler) == HBM_TOKENS - made.decode_tokens


def test_auto_takes_hbm_unless_a_report_has_shown_less_than_the_request_was_placed_for() -> None:
    """The DE is found first; its requests generate more than was reserved before the PE is."""
    made = assigned(scheduler_with(Handover.AUTO), turn())
    assert (made.handover, made.handover_reason) == (Handover.HBM, "hbm-free")

    short = scheduler_with(Handover.AUTO)
    short.apply(Submitted(turn()))
    assert short.apply(Fetch("d0")).assignments == ()
    short.apply(EngineReport("d0", Load(1, 9000, 0, HBM_TOKENS - 9000, 0)))
    (made,) = short.apply(Fetch("p0")).assignments
    assert free_hbm(short) < 0
    assert (made.handover, made.handover_reason) == (Handover.BUFFER, "hbm-full")


@pytest.mark.parametrize(
    ("mode", "cached_left", "expected"),
    [
        # The DE's queue is shorter, but its 10 slots do not suffice for the other 25 blocks.
        (Mode.DUALPATH, 5, (("de", 0, 5, True), ("pe", 5, 25, False))),
        (Mode.DUALPATH, 0, (("pe", 0, 30, False),)),
        # It reads as many as it has slots for.
        (Mode.SPLIT, 5, (("de", 0, 5, True), ("pe", 5, 20, False), ("de", 25, 5, False))),
        (Mode.SPLIT, 0, (("pe", 0, 20, False), ("de", 20, 10, False))),
    ],
)
def test_reads_that_are_planned_again_fit_the_slots_that_the_decode_engine_has(
    mode: Mode, cached_left: int, expected: tuple[tuple[str, int, int, bool], ...]
) -> None:
    """The DE cached 10 blocks and had the longer reading queue; now the PE has."""
    scheduler = scheduler_with(Handover.HBM, mode)
    queue_reads(scheduler, "d0", 50_000)
    made = assigned(scheduler, turn(cached=10))
    assert made.blocks_at(Role.DECODE) == 10
    queue_reads(scheduler, "d0", 0)
    queue_reads(scheduler, "p0", 50_000)
    (again,) = scheduler.apply(SlotsGranted("r", cached_left, 0)).assignments
    sides = {"pe": Role.PREFILL, "de": Role.DECODE}
    assert again.reads == tuple(
        HitRun(sides[side], BlockRun(first, count), cached=cached)
        for side, first, count, cached in expected
    )
    assert again.handover is Handover.HBM
    assert again.blocks_at(Role.DECODE) <= 10


def test_in_the_buffer_the_decode_engine_has_slots_for_all_that_it_is_given_to_read() -> None:
    scheduler = scheduler_with(Handover.BUFFER)
    queue_reads(scheduler, "d0", 50_000)
    assigned(scheduler, turn(cached=10))
    queue_reads(scheduler, "d0", 0)
    queue_reads(scheduler, "p0", 50_000)
    (again,) = scheduler.apply(SlotsGranted("r", 5, 0)).assignments
    assert again.blocks_at(Role.DECODE) == HIT_BLOCKS
