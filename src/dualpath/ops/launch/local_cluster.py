"""Starts, supervises and stops a cluster; a failed start leaves no processes behind.

Its processes run on this machine or on the nodes of another executor; supervision, restarts and
draining are the same.
"""

import functools
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from dualpath.core.cluster import Role, UnitShape
from dualpath.ops.launch.cluster_keys import ClusterKeys
from dualpath.ops.launch.cluster_status import ClusterStatus
from dualpath.ops.launch.commands import VLLM, Commands, DpRank, engine_id
from dualpath.ops.launch.devices import visible
from dualpath.ops.launch.executor import Executor, Launch, Launches, Place
from dualpath.ops.launch.executors import open_executor
from dualpath.ops.launch.managed_process import POLL_S, ManagedProcess
from dualpath.ops.launch.ports import LOOPBACK, claim_port
from dualpath.ops.launch.process import Supervisor
from dualpath.ops.launch.restarts import DRAIN_GUARD_S, Restarts
from dualpath.ops.launch.role_wishes import RequestedRoles
from dualpath.ops.launch.settings import LocalClusterSettings
from dualpath.ops.launch.start_checks import check_settings, check_storage
from dualpath.ops.launch.trials import Trials
from dualpath.ops.launch.units import (
    ROUTER,
    STANDBY,
    Unit,
    engine_unit,
    engine_units,
    router_units,
    too_few_devices,
)
from dualpath.router.api_keys import client_headers

log = logging.getLogger(__name__)


