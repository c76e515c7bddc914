"""Pictures of the live page of an emulated cluster under load, for inspection and the docs.

    PYTHONPATH=src python -m tests.e2e.dashboard_pictures FOLDER --seconds 90

2P2D in this process, each SNIC throttled; agents with contexts that grow by a turn's text until
they start again.  Each width in each theme; the same for 64 nodes and for synthetic runs.
"""

import argparse
import asyncio
import random
from pathlib import Path
from typing import Any

from tests.e2e.chromium import THEMES, WIDTHS, Tab, chromium_for, open_tab
from tests.e2e.test_dashboard_browser import simulation
from tests.emulated_cluster import Cluster, cluster
from tests.unit.dashboard_cluster import large_cluster
from tests.unit.test_workload_report import result, turn

from dualpath.core.modes import Mode
from dualpath.router.http.server import serving_app
from dualpath.workload.replay.result import write_result
from dualpath_lab.emulated.router_server import RouterServer
from dualpath_lab.emulated.settings import block_geometry
from dualpath_sim.simulator.settings import DecodeCosts, ModelCosts, PrefillCosts

#: Of the picture in the docs: down to the tables of nodes.
DOCS_HEIGHT = 1062
AGENTS = 10
APPEND_TOKENS, GENERATED_TOKENS, CONTEXT_TOKENS = 192, 24, 3000
COSTS = ModelCosts(
    name="pictured",
    layers=4,
    kv_bytes_per_token=4 * 1024.0,
    prefill=PrefillCosts(batch_s=2e-3, attention_token_s=2e-5, pair_s=1e-8),
    decode=DecodeCosts(step_s=5e-3),
    prefill_tokens_per_s=1e4,
)
GEOMETRY = block_geometry(COSTS.layers, 32, COSTS.kv_bytes_per_token)


async def agent(made: Cluster, number: int) -> None:
    """Take turns until cancelled; tokens are random, so that no two agents share blocks."""
    chance = random.Random(number)
    while True:
        context = [chance.randrange(30_000) for _ in range(chance.randrange(200, 900))]
        while len(context) < CONTEXT_TOKENS:
            generated, _ = await made.ask(context, GENERATED_TOKENS)
            context += generated
            context += [chance.randrange(30_000) for _ in range(APPEND_TOKENS)]
            await asyncio.sleep(chance.expovariate(2.0))


async def pictures(tab: Tab, url: str, folder: Path, name: str) -> None:
    """Take the page in each width and theme."""
    for theme in THEMES:
        for width in WIDTHS:
            await tab.prefer(theme)
            await tab.size(width, 1000)
            await tab.go(url)
            await tab.until("document.documentElement.dataset.state !== undefined")
            await tab.until("document.querySelector('.tile') !== null")
            await asyncio.sleep(1.5)
            await tab.picture(folder / f"{name}-{width}-{theme}.png", whole=True)
    assert tab.troubles == [], tab.troubles


async def run_pictures(tab: Tab, url: str, folder: Path, run: Path) -> None:
    """Open a run's file in each width."""
    for width in WIDTHS:
        await tab.prefer(THEMES[0])
        await tab.size(width, 1000)
        await tab.go(url)
        await tab.choose_files("#file", [run])
        await tab.until("document.documentElement.dataset.state === 'file'")
        await tab.picture(folder / f"{run.stem}-{width}.png", whole=True)


def made_up_replay(path: Path) -> None:
    """Write a result of turns with random times."""
    chance = random.Random(5)
    turns = [
        turn(number, start_s=start_s, ttft_s=0.2 + chance.expovariate(3), latency_s=3.0)
        for number, start_s in enumerate(sorted(chance.uniform(0, 240) for _ in range(900)))
    ]
    write_result(result("dualpath", 245.0, *turns), path)


async def run(folder: Path, seconds: float, devtools: str, storage: Path) -> None:
    """Take all pictures."""
    options: dict[str, Any] = {
        # Settings are checked one by one, and a batch must hold the blocks of the geometry.
        "batch_cap_tokens": 512,
        "costs": COSTS,
        "geometry": GEOMETRY,
        "buffer_bytes": 512 * GEOMETRY.full_block_bytes,
        "hbm_bytes": 512 * GEOMETRY.full_block_bytes,
        "max_model_len": 4096,
        "speedup": 1.0,
        "snic_bytes_per_s": 12e6,
    }
    async with open_tab(devtools) as tab:
        made_up = RouterServer(large_cluster(64, 8).service).app()
        async with serving_app(made_up, "127.0.0.1", 0) as port:
            url = f"http://127.0.0.1:{port}/dashboard"
            await pictures(tab, url, folder, "many")
            made_up_replay(storage.parent / "replay.json")
            simulation(storage.parent)
            for name in ("replay.json", "simulation.json"):
                await run_pictures(tab, url, folder, storage.parent / name)
        async with cluster(storage, Mode.DUALPATH, 2, 2, **options) as made:
            agents = [asyncio.create_task(agent(made, number)) for number in range(AGENTS)]
            await asyncio.wait(agents, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            await pictures(tab, f"{made.endpoint}/dashboard", folder, "live")
            await tab.prefer("light")
            await tab.size(1280, DOCS_HEIGHT)
            await asyncio.sleep(1.5)
            await tab.picture(folder / "dashboard.png")
            for task in agents:
                task.cancel()
            ended = await asyncio.gather(*agents, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
        await tab.until("document.documentElement.dataset.state === 'lost'")
        await tab.picture(folder / "lost.png")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0, help="load before the pictures")
    args = parser.parse_args()
    with chromium_for(parser) as (devtools, home):
        args.folder.mkdir(parents=True, exist_ok=True)
        asyncio.run(run(args.folder, args.seconds, devtools, home / "storage"))


if __name__ == "__main__":
    main()
