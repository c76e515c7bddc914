"""Calls that fall silent: which part of an engine is silent, and where the request is retried."""

import asyncio
from typing import Any

import pytest
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import expected, job

from dualpath.router.engines import EngineInfo
from dualpath.router.settings import RouterSettings
from dualpath_lab.faults.virtual_time import VirtualTimeLoop

pytestmark = pytest.mark.virtual_time

PROMPT = list(range(1, 19))
#: Silence, and twice the time for an answer: first the inquiry's, then the probe's.
NOTICED_S = 2.0 + 5.0 + 1.0


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def gated(made: Cluster, stage: str) -> "asyncio.Task[list[int]]":
    """Return a request that has got to a stage and stays there."""
    made.calls.gates[stage] = asyncio.Event()
    made.calls.entered[stage].clear()
    run = asyncio.create_task(made.run(job("a", PROMPT)))
    await made.arrives(stage)
    return run


def where(made: Cluster, stage: str) -> list[str]:
    return made.calls.prefills if stage == "prefill" else made.calls.decodes


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("after_tokens", [0, 3])
async def test_a_silent_http_server_is_noticed_in_seconds_and_its_calls_go_elsewhere(
    stage: str, after_tokens: int
) -> None:
    async with cluster(prefill=2, decode=2) as made:
        made.calls.gate_after_tokens = after_tokens
        run = await gated(made, stage)
        (silent,) = where(made, stage)
        made.calls.mute.add(silent)
        del made.calls.gates[stage]  # The next engine serves.
        began_s = now_s()
        assert await run == expected(PROMPT, 6)
        assert now_s() - began_s < NOTICED_S
        assert where(made, stage)[0] == silent
        assert where(made, stage)[1] != silent
        assert f"the HTTP server of engine {silent}" in made.service.records[0].failures[0]
        await made.service.saw_loss(silent)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_call_that_is_silent_for_long_goes_on_while_its_server_has_it(stage: str) -> None:
    """An overloaded engine: the prompt waits in a queue and the core works for others."""
    async with cluster(prefill=2, decode=2) as made:
        run = await gated(made, stage)
        await asyncio.sleep(150.0)
        assert made.calls.inquiries
        made.calls.gates[stage].set()
        assert await run == expected(PROMPT, 6)
        assert made.service.records[0].failures == []


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_call_that_its_server_never_got_is_retried(stage: str) -> None:
    async with cluster(prefill=2, decode=2) as made:
        run = await gated(made, stage)
        (first,) = where(made, stage)
        made.calls.open[first].clear()
        del made.calls.gates[stage]
        began_s = now_s()
        assert await run == expected(PROMPT, 6)
        assert now_s() - began_s < NOTICED_S
        assert len(where(made, stage)) == 2
        assert "never got it" in made.service.records[0].failures[0]
        assert len(made.service.registry.alive()) == 4  # The engine itself is well.


async def test_a_call_of_which_the_answer_does_not_arrive_is_retried() -> None:
    async with cluster(decode=2) as made:
        made.calls.gate_after_tokens = 3
        run = await gated(made, "decode")
        (first,) = made.calls.decodes
        made.calls.open[first] = dict.fromkeys(made.calls.open[first], 0.0)
        del made.calls.gates["decode"]
        assert await run == expected(PROMPT, 6)
        assert "has sent more of its answer than arrived" in made.service.records[0].failures[0]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_an_engine_of_which_the_core_hangs_is_lost_though_server_and_link_live(
    stage: str,
) -> None:
    settings = RouterSettings(core_timeout_s=10.0)
    async with cluster(prefill=2, decode=2, settings=settings) as made:
        run = await gated(made, stage)
        (first,) = where(made, stage)
        made.engines[first].core_hangs = True
        del made.calls.gates[stage]
        began_s = now_s()
        assert await run == expected(PROMPT, 6)
        assert 10.0 < now_s() - began_s < 20.0
        assert "its core has made no step" in made.service.records[0].failures[0]


