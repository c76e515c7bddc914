"""Several front ends of one scheduler: each its requests, and what the loss of either end costs."""

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator, Mapping

import msgspec
import pytest
from tests.control_network import ControlNetwork
from tests.front_end_links import TIMEOUT_S, Link, LinkServer, link_server
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import expected, job, keys_of

from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.core.key_cache import Adapter
from dualpath.router.engines import missing_engines
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.requests.front_end import FrontEnd
from dualpath.router.scheduler import link_messages as m
from dualpath.router.scheduler.front_end_server import FrontEndSession
from dualpath.router.scheduler.registry import Registry
from dualpath.router.scheduling import AttemptOrder, RequestOrder
from dualpath.router.served_adapters import ServedAdapters

pytestmark = pytest.mark.virtual_time
PROMPT = list(range(1, 18))
#: Of virtual time, for one request.
LIMIT_S = 120.0


class Far:
    """A front end behind a link, with lives of requests as a router has them."""

    def __init__(self, made: Cluster, link: Link) -> None:
        clock = asyncio.get_running_loop().time
        self.link = link
        metrics = RouterMetrics(Registry(), dict, clock)
        self.front_end = FrontEnd(
            made.service.settings, link, metrics, made.calls, clock, lambda record: None
        )

    async def run(self, name: str, tokens: int = 6) -> list[int]:
        async with asyncio.timeout(LIMIT_S):
            events = [event async for event in self.front_end.submit(job(name, PROMPT, tokens))]
        return [token for event in events for token in event.token_ids]

    async def kill(self) -> None:
        await self.link.kill()
        for task in self.front_end._tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def far(
    made: Cluster, opened: LinkServer, name: str, adapters: Mapping[str, str] | None = None
) -> AsyncIterator[Far]:
    async with opened.link(name, adapters) as link:
        one = Far(made, link)
        yield one
        await one.front_end.end_requests()


@contextlib.asynccontextmanager
async def both_of_two(
    network: ControlNetwork | None = None, *, prefill: int = 1, decode: int = 1
) -> AsyncIterator[tuple[Cluster, Far, Far]]:
    async with (
        cluster(prefill, decode) as made,
        link_server(made.service.scheduler, network) as opened,
        far(made, opened, "f") as one,
        far(made, opened, "g") as other,
    ):
        yield made, one, other


async def nothing_is_left(made: Cluster) -> None:
    async with asyncio.timeout(LIMIT_S):
        await made.settled()
        # The ends of requests come over links that may be slow.
        scheduler = made.service.scheduler
        while scheduler.releases.held or not scheduler.dispatch.idle():
            await asyncio.sleep(0.001)


async def test_front_ends_share_the_engines_and_what_is_stored() -> None:
    async with both_of_two() as (made, one, other):
        assert await one.run("a") == expected(PROMPT, 6)
        assert await other.run("b") == expected(PROMPT, 6)
        assert other.front_end.records[0].hit_tokens == 16
        await nothing_is_left(made)


async def test_many_requests_at_once_over_links_that_are_slow_and_reset() -> None:
    chance = random.Random(7)
    network = ControlNetwork(lambda: chance.choice((0.0, 0.01, 0.2)))
    async with both_of_two(network, prefill=2, decode=2) as (made, one, other):
        fronts = [one, other] * 4
        runs = [asyncio.create_task(f.run(f"{n}")) for n, f in enumerate(fronts)]
        for number in range(10):
            await asyncio.sleep(0.3)
            (one, other)[number % 2].link.connection.reset()
        assert await asyncio.gather(*runs) == [expected(PROMPT, 6)] * 8
        await nothing_is_left(made)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_killed_front_end_costs_its_own_streams_only(stage: str) -> None:
    async with both_of_two() as (made, one, other):
        made.calls.gates[stage] = asyncio.Event()
        dies = asyncio.create_task(one.run("a"))
        await made.arrives(stage)
        lives = asyncio.create_task(other.run("b"))
        await one.kill()
        with pytest.raises(Exception, match="router stops"):
            await dies
        await asyncio.sleep(TIMEOUT_S + 1)  # its death is not reported
        made.calls.gates.pop(stage).set()
        assert await lives == expected(PROMPT, 6)
        await nothing_is_left(made)


async def test_a_prompt_is_stored_though_its_front_end_dies_before_it_calls_the_decode_engine() -> (
    None
):
    async with both_of_two() as (made, one, _):
        made.calls.gates["decode"] = asyncio.Event()
        dies = asyncio.create_task(one.run("a"))
        await made.arrives("decode")
        assert not made.stored, "the call orders it"
        await one.kill()
        with pytest.raises(Exception, match="router stops"):
            await dies
        await asyncio.sleep(TIMEOUT_S + 1)
        await nothing_is_left(made)
        assert made.stored == set(keys_of(PROMPT))


