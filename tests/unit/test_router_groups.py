"""Data-parallel groups at the router: their ranks join together, are lost together, drain together.

Ranks compute in lock step, so that one that ends takes the others with it, in its own time: what is
tried again must not go to one of them.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence

import pytest
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import FakeEngine, expected, job

from dualpath.core import control
from dualpath.core.cluster import GroupRank, Role
from dualpath.core.errors import EngineLostError
from dualpath.core.weights import weights_version
from dualpath.router.scheduler.registry import Pause
from dualpath.router.settings import RouterSettings

pytestmark = pytest.mark.virtual_time

PROMPT = list(range(1, 19))


def place(engine: FakeEngine, rank: int, start: int, size: int = 2) -> None:
    """Give an engine its rank in a start of the group named by its role."""
    engine.dp = GroupRank(engine.role.value, f"start {start}", rank, size)


async def add_group(made: Cluster, name: str, role: Role, size: int = 2) -> list[FakeEngine]:
    """Start a group of engines; they all join."""
    engines = [FakeEngine(f"{name}{rank}", role, made.stored) for rank in range(size)]
    for rank, engine in enumerate(engines):
        engine.dp = GroupRank(name, f"{name} 1", rank, size)
        made.engines[engine.engine_id] = engine
    await asyncio.gather(*(engine.join(made.network) for engine in engines))
    return engines


async def restart(made: Cluster, engines: Sequence[FakeEngine], start: int) -> None:
    """Start the next processes of some ranks; returns when they have begun to register."""
    for engine in engines:
        assert engine.dp is not None
        engine.dp = GroupRank(engine.dp.group, f"start {start}", engine.dp.rank, engine.dp.size)
        await engine.start(made.network)


def alive(made: Cluster) -> list[str]:
    return [engine.engine_id for engine in made.service.registry.alive()]


def waits(made: Cluster) -> list[str]:
    """Return the engines that wait for their group."""
    return [e["engine_id"] for e in made.service.status()["engines"] if e["waits_for"]]


async def test_a_rank_waits_until_all_of_its_group_have_registered() -> None:
    async with cluster(prefill=0) as made:
        first, second = (FakeEngine(f"p{rank}", Role.PREFILL, made.stored) for rank in range(2))
        place(first, 0, start=1)
        place(second, 1, start=1)
        made.engines.update(p0=first, p1=second)
        await first.start(made.network)
        refused = await first.saw(control.Refused)
        assert "'prefill' waits for 1 of its 2 ranks: 1;" in refused.reason
        await asyncio.sleep(20.0)  # it registers repeatedly, and does not count as silent
        assert alive(made) == ["d0"]
        assert waits(made) == ["p0"]
        assert "'prefill' waits for 1 of its 2 ranks: 1;" in str(made.service.unready())
        labels = 'engine="p0",role="prefill",node="node of p0",group="prefill"'
        metrics = made.service.exposition().decode()
        assert f"dualpath:engine_waits_for_group{{{labels}}} 1.0" in metrics
        await second.start(made.network)
        await asyncio.gather(*(engine.saw(control.Registered) for engine in (first, second)))
        assert alive(made) == ["d0", "p0", "p1"]
        assert waits(made) == []
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)


async def test_all_ranks_are_lost_with_one_and_a_retry_goes_to_another_group() -> None:
    async with cluster(prefill=0) as made:
        await add_group(made, "a", Role.PREFILL)
        await add_group(made, "b", Role.PREFILL)
        made.calls.gates["prefill"] = asyncio.Event()
        runs = [asyncio.create_task(made.run(job(f"r{i}", PROMPT))) for i in range(4)]
        while len(made.calls.prefills) < 4:
            await asyncio.sleep(0.01)
        assert sorted(made.calls.prefills) == ["a0", "a1", "b0", "b1"]
        await made.engines["a1"].kill()
        made.lose("a1")
        assert alive(made) == ["d0", "b0", "b1"]
        made.calls.gates["prefill"].set()
        assert await asyncio.gather(*runs) == [expected(PROMPT, 6)] * 4
        assert {name[0] for name in made.calls.prefills[4:]} == {"b"}
        assert made.service.status()["counters"]["retries"] == 2


async def test_a_group_is_back_when_all_ranks_of_one_start_are() -> None:
    async with cluster(prefill=0) as made:
        first, second = await add_group(made, "p", Role.PREFILL)
        await first.kill()
        made.lose("p0")
        # Its process goes on for a while: it registers, as rank of a start that is over.
        await asyncio.sleep(2.0)
        assert waits(made) == ["p1"]
        await restart(made, [first], start=2)
        await asyncio.sleep(2.0)
        assert waits(made) == ["p0", "p1"]
        assert alive(made) == ["d0"]
        await second.kill()
        await restart(made, [second], start=2)
        await asyncio.gather(*(engine.saw(control.Registered) for engine in (first, second)))
        assert sorted(alive(made)) == ["d0", "p0", "p1"]
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)


async def test_a_group_with_a_temporarily_unreachable_rank_comes_back_without_a_restart() -> None:
    async with cluster(prefill=0) as made:
        await add_group(made, "p", Role.PREFILL)
        made.lose("p1")
        assert alive(made) == ["d0"]
        await made.service.wait_ready(2, 1, 30.0)
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)


async def test_a_restarted_router_gets_whole_groups() -> None:
    async with cluster(prefill=0) as made:
        await add_group(made, "p", Role.PREFILL)
        await made.service.stop()
        await made.restart_router()
        await made.service.wait_ready(2, 1, 30.0)
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)


async def test_a_failure_on_one_rank_makes_its_group_suspect_until_each_rank_has_answered() -> None:
    settings = RouterSettings(suspect_timeout_s=1.5)
    async with cluster(prefill=0, settings=settings) as made:
        await add_group(made, "a", Role.PREFILL)
        await add_group(made, "b", Role.PREFILL)
        made.calls.errors.append(EngineLostError("connection reset"))
        made.calls.deaf.add("a1")  # the sibling's server is gone, that of the rank that failed not
        assert await made.run(job("r", PROMPT)) == expected(PROMPT, 6)
        assert [name[0] for name in made.calls.prefills] == ["a", "b"]
        await made.service.saw_loss("a0")
        assert sorted(alive(made)) == ["b0", "b1", "d0"]


async def test_ranks_that_all_answer_go_on_but_for_the_one_that_failed() -> None:
    async with cluster(prefill=0) as made:
        await add_group(made, "a", Role.PREFILL)
        made.calls.errors.append(EngineLostError("connection reset"))
        assert await made.run(job("r", PROMPT)) == expected(PROMPT, 6)
        assert made.calls.prefills == ["a0", "a1"]
        engines = made.service.status()["engines"]
        assert {e["engine_id"]: e["paused"] for e in engines if e["paused"]} == {"a0": ["suspect"]}


async def test_a_group_drains_as_one_and_goes_when_nothing_is_left_on_any_rank() -> None:
    async with cluster(prefill=0) as made:
        first, second = await add_group(made, "p", Role.PREFILL)
        await made.add("other", Role.PREFILL)
        made.calls.gates["prefill"] = asyncio.Event()
        runs = [asyncio.create_task(made.run(job(f"r{i}", PROMPT))) for i in range(2)]
        while len(made.calls.prefills) < 2:
            await asyncio.sleep(0.01)
        assert sorted(made.calls.prefills) == ["p0", "p1"]
        first.draining = "SIGTERM"
        first.report()
        states = {e.info.engine_id: e for e in made.service.registry.all()}
        await made.service.arrivals.until(lambda: bool(states["p1"].pauses), 30.0)
        await asyncio.sleep(1.0)  # heartbeats of the sibling do not open it
        assert states["p0"].pauses == states["p1"].pauses == {Pause.DRAINING}
        assert not [m for m in first.received if isinstance(m, control.Drained)]
        made.calls.gates["prefill"].set()
        assert await asyncio.gather(*runs) == [expected(PROMPT, 6)] * 2
        await first.saw(control.Drained)
        first.send(control.Deregister(reason="drained"))
        await made.service.saw_loss("p0")
        assert sorted(alive(made)) == ["d0", "other"]
        assert made.service.status()["counters"]["retries"] == 0
        assert not [m for m in second.received if isinstance(m, control.Drained)]


async def drains_and_leaves(engine: FakeEngine) -> None:
    """Its server gets SIGTERM: it is notified that no request is left, and deregisters."""
    engine.draining = "SIGTERM"
    engine.report()
    await engine.saw(control.Drained)
    await engine.leave()


def have_left(made: Cluster) -> dict[str, bool]:
    """Return of each engine that has no part any more whether it left on purpose."""
    return {e.info.engine_id: e.left for e in made.service.registry.all() if not e.alive}


def losses(made: Cluster) -> float:
    """Return how many prefill engines the router counts as lost."""
    name = 'dualpath:engine_losses_total{role="prefill"} '
    lines = made.service.exposition().decode().splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_a_drained_group_leaves_as_one_in_whatever_order_its_ranks_go(
    order: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Servers of one group get SIGTERM and end each in its own time; no rank is lost by that."""
    async with cluster(prefill=0) as made:
        engines = await add_group(made, "p", Role.PREFILL, size=3)
        for rank in order:
            await drains_and_leaves(engines[rank])
            await made.service.saw_loss(f"p{rank}")
            assert alive(made) == ["d0"]
            await asyncio.sleep(2.0)  # the others go on speaking, and are not sent away
        assert have_left(made) == {"p0": True, "p1": True, "p2": True}
        assert losses(made) == 0
        assert "lost" not in caplog.text
        # Each has reported its own end, so no slot waits for a proof of it.
        states = [made.service.registry.get(engine.engine_id) for engine in engines]
        assert all(s is not None and made.service.registry.is_dead(s.info.writer) for s in states)


