"""Which side reads when the scheduler also knows the PE's own queue and its CNIC."""

import pytest

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.request import Request
from dualpath.policy.events import EngineReport, EngineSpec, SchedulerSettings
from dualpath.policy.read_side import PrefillAhead, Reader, earlier_finish, shorter_queue
from dualpath.policy.scheduler import RequestScheduler

#: 1000 hit tokens take 1 s to read and, over the CNIC, 0.1 s per trip.
HIT, SNIC, CNIC = 1000, 1000.0, 10_000.0


def ahead(before: int = 0, prefill: float = 0.0, cnic: float = 0.0) -> PrefillAhead:
    return PrefillAhead(before, 1010, prefill, cnic)


def test_without_rates_of_the_engine_equal_nics_read_as_by_queue() -> None:
    for queues in ((0, 0), (10, 20), (20, 10)):
        prefill, decode = (Reader(queue, 0, SNIC) for queue in queues)
        assert earlier_finish(prefill, decode, HIT, ahead())[0] is shorter_queue(prefill, decode)[0]


def test_an_idle_prefill_engine_gets_the_read_that_is_over_first() -> None:
    choice = earlier_finish(Reader(500, 0, SNIC), Reader(400, 0, SNIC), HIT, ahead(prefill=5000.0))
    assert choice == (Role.DECODE, "earlier-finish")


def test_a_fast_nic_behind_a_longer_queue_is_through_earlier() -> None:
    """By queue the PE reads: 100 tokens drain in 0.1 s, 400 in 0.13 s; the read itself decides."""
    prefill, decode = Reader(100, 0, SNIC), Reader(400, 0, 3 * SNIC)
    assert shorter_queue(prefill, decode) == (Role.PREFILL, "shorter-queue")
    assert earlier_finish(prefill, decode, HIT, ahead()) == (Role.DECODE, "earlier-finish")


def test_behind_a_busy_engine_both_reads_are_in_time_and_the_queues_decide() -> None:
    """The PE is busy for 10 s, so that a queue of 5 s does this request no harm."""
    busy = ahead(before=50_000, prefill=5000.0)
    prefill, decode = Reader(1000, 9000, SNIC), Reader(5000, 0, SNIC)
    assert earlier_finish(prefill, decode, HIT, busy) == (Role.PREFILL, "shorter-queue")


def test_behind_a_busy_engine_the_decode_side_saves_it_a_trip_through_its_nic() -> None:
    """A read at the PE costs 0.1 s of CNIC more: worth a queue that is 0.05 s longer, not 0.2."""
    busy = ahead(before=50_000, prefill=5000.0, cnic=CNIC)
    prefill = Reader(1000, 0, SNIC)
    near, far = Reader(1050, 9000, SNIC), Reader(1200, 0, SNIC)
    assert earlier_finish(prefill, near, HIT, busy) == (Role.DECODE, "shorter-queue")
    assert earlier_finish(prefill, far, HIT, busy) == (Role.PREFILL, "shorter-queue")


def test_a_pass_that_waits_for_its_nic_is_shorter_when_the_decode_side_read() -> None:
    """Computing takes 0.05 s, the CNIC 0.2 s for a read at the PE and 0.1 s for one at the DE."""
    quick = ahead(prefill=20_200.0, cnic=CNIC)
    level = Reader(0, 0, SNIC), Reader(0, 9000, SNIC)
    assert earlier_finish(*level, HIT, quick) == (Role.DECODE, "earlier-finish")


def test_all_else_equal_the_node_that_was_given_less_reads() -> None:
    busy = ahead(before=50_000, prefill=5000.0)
    more, less = Reader(10, 7000, SNIC), Reader(10, 6000, SNIC)
    assert earlier_finish(more, less, HIT, busy) == (Role.DECODE, "tie")
    assert earlier_finish(less, more, HIT, busy) == (Role.PREFILL, "tie")


def cluster(read_choice: str, mode: Mode = Mode.DUALPATH) -> RequestScheduler:
    scheduler = RequestScheduler(
        SchedulerSettings(mode, 10**6, 10**6, read_choice=read_choice)  # type: ignore[arg-type]
    )
    for order, role in enumerate(Role):
        scheduler.engine_joined(
            EngineSpec(role, role, role, role, order, 10**6, SNIC, 1000.0, CNIC)
        )
    return scheduler


def reads_of(scheduler: RequestScheduler, name: str) -> tuple[list[Role], str]:
    scheduler.submit(Request(name, HIT + 10, HIT, 1))
    (assignment,) = [a for role in Role for a in scheduler.fetch(role)]
    return [part.side for part in assignment.reads], assignment.read_reason


def test_the_setting_decides_and_a_split_is_left_alone() -> None:
    """The DE's node has 0.05 s of reads waiting; the PE has 20 s of work before the request."""
    for choice, mode, expected in (
        ("queue", Mode.DUALPATH, ([Role.PREFILL], "shorter-queue")),
        ("finish-time", Mode.DUALPATH, ([Role.DECODE], "shorter-queue")),
        ("finish-time", Mode.SPLIT, ([Role.PREFILL, Role.DECODE], "split")),
        ("finish-time", Mode.LAYERWISE, ([Role.PREFILL], "pe-only")),
    ):
        scheduler = cluster(choice, mode)
        scheduler.report(EngineReport(Role.PREFILL, 0, 1, 20_000, 0, 10**6, 0))
        scheduler.report(EngineReport(Role.DECODE, 0, 0, 0, 50, 10**6, 0))
        assert reads_of(scheduler, "r") == expected


def test_a_request_placed_here_but_waiting_for_a_decode_engine_is_not_before_another() -> None:
    """It is not read yet, so the PE will not be busy with it: the earlier read still counts."""
    scheduler = cluster("finish-time")
    scheduler.report(EngineReport(Role.DECODE, 0, 0, 0, 300, 2000, 0))
    scheduler.submit(Request("small", HIT + 10, HIT, 1))
    scheduler.submit(Request("large", 5000, HIT, 1))
    assert scheduler.fetch(Role.PREFILL) == []
    (small,) = scheduler.fetch(Role.DECODE)
    assert small.request_id == "small"
    assert [part.side for part in small.reads] == [Role.PREFILL]
    assert small.read_reason == "earlier-finish"


@pytest.mark.parametrize(("prefill", "cnic"), [(-1.0, 0.0), (0.0, -1.0)])
def test_a_negative_rate_is_refused(prefill: float, cnic: float) -> None:
    with pytest.raises(ConfigError, match="leave unknown"):
        RequestScheduler(SchedulerSettings(Mode.DUALPATH, 1, 1)).engine_joined(
            EngineSpec("p", Role.PREFILL, "n", "g", 0, 1, SNIC, prefill, cnic)
        )