async def test_a_scheduler_that_is_lost_costs_what_does_not_decode_yet_another_attempt() -> None:
    network = ControlNetwork()
    async with cluster() as made:
        async with link_server(made.service.scheduler, network):
            link = Link(network.connect(), "f")
            link.start()
            one = Far(made, link)
            made.calls.gates["prefill"] = asyncio.Event()
            run = asyncio.create_task(one.run("a"))
            await made.arrives("prefill")
        made.calls.gates.pop("prefill").set()
        async with link_server(made.service.scheduler, network):
            assert await run == expected(PROMPT, 6)
            assert one.front_end.records[0].attempts == 2
            await one.front_end.end_requests()
            await link.stop()
            await nothing_is_left(made)


@contextlib.asynccontextmanager
async def decoding_when_the_scheduler_is_lost() -> AsyncIterator[
    tuple[Cluster, Far, asyncio.Task[list[int]]]
]:
    """A stream that has tokens of its DE, and the next scheduler."""
    network = ControlNetwork()
    async with cluster() as made:
        calls = made.calls
        async with link_server(made.service.scheduler, network):
            link = Link(network.connect(), "f")
            link.start()
            one = Far(made, link)
            calls.gate_after_tokens, calls.gates["decode"] = 2, asyncio.Event()
            run = asyncio.create_task(one.run("a"))
            await made.arrives("decode")
            former = link.session
            made.service.kill()
        await made.restart_router()
        async with link_server(made.service.scheduler, network):
            while link.session in ("", former):
                await asyncio.sleep(0.1)
            yield made, one, run
            await one.front_end.end_requests()
            await link.stop()
            await nothing_is_left(made)


async def test_a_stream_that_decodes_outlives_its_scheduler() -> None:
    async with decoding_when_the_scheduler_is_lost() as (made, one, run):
        await one.link.wait_for_engines(1, 1, LIMIT_S)
        made.calls.gates.pop("decode").set()
        assert await run == expected(PROMPT, 6)
        assert one.front_end.records[0].attempts == 1
        # What it has stored is found.
        assert await one.run("b") == expected(PROMPT, 6)
        assert one.front_end.records[-1].hit_tokens == 16


async def test_such_a_stream_is_tried_again_when_the_next_scheduler_loses_its_engine() -> None:
    async with decoding_when_the_scheduler_is_lost() as (made, one, run):
        await one.link.wait_for_engines(1, 1, LIMIT_S)
        made.calls.gates.clear()  # of the next attempt; the first one still waits at it
        made.lose("d0")
        assert await run == expected(PROMPT, 6)
        assert one.front_end.records[0].attempts == 2


async def test_a_scheduler_of_another_model_gets_no_keys_of_the_one_before() -> None:
    network = ControlNetwork()
    async with (
        cluster() as made,
        link_server(made.service.scheduler, network) as opened,
        far(made, opened, "f") as one,
    ):
        registry = made.service.registry
        assert registry.namespace is not None
        registry.namespace = msgspec.structs.replace(registry.namespace, model="another")
        # It has not been notified yet, and asks with the keys that it has made.
        with pytest.raises(EngineLostError, match="of another model"):
            await one.run("a")
        opened.server._engines_changed()
        await asyncio.sleep(1.0)
        assert "of another model" in (missing_engines(one.link.engines) or "")
        await nothing_is_left(made)


async def test_tokens_go_on_while_the_scheduler_is_away() -> None:
    network = ControlNetwork()
    async with cluster() as made, link_server(made.service.scheduler, network):
        link = Link(network.connect(), "f")
        link.start()
        one = Far(made, link)
        made.calls.gate_after_tokens = 2
        made.calls.gates["decode"] = asyncio.Event()
        run = asyncio.create_task(one.run("a"))
        await made.arrives("decode")
        link.connection.reset()
        link._ended("the test says so")
        made.calls.gates.pop("decode").set()
        assert await run == expected(PROMPT, 6)
        assert one.front_end.records[0].attempts == 1
        await one.front_end.end_requests()
        await link.stop()
        await nothing_is_left(made)
    assert made.stored >= set(keys_of(PROMPT))


async def test_a_stall_of_the_schedulers_own_loop_does_not_count_as_silence() -> None:
    async with (
        cluster() as made,
        link_server(made.service.scheduler) as opened,
        far(made, opened, "f") as one,
    ):
        made.calls.gates["prefill"] = asyncio.Event()
        run = asyncio.create_task(one.run("a"))
        await made.arrives("prefill")
        opened.ahead_s = 3 * TIMEOUT_S
        # Before its messages are read, as may be after SIGSTOP.
        opened.server._check_liveness()
        await asyncio.sleep(2.0)
        made.calls.gates.pop("prefill").set()
        assert await run == expected(PROMPT, 6)
        assert one.front_end.records[0].attempts == 1
        await nothing_is_left(made)