@pytest.mark.parametrize("settled", [True, False])
async def test_a_rank_with_an_ended_server_may_leave_a_drained_group_first(
    *, settled: bool
) -> None:
    """A server ends when the first of its ranks has drained; others may not have reported it."""
    async with cluster(prefill=0) as made:
        first, second = await add_group(made, "p", Role.PREFILL)
        first.draining = "SIGTERM"
        first.report()
        await first.saw(control.Drained)
        await second.leave(settled=settled)
        await made.service.saw_loss("p1")
        await asyncio.sleep(2.0)
        await first.leave(settled=settled)
        await asyncio.sleep(20.0)
        assert have_left(made) == {"p0": True, "p1": True}
        assert losses(made) == 0
        states = [made.service.registry.get(engine_id) for engine_id in ("p0", "p1")]
        dead = [s is not None and made.service.registry.is_dead(s.info.writer) for s in states]
        assert dead == [settled] * 2  # a transfer that may go on is no end, the process's end is


async def test_ranks_of_which_one_dies_while_their_drained_group_leaves_are_lost_as_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(prefill=0) as made:
        first, second, _ = await add_group(made, "p", Role.PREFILL, size=3)
        await drains_and_leaves(first)
        await second.kill()
        await made.service.saw_loss("p0")
        assert (losses(made), have_left(made)["p1"]) == (0, True)
        await asyncio.sleep(5.0)
        assert losses(made) == 0, "it may still be about to say goodbye"
        await asyncio.sleep(7.0)
        assert have_left(made) == {"p0": True, "p1": False, "p2": False}
        assert losses(made) == 2
        assert "p1 lost: silent for more than" in caplog.text
        assert "p2 lost: rank p1 of its group is lost: silent for more than" in caplog.text
        assert "p0 lost" not in caplog.text


