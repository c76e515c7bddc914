"""A trainer asks the router to change all engines' weights, or to let them sleep."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.front_end_links import link_server
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import GUARD_S, expected, job

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, EngineLostError
from dualpath.router.engine_calls import TokenEvent
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.requests.front_end import FrontEnd
from dualpath.router.scheduler.registry import Registry
from dualpath.router.scheduler.weights import (
    Action,
    EngineCall,
    Running,
    WeightsRequest,
    WeightUpdates,
    weights_call,
)
from dualpath.router.settings import RouterSettings

pytestmark = pytest.mark.virtual_time

PROMPT = list(range(1, 30))
RELOAD = EngineCall("/collective_rpc", {"method": "reload_weights"})
NONCES = tuple(f"{number:016x}" for number in range(1, 9))
STEP_1 = f"step-1-{NONCES[0]}"


class TrainedEngines:
    """Engines' routes for trainers: an engine is a member while it runs, is awake and named."""

    def __init__(self, made: Cluster) -> None:
        self.made = made
        self.calls: list[tuple[str, str]] = []
        self.fails: dict[tuple[str, str], Exception] = {}
        self.paused: set[str] = set()
        self.asleep: set[str] = set()
        self.unnamed: set[str] = set()
        self.past: dict[str, set[str]] = defaultdict(set)
        self.lost_answers: dict[tuple[str, str], Exception] = {}

    async def post(
        self, engine_id: str, api_url: str, call: EngineCall, timeout_s: float
    ) -> object:
        assert api_url == f"http://{engine_id}"
        assert timeout_s > 0
        self.calls.append((engine_id, call.path))
        await asyncio.sleep(0.1)
        if (error := self.fails.pop((engine_id, call.path), None)) is not None:
            raise error
        match call.path:
            case "/pause":
                self.paused.add(engine_id)
            case "/sleep":
                self.asleep.add(engine_id)
            case "/wake_up":
                self.asleep.discard(engine_id)
                self.paused.discard(engine_id)
            case "/collective_rpc":
                self.past[engine_id].add(await self.weights(engine_id, api_url, timeout_s))
                self.unnamed.add(engine_id)
            case "/update_weight_version":
                assert call.body["new_version"] not in self.past[engine_id], "of other weights"
                engine = self.made.engines[engine_id]
                engine.namespace = engine.namespace.with_weights(call.body["new_version"])
                self.unnamed.discard(engine_id)
            case "/resume":
                self.paused.discard(engine_id)
        await self._follow(engine_id)
        if (error := self.lost_answers.pop((engine_id, call.path), None)) is not None:
            raise error
        return {"status": "awake"}

    async def weights(self, engine_id: str, api_url: str, timeout_s: float) -> str:
        named = self.made.engines[engine_id].namespace.weights
        return "default" if engine_id in self.unnamed else named or "default"

    async def _follow(self, engine_id: str) -> None:
        engine = self.made.engines[engine_id]
        away = engine_id in self.paused | self.asleep | self.unnamed
        if away and not engine.dead.is_set():
            await engine.leave()
        elif not away and engine.dead.is_set():
            await engine.start(self.made.network)

    def paths(self, engine_id: str) -> list[str]:
        return [path for name, path in self.calls if name == engine_id]


@asynccontextmanager
async def trained(
    prefill: int = 1, decode: int = 1
) -> AsyncIterator[tuple[Cluster, TrainedEngines]]:
    async with cluster(prefill, decode, settings=RouterSettings(engine_wait_s=1.0)) as made:
        engines, nonces = TrainedEngines(made), iter(NONCES)
        scheduler = made.service.scheduler
        scheduler.weights = WeightUpdates(
            scheduler,
            engines,
            scheduler.clock,
            scheduler.metrics.weights_changed,
            lambda: next(nonces),
        )
        yield made, engines


