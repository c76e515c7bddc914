"""Runs processes on the nodes of a Ray cluster, in the bundles of two placement groups.

One group has the router, pinned to this node: clients reach the endpoint at the expected address,
and router and supervisor stop together.  The other has a bundle for each engine or data-parallel
group, spread or packed by Ray.  If a node is lost, Ray places its bundles again once a node has the
resources; until then the restarted processes wait.

Secrets are passed as arguments of a call to a running actor, not in an actor's creation or its
runtime environment, which Ray stores and displays.
"""

import contextlib
import logging
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dualpath.core.addresses import host_and_port
from dualpath.core.errors import ConfigError
from dualpath.core.settings import PREFIX
from dualpath.launch.commands import ENGINE_ENTRY, engine_environment
from dualpath.launch.devices import has_cpu_build
from dualpath.launch.executor import Executor, Launch, Launches, Unit
from dualpath.launch.ports import claim_port
from dualpath.launch.process import ManagedProcess, SpawnedProcess
from dualpath.launch.settings import LocalClusterSettings
from dualpath.node.private_folder import open_log

# ----------------------------------------------------------------------------------------- bundles
# Resources that a cluster requests from Ray: a bundle for each unit.
#
# A bundle has a whole unit, so that the ranks of a data-parallel group are on one node.

CPU, GPU = "CPU", "GPU"
Resources = Mapping[str, float]


def bundle(unit: Unit, cpus: int, *, with_devices: bool) -> dict[str, float]:
    """Return the resources of a unit: ``cpus`` per process, and its devices if engines have any."""
    processes = len(unit.processes)
    devices = {GPU: float(unit.devices * processes)} if with_devices and unit.devices else {}
    return {CPU: float(cpus * processes), **devices}


def shortage(bundles: Mapping[str, Resources], nodes: Sequence[Resources]) -> str:
    """Return what the nodes lack for all ``bundles`` (by unit), in words; empty if they suffice.

    Does not consider resources used by other jobs, nor whether bundles fit beside each other.
    """
    needed, available = _sum(bundles.values()), _sum(nodes)
    lacking = [
        f"{amount:g} {name} are needed and it has {available.get(name, 0):g}"
        for name, amount in needed.items()
        if amount > available.get(name, 0)
    ]
    if lacking:
        return ", ".join(lacking)
    for unit, one in bundles.items():
        if not any(_holds(node, one) for node in nodes):
            return f"{unit} needs {format_resources(one)} on one node, and no node has as much"
    return ""


def format_resources(resources: Resources) -> str:
    """Return resources as text: "1 CPU, 8 GPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _holds(node: Resources, one: Resources) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in one.items())


def _sum(parts: Iterable[Resources]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


# ---------------------------------------------------------------------------------- unit processes
# The actor of a unit: its processes on a node of a Ray cluster.
#
# Ray calls one method at a time, in the worker's main thread, which also starts the processes; they
# get SIGTERM when it ends.  So the processes do not outlive their actor, their node's raylet, or
# the command that started the cluster.

#: Most bytes of a log per poll; the next poll returns the rest.
_LOG_BYTES = 1 << 20
_RAY = "RAY_"
#: The module that starts vLLM's server with a forked engine core, as on one machine.
_FORKING_MODULE = "dualpath.launch.forked_engine"


class NodePlace(msgspec.Struct, frozen=True):
    """The address of a unit's node, and the devices that Ray assigned to it."""

    host: str
    devices: tuple[str, ...]


class ProcessUpdate(msgspec.Struct, frozen=True):
    """Result of a poll: log bytes from the requested offset on, and the exit code or None."""

    log: bytes
    exit_code: int | None


