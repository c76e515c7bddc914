"""Runs processes on the nodes of a Ray cluster, in the bundles of two placement groups.

One group has the router, pinned to this node: clients reach the endpoint at the expected address,
and router and supervisor stop together.  The other has a bundle for each engine or data-parallel
group, spread or packed by Ray.  If a node is lost, Ray places its bundles again once a node has the
resources; until then the restarted processes wait.

Secrets are passed as arguments of a call to a running actor, not in an actor's creation or its
runtime environment, which Ray stores and displays.
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
from dualpath.ops.launch.bundles import CPU, GPU, bundle, format_resources, shortage
from dualpath.ops.launch.devices import has_cpu_build
from dualpath.ops.launch.executor import Executor, Launches
from dualpath.ops.launch.ray_unit import RayProcess, RayUnit
from dualpath.ops.launch.settings import LocalClusterSettings
from dualpath.ops.launch.unit_processes import UnitProcesses
from dualpath.ops.launch.units import Unit

_ADDRESS_VARIABLE = "RAY_ADDRESS"
_ANY_HERE = "auto"
_NODE_LABEL = "ray.io/node-id"
#: Timeout of placement: bundles that fit are placed quickly, others wait for other jobs.
_PLACE_S = 30.0
#: Timeout of a connection to Ray's head.
_REACH_S = 5.0
#: Time for an actor to stop after its processes have exited.
_JOIN_S = 10.0
#: Prefixes of this process's variables that are forwarded to processes of all nodes.
_FORWARDED_PREFIXES = (PREFIX, "AWS_", "HF_", "NCCL_", "UCX_", "VLLM_")


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
        self._environment = {
            n: v for n, v in environment.items() if n.startswith(_FORWARDED_PREFIXES)
        }
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
        if lacking := shortage(bundles, nodes):
            raise ConfigError(
                f"the Ray cluster has too few resources for {self._settings.nodes}: {lacking}; add "
                "nodes, or change {nodes} or {ray_cpus}"
            )
        here = {_NODE_LABEL: ray.get_runtime_context().get_node_id()}
        routers = [unit.name for unit in units if unit.role is None]
        engines = [unit.name for unit in units if unit.role is not None]
        try:
            self._place(routers, bundles, "PACK", [here] * len(routers))
            self._place(engines, bundles, self._settings.ray_strategy)
        except BaseException:
            self._remove_groups()
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
        self._remove_groups()
        if self._host:
            ray.shutdown()
            self._host = ""

    def _connect(self) -> None:
        if self._host:
            return
        try:
            _check_reachable(self._address)
            with _preserve_sigterm_handler():
                ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"this machine is not a node of a Ray cluster at {self._address!r} "
                f"({str(error).splitlines()[0]}); start one here with `ray start --head`, join "
                "one with `ray start --address`, or give its address as {ray_address}"
            ) from error
        self._host = ray.util.get_node_ip_address()

    def _remove_groups(self) -> None:
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
        """Reserve a group of bundles; raises ``ConfigError`` if Ray cannot place it."""
        if not names:
            return
        wanted = [bundles[name] for name in names]
        group = placement_group(wanted, strategy=strategy, bundle_label_selector=labels)
        self._groups.append(group)
        if not group.wait(_PLACE_S):
            each = "; ".join(f"{name} needs {format_resources(bundles[name])}" for name in names)
            free = {n: v for n, v in ray.available_resources().items() if n in (CPU, GPU)}
            where = "on this node" if labels else f"by {strategy}"
            raise ConfigError(
                f"Ray could not place the bundles {where} within {_PLACE_S:g} s: {each}; free in "
                f"the whole cluster: {format_resources(free) or 'nothing'}; stop other jobs, add "
                "nodes, or change {ray_strategy}, {nodes} or {ray_cpus}"
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
            # The supervisor restarts units, not Ray.
            "max_restarts": 0,
        }
        return ray.remote(UnitProcesses).options(**options).remote(name)


def _check_reachable(address: str) -> None:
    """Raise ``OSError`` or ``ValueError`` immediately, where Ray would retry for minutes."""
    if address == _ANY_HERE:
        return
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdecimal():
        raise ValueError("an address is HOST:PORT, as `ray start --head` prints it")
    with socket.create_connection((host, int(port)), timeout=_REACH_S):
        return


@contextmanager
def _preserve_sigterm_handler() -> Iterator[None]:
    """Restore this process's handler of SIGTERM, which connecting to Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