async def over(made: Cluster) -> dict[str, Any]:
    """Wait until the operation is over; return the report."""
    updates = made.service.scheduler.weights
    assert updates._task is not None
    async with asyncio.timeout(GUARD_S):
        await updates._task
    return updates.report()


def update(label: str = "", **fields: Any) -> WeightsRequest:
    return WeightsRequest(Action.UPDATE, label=label, calls=(RELOAD,), **fields)


async def test_an_update_reaches_all_engines_before_the_next_request_does() -> None:
    async with trained(2, 1) as (made, engines):
        updates = made.service.scheduler.weights
        before = await made.run(job("before", PROMPT))
        asked = updates.request(update("step-1"))
        assert asked["version"] == STEP_1
        during = asyncio.create_task(made.run(job("during", PROMPT)))
        report = await over(made)
        assert (report["state"], report["weights"], report["error"]) == ("serving", STEP_1, None)
        assert await during == before == expected(PROMPT, 6)
        paths = ["/pause", "/collective_rpc", "/update_weight_version", "/resume"]
        assert [engines.paths(name) for name in ("p0", "p1", "d0")] == [paths] * 3
        order = [path for _, path in engines.calls]
        assert order == sorted(order, key=paths.index)
        assert made.service.registry.weights == STEP_1
        await made.settled()


async def test_a_server_of_several_ranks_is_called_once_for_all_of_them() -> None:
    async with trained(2, 1) as (made, _):
        updates, called = made.service.scheduler.weights, list[tuple[str, str]]()
        updates._engines = {"p0-dp0": "http://p", "p0-dp1": "http://p", "d0": "http://d"}

        async def work(engine_id: str, api_url: str) -> str:
            called.append((engine_id, api_url))
            return f"answer of {api_url}"

        found = await updates._each(["p0-dp0", "p0-dp1", "d0"], work)
        assert called == [("p0-dp0", "http://p"), ("d0", "http://d")]
        answer = "answer of http://p"
        assert found == {"p0-dp0": answer, "p0-dp1": answer, "d0": "answer of http://d"}


async def test_running_requests_are_finished_first() -> None:
    async with trained() as (made, engines):
        made.calls.gates["decode"] = asyncio.Event()
        running = asyncio.create_task(made.run(job("long", PROMPT)))
        await made.arrives("decode")
        made.service.scheduler.weights.request(update("step-1"))
        await asyncio.sleep(30)
        assert engines.calls == []
        assert made.service.status()["weights"]["state"] == "pausing"
        made.calls.gates["decode"].set()
        assert await running == expected(PROMPT, 6)
        assert (await over(made))["state"] == "serving"


@pytest.mark.parametrize("running", [Running.ABORT, Running.KEEP])
async def test_running_requests_are_aborted_or_continued(running: Running) -> None:
    async with trained() as (made, _):
        made.calls.gate_after_tokens = 2
        made.calls.gates["decode"] = asyncio.Event()
        task = asyncio.create_task(made.events(job("long", PROMPT)))
        await made.arrives("decode")
        made.service.scheduler.weights.request(update("step-1", running=running))
        made.calls.gate_after_tokens = 0
        for _ in range(200):
            await asyncio.sleep(0.01)
        made.calls.gates["decode"].set()
        events = await task
        tokens = [token for event in events for token in event.token_ids]
        if running is Running.ABORT:
            assert events[-1].finish_reason == "abort"
            assert tokens == expected(PROMPT, 6)[: len(tokens)]
            assert len(tokens) < 6
        else:
            assert tokens == expected(PROMPT, 6)
        assert (await over(made))["state"] == "serving"


