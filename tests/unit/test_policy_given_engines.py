"""Requests whose prefill engine was chosen by a proxy in front of the engines."""

import msgspec
import pytest

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.errors import EngineLostError
from dualpath.core.modes import Mode
from dualpath.core.request import Request
from dualpath.policy.event_log import FORMAT, Begin, Entry, EventLog, assignments, difference
from dualpath.policy.events import (
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineReport,
    EngineSpec,
    Event,
    Fetch,
    Finished,
    PrefillEnded,
    SchedulerSettings,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler

SETTINGS = SchedulerSettings(mode=Mode.DUALPATH, alpha_tokens=1000, beta_tokens=5000)


def cluster(*, hbm_tokens: int = 10_000) -> RequestScheduler:
    """Two PEs of one group and two DEs of one group; ``hbm_tokens`` are those of each DE."""
    scheduler = RequestScheduler(SETTINGS)
    for order, name in enumerate(("p0", "p1", "d0", "d1")):
        role = Role.PREFILL if name[0] == "p" else Role.DECODE
        spec = EngineSpec(name, role, name, name[0], order, hbm_tokens)
        scheduler.apply(EngineJoined(spec))
    return scheduler


def request(name: str, pe: str = "", de: str = "", prompt: int = 1000) -> Request:
    return Request(
        *(name, prompt, 0, 1),
        prefill_engine=pe or msgspec.UNSET,
        decode_engine=de or msgspec.UNSET,
    )


def fetch(scheduler: RequestScheduler) -> list[tuple[str, str | None, str]]:
    placed = [a for group in "pd" for a in scheduler.apply(Fetch(group)).assignments]
    return [(a.request_id, a.prefill_engine, a.decode_engine) for a in placed]


def test_a_given_prefill_engine_is_taken_however_much_it_has_to_do() -> None:
    scheduler = cluster()
    scheduler.apply(EngineReport("p1", Load(9, 50_000, 9_000, 10_000, 0)))
    assert scheduler.apply(Submitted(request("r", pe="p1"))).assignments == ()
    # The first fetch of a DE group assigns it: no PE has to fetch it.
    assert fetch(scheduler) == [("r", "p1", "d0")]
    loads = {load.engine_id: load for load in scheduler.loads()}
    assert loads["p1"].unfinished_tokens == 51_000
    assert loads["p0"].unfinished_tokens == 0
    scheduler.apply(PrefillEnded("r"))
    scheduler.apply(Finished("r"))
    assert scheduler.waiting == 0


def test_a_given_decode_engine_with_room_is_taken_at_once() -> None:
    scheduler = cluster()
    (placed,) = scheduler.apply(Submitted(request("r", pe="p0", de="d1"))).assignments
    assert (placed.prefill_engine, placed.decode_engine) == ("p0", "d1")
    assert (placed.pe_reason, placed.de_reason) == ("given", "given")
    assert fetch(scheduler) == []


@pytest.mark.parametrize("wrong", ["full", "paused", "unknown", "p1"])
def test_a_given_decode_engine_that_cannot_take_it_is_replaced_by_the_rules(wrong: str) -> None:
    scheduler = cluster()
    if wrong == "full":
        scheduler.apply(EngineReport("d1", Load(1, 9_500, 0, 500, 0)))
    elif wrong == "paused":
        scheduler.apply(EnginePaused("d1"))
    named = wrong if wrong in ("unknown", "p1") else "d1"
    assert scheduler.apply(Submitted(request("r", pe="p0", de=named))).assignments == ()
    assert fetch(scheduler) == [("r", "p0", "d0")]


def test_a_request_with_given_engines_overtakes_none_that_waits_for_a_decode_engine() -> None:
    scheduler = cluster(hbm_tokens=1500)
    for name in ("a", "b", "c"):
        scheduler.apply(Submitted(request(name)))
    assert {one[0] for one in fetch(scheduler) + fetch(scheduler)} == {"a", "b"}
    scheduler.apply(Finished("a"))
    assert scheduler.apply(Submitted(request("given", pe="p0", de="d0"))).assignments == ()
    assert [one[0] for one in fetch(scheduler)] == ["c"]
    scheduler.apply(Finished("c"))
    assert fetch(scheduler) == [("given", "p0", "d0")]


def test_a_request_that_waits_for_a_decode_engine_holds_no_prefill_engine() -> None:
    """Else it could keep a PE from a request that has the HBM it waits for."""
    scheduler = cluster(hbm_tokens=1500)
    for name in ("a", "b"):
        scheduler.apply(Submitted(request(name, pe="p0", de="d0" if name == "a" else "d1")))
    scheduler.apply(Submitted(request("c", pe="p1")))
    assert fetch(scheduler) == []
    loads = {load.engine_id: load.unfinished_tokens for load in scheduler.loads()}
    assert loads["p1"] == 0
    scheduler.apply(Finished("b"))
    assert fetch(scheduler) == [("c", "p1", "d1")]


def test_a_given_prefill_engine_that_is_not_there_is_an_error() -> None:
    scheduler = cluster()
    for name, why in (("p9", "not in the cluster"), ("d0", "no prefill engine")):
        with pytest.raises(EngineLostError, match=why):
            scheduler.apply(Submitted(request("r", pe=name)))
    scheduler.apply(EnginePaused("p0"))
    with pytest.raises(EngineLostError, match="paused"):
        scheduler.apply(Submitted(request("r", pe="p0")))
    assert scheduler.waiting == 0


def test_a_request_that_waits_is_lost_with_the_prefill_engine_that_it_was_given() -> None:
    scheduler = cluster(hbm_tokens=1500)
    for name, engine in (("a", "d0"), ("b", "d1")):
        scheduler.apply(Submitted(request(name, pe="p0", de=engine)))
    scheduler.apply(Submitted(request("c", pe="p1")))
    scheduler.apply(Submitted(request("e")))
    assert scheduler.apply(EngineLost("p1")).lost_requests == ("c",)
    assert scheduler.waiting == 1, "the other one may have any prefill engine"


def test_a_request_that_only_one_decode_engine_may_serve_gets_it_or_is_refused() -> None:
    scheduler = cluster(hbm_tokens=1500)
    scheduler.apply(Submitted(request("a", de="d1")))
    assert fetch(scheduler) == [("a", "p0", "d1")]
    for full in ("d1", "d7"):
        with pytest.raises(EngineLostError, match="no room"):
            scheduler.apply(Submitted(request("b", de=full)))
    scheduler.apply(Finished("a"))
    scheduler.apply(EngineReport("p0", Load(9, 9_000, 0, 0, 0)))
    scheduler.apply(EngineReport("p1", Load(9, 9_000, 0, 0, 0)))
    scheduler.apply(Submitted(request("c", de="d1")))
    assert fetch(scheduler) == [], "it waits for a prefill engine"
    scheduler.apply(EnginePaused("d0"))
    scheduler.apply(EngineReport("p1", Load(0, 0, 0, 0, 0)))
    assert fetch(scheduler) == [("c", "p1", "d1")], "its decode engine stays"
    scheduler.apply(Finished("c"))
    scheduler.apply(EngineReport("p1", Load(9, 9_000, 0, 0, 0)))
    scheduler.apply(Submitted(request("e", de="d1")))
    assert scheduler.apply(EngineLost("d1")).lost_requests == ("e",)
    assert scheduler.waiting == 0


def test_a_log_with_given_engines_replays_to_the_same_decisions() -> None:
    specs = [
        EngineSpec(name, Role.PREFILL if name[0] == "p" else Role.DECODE, name, name[0], n, 10_000)
        for n, name in enumerate(("p0", "p1", "d0", "d1"))
    ]
    events: list[Event] = [
        *(EngineJoined(spec) for spec in specs),
        Submitted(request("r", pe="p0", de="d1")),
        Submitted(request("s", pe="p1")),
        Fetch("d"),
    ]
    scheduler = RequestScheduler(SETTINGS)
    begin = Begin(version="test", settings=SETTINGS, format=FORMAT)
    log = EventLog(begin, tuple(Entry(event, scheduler.apply(event)) for event in events))
    assert [a.request_id for a in assignments(log)] == ["r", "s"]
    assert difference(log) is None