class LocalCluster:
    """P prefill engines, D decode engines and a router; a context manager.

    ``progress`` is called with messages about the start; later events are logged.  ``executor``
    replaces the one that the settings name, and is closed at the end; ``commands`` are the command
    lines of the kind of engines.  Entering raises ``ConfigError``, ``EngineLostError`` with the
    cause from the log, or ``DeadlineError``, after everything was stopped again.
    """

    def __init__(
        self,
        settings: LocalClusterSettings,
        progress: Callable[[str], None] = lambda text: None,
        executor: Executor | None = None,
        commands: Commands = VLLM,
    ) -> None:
        self.settings = settings
        self._progress = progress
        self._executor = executor or open_executor(settings)
        self._commands = commands
        self._supervisor = Supervisor()
        self._starts: dict[str, Callable[[], None]] = {}
        #: The unit of each process: processes of a unit start and stop together.
        self._units: dict[str, str] = {}
        #: The shape of each unit, or its next one while it drains.
        self._shapes: dict[str, UnitShape] = {}
        self._trials = Trials(self._shapes)
        self._restarts = Restarts(self._start_again, self._units)
        self._requested_roles = RequestedRoles(
            lambda: self._status.roles(), self._units, self._shapes, settings.ranks, self.change
        )
        self._own_logs: str | None = None
        self._keys = ClusterKeys(settings, one_machine=self._executor.one_machine)
        self.control_port = 0
        self._status = ClusterStatus("", "", {})  # replaced by ``launch``

    def __enter__(self) -> "LocalCluster":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """The URL for clients, once the cluster is launched."""
        return self._status.endpoint

    @property
    def cluster_url(self) -> str:
        """The URL of the cluster's state: the same unless there are several front ends."""
        return self._status.cluster_url

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """Router first, then prefill engines, then decode engines."""
        return self._supervisor.processes

    def process(self, name: str) -> ManagedProcess:
        """Return a process by its name ("router", "pe-0", "de-0")."""
        return self._supervisor.process(name)

    def start(self) -> None:
        """Start everything and wait until requests can be served."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start everything without waiting; call ``wait_ready`` or ``stop`` next."""
        settings = self.settings
        check_settings(settings)
        routers, engines = router_units(settings), tuple(engine_units(settings))
        try:
            self._executor.reserve((*routers, *engines))
            check_storage(settings.storage)
            self._claim_addresses()
            self._progress(
                f"starting router, {settings.prefill}P{settings.decode}D ({settings.mode})"
            )
            for unit in routers:
                self._starts[unit.name] = functools.partial(self._start_router, unit)
                self._starts[unit.name]()
            for unit in engines:
                assert unit.role is not None
                self.start_engines(unit.role, unit.index)
        except BaseException:
            self.stop()
            raise

    def _claim_addresses(self) -> None:
        """Choose the router's addresses on this machine."""
        host = self.settings.host
        self._port = claim_port(host, self.settings.port)
        self.control_port = claim_port(self._executor.host)
        reachable = LOOPBACK if host in ("0.0.0.0", "::") else host
        self._cluster_port = claim_port(host) if self.settings.front_ends else 0
        self._status = ClusterStatus(
            f"http://{reachable}:{self._port}",
            f"http://{reachable}:{self._cluster_port or self._port}",
            client_headers(self.settings.api_keys),
        )

    def _start_router(self, unit: Unit) -> None:
        logs = self._log_dir()
        lock = str(logs / "router.lock") if self.settings.standby else ""
        settings = self.settings
        if not self._executor.one_machine:
            settings = msgspec.structs.replace(settings, control_host=self._executor.host)
        ports = (self._port, self.control_port)
        command = self._commands.router(settings, *ports, lock, self._cluster_port)
        keys = self._keys.router_environment()
        self._start(unit, lambda place: [Launch(self._commands.router_entry, command, keys)])

    def start_engines(self, role: Role, index: int) -> None:
        """Start or restart the engines of a node, under the same names.

        A node has one engine, or the ranks of a data-parallel group, which start together.
        """
        name = engine_id(role, index)
        shape = self._shapes.setdefault(name, UnitShape(role, self.settings.ranks(role)))
        unit = engine_unit(self.settings, role, index, shape.ranks)
        self._starts[name] = functools.partial(self.start_engines, role, index)
        for process in self.processes:
            if self._units.get(process.name) == name and process.name not in unit.processes:
                self._supervisor.release(process)
                del self._units[process.name]
        self._units.update(dict.fromkeys(unit.processes, name))
        self._start(unit, functools.partial(self._engine_launches, unit, shape.role))

    def _engine_launches(self, unit: Unit, role: Role, place: Place) -> list[Launch]:
        """Return the processes of a unit with the current ``role``, at its place."""
        size, each = len(unit.processes), len(place.devices) // len(unit.processes)
        rpc_port = place.claim_port() if size > 1 else 0
        launches = []
        for rank in range(size):
            own = place.devices[rank * each : (rank + 1) * each]
            command = self._commands.engine(
                self.settings,
                *(role, unit.index, place.claim_port(), self.control_port),
                host=place.host,
                router_host=self._executor.host,
                dp=DpRank(rank, size, rpc_port) if size > 1 else None,
                named_as=unit.role,
                on_cpus=not place.devices,
            )
            environment = {**self._keys.engine_environment(), **visible(own)}
            launches.append(Launch(self._commands.engine_entry, command, environment))
        return launches

    def _start(self, unit: Unit, launches: Launches) -> None:
        ends_last = unit.name in (ROUTER, STANDBY)
        for process in self._executor.start(unit, launches, self._log_dir()):
            self._supervisor.add(process, ends_last=ends_last)

    def drain(self) -> None:
        """Accept no new requests; return when the running ones have ended."""
        names = [process.name for process in self.processes]
        if STANDBY in names:
            self._supervisor.process(STANDBY).kill()  # otherwise it would become the leader
        if ROUTER in names:
            router = self._supervisor.process(ROUTER)
            router.terminate()
            router.wait(DRAIN_GUARD_S)

    def stop(self) -> None:
        """Stop everything now; running requests end with an error.  Idempotent."""
        self._supervisor.end(interrupt=True)
        self._executor.close()
        if self._own_logs:
            shutil.rmtree(self._own_logs, ignore_errors=True)
            self._own_logs = None

    def watch(self) -> None:
        """Restart processes that exit, and log it; never returns."""
        while True:
            self.supervise()
            time.sleep(POLL_S)

    def supervise(self) -> None:
        """Restart processes that are due and apply role changes; call it periodically."""
        self._restarts.poll(self.processes, time.monotonic())
        self._requested_roles.poll(time.monotonic())
        self._trials.poll(time.monotonic(), self._serves_as)

    def change(self, unit: str, shape: UnitShape) -> None:
        """Drain a unit of engines; it is restarted as ``shape`` under its old name."""
        why = None if self._executor.on_cpus else too_few_devices(self.settings, unit, shape)
        if why is not None:
            log.warning("%s cannot be changed from %s: %s", unit, self._shapes[unit], why)
            return
        log.info("draining %s, which becomes %s", unit, shape)
        self._trials.begin(unit, shape)
        self._restarts.expect_exit(unit, time.monotonic())
        for process in self.processes:
            if self._units.get(process.name) == unit and process.alive:
                process.terminate()

    def _start_again(self, unit: str) -> None:
        self._trials.note_start(unit)
        self._starts[unit]()

    def _serves_as(self, unit: str, shape: UnitShape) -> bool:
        alive = self._status.alive()
        names = [name for name, of in self._units.items() if of == unit]
        return all(alive.get(name) == shape.role.value for name in names)

    def status(self) -> dict[str, Any]:
        """Return the router's ``/dualpath/v1/status``."""
        return self._status.read()

    def _log_dir(self) -> Path:
        if self.settings.log_dir:
            path = Path(self.settings.log_dir)
            path.mkdir(parents=True, exist_ok=True)
            return path
        if self._own_logs is None:
            self._own_logs = tempfile.mkdtemp(prefix="dualpath-logs-")
        return Path(self._own_logs)

    def wait_ready(self) -> None:
        """Return when all engines have registered; on failure, stop everything and raise."""
        try:
            self._await_engines()
        except BaseException:
            self.stop()
            raise

    def _await_engines(self) -> None:
        settings = self.settings
        expected = settings.prefill * settings.prefill_dp + settings.decode * settings.decode_dp
        reported = ""

        def missing() -> str:
            nonlocal reported
            present = len(self._status.alive())
            state = f"{present} of {expected} engines registered"
            loads = present == expected and not self._status.serves()
            state += ", no front end serves yet" if loads else ""
            if state != reported:
                reported = state
                self._progress(state)
            return state if present < expected or loads else ""

        self._supervisor.wait_until_ready(missing, self.settings.start_timeout_s)