class UnitProcesses:
    """An actor's processes, by name; ``unit`` is the actor's name in Ray's dashboard."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._logs = Path(tempfile.mkdtemp(prefix=f"dualpath-{unit}-"))
        self._processes: dict[str, SpawnedProcess] = {}

    def __repr__(self) -> str:
        return self._unit

    def place(self) -> NodePlace:
        """Return the node and devices of this actor."""
        import ray

        devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
        return NodePlace(ray.util.get_node_ip_address(), tuple(devices))

    def claim_port(self) -> int:
        """Return a free port of this node."""
        return claim_port(self.place().host)

    def start(
        self, launches: Mapping[str, Launch], folder: str, environment: Mapping[str, str]
    ) -> None:
        """Start processes in ``folder``, with ``environment`` over this node's environment.

        Idempotent.  Raises ``ConfigError`` if the folder does not exist.
        """
        if not Path(folder).is_dir():
            raise ConfigError(
                f"there is no folder {folder} on the node of {self._unit}, and paths may be "
                "relative to it; run `dualpath serve` in a folder that all nodes have, such as /"
            )
        own = {name: value for name, value in os.environ.items() if not name.startswith(_RAY)}
        for name, launch in launches.items():
            if name not in self._processes:
                self._processes[name] = SpawnedProcess(
                    name,
                    words(launch),
                    self._logs / f"{name}.log",
                    {**engine_environment(), **own, **environment, **launch.environment},
                    folder=Path(folder),
                    ends_with_parent=signal.SIGTERM,
                )

    def poll(self, offsets: Mapping[str, int]) -> dict[str, ProcessUpdate]:
        """Return each process's log from an offset on; its exit code with the last part."""
        return {name: self._poll(name, offset) for name, offset in offsets.items()}

    def _poll(self, name: str, offset: int) -> ProcessUpdate:
        process = self._processes[name]
        exit_code = process.exit_code  # read first, so that the last output is read below
        with process.log.open("rb") as file:
            file.seek(offset)
            text = file.read(_LOG_BYTES)
        return ProcessUpdate(text, exit_code if len(text) < _LOG_BYTES else None)

    def send_signal(self, name: str, number: int) -> None:
        """Send a signal to a process."""
        self._processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """Kill a process and its children."""
        self._processes[name].kill()

    def close(self) -> None:
        """Kill all remaining processes and remove their logs, which have been copied."""
        for process in self._processes.values():
            process.kill()
        shutil.rmtree(self._logs, ignore_errors=True)


def words(launch: Launch) -> list[str]:
    """Return the command line of a launch; its module is run with ``-m``."""
    module = launch.entry.partition(":")[0]
    module = _FORKING_MODULE if launch.entry == ENGINE_ENTRY else module
    return [sys.executable, "-m", module, *launch.command]


# ---------------------------------------------------------------------------------------- ray unit
# The supervisor's side of a unit of processes on a node of a Ray cluster.
#
# One thread per unit makes all calls to Ray: it waits for a place, starts the processes there,
# forwards signals to them and copies their logs here.  Ray reports when an actor is lost, with its
# worker or its node; the processes of the unit have exited then.

log = logging.getLogger(__name__)

#: Interval of polls for logs and exit codes.
POLL_S = 0.2
#: Timeout of a call to an actor.
_CALL_S = 20.0
#: Log a warning if a unit waits longer for its place, and repeat it at an interval.
_WARN_AFTER_S = 5.0
_WARN_AGAIN_S = 60.0


class RayProcess(ManagedProcess):
    """A process on a node of the Ray cluster; its log is copied here."""

    def __init__(self, name: str, log: Path, signals: "queue.SimpleQueue[_Signal]") -> None:
        super().__init__(name, log)
        self._signals = signals
        self._over = threading.Event()
        self._exit_code = 0
        #: Bytes of its log that were copied.
        self.fetched_bytes = 0
        os.close(open_log(log))

    @property
    def exit_code(self) -> int | None:
        """See the base class."""
        return self._exit_code if self._over.is_set() else None

    def wait(self, timeout_s: float) -> int | None:
        """See the base class."""
        self._over.wait(timeout_s)
        return self.exit_code

    def send_signal(self, number: int) -> None:
        """See the base class; any signal ends a process that waits for a place."""
        if self.alive:
            self._signals.put(_Signal(self.name, number))

    def kill(self) -> None:
        """See the base class."""
        if self.alive:
            self._signals.put(_Signal(self.name, signal.SIGKILL, whole_group=True))

    def update(self, update: ProcessUpdate) -> None:
        """Append fetched output to the log; finish if the process has exited."""
        with open(open_log(self.log), "ab") as file:
            file.write(update.log)
        self.fetched_bytes += len(update.log)
        if update.exit_code is not None:
            self.finish(update.exit_code)

    def finish(self, exit_code: int, last_line: str = "") -> None:
        """Mark as exited; ``last_line`` is appended to its log."""
        if last_line:
            with open(open_log(self.log), "a") as file:
                file.write(f"{last_line}\n")
        self._exit_code = exit_code
        self._over.set()


class _Signal(msgspec.Struct, frozen=True):
    name: str
    number: int
    whole_group: bool = False


