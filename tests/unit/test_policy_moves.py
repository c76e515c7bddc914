"""Requests of which the KV is moved to another decode engine once their prompt is computed."""

import pytest
from tests.unit.test_policy_given_engines import cluster, fetch, request

from dualpath.core.control import Load
from dualpath.core.errors import EngineLostError
from dualpath.policy.events import (
    EngineLost,
    EnginePaused,
    EngineReport,
    Event,
    Finished,
    MoveBegun,
    MoveEnded,
    PrefillEnded,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler

TOKENS = 1001
HBM_TOKENS = 10_000


def prefilled(name: str = "r", **options: int) -> RequestScheduler:
    """A cluster with a request whose prompt is computed and that is at d0."""
    scheduler = cluster(**options)
    scheduler.apply(Submitted(request(name, pe="p0", de="d0")))
    scheduler.apply(PrefillEnded(name))
    return scheduler


def tokens(scheduler: RequestScheduler) -> tuple[int, int]:
    """Return what counts at d0 and at d1, in unfinished tokens and in taken HBM."""
    loads = {load.engine_id: load for load in scheduler.loads() if load.engine_id[0] == "d"}
    for load in loads.values():
        assert load.unfinished_tokens == HBM_TOKENS - load.free_hbm_tokens
    return loads["d0"].unfinished_tokens, loads["d1"].unfinished_tokens


def test_both_decode_engines_count_a_request_until_its_move_is_over() -> None:
    for moved, after in ((True, (0, TOKENS)), (False, (TOKENS, 0))):
        scheduler = prefilled()
        assert tokens(scheduler) == (TOKENS, 0)
        scheduler.apply(MoveBegun("r", "d1"))
        assert tokens(scheduler) == (TOKENS, TOKENS)
        for _ in range(2):
            scheduler.apply(MoveEnded("r", moved, 3.0))
            assert tokens(scheduler) == after
        scheduler.apply(Finished("r", 4.0))
        assert tokens(scheduler) == (0, 0)


def test_a_request_that_ends_during_its_move_counts_nowhere() -> None:
    scheduler = prefilled()
    scheduler.apply(MoveBegun("r", "d1"))
    scheduler.apply(Finished("r"))
    assert tokens(scheduler) == (0, 0)
    scheduler.apply(MoveEnded("r", moved=True))
    assert tokens(scheduler) == (0, 0)


def test_reports_count_a_moved_request_once() -> None:
    scheduler = prefilled()
    scheduler.apply(EngineReport("d0", Load(1, TOKENS, 0, HBM_TOKENS - TOKENS, 0)))
    scheduler.apply(MoveBegun("r", "d1"))
    scheduler.apply(EngineReport("d1", Load(0, 0, 0, HBM_TOKENS, 0), uncounted=("r",)))
    assert tokens(scheduler) == (TOKENS, TOKENS)
    scheduler.apply(EngineReport("d1", Load(1, TOKENS, 0, HBM_TOKENS - TOKENS, 0)))
    scheduler.apply(MoveEnded("r", moved=True))
    scheduler.apply(EngineReport("d0", Load(0, 0, 0, HBM_TOKENS, 0)))
    assert tokens(scheduler) == (0, TOKENS)


@pytest.mark.parametrize("lost", ["d0", "d1"])
def test_a_request_is_lost_with_either_decode_engine_of_its_move(lost: str) -> None:
    scheduler = prefilled()
    scheduler.apply(MoveBegun("r", "d1"))
    assert scheduler.apply(EngineLost(lost)).lost_requests == ("r",)
    assert all(load.unfinished_tokens == 0 for load in scheduler.loads())


def test_the_loss_of_the_decode_engine_that_a_request_has_left_does_not_concern_it() -> None:
    scheduler = prefilled()
    scheduler.apply(MoveBegun("r", "d1"))
    scheduler.apply(MoveEnded("r", moved=True))
    assert scheduler.apply(EngineLost("d0")).lost_requests == ()
    assert scheduler.apply(EngineLost("d1")).lost_requests == ("r",)


@pytest.mark.parametrize(
    "before",
    [
        EnginePaused("d1"),
        EngineLost("d1"),
        EngineReport("d1", Load(1, 9_000, 0, 1_000, 0)),
        # A request that waits for a decode engine is not overtaken.
        Submitted(request("large", prompt=9_900)),
    ],
)
def test_a_decode_engine_that_gets_no_requests_or_has_no_room_is_refused(before: Event) -> None:
    scheduler = prefilled()
    scheduler.apply(before)
    if isinstance(before, Submitted):
        scheduler.apply(EngineReport("d1", Load(1, 1_000, 0, 9_000, 0)))
        fetch(scheduler)
    loads = scheduler.loads()
    with pytest.raises(EngineLostError, match="no room now for 1001 tokens"):
        scheduler.apply(MoveBegun("r", "d1"))
    assert scheduler.loads() == loads


@pytest.mark.parametrize("target", ["d0", "p1", "d9"])
def test_an_engine_that_cannot_take_a_request_is_refused(target: str) -> None:
    with pytest.raises(EngineLostError, match="no room now"):
        prefilled().apply(MoveBegun("r", target))


def test_a_request_without_a_computed_prompt_is_not_moved_nor_is_one_twice_at_a_time() -> None:
    scheduler = cluster()
    scheduler.apply(Submitted(request("r", pe="p0", de="d0")))
    for name in ("r", "unknown"):
        with pytest.raises(EngineLostError, match="no computed prompt"):
            scheduler.apply(MoveBegun(name, "d1"))
    scheduler.apply(PrefillEnded("r"))
    scheduler.apply(MoveBegun("r", "d1"))
    with pytest.raises(EngineLostError, match="is being moved"):
        scheduler.apply(MoveBegun("r", "d1"))
