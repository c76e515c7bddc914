"""Runs processes on the nodes of a Ray cluster, in the bundles of two placement groups.

One group has the router, pinned to the node where this runs: clients find the endpoint where they
asked for it, and router and supervisor end together.  The other has a bundle for each engine or
data-parallel group, spread or packed by Ray.  A bundle whose node is lost is placed again by Ray
once a node has room for it; until then the unit's next process waits.

Secrets travel as arguments of a call to an actor that runs.  They are in no creation of an actor
and no runtime environment, which Ray keeps and shows.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dualpath.core.configuration import PREFIX
from dualpath.core.errors import ConfigError
from dualpath.ops.launch.bundles import CPU, GPU, bundle, missing, shown
from dualpath.ops.launch.devices import has_cpu_build
from dualpath.ops.launch.executor import Executor, Launches
from dualpath.ops.launch.ray_unit import RayProcess, RayUnit
from dualpath.ops.launch.settings import LocalClusterSettings
from dualpath.ops.launch.unit_processes import UnitProcesses
from dualpath.ops.launch.units import Unit

_ADDRESS_VARIABLE = "RAY_ADDRESS"
_ANY_HERE = "auto"
_NODE_LABEL = "ray.io/node-id"
#: What fits places within moments; what does not is held by other jobs.
_PLACE_S = 30.0
#: Ray's head accepts a connection within it.
_REACH_S = 5.0
#: An actor whose processes have ended is gone within it.
_JOIN_S = 10.0
#: Variables of this process that count for processes of all nodes, beside their nodes' own.
_CARRIED = (PREFIX, "AWS_", "HF_", "NCCL_", "UCX_", "VLLM_")


class RayExecutor(Executor):
    """See the base class; connects to the cluster when places are reserved."""

    one_machine = False

    def __init__(
        self,
        settings: LocalClusterSettings,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings
        self._address = settings.ray_address or environment.get(_ADDRESS_VARIABLE) or _ANY_HERE
        self._environment = {n: v for n, v in environment.items() if n.startswith(_CARRIED)}
        self._groups: list[PlacementGroup] = []
        self._bundles: dict[str, tuple[PlacementGroup, int, dict[str, float]]] = {}
        self._units: dict[str, RayUnit] = {}
        self._with_devices = False
        self._host = ""

    @property
    def host(self) -> str:
        """See the base class: this node's address in the Ray cluster."""
        return self._host

    @property
    def on_cpus(self) -> bool:
        """See the base class."""
        return not self._with_devices

    def reserve(self, units: Sequence[Unit]) -> None:
        """See the base class."""
        self._connect()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._with_devices = not has_cpu_build() and any(node.get(GPU) for node in nodes)
        bundles = {
            unit.name: bundle(unit, self._settings.ray_cpus, with_devices=self._with_devices)
            for unit in units
        }
        if lacking := missing(bundles, nodes):
            raise ConfigError(
                f"the Ray cluster has too little for {self._settings.nodes}: {lacking}; add nodes, "
                "or change {nodes} or {ray_cpus}"
            )
        here = {_NODE_LABEL: ray.get_runtime_context().get_node_id()}
        routers = [unit.name for unit in units if unit.role is None]
        engines = [unit.name for unit in units if unit.role is not None]
        try:
            self._place(routers, bundles, "PACK", [here] * len(routers))
            self._place(engines, bundles, self._settings.ray_strategy)
        except BaseException:
            self._give_back()
            raise

    def start(self, unit: Unit, launches: Launches, logs: Path) -> Sequence[RayProcess]:
        """See the base class."""
        started = RayUnit(
            *(unit, lambda: self._actor(unit.name), launches, logs),
            *(os.getcwd(), self._environment),
        )
        self._units[unit.name] = started
        return started.processes

    def close(self) -> None:
        """See the base class."""
        for unit in self._units.values():
            unit.join(_JOIN_S)
        self._units = {}
        self._give_back()
        if self._host:
            ray.shutdown()
            self._host = ""

    def _connect(self) -> None:
        if self._host:
            return
        try:
            _reach(self._address)
            with _signals_as_they_are():
                ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"there is no Ray cluster at {self._address!r} that this machine is a node of "
                f"({str(error).splitlines()[0]}); start one here with `ray start --head`, join "
                "one with `ray start --address`, or name it with {ray_address}"
            ) from error
        self._host = ray.util.get_node_ip_address()

    def _give_back(self) -> None:
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []

    def _place(
        self,
        names: Sequence[str],
        bundles: Mapping[str, dict[str, float]],
        strategy: str,
        labels: list[dict[str, str]] | None = None,
    ) -> None:
        """Reserve one group of bundles; raises ``ConfigError`` if Ray finds no places for it."""
        if not names:
            return
        wanted = [bundles[name] for name in names]
        group = placement_group(wanted, strategy=strategy, bundle_label_selector=labels)
        self._groups.append(group)
        if not group.wait(_PLACE_S):
            each = "; ".join(f"{name} needs {shown(bundles[name])}" for name in names)
            free = {n: v for n, v in ray.available_resources().items() if n in (CPU, GPU)}
            where = "on this node" if labels else f"by {strategy}"
            raise ConfigError(
                f"Ray has placed no group of bundles {where} within {_PLACE_S:g} s: {each}; free "
                f"in the whole cluster: {shown(free) or 'nothing'}; end other jobs, add nodes, or "
                "change {ray_strategy}, {nodes} or {ray_cpus}"
            )
        for index, name in enumerate(names):
            self._bundles[name] = group, index, bundles[name]

    def _actor(self, name: str) -> Any:  # noqa: ANN401 - Ray's handle of an actor
        group, index, resources = self._bundles[name]
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {
            "num_cpus": resources[CPU],
            "num_gpus": resources.get(GPU, 0),
            "scheduling_strategy": strategy,
            # What is started again, and when, is the supervisor's to decide.
            "max_restarts": 0,
        }
        return ray.remote(UnitProcesses).options(**options).remote(name)


def _reach(address: str) -> None:
    """Raise ``OSError`` or ``ValueError`` at once where Ray would try for minutes."""
    if address == _ANY_HERE:
        return
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdecimal():
        raise ValueError("an address is HOST:PORT, as `ray start --head` prints it")
    with socket.create_connection((host, int(port)), timeout=_REACH_S):
        return


@contextmanager
def _signals_as_they_are() -> Iterator[None]:
    """Keep this process's handler of SIGTERM: connecting to Ray puts another in its place."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
