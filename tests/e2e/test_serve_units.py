"""`dualpath serve --units 2` with emulated engines: division, requests, and a killed scheduler."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.e2e.plain_engine import complete, until
from tests.e2e.small_costs import COSTS

from dualpath.launch.local_cluster import ClusterStatus, LocalCluster
from dualpath.launch.process import all_processes, local
from dualpath.launch.settings import LocalClusterSettings
from dualpath_lab.emulated.commands import emulated_commands
from dualpath_lab.emulated.settings import EmulatedOptions

PROMPT = list(range(1, 100))


def engines_of(url: str) -> set[str]:
    """Return the live engines of the unit with this URL."""
    return set(ClusterStatus("", url, {}).alive())


def schedulers(cluster: LocalCluster) -> list[int]:
    """Return the processes of the router's schedulers."""
    router = local(cluster.process("router")).pid
    children = [pid for pid, stat in all_processes() if stat.parent == router]
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, command in commands.items() if b"\0scheduler\0" in command]


def test_units_divide_the_engines_and_the_loss_of_a_scheduler_stops_no_request(
    tmp_path: Path,
) -> None:
    (tmp_path / "costs.toml").write_text(COSTS)
    settings = LocalClusterSettings(
        transport="memory",
        model="emulated",
        storage=str(tmp_path / "kv"),
        log_dir=str(tmp_path / "logs"),
        nodes="2P2D",
        front_ends=1,
        units=2,
        port=0,
        block_tokens=16,
        buffer_bytes=16 << 20,
    )
    options = EmulatedOptions(
        model=str(tmp_path / "costs.toml"),
        layers=6,
        kv_bytes_per_token=1536,
        block_tokens=16,
        hbm_bytes=16 << 20,
    )
    with LocalCluster(settings, commands=emulated_commands(options)) as cluster:
        one, other = cluster.cluster_urls
        assert (engines_of(one), engines_of(other)) == ({"pe-0", "de-0"}, {"pe-1", "de-1"})
        front = ClusterStatus("", cluster.endpoint, {})

        def serve(expected: int) -> bool:
            units: list[dict[str, Any]] = front.read()["units"]
            return len([unit for unit in units if unit["serves"]]) == expected

        until(lambda: serve(2), "both units")
        first = complete(cluster.endpoint, PROMPT, 20)
        before = schedulers(cluster)
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        for _ in range(4):
            assert complete(cluster.endpoint, PROMPT, 20).token_ids == first.token_ids
        until(lambda: len(schedulers(cluster)) == 2 and serve(2), "the next scheduler")
        # The engines register with it one after the other.
        until(lambda: engines_of(one) == {"pe-0", "de-0"}, "the engines of the next scheduler")
        assert engines_of(other) == {"pe-1", "de-1"}