class _ActorPlace:
    """The place of an actor."""

    def __init__(self, actor: Any, found: NodePlace) -> None:  # noqa: ANN401 - Ray's handle
        self._actor = actor
        self.host, self.devices = found.host, found.devices

    def claim_port(self) -> int:
        """See ``Place``."""
        port: int = ray.get(self._actor.claim_port.remote(), timeout=_CALL_S)
        return port


class RayUnit:
    """Starts the processes of a unit in an actor; ``make_actor`` must not block.

    ``folder`` and ``environment``: see ``UnitProcesses.start``.  Waiting for a place is logged.
    """

    def __init__(
        self,
        unit: Unit,
        make_actor: Callable[[], Any],
        launches: Launches,
        logs: Path,
        folder: str,
        environment: Mapping[str, str],
    ) -> None:
        self._unit = unit
        self._launches = launches
        self._start_in = (folder, dict(environment))
        self._signals: queue.SimpleQueue[_Signal] = queue.SimpleQueue()
        self.processes = tuple(
            RayProcess(name, logs / f"{name}.log", self._signals) for name in unit.processes
        )
        self._make_actor = make_actor
        self._actor: Any = None
        self._placed = False
        self._thread = threading.Thread(target=self._run, name=f"ray-{unit.name}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the actor has stopped, after its processes have exited."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._actor = self._make_actor()
            if (place := self._await_place()) is not None:
                self._start(place)
                self._follow()
        except RayTaskError as error:
            self._ended(1, str(error.cause))
        except Exception as error:  # without this thread the processes are unsupervised
            self._ended(-signal.SIGKILL, f"lost with its actor or node: {_first_line(error)}")
        finally:
            self._release()

    def _await_place(self) -> NodePlace | None:
        """Wait for the actor; return its place, None if the unit was stopped before."""
        answer = self._actor.place.remote()
        warn_s, warned = time.monotonic() + _WARN_AFTER_S, False
        while not ray.wait([answer], timeout=POLL_S)[0]:
            with contextlib.suppress(queue.Empty):
                self._ended(-self._signals.get_nowait().number, "ended before it had a place")
                return None
            if time.monotonic() > warn_s:
                log.warning("%s waits for Ray to place it", self._unit.name)
                warn_s, warned = time.monotonic() + _WARN_AGAIN_S, True
        found: NodePlace = ray.get(answer, timeout=_CALL_S)
        self._placed = True
        if warned:
            log.info("%s was placed on %s", self._unit.name, found.host)
        return found

    def _start(self, found: NodePlace) -> None:
        launches = self._launches(_ActorPlace(self._actor, found))
        by_name = dict(zip(self._unit.processes, launches, strict=True))
        ray.get(self._actor.start.remote(by_name, *self._start_in), timeout=_CALL_S)

    def _follow(self) -> None:
        """Copy logs and forward signals until all processes have exited."""
        while alive := [process for process in self.processes if process.alive]:
            with contextlib.suppress(queue.Empty):
                self._forward(self._signals.get(timeout=POLL_S))
            offsets = {process.name: process.fetched_bytes for process in alive}
            # A node that does not answer counts as alive until Ray reports its loss.
            with contextlib.suppress(ActorUnavailableError, GetTimeoutError):
                updates = ray.get(self._actor.poll.remote(offsets), timeout=_CALL_S)
                for process in alive:
                    process.update(updates[process.name])

    def _forward(self, asked: _Signal) -> None:
        if asked.whole_group:
            self._actor.kill.remote(asked.name)
        else:
            self._actor.send_signal.remote(asked.name, asked.number)

    def _ended(self, exit_code: int, last_line: str) -> None:
        for process in self.processes:
            if process.alive:
                process.finish(exit_code, last_line)

    def _release(self) -> None:
        """Stop the actor, which releases the unit's resources."""
        if self._actor is None:
            return
        if self._placed:
            with contextlib.suppress(RayError):
                ray.get(self._actor.close.remote(), timeout=_CALL_S)
        with contextlib.suppress(RayError):
            ray.kill(self._actor)


def _first_line(error: Exception) -> str:
    """Return the line of Ray's error message that has the reason of an actor's death."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    because = [line for line in lines if "because" in line]
    return f"{type(error).__name__}: {(because or lines or ['no reason given'])[0]}"


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
    try:
        place = host_and_port(address)
    except ValueError as error:
        raise ValueError(
            f"{error}; an address is HOST:PORT, as `ray start --head` prints it"
        ) from error
    with socket.create_connection(place, timeout=_REACH_S):
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
