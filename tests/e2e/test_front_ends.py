"""Front ends as processes of their own before one router with emulated engines."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import msgspec
from tests.emulated_cluster import Cluster, cluster
from tests.guard import GUARD_S

from dualpath.core.modes import Mode
from dualpath.launch.process import SpawnedProcess, Supervisor
from dualpath.router.settings import RouterSettings
from dualpath.router.token_api.wire import EventLines

PROMPT = list(range(1, 41))
#: Seconds of decoding, as a step takes 1 ms of the model and 10 ms here; two fit into the DE.
TOKENS, SPEEDUP = 200, 0.1


class FrontEndProcess:
    """`dualpath emulate frontend`, and its clients."""

    def __init__(self, started: Supervisor, name: str, made: Cluster, folder: Path) -> None:
        self.process = SpawnedProcess(
            name,
            (
                *(sys.executable, "-m", "dualpath.cli.main", "emulate", "frontend", "--port", "0"),
                *(
                    "--scheduler",
                    made.service.scheduler.front_ends.address,
                    "--front-end-name",
                    name,
                ),
            ),
            folder / f"{name}.log",
            {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.add(self.process)
        self._http = made.http
        self.under_way = asyncio.Event()

    async def up(self) -> None:
        """Wait until it serves."""
        first_words = "dualpath emulated front end"
        line = await asyncio.to_thread(self.process.wait_for_line, first_words, GUARD_S)
        (self.endpoint,) = re.findall(r"(http://[\d.:]+)/v1", line)

    async def get(self, path: str) -> tuple[int, str]:
        """Return status and body."""
        async with self._http.get(f"{self.endpoint}{path}") as response:
            return response.status, await response.text()

    async def stream(self) -> list[int] | None:
        """Return a stream's tokens; None if it is cut off."""
        lines, token_ids = EventLines(), []
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
        try:
            async with self._http.post(f"{self.endpoint}/v1/completions", json=body) as response:
                async for received in response.content.iter_any():
                    for payload in lines.feed(received):
                        for choice in msgspec.json.decode(payload)["choices"]:
                            token_ids += choice["token_ids"]
                            self.under_way.set()
        except aiohttp.ClientError:
            return None
        return token_ids if lines.ended else None


async def test_a_killed_front_end_takes_only_its_own_streams_with_it(tmp_path: Path) -> None:
    router = RouterSettings(mode=Mode.DUALPATH, front_ends_port=0, engine_timeout_s=3.0)
    with Supervisor() as started:
        async with (
            asyncio.timeout(2 * GUARD_S),
            cluster(tmp_path / "kv", Mode.DUALPATH, router=router, speedup=SPEEDUP) as made,
        ):
            dies, lives = (FrontEndProcess(started, name, made, tmp_path) for name in "fg")
            await asyncio.gather(dies.up(), lives.up())
            cut, whole = asyncio.create_task(dies.stream()), asyncio.create_task(lives.stream())
            await asyncio.gather(dies.under_way.wait(), lives.under_way.wait())
            dies.process.kill()
            assert await cut is None
            tokens = await whole
            await made.idle()
            assert tokens == (await made.ask(PROMPT, TOKENS))[0]
            assert len(tokens) == TOKENS
            assert (await lives.get("/health"))[0] == 200
            assert (
                'dualpath:requests_total{outcome="finished"} 1.0'
                in (await lives.get("/metrics"))[1]
            )
            assert (await lives.get("/dashboard"))[0] == 404
            assert made.counts(1) == 0
        lives.process.terminate()
        assert await asyncio.to_thread(lives.process.wait, GUARD_S) == 0
        assert await asyncio.to_thread(dies.process.wait, GUARD_S) == -signal.SIGKILL
