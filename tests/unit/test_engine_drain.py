"""An engine that drains finishes its requests, gets no new ones and leaves without failures."""

import asyncio
from pathlib import Path

import pytest
from tests.emulated_cluster import Cluster, cluster
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath_lab.emulated.process import drain

PROMPT = list(range(1, 38))


def attempts(made: Cluster) -> set[int]:
    return {record.attempts for record in made.service.records}


@pytest.mark.parametrize("role", list(Role))
async def test_under_load_an_engine_drains_without_a_retry(role: Role, tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH, prefill=2, decode=2, speedup=1.0) as made:
        engine = made.engines[f"{role.value}-0"]
        asked = [asyncio.create_task(made.ask([n, *PROMPT], 40)) for n in range(1, 9)]
        placed = lambda: made.service.counts()[1] >= 4  # noqa: E731
        await made.arrivals.until(placed, GUARD_S)
        draining = asyncio.create_task(drain(engine.plane))
        asked += [asyncio.create_task(made.ask([n, *PROMPT], 4)) for n in range(9, 13)]
        answers = await asyncio.gather(*asked)
        assert [len(tokens) for tokens, _ in answers] == [40] * 8 + [4] * 4
        async with asyncio.timeout(GUARD_S):
            await draining
        assert attempts(made) == {1}
        assert engine.plane.manager.report().load.unfinished_requests == 0

        await asyncio.to_thread(engine.plane.membership.leave)
        gone = lambda: len(made.service.registry.alive()) == 3  # noqa: E731
        await made.arrivals.until(gone, GUARD_S)
        assert (await made.ask(PROMPT, 4))[0]
        assert attempts(made) == {1}


async def test_an_engine_without_a_router_drains_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        engine = made.engines["prefill-0"]
        made.service.server.declare_lost("prefill-0", "test", certain=False)
        async with asyncio.timeout(GUARD_S):
            await drain(engine.plane)
        assert "prefill-0" not in {e.engine_id for e in made.service.registry.alive()}


async def test_pausing_over_http(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH, prefill=2) as made:
        url = f"{made.endpoint}/dualpath/v1/engines/prefill-0/pause"
        async with made.http.post(url, json={}) as answer:
            assert (answer.status, await answer.json()) == (
                200,
                {"engine_id": "prefill-0", "paused": True},
            )
        for number in range(3):
            await made.ask([number + 1, *PROMPT], 2)
        used = {note["prefill_engine"] for note in made.service.status()["assignments"]}
        assert used == {"prefill-1"}
        async with made.http.delete(url) as answer:
            assert (await answer.json())["paused"] is False
        async with made.http.post(url.replace("prefill-0", "nobody"), json={}) as answer:
            assert answer.status == 404
