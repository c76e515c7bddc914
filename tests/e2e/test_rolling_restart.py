"""Processes of a cluster are killed and restarted in turn under agents; no request fails."""

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import islice
from pathlib import Path

import aiohttp
from tests.e2e.test_emulated_cluster import ENGINE, Processes
from tests.guard import GUARD_S

from dualpath.launch.ports import claim_port
from dualpath.launch.process import LocalProcess
from dualpath.router.scheduler.leadership import STANDS_BY
from dualpath_lab.faults.engine_kinds import EmulatedEngines
from dualpath_lab.faults.settings import EmulatedEnginesSettings

ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
ROUTERS = ("router-0", "router-1")
AGENTS = 6
#: Statuses that OpenAI's clients retry as temporary.
RETRIED = (429, 503)
RETRIED_ENDS = {"refused", "not there", "not answered"}


class Cluster:
    """Two routers, one of them on standby, and engines; each can be restarted."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self._folder = folder
        self._processes = processes
        self._control = f"tcp://127.0.0.1:{claim_port()}"
        self.port = claim_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def start(self, name: str) -> LocalProcess:
        """Start a process, also the next one of its name."""
        if name.startswith("router"):
            more = ("--port", str(self.port), "--standby-lock", str(self._folder / "lock"))
            return self._processes.start(name, "router", self._control, *more)
        role = name.partition("-")[0]
        return self._processes.start(name, role, self._control, *ENGINE, "--engine-id", name)

    async def restart(self, name: str) -> None:
        """End a process as an operator would and start the next one."""
        old = self._processes.process(name)
        old.terminate()
        assert await asyncio.to_thread(old.wait, GUARD_S) == 0, old.log_tail()
        self.start(name)

    async def kill(self, name: str) -> None:
        """End a process at once and start the next one."""
        old = self._processes.process(name)
        old.kill()
        await asyncio.to_thread(old.wait, GUARD_S)
        self.start(name)

    async def router(self) -> str:
        """Return the name of the router that serves, once the other one is on standby."""
        routers = [self._processes.process(name) for name in ROUTERS]
        for router in routers:
            await asyncio.to_thread(router.wait_for_line, STANDS_BY, GUARD_S)
        return next(r.name for r in routers if r.find_line("dualpath emulated router"))


class Agents:
    """Clients of emulated engines that retry refused requests and count the outcomes."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: str) -> None:
        self._http = http
        self._endpoint = endpoint
        self.ends: Counter[str] = Counter()
        self.over = asyncio.Event()

    async def play(self, agent: int) -> None:
        """Send turn after turn, each with the whole conversation so far."""
        context = [agent + 1]
        while not self.over.is_set():
            context += [7] * 40 if len(context) < 600 else []
            if len(context) >= 600:
                context = [agent + 1]
                continue
            tokens = await self.turn(context, 12)
            if tokens is not None:
                context += tokens

    async def turn(self, prompt: list[int], tokens: int) -> list[int] | None:
        """Return one turn's answer, None if it failed."""
        body = {"prompt": prompt, "max_tokens": tokens}
        while True:
            try:
                url = f"{self._endpoint}/v1/completions"
                async with self._http.post(url, json=body) as answer:
                    if answer.status in RETRIED:
                        self.ends["refused"] += 1
                        await asyncio.sleep(float(answer.headers["Retry-After"]) / 10)
                        continue
                    if answer.status != 200:
                        self.ends[f"{answer.status}: {await answer.text()}"] += 1
                        return None
                    found = list((await answer.json())["choices"][0]["token_ids"])
                    self.ends["well" if found == right_answer(prompt, tokens) else "wrong"] += 1
                    return found
            except aiohttp.ClientConnectorError:
                self.ends["not there"] += 1  # nothing was sent
                await asyncio.sleep(0.05)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # An idle connection was closed just when it was reused; no byte of an answer came.
                self.ends["not answered"] += 1
                await asyncio.sleep(0.05)
            except aiohttp.ClientError as error:
                self.ends[f"broken off: {error!r}"] += 1
                return None


def right_answer(prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the answer that any emulated engine gives."""
    return list(islice(EmulatedEngines(EmulatedEnginesSettings()).expected_tokens(prompt), tokens))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(GUARD_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def all_there(http: aiohttp.ClientSession, endpoint: str, epochs: set[str]) -> bool:
    """Whether all engines live, none of them in one of the ``epochs``."""
    with contextlib.suppress(aiohttp.ClientError):
        async with http.get(f"{endpoint}/dualpath/v1/status") as answer:
            engines = (await answer.json())["engines"]
            alive = {e["epoch"] for e in engines if e["alive"] and not e["paused"]}
            return len(alive) == len(ENGINES) and not alive & epochs
    return False


async def epoch_of(http: aiohttp.ClientSession, endpoint: str, engine_id: str) -> str:
    async with http.get(f"{endpoint}/dualpath/v1/status") as answer:
        engines = (await answer.json())["engines"]
        return next(str(e["epoch"]) for e in engines if e["engine_id"] == engine_id)


@contextlib.asynccontextmanager
async def under_load(made: Cluster) -> AsyncIterator[tuple[aiohttp.ClientSession, Agents]]:
    async with aiohttp.ClientSession() as http:
        for name in (*ROUTERS, *ENGINES):
            made.start(name)
        await until(functools.partial(all_there, http, made.endpoint, set()))
        agents = Agents(http, made.endpoint)
        playing = [asyncio.create_task(agents.play(number)) for number in range(AGENTS)]
        try:
            yield http, agents
        finally:
            agents.over.set()
            await asyncio.gather(*playing)


async def well_after(agents: Agents, more: int) -> None:
    """Wait for this many more answers."""
    wanted = agents.ends["well"] + more

    async def there() -> bool:
        return agents.ends["well"] >= wanted

    await until(there)


async def test_no_request_fails_while_processes_are_killed_and_restarted(
    tmp_path: Path, processes: Processes
) -> None:
    made = Cluster(tmp_path, processes)
    async with under_load(made) as (http, agents):

        async def replace(name: str, end_and_start: Callable[[str], Awaitable[None]]) -> None:
            epoch = await epoch_of(http, made.endpoint, name)
            await end_and_start(name)
            await until(functools.partial(all_there, http, made.endpoint, {epoch}))
            await well_after(agents, AGENTS)

        await well_after(agents, AGENTS)
        for name in ("prefill-0", "decode-0"):
            await replace(name, made.kill)
        assert set(agents.ends) == {"well"}, agents.ends
        for name in ("prefill-1", "decode-1"):
            await replace(name, made.restart)
        for _ in ROUTERS:
            await made.restart(await made.router())
            await until(functools.partial(all_there, http, made.endpoint, set()))
            await well_after(agents, AGENTS)
        not_answered = agents.ends["not answered"]
        await made.kill(await made.router())
        await until(functools.partial(all_there, http, made.endpoint, set()))
        await well_after(agents, AGENTS)
    assert set(agents.ends) <= RETRIED_ENDS | {"well"}, agents.ends
    # Only requests that were open when the router was killed, and of each agent one that the
    # socket of the dying process had still accepted.
    assert agents.ends["not answered"] - not_answered <= 2 * AGENTS
