"""The queue of a front end: who goes on when, who is refused, and what ends a wait."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from tests.control_network import ControlNetwork
from tests.front_end_links import Link, link_server
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import expected, job
from tests.unit.scraped_cluster import Scrape
from tests.unit.test_router_front_ends import Far, nothing_is_left

from dualpath.core.errors import (
    ConfigError,
    DeadlineError,
    DrainingError,
    EngineLostError,
    OverloadedError,
)
from dualpath.router.settings import RouterSettings

pytestmark = pytest.mark.virtual_time
PROMPT = list(range(1, 18))
TAG, OTHER_TAG = "a" * 16, "b" * 16
ONE_AT_A_TIME = RouterSettings(max_concurrent_requests=1)


class Runs:
    """Requests of one cluster, begun one after the other, and the order in which they go on."""

    def __init__(self, made: Cluster) -> None:
        self.made = made
        self.order: list[str] = []
        self.runs: dict[str, asyncio.Task[list[int]]] = {}

    async def begin(self, *names: str, tenant: str = "", priority: int = 0) -> None:
        """Submit requests in this order."""
        for name in names:
            self.runs[name] = asyncio.create_task(self._run(name, tenant, priority))
            await asyncio.sleep(0.001)

    async def _run(self, name: str, tenant: str, priority: int) -> list[int]:
        tokens = await self.made.run(job(name, PROMPT, tenant=tenant, priority=priority))
        self.order.append(name)
        return tokens

    async def end(self) -> None:
        """Let all go on; each has the right answer."""
        self.made.calls.gates["prefill"].set()
        assert await asyncio.gather(*self.runs.values()) == [expected(PROMPT, 6)] * len(self.runs)

    @property
    def queue(self) -> dict[str, Any]:
        return dict(self.made.service.status()["queue"])


@contextlib.asynccontextmanager
async def queued(settings: RouterSettings = ONE_AT_A_TIME) -> AsyncIterator[Runs]:
    """The request "first" computes until ``end``, so that the others wait in the queue."""
    async with cluster(settings=settings) as made:
        made.calls.gates["prefill"] = asyncio.Event()
        runs = Runs(made)
        await runs.begin("first")
        await made.arrives("prefill")
        yield runs


def samples(made: Cluster, name: str) -> dict[str, float]:
    """Return a metric's values by the value of its one label, those of 0 left out."""
    found = Scrape(made.service.exposition().decode()).samples
    return {"".join(s.labels.values()): s.value for s in found if s.name == name and s.value}


# ------------------------------------------------------------------------ the order


async def test_a_lower_priority_goes_first_among_the_requests_of_a_tenant() -> None:
    async with queued() as runs:
        await runs.begin("late", priority=5)
        await runs.begin("usual", "usual too")
        await runs.begin("urgent", priority=-5)
        await runs.end()
        assert runs.order == ["first", "urgent", "usual", "usual too", "late"]


async def test_a_tenant_with_many_requests_does_not_delay_another_by_them() -> None:
    async with queued() as runs:
        await runs.begin("a1", "a2", "a3", "a4", tenant=TAG, priority=-9)
        await runs.begin("b1", "b2", tenant=OTHER_TAG)
        await runs.end()
        assert runs.order == ["first", "a1", "b1", "a2", "b2", "a3", "a4"]


async def test_a_tenants_weight_is_its_share() -> None:
    settings = RouterSettings(max_concurrent_requests=1, tenant_weights={OTHER_TAG: 2, "none": 1})
    async with queued(settings) as runs:
        await runs.begin("n1", "n2", "n3")
        await runs.begin("b1", "b2", "b3", "b4", tenant=OTHER_TAG)
        await runs.end()
        assert runs.order == ["first", "n1", "b1", "b2", "n2", "b3", "b4", "n3"]


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=f"tenant_weights has {TAG}=.*must be above 0"):
        RouterSettings(tenant_weights={TAG: weight}).check()