@pytest.mark.parametrize("running", [Running.ABORT, Running.KEEP])
async def test_a_front_end_of_its_own_aborts_or_continues_running_requests_as_the_router_does(
    running: Running,
) -> None:
    async with (
        trained() as (made, _),
        link_server(made.service.scheduler) as opened,
        opened.link("f") as link,
    ):
        clock = asyncio.get_running_loop().time
        metrics = RouterMetrics(Registry(), dict, clock)
        own = FrontEnd(made.service.settings, link, metrics, made.calls, clock, lambda record: None)
        made.calls.gate_after_tokens = 2
        gate = made.calls.gates["decode"] = asyncio.Event()

        async def events() -> list[TokenEvent]:
            return [event async for event in own.submit(job("long", PROMPT))]

        task = asyncio.create_task(events())
        await made.arrives("decode")
        made.service.scheduler.weights.request(update("step-1", running=running))
        made.calls.gate_after_tokens = 0
        while made.service.scheduler.registry.alive():
            await asyncio.sleep(0.01)
        gate.set()
        got = await task
        tokens = [token for event in got for token in event.token_ids]
        if running is Running.ABORT:
            assert (got[-1].finish_reason, len(tokens) < 6) == ("abort", True)
            assert tokens == expected(PROMPT, 6)[: len(tokens)]
        else:
            assert tokens == expected(PROMPT, 6)
        assert (await over(made))["state"] == "serving"


async def test_requests_that_do_not_end_leave_the_cluster_paused_with_a_remedy() -> None:
    async with trained() as (made, engines):
        made.calls.gates["decode"] = asyncio.Event()
        running = asyncio.create_task(made.run(job("endless", PROMPT)))
        await made.arrives("decode")
        updates = made.service.scheduler.weights
        updates.request(update("step-1", timeout_s=20))
        report = await over(made)
        assert report["state"] == "failed"
        assert "1 requests still run; wait longer, or abort or keep" in report["error"]
        assert engines.calls == []
        # They are served as they are, with the weights that they have.
        made.calls.gates["decode"].set()
        await running
        updates.request(WeightsRequest(Action.RESUME))
        assert (await over(made))["state"] == "serving"
        assert await made.run(job("after", PROMPT)) == expected(PROMPT, 6)


async def test_an_update_that_failed_at_one_engine_is_repeated_there_only() -> None:
    async with trained(2, 1) as (made, engines):
        engines.fails["p1", "/update_weight_version"] = EngineLostError("p1 does not answer")
        updates = made.service.scheduler.weights
        updates.request(update("step-1"))
        waiting = asyncio.create_task(made.run(job("waits", PROMPT)))
        report = await over(made)
        assert report["state"] == "failed"
        assert f"p1 does not answer. Requests wait. Once that is mended, repeat the update with " \
               f"version {STEP_1}" in report["error"]  # fmt: skip
        await asyncio.sleep(100)  # Longer than a request waits for engines otherwise.
        assert not waiting.done()

        engines.calls.clear()
        updates.request(update(version=STEP_1))
        report = await over(made)
        assert (report["state"], report["weights"]) == ("serving", STEP_1)
        assert "/collective_rpc" in engines.paths("p1")
        assert await waiting == expected(PROMPT, 6)
        assert {e.namespace.weights for e in made.engines.values()} == {STEP_1}


async def test_an_engine_whose_answer_was_lost_is_not_updated_again() -> None:
    async with trained(2, 1) as (made, engines):
        engines.lost_answers["p1", "/update_weight_version"] = EngineLostError("no answer of p1")
        updates = made.service.scheduler.weights
        updates.request(update("step-1"))
        assert "no answer of p1" in (await over(made))["error"]
        engines.calls.clear()
        updates.request(update(version=STEP_1))
        report = await over(made)
        assert (report["state"], report["updated"]) == ("serving", ["d0", "p0", "p1"])
        assert "/collective_rpc" not in {path for _, path in engines.calls}


