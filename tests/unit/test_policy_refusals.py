"""What the scheduler refuses, with value, limit and remedy."""

import pytest

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.errors import (
    BadRequestError,
    ConfigError,
    EngineLostError,
    IncompatibleError,
)
from dualpath.core.modes import Mode
from dualpath.core.request import Request
from dualpath.policy.events import (
    EngineJoined,
    EngineReport,
    EngineSpec,
    Fetch,
    Finished,
    SchedulerSettings,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler


def one_pair() -> RequestScheduler:
    scheduler = RequestScheduler(SchedulerSettings(Mode.DUALPATH, 1000, 5000))
    scheduler.apply(EngineJoined(EngineSpec("p0", Role.PREFILL, "node-p", "P", 0, 10_000)))
    scheduler.apply(EngineJoined(EngineSpec("d0", Role.DECODE, "node-d", "D", 1, 10_000)))
    return scheduler


def engine(name: str, role: Role, group: str, order: int, hbm: int = 10_000) -> EngineSpec:
    return EngineSpec(name, role, "node", group, order, hbm)


def report(
    name: str, requests: int = 0, tokens: int = 0, uncounted: tuple[str, ...] = ()
) -> EngineReport:
    return EngineReport(name, Load(requests, tokens, 0, 10_000, 0), uncounted)


def request(name: str, prompt: int = 1000, hit: int = 0, new: int = 1) -> Request:
    return Request(name, prompt, hit, new)


@pytest.mark.parametrize(
    "bad",
    [request("r", prompt=0), request("r", hit=-1), request("r", hit=1000), request("r", new=0)],
)
def test_absurd_lengths_are_refused(bad: Request) -> None:
    with pytest.raises(BadRequestError, match="at least 1 prompt token"):
        one_pair().apply(Submitted(bad))


def test_an_id_is_used_once_at_a_time() -> None:
    scheduler = one_pair()
    scheduler.apply(Submitted(request("r0")))
    with pytest.raises(BadRequestError, match="in use"):
        scheduler.apply(Submitted(request("r0")))
    scheduler.apply(Finished("r0"))
    scheduler.apply(Submitted(request("r0")))
    assert scheduler.waiting == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (engine("p0", Role.PREFILL, "P", 9), "joined already"),
        (engine("p1", Role.PREFILL, "P", 1), "order 1"),
        (engine("p1", Role.PREFILL, "D", 9), "another group"),
        (engine("p1", Role.PREFILL, "P", 9, hbm=0), "at least 1"),
    ],
)
def test_contradicting_engines_are_refused(spec: EngineSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        one_pair().apply(EngineJoined(spec))


def test_reports_that_cannot_be_true_are_refused_and_late_ones_dropped() -> None:
    scheduler = one_pair()
    with pytest.raises(EngineLostError, match="none of the 2"):
        scheduler.apply(report("p7"))
    with pytest.raises(IncompatibleError, match="negative load"):
        scheduler.apply(report("p0", tokens=-1))
    scheduler.apply(Submitted(request("r0")))
    scheduler.apply(Fetch("P"))
    scheduler.apply(Fetch("D"))
    scheduler.apply(report("p0", tokens=1000, requests=1))
    scheduler.apply(report("p0", uncounted=("r0",)))
    assert scheduler.loads()[0].unfinished_tokens == 1000
    scheduler.apply(report("p0", tokens=300, requests=1, uncounted=("unknown",)))
    assert scheduler.loads()[0].unfinished_tokens == 300
    scheduler.apply(Finished("r0"))
    scheduler.apply(report("p0", uncounted=("r0",)))
    assert scheduler.loads()[0].unfinished_tokens == 0