# ------------------------------------------------------------------------ how many go on


async def test_what_engines_do_not_take_waits_at_the_front_end_where_it_can_be_overtaken() -> None:
    async with cluster(prefill=2) as made:
        scheduler, runs = made.service.scheduler, Runs(made)
        made.calls.gates["prefill"] = asyncio.Event()
        for name in ("p0", "p1"):
            scheduler.pause_engine(name, paused=True)
        await runs.begin(*(f"r{number}" for number in range(8)))
        # As many as there are prefill engines, any of which may take one at any moment.
        assert (scheduler.dispatch.waiting, runs.queue["waiting"]) == (2, 6)
        assert (runs.queue["at_scheduler"], runs.queue["at_scheduler_limit"]) == (2, 2)
        assert (made.service.status()["waiting"], made.service.status()["running"]) == (8, 0)
        await runs.begin("urgent", priority=-1)
        made.calls.gates["prefill"].set()
        for name in ("p0", "p1"):
            scheduler.pause_engine(name, paused=False)
        await runs.end()
        assert set(runs.order[:3]) == {"r0", "r1", "urgent"}


async def test_engines_that_take_all_get_all_at_once() -> None:
    """The window doubles while it is short and nothing waits at the scheduler."""
    async with cluster() as made:
        made.calls.gates["prefill"] = asyncio.Event()
        runs = Runs(made)
        for number in range(64):
            runs.runs[f"r{number}"] = asyncio.create_task(made.run(job(f"r{number}", PROMPT)))
        await asyncio.sleep(1.0)
        assert made.service.status()["running"] == 64
        assert runs.queue["waiting"] == 0
        made.calls.gates["prefill"].set()
        await asyncio.gather(*runs.runs.values())


async def test_the_role_policy_sees_what_waits_at_front_ends() -> None:
    async with cluster() as made:
        scheduler, runs = made.service.scheduler, Runs(made)
        made.calls.gates["prefill"] = asyncio.Event()
        scheduler.pause_engine("p0", paused=True)
        await runs.begin(*(f"r{number}" for number in range(8)))
        role = next(iter(scheduler.registry.alive())).role
        assert scheduler.dispatch.waiting == 1
        assert scheduler._role_queue(role).waiting == 8
        scheduler.pause_engine("p0", paused=False)
        await runs.end()


# ------------------------------------------------------------------------ the end of a wait


async def test_a_client_that_leaves_frees_its_place_at_once() -> None:
    settings = RouterSettings(max_concurrent_requests=1, max_waiting_requests=1)
    async with queued(settings) as runs:
        await runs.begin("leaves")
        assert runs.made.service.turned_away() is not None
        runs.runs.pop("leaves").cancel()
        await asyncio.sleep(0.001)
        assert runs.made.service.turned_away() is None
        assert runs.queue["waiting"] == 0
        await runs.begin("comes")
        await runs.end()
        assert runs.order == ["first", "comes"]


async def test_the_deadline_holds_in_the_queue() -> None:
    settings = RouterSettings(max_concurrent_requests=1, request_deadline_s=30.0)
    async with queued(settings) as runs:
        await asyncio.sleep(10.0)
        await runs.begin("waits")
        with pytest.raises(DeadlineError, match="first is not done after 30 s"):
            await runs.runs.pop("first")
        await runs.end()
        assert runs.order == ["waits"]
        runs.made.calls.gates["prefill"].clear()
        await runs.begin("holds")
        await asyncio.sleep(10.0)
        await runs.begin("in vain")
        runs.runs.pop("holds").cancel()
        with pytest.raises(DeadlineError, match="in vain is not done after 30 s"):
            await runs.runs.pop("in vain")
        assert runs.queue["waiting"] == 0