async def test_a_router_that_was_stopped_does_not_take_its_engines_for_silent() -> None:
    settings = RouterSettings(inquiry_timeout_s=2.0)
    async with cluster(prefill=2, decode=2, settings=settings) as made:
        answers = made.calls.answers

        async def after_a_second(engine: EngineInfo) -> None:
            await asyncio.sleep(1.0)
            for _ in range(5):  # What has arrived is read in some turns of the loop.
                await asyncio.sleep(0)
            await answers(engine)

        made.calls.answers = after_a_second  # type: ignore[method-assign]
        run = await gated(made, "prefill")
        for _ in range(5):
            asked = len(made.calls.inquiries)
            while len(made.calls.inquiries) == asked and not run.done():
                await asyncio.sleep(0.1)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop._now_s += 3.0  # The answer is under way meanwhile.
        made.calls.gates["prefill"].set()
        assert await run == expected(PROMPT, 6)
        assert made.service.records[0].failures == []
        assert len(made.service.registry.alive()) == 4


async def test_an_idle_engine_with_a_slow_first_call_is_not_lost() -> None:
    """Its reports show no step for hours, but the call has not waited for long."""
    async with cluster(settings=RouterSettings(core_timeout_s=10.0)) as made:
        made.engines["p0"].core_hangs = True
        await asyncio.sleep(200.0)
        run = await gated(made, "prefill")
        await asyncio.sleep(9.0)
        made.calls.gates["prefill"].set()
        assert await run == expected(PROMPT, 6)
        assert made.service.records[0].failures == []


def paused(made: Cluster) -> set[str]:
    return {e["engine_id"] for e in made.service.status()["engines"] if e["paused"]}


async def until(made: Cluster, wanted: Any) -> None:
    await made.service.arrivals.until(wanted, 100.0)


async def test_an_engine_that_registers_again_gets_no_requests_until_its_server_answers() -> None:
    async with cluster(prefill=2) as made:
        run = await gated(made, "prefill")
        made.calls.mute.add("p0")
        del made.calls.gates["prefill"]
        assert await run == expected(PROMPT, 6)
        await made.service.saw_loss("p0")
        await made.service.wait_ready(2, 1, 30.0)
        await asyncio.sleep(100.0)
        for number in range(3):
            await made.run(job(f"r{number}", PROMPT))
        assert made.calls.prefills == ["p0", "p1", "p1", "p1", "p1"]
        assert paused(made) == {"p0"}
        made.calls.mute.clear()
        await asyncio.sleep(5.0)
        assert paused(made) == set()


async def test_an_engine_of_which_the_core_hung_gets_requests_when_it_makes_steps_again() -> None:
    async with cluster(prefill=2) as made:
        run = await gated(made, "prefill")
        made.engines["p0"].core_hangs = True
        del made.calls.gates["prefill"]
        assert await run == expected(PROMPT, 6)
        await made.service.wait_ready(2, 1, 30.0)
        await asyncio.sleep(10.0)
        assert paused(made) == {"p0"}
        made.engines["p0"].core_hangs = False
        await asyncio.sleep(5.0)
        assert paused(made) == set()


@pytest.mark.parametrize("name", ["p0", "d1"])
async def test_a_silent_http_server_of_an_idle_engine_is_noticed_before_a_request(
    name: str,
) -> None:
    async with cluster(prefill=2, decode=2) as made:
        made.calls.mute.add(name)
        await made.service.saw_loss(name)
        for number in range(2):
            assert await made.run(job(f"r{number}", PROMPT)) == expected(PROMPT, 6)
        assert name not in (*made.calls.prefills, *made.calls.decodes)
        assert [r.failures for r in made.service.records] == [[], []]


async def test_a_patrol_asks_at_most_ten_engines_a_second() -> None:
    async with cluster(prefill=99) as made:
        asked: list[str] = []
        answers = made.calls.answers

        async def counted(engine: EngineInfo) -> None:
            asked.append(engine.engine_id)
            await answers(engine)

        made.calls.answers = counted  # type: ignore[method-assign]
        await asyncio.sleep(20.0)
        assert 100 < len(asked) <= 200
        # In turn, but for those that have not reported yet.
        assert len(set(asked[:50])) == 50


async def test_one_inquiry_covers_all_silent_calls_of_an_engine() -> None:
    async with cluster() as made:
        made.calls.gates["prefill"] = asyncio.Event()
        runs = [asyncio.create_task(made.run(job(f"r{n}", PROMPT))) for n in range(5)]
        await asyncio.sleep(100.0)
        # After 2 s, and then at intervals that grow to 8 s.
        assert len(made.calls.inquiries) < 5 + 100 / 8
        made.calls.gates["prefill"].set()
        for run in runs:
            assert await run == expected(PROMPT, 6)