async def test_an_engine_that_was_restarted_is_refused_until_it_has_the_weights() -> None:
    async with trained(2, 1) as (made, engines):
        updates = made.service.scheduler.weights
        updates.request(update("step-1"))
        await over(made)
        restarted = made.engines["p1"]
        await restarted.kill()
        restarted.namespace = restarted.namespace.with_weights()
        await restarted.start(made.network)
        async with asyncio.timeout(GUARD_S):
            while "p1" not in updates.report()["outdated"]:
                await asyncio.sleep(0.1)
        assert updates.report()["outdated"]["p1"] == "the weights it was started with"
        engines.calls.clear()
        updates.request(update(version=STEP_1))
        report = await over(made)
        assert (report["state"], report["outdated"]) == ("serving", {})
        assert "/collective_rpc" not in engines.paths("p0")
        assert len(made.service.registry.alive(Role.PREFILL)) == 2


async def test_an_engine_that_has_ended_is_left_out() -> None:
    async with trained(2, 1) as (made, engines):
        engines.fails["p1", "/pause"] = EngineLostError("p1 does not answer")
        await made.engines["p1"].kill()
        updates = made.service.scheduler.weights
        updates.request(update("step-1"))
        assert (await over(made))["state"] == "failed"
        with pytest.raises(BadRequestError, match=r"p7, which are no engines .* d0, p0, p1"):
            updates.request(update("step-2", without=("p7",)))
        updates.request(update("step-2", without=("p1",)))
        report = await over(made)
        assert (report["state"], report["weights"]) == ("serving", report["version"])
        assert report["version"].startswith("step-2-")
        assert await made.run(job("after", PROMPT)) == expected(PROMPT, 6)


async def test_engines_sleep_until_they_are_woken_and_requests_wait() -> None:
    async with trained() as (made, engines):
        updates = made.service.scheduler.weights
        updates.request(WeightsRequest(Action.SLEEP))
        assert (await over(made))["state"] == "asleep"
        waiting = asyncio.create_task(made.run(job("waits", PROMPT)))
        updates.request(update("step-1"))  # Weights may change during sleep.
        assert (await over(made))["state"] == "asleep"
        await asyncio.sleep(100)
        assert not waiting.done()
        updates.request(WeightsRequest(Action.WAKE_UP))
        report = await over(made)
        assert (report["state"], report["weights"]) == ("serving", STEP_1)
        assert await waiting == expected(PROMPT, 6)
        assert engines.paths("d0").count("/pause") == 1


async def test_an_engine_restarted_during_sleep_does_not_decide_the_weights() -> None:
    async with trained(2, 1) as (made, _):
        updates = made.service.scheduler.weights
        updates.request(update("step-1"))
        await over(made)
        updates.request(WeightsRequest(Action.SLEEP))
        await over(made)
        sleeping = made.engines["p1"]
        sleeping.namespace = sleeping.namespace.with_weights()
        await sleeping.start(made.network)
        await asyncio.sleep(10)
        assert made.service.registry.alive() == ()
        assert made.service.registry.weights == STEP_1


async def test_what_cannot_be_done_is_refused_with_the_reason() -> None:
    async with trained() as (made, _):
        updates = made.service.scheduler.weights
        for asked, message in (
            (WeightsRequest(Action.UPDATE, label="a"), "calls of an update are none"),
            (
                WeightsRequest(Action.UPDATE, label="a", calls=(EngineCall("/sleep"),)),
                "calls of an update are /sleep",
            ),
            (update(), "either a label"),
            (update("a", version=STEP_1), "either a label"),
            (update(version="step-1"), "16 hex digits"),
            (update("a b"), "letters, digits"),
        ):
            with pytest.raises(BadRequestError, match=message):
                updates.request(asked)
        updates.request(update("step-1"))
        with pytest.raises(BadRequestError, match=r"update step-1-.* is under way"):
            updates.request(update("step-2"))
        await over(made)
        status, answer = weights_call(updates, b'{"action": "melt"}')
        assert status == 400
        assert "melt" in msgspec.json.encode(answer).decode()


async def test_an_update_without_any_engine_is_refused() -> None:
    async with trained(0, 0) as (made, _):
        with pytest.raises(EngineLostError, match="no engine has registered"):
            made.service.scheduler.weights.request(update("step-1"))