async def test_without_engines_all_that_wait_end_after_the_limit_wherever_they_wait() -> None:
    settings = RouterSettings(engine_wait_s=20.0)
    async with cluster(settings=settings) as made:
        runs = Runs(made)
        made.service.scheduler.pause_engine("p0", paused=True)
        await runs.begin("r0", "r1", "r2")  # the first one waits at the scheduler
        await asyncio.sleep(10.0)
        await made.engines["p0"].kill()
        made.lose("p0", certain=True)
        begun_s = asyncio.get_running_loop().time()
        for name in ("r0", "r1", "r2"):
            with pytest.raises(EngineLostError, match="0 of 1 prefill"):
                await runs.runs.pop(name)
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(20.0, abs=1.0)
        assert runs.queue["waiting"] == 0
        assert not made.service.scheduler.dispatch.waiting
        await made.revive("p0")
        await runs.begin("again")
        assert await runs.runs.pop("again") == expected(PROMPT, 6)


async def test_a_request_that_gives_way_is_refused_at_once_also_without_engines() -> None:
    settings = RouterSettings(max_concurrent_requests=1, max_waiting_requests=3)
    async with cluster(settings=settings) as made:
        await made.engines["p0"].kill()
        made.lose("p0", certain=True)
        runs = Runs(made)
        await runs.begin("first")
        await runs.begin("a1", "a2", tenant=TAG)
        await runs.begin("b1", tenant=OTHER_TAG)
        await runs.begin("n1")
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(OverloadedError, match="gave way"):
            await runs.runs.pop("a2")
        assert asyncio.get_running_loop().time() - begun_s < 1.0
        await made.revive("p0")
        assert await asyncio.gather(*runs.runs.values()) == [expected(PROMPT, 6)] * 4


async def test_a_router_that_drains_ends_its_queue_and_takes_nothing_new() -> None:
    async with queued() as runs:
        await runs.begin("waits", "waits too")
        draining = asyncio.create_task(runs.made.service.drain())
        await asyncio.sleep(0.001)
        with pytest.raises(DrainingError, match="3 are under way"):
            await runs.made.run(job("comes", PROMPT))
        assert not draining.done()
        await runs.end()
        assert runs.order == ["first", "waits", "waits too"]
        await draining


async def test_a_full_queue_outlives_the_scheduler() -> None:
    """The next scheduler gets few requests first, then all, in their order."""
    network = ControlNetwork()
    async with cluster() as made:
        made.calls.gates["prefill"] = asyncio.Event()
        link = Link(network.connect(), "f")
        async with link_server(made.service.scheduler, network):
            link.start()
            one = Far(made, link)
            first = [asyncio.create_task(one.run(f"p{number}")) for number in range(3)]
            await asyncio.sleep(1.0)
            made.service.scheduler.pause_engine("p0", paused=True)
            rest = [asyncio.create_task(one.run(f"r{number}")) for number in range(12)]
            await asyncio.sleep(1.0)
            before = one.front_end.admission.report()
            assert before["waiting"] + before["at_scheduler"] == 12
        await asyncio.sleep(1.0)
        # All that had engines wait for the next scheduler as well, and no other is admitted.
        lost = one.front_end.admission.report()
        assert lost["at_scheduler_limit"] == 1
        assert lost["waiting"] == before["waiting"]
        made.service.scheduler.pause_engine("p0", paused=False)
        made.calls.gates["prefill"].set()
        async with link_server(made.service.scheduler, network):
            assert await asyncio.gather(*first, *rest) == [expected(PROMPT, 6)] * 15
            await one.front_end.end_requests()
            await link.stop()
            await nothing_is_left(made)
        assert one.front_end.admission.report()["waiting"] == 0


# ------------------------------------------------------------------------ refusals


async def refused(made: Cluster, names: Iterable[str], **options: Any) -> list[OverloadedError]:
    errors = []
    for name in names:
        with pytest.raises(OverloadedError) as caught:
            await made.run(job(name, PROMPT, **options))
        errors.append(caught.value)
    return errors


