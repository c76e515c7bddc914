"""Scheduler, front ends and engines are restarted one after another under agents.

No request is refused, so clients do not retry.  The exception is a connection that arrives at the
moment at which a front end's listener closes; the kernel resets it.
"""

import asyncio
import contextlib
import functools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

import aiohttp
import pytest
from tests.e2e.test_emulated_cluster import Processes
from tests.e2e.test_rolling_restart import (
    ENGINES,
    Agents,
    all_there,
    epoch_of,
    until,
    well_after,
)
from tests.e2e.test_scaled_router import Router, scaled
from tests.guard import GUARD_S

AGENTS = 3
ROUNDS = 2


class Restarts:
    """Restarts processes under agents, each one after the previous one serves again."""

    def __init__(self, made: Router, processes: Processes, agents: Sequence[Agents]) -> None:
        self._made = made
        self._processes = processes
        self._agents = agents
        self._http = aiohttp.ClientSession()
        #: By what was restarted.
        self.counted: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        await self._served(set())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def scheduler(self) -> None:
        """Ask it to end; its supervisor starts the next one."""
        before = self._made.scheduler()
        os.kill(before, signal.SIGTERM)

        async def followed() -> bool:
            with contextlib.suppress(StopIteration):
                return self._made.scheduler() != before
            return False

        await until(followed)
        self.counted["scheduler"] += 1
        await self._served(set())

    async def front_ends(self) -> None:
        """One after the other, again by their supervisor."""
        async with self._made.clients_of_both() as clients:
            fronts = dict(client.front for client in clients)
        for name, pid in fronts.items():
            await self._made.restart_front_end(name, pid)
            self.counted["front end"] += 1
            await self._served(set())

    async def engine(self, name: str) -> None:
        """End it as an operator would and start the next of its name."""
        epoch = await epoch_of(self._http, self._made.cluster_url, name)
        old = self._processes.process(name)
        old.terminate()
        assert await asyncio.to_thread(old.wait, GUARD_S) == 0, old.log_tail()
        self._made.start(name)
        self.counted["engine"] += 1
        await self._served({epoch})

    async def _served(self, former: set[str]) -> None:
        """Wait for all engines, none in one of these epochs, and for answers of all agents."""
        await until(functools.partial(all_there, self._http, self._made.cluster_url, former))
        await asyncio.gather(*(well_after(each, 2 * AGENTS) for each in self._agents))


@contextlib.asynccontextmanager
async def under_agents(folder: Path, processes: Processes) -> AsyncIterator[Restarts]:
    """A cluster under agents; in the end no request was refused and every token was right."""
    made = await scaled(folder, processes, ENGINES)
    # Some keep their connection from request to request, some have a new one for each.
    async with (
        aiohttp.ClientSession() as persistent,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as reconnecting,
    ):
        agents = [Agents(persistent, made.url), Agents(reconnecting, made.url)]
        playing = [asyncio.create_task(a.play(n)) for a in agents for n in range(AGENTS)]
        try:
            async with Restarts(made, processes, agents) as restarts:
                yield restarts
        finally:
            for each in agents:
                each.over.set()
            await asyncio.gather(*playing)
    ends = agents[0].ends + agents[1].ends
    print(f"restarts {dict(restarts.counted)}; requests {dict(ends)}")
    assert set(ends) <= {"well", "not answered"}, ends
    assert ends["not answered"] <= restarts.counted["front end"], ends


async def test_no_request_fails_while_front_ends_and_the_scheduler_are_restarted(
    tmp_path: Path, processes: Processes
) -> None:
    async with under_agents(tmp_path, processes) as restarts:
        await restarts.front_ends()
        await restarts.scheduler()


@pytest.mark.long
async def test_no_request_fails_while_everything_is_restarted(
    tmp_path: Path, processes: Processes
) -> None:
    async with under_agents(tmp_path, processes) as restarts:
        for _ in range(ROUNDS):
            await restarts.scheduler()
            await restarts.front_ends()
            for name in ENGINES:
                await restarts.engine(name)
    assert restarts.counted == {"scheduler": ROUNDS, "front end": 2 * ROUNDS, "engine": 4 * ROUNDS}
