"""A small Ray cluster on this machine: two raylets, the second of which may be lost and return."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

#: The second raylet has resources for one engine; its devices do not exist.
_BOTH: dict[str, Any] = {"object_store_memory": 80_000_000, "include_log_monitor": False}
_SECOND: dict[str, Any] = {**_BOTH, "num_cpus": 1, "num_gpus": 2}
#: A killed raylet is detected within seconds; a slow one is not considered lost.
_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 30_000,
    "health_check_failure_threshold": 3,
}


class RayCluster:
    """Two raylets; nothing of it is used by another Ray of this machine.

    The first has so many ``cpus``: by default room for a router and one engine.
    """

    def __init__(self, cpus: int = 2) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Short: names of sockets are in it.
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        # A separate folder for Ray's address file.
        os.environ["RAY_TMPDIR"] = self.folder
        Path(self.folder, "ray").mkdir()
        first = {
            **_BOTH,
            "num_cpus": cpus,
            # No autoscaler, which would be another process.
            "no_monitor": True,
            "include_dashboard": False,
            "temp_dir": self.folder,
            "_system_config": _NOTICE,
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=first)
        self._second: Any = None
        self.join()

    @property
    def address(self) -> str:
        """The address for drivers."""
        address: str = self._cluster.address
        return address

    def join(self) -> None:
        """Start or restart the second raylet."""
        self._second = self._cluster.add_node(**_SECOND)

    def lose(self) -> None:
        """Kill the second raylet, as a machine that goes down."""
        self._cluster.remove_node(self._second, allow_graceful=False)

    def close(self) -> None:
        """Stop everything."""
        with contextlib.suppress(Exception):
            self._cluster.shutdown()
        del os.environ["RAY_TMPDIR"]
        shutil.rmtree(self.folder, ignore_errors=True)
