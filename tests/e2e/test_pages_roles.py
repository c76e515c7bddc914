"""Pages on roles and on sizes of groups: their commands, with emulated engines."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.e2e.test_elastic_groups import serving
from tests.e2e.typed_pages import TypedPages, curl, types
from tests.guard import GUARD_S

from dualpath.cli.main import main
from dualpath.launch.local_cluster import LocalCluster

#: The state of `pe-1`, and of the cluster, after each command of a page.
STEPS = {
    "roles.md": ["3P1D", "2P2D", "1P3D", "2P2D"],
    "groups.md": ["pe-1 prefill 4", "pe-1 decode 2", "pe-1 decode 4"],
}


async def typed(words: list[str], endpoint: str) -> None:
    """Type a command, and wait until the switch that it asks for is over."""
    if words[0] == "dualpath":
        assert await asyncio.to_thread(main, [*words[1:], "--endpoint", endpoint]) == 0
        return
    await asyncio.to_thread(curl, words)
    async with asyncio.timeout(GUARD_S):
        while (await roles(endpoint))["switch"] is not None:
            await asyncio.sleep(0.05)


async def roles(endpoint: str) -> dict[str, object]:
    """Return the router's report on roles."""
    answer = await asyncio.to_thread(curl, ["curl", f"{endpoint}/dualpath/v1/roles"])
    return dict(json.loads(answer))


async def division(cluster: LocalCluster) -> str:
    """Return the cluster's division, such as 1P2D."""
    answer = await roles(cluster.endpoint)
    return f"{answer['prefill']}P{answer['decode']}D"


async def second_group(cluster: LocalCluster) -> str:
    """Return the role and the number of live ranks of what was the second prefill engine."""
    url = f"{cluster.endpoint}/dualpath/v1/status"
    engines = json.loads(await asyncio.to_thread(curl, ["curl", url]))["engines"]
    ranks = [e for e in engines if e["alive"] and e["engine_id"].startswith("pe-1")]
    (role,) = {rank["role"] for rank in ranks}
    return f"pe-1 {role} {len(ranks)}"


async def test_engines_change_their_role_as_the_page_types_it(tmp_path: Path) -> None:
    pages = TypedPages(tmp_path)
    async with serving(tmp_path, nodes="3P1D", port=int(pages.port("8000"))) as cluster:
        seen = []
        for words in pages.commands("roles.md", types("dualpath", "roles")):
            await typed(words, cluster.endpoint)
            seen.append(await division(cluster))
        assert seen == STEPS["roles.md"]


@pytest.mark.long
async def test_groups_change_their_size_as_the_page_types_it(tmp_path: Path) -> None:
    pages = TypedPages(tmp_path)
    port = int(pages.port("8000"))
    async with serving(tmp_path, nodes="2P1D", prefill_dp=2, port=port) as cluster:
        seen = []
        for words in pages.commands("groups.md", types("dualpath", "roles")):
            await typed(words, cluster.endpoint)
            seen.append(await second_group(cluster))
        assert seen == STEPS["groups.md"]
