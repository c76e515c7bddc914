"""Groups change their size and their role under agents; no request fails, no byte is wrong."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.small_costs import COSTS
from tests.e2e.test_rolling_restart import AGENTS, Agents, well_after

from dualpath.cli.main import main
from dualpath.launch.executor import LocalExecutor
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.settings import LocalClusterSettings
from dualpath_lab.emulated.commands import emulated_commands
from dualpath_lab.emulated.settings import EmulatedOptions, Verify


@contextlib.asynccontextmanager
async def serving(
    folder: Path, *, nodes: str, prefill_dp: int = 1, port: int = 0
) -> AsyncIterator[LocalCluster]:
    """Serve emulated engines, watched as `serve` watches."""
    (folder / "costs.toml").write_text(COSTS)
    settings = LocalClusterSettings(
        transport="memory",
        model="emulated",
        storage=str(folder / "kv"),
        log_dir=str(folder / "logs"),
        nodes=nodes,
        prefill_dp=prefill_dp,
        port=port,
        block_tokens=16,
        buffer_bytes=16 << 20,
    )
    # Processes end with the thread that starts them, so this one starts and watches them.
    options = EmulatedOptions(
        model=str(folder / "costs.toml"),
        layers=6,
        kv_bytes_per_token=1536,
        block_tokens=16,
        hbm_bytes=16 << 20,
        verify=Verify.FULL,
    )
    executor = LocalExecutor(settings, ["dualpath_lab.cli.emulate"])
    with LocalCluster(settings, executor=executor, commands=emulated_commands(options)) as cluster:

        async def watch() -> None:
            while True:
                cluster.supervise()
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        try:
            yield cluster
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def engines_of(http: aiohttp.ClientSession, cluster: LocalCluster) -> list[str]:
    """Return the live engines by name, each with its role."""
    async with http.get(f"{cluster.endpoint}/dualpath/v1/status") as answer:
        engines = (await answer.json())["engines"]
    return sorted(f"{e['engine_id']} {e['role']}" for e in engines if e["alive"])


@pytest.mark.long
async def test_a_group_is_resized_and_changes_its_role_under_agents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = serving(tmp_path, nodes="2P1D", prefill_dp=2)
    async with made as cluster, aiohttp.ClientSession() as http:
        agents = Agents(http, cluster.endpoint)
        playing = [asyncio.create_task(agents.play(n)) for n in range(AGENTS)]

        async def changed(*asked: str) -> list[str]:
            await well_after(agents, 2 * AGENTS)
            command = ["roles", "--endpoint", cluster.endpoint, *asked]
            assert await asyncio.to_thread(main, command) == 0, capsys.readouterr().err
            await well_after(agents, 2 * AGENTS)
            return [e for e in await engines_of(http, cluster) if e.startswith("pe-1")]

        assert await changed("--ranks", "pe-1=3") == [f"pe-1-dp{n} prefill" for n in range(3)]
        assert await changed("--ranks", "pe-1=1") == ["pe-1 prefill"]
        # As many as the settings say for a decode engine, which are fewer than of a prefill group.
        assert await changed("--set", "pe-1=decode") == ["pe-1 decode"]
        both = await changed("--set", "pe-1=prefill", "--ranks", "pe-1=2")
        assert both == ["pe-1-dp0 prefill", "pe-1-dp1 prefill"]
        agents.over.set()
        await asyncio.gather(*playing)
    assert set(agents.ends) == {"well"}, agents.ends
    # Only what was asked to has ended, and the shapes are those asked for.
    assert [line for line in caplog.messages if "has ended" in line] == [
        "pe-1 has exited as requested and is restarted"
    ] * 4
    assert "draining pe-1, which becomes prefill with 3 ranks" in caplog.messages
    print(dict(agents.ends))
