"""Emulated engines with ranks as processes, as an operator starts them."""

import asyncio
import os
import re
import signal
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.small_costs import COSTS
from tests.e2e.test_emulated_cluster import (
    ENGINE,
    Player,
    Processes,
    ended,
    first_line,
    ideal_hits,
    verified_and_wrong,
)
from tests.guard import GUARD_S

from dualpath.core.modes import Mode
from dualpath.launch.process import LocalProcess, all_processes
from dualpath.node.host_process import process_stat
from dualpath.router.settings import RouterSettings
from dualpath.transport.nixl import nixl_package
from dualpath_lab.emulated.router_server import emulated_router

pytest.importorskip(nixl_package())
pytestmark = pytest.mark.nixl

MODE = Mode.DUALPATH
#: Engines of different tensor parallelism exchange KV and share a storage.
RANKS = {"prefill-0": 4, "prefill-1": 1, "decode-0": 2}


def ranks_of(process: LocalProcess) -> list[int]:
    """The processes of an engine's follower ranks."""
    return [pid for pid, stat in all_processes() if stat.parent == process.pid]


async def test_agents_are_served_by_ranks_and_an_engine_ends_with_one_of_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "costs.toml").write_text(COSTS)
    async with emulated_router(RouterSettings(mode=MODE), "127.0.0.1", 0) as (endpoint, service):
        with Processes(tmp_path, MODE) as started:
            engines = [
                started.start(
                    *(name, name.partition("-")[0], service.scheduler.server.address),
                    *(*ENGINE, "--kv-heads", "4", "--tensor-parallel-size", str(ranks)),
                    *("--engine-id", name),
                )
                for name, ranks in RANKS.items()
            ]
            lines = [await first_line(process) for process in engines]
            await service.wait_ready(2, 1, GUARD_S)
            player = Player(tmp_path, endpoint, service, MODE)
            agents = await player.play()
            assert [[hits for _, hits in rounds] for rounds in agents] == ideal_hits(
                player.geometry
            )
            urls = [found for line in lines for found in re.findall(r"http://[\d.:]+\d", line)]
            verified, wrong = await verified_and_wrong(urls)
            assert verified > 0
            assert wrong == 0
            lost, *others = engines
            followers = {process.name: ranks_of(process) for process in engines}
            assert {name: 1 + len(pids) for name, pids in followers.items()} == RANKS
            killed = followers["prefill-0"][1]
            os.kill(killed, signal.SIGKILL)
            assert await asyncio.to_thread(lost.wait, GUARD_S) == -signal.SIGKILL
            message = rf"prefill-0 ends itself: rank \d \(process {killed}\) has ended, by SIGKILL"
            assert re.search(message, lost.output())
            async with aiohttp.ClientSession() as http:
                body = {"prompt": list(range(7, 90)), "max_tokens": 4}
                async with http.post(f"{endpoint}/v1/completions", json=body) as response:
                    assert response.status == 200
            for process in others:
                assert await ended(process) == []
            assert [process_stat(pid) for pid in followers["decode-0"]] == [None]