async def test_a_rank_that_dies_while_its_group_drains_takes_the_others_with_it() -> None:
    """One leaves later in good order: that makes nothing of the loss undone."""
    async with cluster(prefill=0) as made:
        first, second = await add_group(made, "p", Role.PREFILL)
        first.draining = "SIGTERM"
        first.report()
        await first.saw(control.Drained)
        await second.kill()
        made.lose("p1")
        await first.leave()
        await made.service.arrivals.until(lambda: have_left(made)["p0"], 30.0)
        assert losses(made) == 2
        assert have_left(made) == {"p0": True, "p1": False}


async def test_a_rank_that_stays_when_its_drained_group_has_left_is_seen_to_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only one of two servers got SIGTERM, and an idle rank may not notice that its group ends."""
    async with cluster(prefill=0) as made:
        first, _ = await add_group(made, "p", Role.PREFILL)
        await drains_and_leaves(first)
        await asyncio.sleep(5.0)
        assert (losses(made), waits(made)) == (0, [])
        await asyncio.sleep(10.0)
        assert (losses(made), waits(made)) == (1, ["p1"])
        assert "p1 lost: its group has left" in caplog.text


async def test_a_rank_that_leaves_while_its_group_works_takes_the_others_with_it() -> None:
    async with cluster(prefill=0) as made:
        first, _ = await add_group(made, "p", Role.PREFILL)
        await made.add("other", Role.PREFILL)
        made.calls.gates["prefill"] = asyncio.Event()
        runs = [asyncio.create_task(made.run(job(f"r{i}", PROMPT))) for i in range(2)]
        while len(made.calls.prefills) < 2:
            await asyncio.sleep(0.01)
        first.draining = "SIGTERM"
        first.report()
        await first.leave()  # it was given no time to drain
        await made.service.saw_loss("p0")
        assert sorted(alive(made)) == ["d0", "other"]
        assert (have_left(made), losses(made)) == ({"p0": True, "p1": False}, 1)
        made.calls.gates["prefill"].set()
        assert await asyncio.gather(*runs) == [expected(PROMPT, 6)] * 2
        assert made.calls.prefills[2:] == ["other", "other"]


async def test_a_group_that_has_left_for_other_weights_is_back_with_its_last_rank() -> None:
    async with cluster(prefill=0) as made:
        ranks = await add_group(made, "p", Role.PREFILL)
        assert await made.run(job("before", PROMPT)) == expected(PROMPT, 6)
        version, decode = weights_version("step-1", "0123456789abcdef"), made.engines["d0"]
        for engine in (*ranks, decode):
            await engine.leave()
            engine.namespace = engine.namespace.with_weights(version)
        await made.service.saw_loss("d0")
        assert alive(made) == []
        made.stored.clear()  # that of the former version's namespace
        await decode.join(made.network)
        waiting = asyncio.create_task(made.run(job("waits", PROMPT)))
        await restart(made, ranks[:1], start=2)
        await asyncio.sleep(2.0)
        assert (alive(made), waits(made)) == (["d0"], ["p0"])
        await restart(made, ranks[1:], start=2)
        assert await waiting == expected(PROMPT, 6)
        assert sorted(alive(made)) == ["d0", "p0", "p1"]
        assert made.service.registry.weights == version
        await made.settled()


async def test_a_rank_that_another_engine_has_is_refused() -> None:
    async with cluster(prefill=0) as made:
        await add_group(made, "p", Role.PREFILL)
        third = FakeEngine("third", Role.PREFILL, made.stored)
        third.dp = GroupRank("p", "p 1", 1, 2)
        made.engines["third"] = third
        await third.start(made.network)
        refused = await third.saw(control.Refused)
        assert "where 'p1' is rank 1 of 2" in refused.reason
        third.dp = GroupRank("q", "q 1", 2, 2)
        await third.saw(control.Refused, lambda m: "rank 2 of 2" in m.reason)
        third.dp = GroupRank("q", "q 1", 0, 1 << 60)
        await third.saw(control.Refused, lambda m: "at most 4096" in m.reason)
        assert "third" not in alive(made)


@pytest.mark.parametrize("settled", [True, False])
async def test_a_deregistered_engine_is_logged_as_leaving_not_as_lost(
    caplog: pytest.LogCaptureFixture, *, settled: bool
) -> None:
    """Stopped without draining: its requests are retried elsewhere, and no alert is due."""
    caplog.set_level(logging.INFO)
    async with cluster() as made:
        await made.engines["d0"].leave(settled=settled)
        await made.service.saw_loss("d0")
    logged = [(r.levelname, r.getMessage()) for r in caplog.records if " d0 " in r.getMessage()]
    assert ("INFO", "decode engine d0 leaves: it shuts down") in logged
    assert "lost" not in caplog.text
