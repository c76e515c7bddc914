"""A router that ends: what it has goes on, nothing new is taken, and the next one follows."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.emulated_cluster import Cluster, cluster, engine_settings
from tests.guard import GUARD_S
from tests.unit.router_fakes import job

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError, DrainingError
from dualpath.core.modes import Mode
from dualpath.launch.ports import claim_port
from dualpath.router.http.server import until_signal
from dualpath.router.scheduler.leadership import FileLeadership, SoleLeader, bound, stop_when_lost
from dualpath.router.settings import RouterSettings
from dualpath_lab.emulated.process import emulated_engine
from dualpath_lab.emulated.router_server import emulated_router

PROMPT = list(range(1, 38))


@contextlib.asynccontextmanager
async def a_running_stream(made: Cluster, tokens: int) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {"prompt": PROMPT, "max_tokens": tokens, "stream": True}
    async with made.http.post(f"{made.endpoint}/v1/completions", json=body) as response:
        assert response.status == 200
        yield response


def generated(stream: bytes) -> int:
    """Return how many tokens a stream held; fails for one with an error in it."""
    events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {")]
    bodies = [msgspec.json.decode(event) for event in events]
    assert not [body for body in bodies if "error" in body]
    return sum(len(choice["token_ids"]) for body in bodies for choice in body["choices"])


async def health(made: Cluster) -> tuple[int, bytes]:
    async with made.http.get(f"{made.endpoint}/health") as response:
        return response.status, await response.read()


async def test_a_draining_router_ends_what_it_has_and_takes_nothing_new(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH, speedup=1.0) as made:
        assert (await health(made))[0] == 200
        async with a_running_stream(made, tokens=60) as running:
            draining = asyncio.create_task(made.service.drain())
            await asyncio.sleep(0)
            status, reason = await health(made)
            assert (status, b"takes no new requests, 1 are under way" in reason) == (503, True)
            url = f"{made.endpoint}/v1/completions"
            async with made.http.post(url, json={"prompt": PROMPT}) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert not draining.done()
            assert generated(await running.read()) == 60
        async with asyncio.timeout(GUARD_S):
            await draining


async def test_where_others_serve_no_request_is_refused_until_the_clients_have_left(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, Mode.DUALPATH, speedup=1.0) as made:
        gone = asyncio.Event()

        async def clients_gone() -> None:
            await gone.wait()

        draining = asyncio.create_task(made.service.drain(clients_gone))
        await asyncio.sleep(0)
        assert (await health(made))[0] == 503
        async with a_running_stream(made, tokens=30) as running:
            gone.set()
            await asyncio.sleep(0)
            assert not draining.done()
            assert generated(await running.read()) == 30
        async with asyncio.timeout(GUARD_S):
            await draining


async def test_a_drain_without_requests_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path, Mode.DUALPATH, speedup=0.01) as made:
        caplog.clear()
        await made.service.drain()
    lines = [r for r in caplog.records if r.getMessage().startswith("draining")]
    assert [(r.levelname, r.getMessage()) for r in lines] == [
        ("INFO", "draining: no request is under way")
    ]


async def test_what_does_not_end_in_time_ends_with_an_error(tmp_path: Path) -> None:
    settings = RouterSettings(mode=Mode.DUALPATH, drain_timeout_s=0)
    async with (
        cluster(tmp_path, Mode.DUALPATH, router=settings, speedup=0.01) as made,
        a_running_stream(made, tokens=300) as running,
    ):
        async with asyncio.timeout(GUARD_S):
            await made.service.drain()
        stopping = asyncio.create_task(made.service.stop())
        assert b"the router stops" in await running.read()
        await stopping


async def test_the_first_sigterm_drains_and_the_second_ends() -> None:
    drained = asyncio.Event()
    for again in (drained.set, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        drained.clear()
        begun = asyncio.Event()

        async def drain(begun: asyncio.Event = begun) -> None:
            begun.set()
            await drained.wait()

        ending = asyncio.create_task(until_signal(drain))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(GUARD_S):
            await begun.wait()
            assert not ending.done()
            again()
            await ending


async def test_a_draining_service_refuses_new_jobs_with_that_reason(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        await made.service.drain()
        assert isinstance(made.service.turned_away(), DrainingError)
        await made.service.stop()
        with pytest.raises(DrainingError):  # as before, not the end of a request that had begun
            await anext(made.service.submit(job("late", [1, 2, 3])))


# ------------------------------------------------------------------------------------- turns


async def test_a_scheduler_that_lost_its_leadership_places_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        in_turn = True
        made.service.scheduler.is_leader = lambda: in_turn
        assert (await made.ask(PROMPT, 2))[0]
        in_turn = False
        status, body = await made.post(PROMPT, 2)
        assert status == 503
        assert "this scheduler is no longer the leader" in body["error"]["message"]
        await made.idle()


class Lost(SoleLeader):
    """A turn that is over."""

    others = True

    async def lost(self) -> str:
        return "the test says so"


async def test_a_scheduler_that_lost_its_leadership_deregisters_before_its_process_ends() -> None:
    steps: list[str] = []

    async def stop() -> None:
        await asyncio.sleep(0)
        steps.append("front ends and engines are sent away")
        raise RuntimeError("whatever comes of that, the process ends")

    async def drain() -> None:
        raise AssertionError("SIGTERM must not be sent")

    async with asyncio.timeout(GUARD_S), contextlib.AsyncExitStack() as stack:
        await stop_when_lost(Lost(), stack, stop)
        await until_signal(drain)
        steps.append("connections of clients end")
    assert steps == ["front ends and engines are sent away", "connections of clients end"]


async def test_addresses_are_waited_for_only_where_another_router_may_still_have_them(
    tmp_path: Path,
) -> None:
    tries = 0

    async def taken_twice() -> int:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ConfigError("taken")
        return tries

    assert await bound(FileLeadership(str(tmp_path / "lock")), taken_twice) == 3
    tries = 0
    with pytest.raises(ConfigError, match="taken"):
        await bound(SoleLeader(), taken_twice)


def test_a_lock_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"standby_lock .*no/lock.* cannot be opened \(No such"):
        FileLeadership(str(tmp_path / "no" / "lock"))


async def test_engines_and_clients_find_the_router_that_stood_by(tmp_path: Path) -> None:
    settings = RouterSettings(
        mode=Mode.DUALPATH, control_port=claim_port(), standby_lock=str(tmp_path / "lock")
    )
    port = claim_port()
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(2 * GUARD_S):
        http = await stack.enter_async_context(aiohttp.ClientSession())
        first = emulated_router(settings, "127.0.0.1", port)
        endpoint, service = await first.__aenter__()
        made = Cluster(endpoint, service, http)
        for role in Role:
            chosen = engine_settings(
                role, role.value, service.scheduler.server.address, tmp_path / "kv", Mode.DUALPATH
            )
            engine = emulated_engine(chosen, made.surroundings)
            await stack.enter_async_context(engine)
        await service.wait_ready(1, 1, GUARD_S)
        answered = await made.ask(PROMPT, 5)

        second = asyncio.create_task(
            stack.enter_async_context(emulated_router(settings, "127.0.0.1", port))
        )
        await asyncio.sleep(0)
        assert not second.done()
        await first.__aexit__(None, None, None)
        again, next_service = await second
        assert again == endpoint
        await next_service.wait_ready(1, 1, GUARD_S)
        assert (await made.ask(PROMPT, 5))[0] == answered[0]