async def test_a_call_that_is_over_before_it_has_begun_leaves_nothing_behind(
    recwarn: pytest.WarningsRecorder,
) -> None:
    async with cluster() as made:
        session = FrontEndSession(made.service.scheduler, lambda message: None)
        request = RequestOrder("a", tuple(keys_of(PROMPT)))
        order = AttemptOrder("a", 1, len(PROMPT), 6, tuple(keys_of(PROMPT)))
        namespace = made.service.registry.namespace
        session.take(m.BeginAttempt(1, "a", order, namespace, {}, request))
        session.take(m.EndAttempt("a", "its client has left"))
        await asyncio.sleep(1.0)
        gc.collect()
        assert not [str(warning.message) for warning in recwarn.list]
        await nothing_is_left(made)


SQL, CHAT = Adapter("sql", "/adapters/sql", "a" * 64), Adapter("chat", "/adapters/chat", "b" * 64)


@contextlib.asynccontextmanager
async def with_adapters(
    listed: Mapping[str, str],
) -> AsyncIterator[tuple[ServedAdapters, LinkServer, Far]]:
    """A scheduler with engines that have both, and a front end that lists some."""
    async with cluster() as made:
        made.service.registry.adapters = served = ServedAdapters(
            {adapter.name: adapter.path for adapter in (SQL, CHAT)}
        )
        served.learn([SQL, CHAT])
        async with (
            link_server(made.service.scheduler) as opened,
            far(made, opened, "f", listed) as one,
        ):
            yield served, opened, one


async def test_a_front_end_learns_the_weights_of_the_adapters_that_it_lists() -> None:
    async with with_adapters({"sql": SQL.path, "chat": "/elsewhere"}) as (_, _, one):
        assert one.link.engines.adapters.adapter("sql", SQL.path) == SQL
        # Keys hold the path, and engines have another: it is not served.
        with pytest.raises(DualPathError, match="no engine with adapter 'chat'"):
            one.link.engines.adapters.adapter("chat", "/elsewhere")
        assert await one.run("a") == expected(PROMPT, 6)


async def test_other_weights_of_an_adapter_get_no_keys_of_the_ones_before() -> None:
    async with with_adapters({"sql": SQL.path}) as (served, opened, one):
        served._known["sql"] = msgspec.structs.replace(SQL, digest="c" * 64)
        # It has not been notified yet, and asks with the keys that it has made.
        with pytest.raises(EngineLostError, match="other weights of adapter 'sql'"):
            await one.run("a")
        opened.server._engines_changed()
        await asyncio.sleep(1.0)
        assert "no adapter 'sql', or other weights of it" in (
            missing_engines(one.link.engines) or ""
        )
        assert one.link.engines.adapters.adapter("sql", SQL.path) == SQL


async def test_an_adapter_that_the_next_scheduler_does_not_serve_may_be_any() -> None:
    async with with_adapters({"sql": SQL.path}) as (served, _, one):
        del served._known["sql"]
        with pytest.raises(EngineLostError, match="other weights of adapter 'sql'"):
            await one.run("a")


async def test_an_adapter_that_a_front_end_does_not_serve_may_change() -> None:
    async with with_adapters({"sql": SQL.path}) as (served, opened, one):
        served._known["chat"] = msgspec.structs.replace(CHAT, digest="c" * 64)
        opened.server._engines_changed()
        assert await one.run("a") == expected(PROMPT, 6)


@pytest.mark.parametrize("silent", ["server", "core"])
async def test_an_engine_that_is_silent_for_a_front_ends_call_is_lost_for_all(silent: str) -> None:
    """A front end asks the HTTP server; the scheduler knows whether the core makes steps."""
    async with both_of_two(decode=2) as (made, one, other):
        made.calls.gates["decode"] = asyncio.Event()
        run = asyncio.create_task(one.run("a"))
        await made.arrives("decode")
        (first,) = made.calls.decodes
        if silent == "server":
            made.calls.mute.add(first)
        else:
            made.engines[first].core_hangs = True
        del made.calls.gates["decode"]
        assert await run == expected(PROMPT, 6)
        assert await other.run("b") == expected(PROMPT, 6)
        assert first not in made.calls.decodes[1:]


async def test_of_two_front_ends_of_one_name_the_later_serves_and_the_earlier_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster() as made, link_server(made.service.scheduler) as opened:
        async with far(made, opened, "f") as earlier:
            assert await earlier.run("first") == expected(PROMPT, 6)
            async with far(made, opened, "f") as later:
                await asyncio.sleep(3 * TIMEOUT_S)
                for number in range(8):
                    assert await later.run(f"later-{number}") == expected(PROMPT, 6)
                refused = [r.message for r in caplog.records if "refuses" in r.message]
                assert len(refused) == 1
                assert "give one of the two another --front-end-name" in refused[0]
            assert await earlier.run("again") == expected(PROMPT, 6)
        await nothing_is_left(made)
