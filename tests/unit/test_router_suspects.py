"""Suspect and draining engines: which engine gets new requests, and what a failure costs."""

import asyncio
from typing import Any

import pytest
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import expected, job

from dualpath.core import control
from dualpath.core.errors import EngineLostError, TransportError
from dualpath.router.scheduler.registry import Pause
from dualpath.router.settings import RouterSettings

pytestmark = pytest.mark.virtual_time

PROMPT = list(range(1, 19))


def paused(made: Cluster) -> dict[str, list[str]]:
    """Return the engines that get nothing new, and why."""
    engines = made.service.status()["engines"]
    return {e["engine_id"]: e["paused"] for e in engines if e["paused"]}


async def until(made: Cluster, wanted: Any) -> None:
    await made.service.arrivals.until(wanted, 30.0)


async def test_a_retry_goes_elsewhere_though_the_failed_engine_is_live() -> None:
    async with cluster(prefill=2) as made:
        made.calls.errors.extend([TransportError("once"), TransportError("twice")])
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        # The other was the last one open, and so was open again as soon as it had answered.
        assert made.calls.prefills == ["p0", "p1", "p1"]
        assert paused(made) == {"p0": ["suspect"]}
        await asyncio.sleep(made.service.settings.suspect_timeout_s * 2)
        assert paused(made) == {}
        assert len(made.service.registry.alive()) == 3


async def test_an_engine_without_its_server_is_lost_though_its_control_link_lives() -> None:
    async with cluster(prefill=2) as made:
        made.calls.errors.append(EngineLostError("p0 refuses connections"))
        made.calls.deaf.add("p0")
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert made.calls.prefills == ["p0", "p1"]
        await made.service.saw_loss("p0")


async def test_a_report_that_comes_after_a_failure_proves_nothing() -> None:
    async with cluster(prefill=2) as made:
        made.calls.errors.append(EngineLostError("connection reset"))
        made.engines["p0"].unanswered.add(control.Sync)
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await until(made, lambda: bool(paused(made)))
        made.engines["p0"].report()
        assert await run == expected(PROMPT, 6)
        await made.service.saw_loss("p0")


@pytest.mark.parametrize(("most", "fails"), [(2, False), (1, True)])
async def test_attempts_lost_with_an_engine_are_counted_apart(most: int, fails: bool) -> None:
    """Neither an engine's death eats the attempts, nor can a request kill engines for ever."""
    async with cluster(prefill=3, settings=RouterSettings(max_attempts=most)) as made:
        made.calls.errors.extend([EngineLostError("reset"), TransportError("live failure")])
        made.calls.deaf.add("p0")
        run = made.run(job("a", PROMPT))
        if fails:
            with pytest.raises(EngineLostError, match=r"failed 1 times, at most 1 attempts.*reset"):
                await run
        else:
            assert await run == expected(PROMPT, 6)


async def test_a_transfer_that_failed_makes_the_receiver_suspect() -> None:
    async with cluster(decode=2) as made:
        made.calls.send_failure = "cable pulled"
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert [t.decode_engine for t in made.calls.transfers] == ["d0", "d1"]
        assert paused(made) == {"d0": ["suspect"]}


async def test_a_prefill_given_up_since_a_transfer_failed_is_blamed_on_the_receiver() -> None:
    """The PE's vLLM says only that it gave up; why stands in its ``PrefillDone``."""
    async with cluster(decode=2) as made:
        made.calls.send_failure, made.calls.gives_up_once = "the link to it stalls", "error"
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert [t.decode_engine for t in made.calls.transfers] == ["d0", "d1"]
        (failure,) = made.service.records[0].failures
        assert "the link to it stalls" in failure


async def test_a_draining_engine_finishes_its_requests_and_is_notified_when_none_is_left() -> None:
    async with cluster(prefill=2) as made:
        made.calls.gates["prefill"] = asyncio.Event()
        old = asyncio.create_task(made.run(job("old", PROMPT)))
        await made.arrives("prefill")
        p0 = made.engines["p0"]
        p0.draining = "SIGTERM"
        p0.report()
        await until(made, lambda: paused(made) == {"p0": ["draining"]})
        new = asyncio.create_task(made.run(job("new", PROMPT)))
        await made.engines["p1"].saw(control.PeerUp)
        assert not [m for m in p0.received if isinstance(m, control.Drained)]

        made.calls.gates["prefill"].set()
        assert await old == await new == expected(PROMPT, 6)
        assert made.calls.prefills == ["p0", "p1"]
        await p0.saw(control.Drained)
        p0.send(control.Deregister(reason="drained"))
        await made.service.saw_loss("p0")
        assert made.service.status()["counters"]["retries"] == 0


async def test_an_engine_that_drains_at_a_restarted_router_is_notified_again() -> None:
    async with cluster() as made:
        p0 = made.engines["p0"]
        p0.draining = "SIGTERM"
        p0.report()
        await p0.saw(control.Drained)
        await made.service.stop()
        p0.received.clear()
        await made.restart_router()
        await p0.saw(control.Drained)


async def test_an_operator_pauses_and_resumes_an_engine() -> None:
    async with cluster(prefill=2) as made:
        assert made.service.scheduler.pause_engine("p0", paused=True)
        assert not made.service.scheduler.pause_engine("none", paused=True)
        for number in range(2):
            await made.run(job(f"r{number}", PROMPT))
        assert made.calls.prefills == ["p1", "p1"]
        made.lose("p0")
        await made.service.wait_ready(2, 1, 30.0)  # it registers again and is still paused
        assert paused(made) == {"p0": [Pause.ASKED]}
        assert made.service.scheduler.pause_engine("p0", paused=False)
        assert await made.run(job("last", PROMPT)) == expected(PROMPT, 6)
        assert made.calls.prefills[-1] == "p0"