async def test_a_full_queue_makes_room_for_a_tenant_that_uses_less_of_it() -> None:
    settings = RouterSettings(max_concurrent_requests=1, max_waiting_requests=3)
    async with queued(settings) as runs:
        await runs.begin("a1", "a2", "a3", tenant=TAG)
        assert runs.made.service.turned_away() is not None  # Before its body is read.
        runs.runs.pop("a3").cancel()
        await asyncio.sleep(0.001)
        await runs.begin("b1", tenant=OTHER_TAG)
        await refused(runs.made, ["a4"], tenant=TAG)
        await runs.begin("n1")
        (error,) = [run.exception() for run in [runs.runs.pop("a2")]]
        assert isinstance(error, OverloadedError)
        assert "gave way to one of another tenant" in str(error)
        assert runs.queue["refused"] == {"full": 2, "displaced": 1}
        assert samples(runs.made, "dualpath:queue_refusals_total") == {"full": 2, "displaced": 1}
        assert samples(runs.made, "dualpath:requests_total")["refused"] == 1
        await runs.end()
        assert runs.order == ["first", "a1", "b1", "n1"]


async def test_an_urgent_request_takes_the_place_of_the_last_one_of_its_tenant() -> None:
    settings = RouterSettings(max_concurrent_requests=1, max_waiting_requests=2)
    async with queued(settings) as runs:
        await runs.begin("late", priority=3)
        await runs.begin("usual")
        await runs.begin("urgent", priority=-1)
        with pytest.raises(OverloadedError, match="or of lower priority"):
            await runs.runs.pop("late")
        await runs.end()
        assert runs.order == ["first", "urgent", "usual"]


async def test_a_refused_client_is_asked_to_come_back_when_the_queue_has_drained() -> None:
    settings = RouterSettings(max_concurrent_requests=1, max_waiting_requests=30)
    async with queued(settings) as runs:
        made = runs.made
        await runs.begin(*(f"r{number}" for number in range(30)))
        (before,) = await refused(made, ["x"])
        assert (before.retry_after_s, made.service.retry_after_s()) == (1, 1)  # no rate is known
        for number in range(20):  # one every two seconds
            await asyncio.sleep(1.5)
            made.calls.gates["prefill"].set()
            made.calls.gates["prefill"].clear()
            await asyncio.sleep(0.5)
            await runs.begin(f"s{number}")
        (after,) = await refused(made, ["y"])
        assert after.retry_after_s == made.service.retry_after_s()
        waiting, per_s = runs.queue["waiting"], runs.queue["admitted_per_s"]
        assert waiting / per_s <= after.retry_after_s <= waiting / per_s + 1
        assert f"{waiting} wait now" in str(after)
        assert f"after {after.retry_after_s} s, or raise --max-concurrent-requests" in str(after)
        await runs.end()


# ------------------------------------------------------------------------ what is counted


async def test_status_and_metrics_show_who_waits_and_for_how_long() -> None:
    settings = RouterSettings(max_concurrent_requests=1, tenant_weights={TAG: 2})
    async with queued(settings) as runs:
        await runs.begin("a1", "a2", tenant=TAG)
        await runs.begin("b1", tenant=OTHER_TAG)
        await runs.begin("n1", "n2", "n3", "n4")
        await asyncio.sleep(5.0)
        tenants = {each["tenant"]: each["waiting"] for each in runs.queue["tenants"]}
        assert tenants == {TAG: 2, OTHER_TAG: 1, "none": 4}
        assert runs.queue["tenants"][0] == {"tenant": "none", "waiting": 4}
        assert runs.queue["oldest_s"] == pytest.approx(5.0, abs=0.1)
        waiting = samples(runs.made, "dualpath:queued_requests")
        assert waiting == {"none": 4, TAG: 2, "other": 1}
        await runs.end()
        assert samples(runs.made, "dualpath:queued_requests") == {}
        assert samples(runs.made, "dualpath:queue_wait_seconds_count") == {"": 8}
        assert samples(runs.made, "dualpath:queue_wait_seconds_sum")[""] >= 7 * 5.0
