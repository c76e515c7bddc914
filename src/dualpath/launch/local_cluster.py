"""Starts, supervises and stops a cluster; a failed start leaves no processes behind.

Its processes run on this machine or on the nodes of another executor; supervision, restarts and
draining are the same.
"""

import functools
import http.client
import json
import logging
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dualpath.core.addresses import http_url, seen_from_here
from dualpath.core.cluster import Role, UnitShape
from dualpath.core.errors import ConfigError, DualPathError, EngineLostError
from dualpath.core.settings import variable
from dualpath.engine.settings import NET_DEVICES
from dualpath.launch.commands import VLLM, Commands, DpRank, engine_id
from dualpath.launch.devices import usable_devices, visible
from dualpath.launch.executor import (
    ROUTER,
    STANDBY,
    Executor,
    Launch,
    Launches,
    LocalExecutor,
    Place,
    Unit,
    engine_unit,
    engine_units,
    router_units,
    too_few_devices,
)
from dualpath.launch.ports import claim_port, claim_ports
from dualpath.launch.process import DRAIN_GUARD_S, POLL_S, ManagedProcess, Restarts, Supervisor
from dualpath.launch.settings import LocalClusterSettings
from dualpath.launch.start_checks import check_start
from dualpath.node.certificates import trusting_only
from dualpath.node.cluster_secret import SECRET_VARIABLE, new_secret
from dualpath.node.private_folder import log_folder
from dualpath.node.secret_file import secret_variable
from dualpath.router.api_keys import API_KEY_VARIABLE, ENGINE_KEY_VARIABLE, client_headers
from dualpath.router.scheduler.role_calls import call_roles, open_connection
from dualpath.router.settings import UNIT_PORTS_APART
from dualpath.transport.nic_pairing import local_nic_pairing
from dualpath.vllm.engine_arguments import tls_arguments

# ------------------------------------------------------------------------------------ cluster keys
# Secrets of one cluster: the cluster secret, and the engines' API key.
#
# They are generated for every cluster (a cluster secret in the environment is used instead) and
# passed to processes through the environment, never on a command line.  Engines listen on the
# loopback address, which every user of the machine can reach; the key admits only the router, so
# that users cannot bypass the router's limits and keys or forge transfers.  On several machines the
# operator must set the secret.

#: UCX's TCP transport listens on every network device it may use; between processes of one
#: machine the loopback device is enough, unless their GPUs have RDMA ports: an engine then uses
#: only the port nearest to its GPU.
LOOPBACK_DEVICES = {f"UCX_{NET_DEVICES}": "lo"}


class ClusterKeys:
    """Secret and keys of one local cluster, as environments of its processes."""

    def __init__(
        self,
        settings: LocalClusterSettings,
        environment: Mapping[str, str] = os.environ,
        *,
        one_machine: bool = True,
        paired_ports: bool = False,
    ) -> None:
        """Read or generate the keys; raises ``ConfigError`` for several machines without secret.

        ``paired_ports``: the engines' GPUs have RDMA ports.
        """
        secret = secret_variable(SECRET_VARIABLE, environment)
        if not secret and not one_machine:
            raise ConfigError(
                f"{SECRET_VARIABLE} is not set, and engines on other nodes need a cluster secret; "
                f"set it: export {SECRET_VARIABLE}=$(openssl rand -hex 32)"
            )
        self._secret = {SECRET_VARIABLE: secret or new_secret()}
        self._engine_key = new_secret()
        self._api_keys = settings.api_keys
        chosen = not LOOPBACK_DEVICES.keys().isdisjoint(environment)
        chosen = chosen or NET_DEVICES in settings.nixl_engine_config
        loopback = one_machine and not chosen and not paired_ports
        self._devices = LOOPBACK_DEVICES if loopback else {}

    def router_environment(self) -> dict[str, str]:
        """Return the router's variables, with the clients' API keys if there are any."""
        keys = {variable("router", "api_keys"): json.dumps(self._api_keys)}
        return {
            **self._secret,
            ENGINE_KEY_VARIABLE: self._engine_key,
            **(keys if self._api_keys else {}),
        }

    def engine_environment(self) -> dict[str, str]:
        """Return an engine's variables; they replace a client's API key in the environment."""
        return {**self._secret, **self._devices, API_KEY_VARIABLE: self._engine_key}


# ---------------------------------------------------------------------------------- cluster status
# HTTP client of a cluster's status, for its supervisor.


#: Limit of one step of a call.
_ANSWER_S = 5.0


class ClusterStatus:
    """Queries the router at ``cluster_url`` with ``headers``; clients use ``endpoint``.

    Both URLs are the same unless front ends are processes of their own.  ``tls`` returns
    what checks the certificate of the ones with ``https://``.
    """

    def __init__(
        self,
        endpoint: str,
        cluster_url: str,
        headers: dict[str, str],
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        self.endpoint = endpoint
        self.cluster_url = cluster_url
        self._headers = headers
        self._tls = tls

    def read(self) -> dict[str, Any]:
        """Return the router's ``/dualpath/v1/status``.

        Raises ``EngineLostError`` if it answers with an error, ``OSError`` if it does not answer.
        """
        code, body = self._get(f"{self.cluster_url}/dualpath/v1/status", self._headers)
        if code != 200:
            raise EngineLostError(f"router at {self.cluster_url} answered {code}; see its log")
        return msgspec.json.decode(body, type=dict[str, Any])

    def alive(self) -> dict[str, str]:
        """Return the role of every live engine by name; empty if the router does not answer."""
        try:
            engines = self.read()["engines"]
        except (OSError, DualPathError, http.client.HTTPException):
            return {}
        return {engine["engine_id"]: engine["role"] for engine in engines if engine["alive"]}

    def serves(self) -> bool:
        """Whether the endpoint serves clients."""
        try:
            return self._get(f"{self.endpoint}/health", {})[0] == 200
        except (OSError, DualPathError, http.client.HTTPException):
            return False

    def roles(self) -> dict[str, Any] | None:
        """Return the router's ``/dualpath/v1/roles``, None if it does not answer."""
        try:
            return call_roles(self.cluster_url, self._headers, tls=self._tls())
        except DualPathError:
            return None  # the router is lost or restarting; a role switch here continues

    def _get(self, url: str, headers: dict[str, str]) -> tuple[int, bytes]:
        parts = urlsplit(url)
        connection = open_connection(parts, _ANSWER_S, self._tls())
        try:
            connection.request("GET", parts.path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


# --------------------------------------------------------------------------------------- executors
# Opens the executor that settings name.


def open_executor(settings: LocalClusterSettings) -> Executor:
    """Return the executor; raises ``ModuleNotFoundError`` if it needs Ray and Ray is missing."""
    if settings.executor == "ray":
        from dualpath.launch.ray_executor import RayExecutor

        return RayExecutor(settings)
    return LocalExecutor(settings)


# --------------------------------------------------------------------------------- requested roles
# Applies the role changes that the router requests for engines, and changes of group sizes.
#
# The supervisor of an engine restarts it in its new role.
#
# The requested role is polled, and a request that is already applied is ignored: a response may be
# lost or repeated, and another router may be the leader by the time the engine is back.

#: Poll interval; short compared with the start of an engine.
INTERVAL_S = 1.0


class RequestedRoles:
    """Polls the router every ``INTERVAL_S`` and changes units; call ``poll`` more often than that.

    ``ask`` returns the body of ``GET /dualpath/v1/roles``, None if no router answers.  ``shapes``
    are the shapes of this supervisor's units, and ``units`` maps engines to units; ``usual_ranks``
    returns the default number of ranks of a role.  ``change`` drains a unit and restarts it in
    another shape.
    """

    def __init__(
        self,
        ask: Callable[[], Mapping[str, Any] | None],
        units: Mapping[str, str],
        shapes: Mapping[str, UnitShape],
        usual_ranks: Callable[[Role], int],
        change: Callable[[str, UnitShape], None],
    ) -> None:
        self._ask = ask
        self._units = units
        self._shapes = shapes
        self._usual_ranks = usual_ranks
        self._change = change
        self._due_s = 0.0

    def poll(self, now_s: float) -> None:
        """Query the router if it is time, and start requested changes."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        report = self._ask()
        switch = report["switch"] if report else None
        if switch is None or switch["state"] != "asked":
            return
        role = Role(switch["to_role"])
        shape = UnitShape(role, switch["to_ranks"] or self._usual_ranks(role))
        # Other engines have another supervisor.
        here = {self._units[name] for name in switch["engines"] if name in self._units}
        for unit in sorted(here):
            if self._shapes[unit] != shape:
                self._change(unit, shape)


# ------------------------------------------------------------------------------------------ trials
# Limits the starts of a unit of engines in a requested shape in which it has not served yet.
#
# A shape that has served is restarted without limit, as the failure may be temporary.  A requested
# shape may never start (a model without experts, too little memory), and meanwhile the unit does
# not serve.  So after a few failed starts the unit returns to its former shape; the router then
# reports the switch as cancelled.

#: Starts in a new shape before the unit returns to its former one.
MAX_STARTS = 3


class Trials:
    """Changes ``shapes`` (by unit) and reverts changes that fail; failures are logged."""

    def __init__(self, shapes: MutableMapping[str, UnitShape]) -> None:
        self._shapes = shapes
        #: The former shapes of units on trial.
        self._former: dict[str, UnitShape] = {}
        self._starts: dict[str, int] = {}
        self._due_s = 0.0

    def begin(self, unit: str, shape: UnitShape) -> None:
        """Use another shape for the next starts of a unit."""
        self._former.setdefault(unit, self._shapes[unit])
        self._shapes[unit] = shape
        self._starts[unit] = 0

    def note_start(self, unit: str) -> None:
        """Count a start of a unit; after too many, its former shape is restored first."""
        if unit not in self._former:
            return
        self._starts[unit] += 1
        if self._starts[unit] > MAX_STARTS:
            failed, former = self._shapes[unit], self._former.pop(unit)
            self._shapes[unit] = former
            log.error(
                "%s did not serve as %s after %d starts (see their errors above); it is started "
                "as %s again. Correct the cause, then request the change again with "
                "`dualpath roles`",
                *(unit, failed, MAX_STARTS, former),
            )

    def poll(self, now_s: float, serves: Callable[[str, UnitShape], bool]) -> None:
        """End the trial of units that ``serves`` reports as serving; call it periodically."""
        if now_s < self._due_s or not self._former:
            return
        self._due_s = now_s + INTERVAL_S
        # Before the first start the processes of the former shape serve.
        for unit in [unit for unit in self._former if self._starts[unit]]:
            if serves(unit, self._shapes[unit]):
                del self._former[unit]


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
        self._requested_roles = [
            RequestedRoles(
                functools.partial(self._roles_of, unit),
                *(self._units, self._shapes, settings.ranks, self.change),
            )
            for unit in range(settings.units)
        ]
        self._own_logs: str | None = None
        self._keys = ClusterKeys(
            settings,
            one_machine=self._executor.one_machine,
            paired_ports=bool(usable_devices(settings.devices) and local_nic_pairing()),
        )
        #: That of the first unit.
        self.control_port = 0
        #: One for each unit, replaced by ``launch``.
        self._statuses = [ClusterStatus("", "", {})] * settings.units

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
        return self._statuses[0].endpoint

    @property
    def cluster_url(self) -> str:
        """The URL of the cluster's state: the same unless there are several front ends."""
        return self.cluster_urls[0]

    @property
    def cluster_urls(self) -> list[str]:
        """The URL of each unit's state."""
        return [status.cluster_url for status in self._statuses]

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
        check_start(settings)
        routers, engines = router_units(settings), tuple(engine_units(settings))
        try:
            self._executor.reserve((*routers, *engines))
            self._claim_addresses()
            several = f", {settings.units} units" if settings.units > 1 else ""
            self._progress(
                f"starting router, {settings.prefill}P{settings.decode}D ({settings.mode}){several}"
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
        units = self.settings.units
        self.control_port = claim_ports(self._executor.host, units, UNIT_PORTS_APART)
        reachable, tls = seen_from_here(host), tls_arguments(self.settings.vllm_args)
        has_tls = bool(tls.certificate_file)

        def context() -> ssl.SSLContext | None:
            # Read for each call, because the certificate may be renewed.
            own = (tls.certificate_file, tls.key_file)
            return trusting_only(*own) if has_tls else None

        self._cluster_port = 0
        if self.settings.front_ends:
            # The scheduler of several front ends has a server of its own.
            self._cluster_port = claim_ports(host, units, UNIT_PORTS_APART)
        self._statuses = [
            ClusterStatus(
                http_url(reachable, self._port, tls=has_tls),
                http_url(
                    reachable,
                    (self._cluster_port or self._port) + unit * UNIT_PORTS_APART,
                    tls=has_tls,
                ),
                client_headers(self.settings.api_keys),
                context,
            )
            for unit in range(units)
        ]

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
        control_port = self.control_port + self.settings.unit(unit.index) * UNIT_PORTS_APART
        rpc_port = place.claim_port() if size > 1 else 0
        launches = []
        for rank in range(size):
            own = place.devices[rank * each : (rank + 1) * each]
            command = self._commands.engine(
                self.settings,
                *(role, unit.index, place.claim_port(), control_port),
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
        for requested in self._requested_roles:
            requested.poll(time.monotonic())
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
        alive = self._alive()
        names = [name for name, of in self._units.items() if of == unit]
        return all(alive.get(name) == shape.role.value for name in names)

    def status(self) -> dict[str, Any]:
        """Return the router's ``/dualpath/v1/status``, that of the first unit."""
        return self._statuses[0].read()

    def _alive(self) -> dict[str, str]:
        """Return the role of every live engine of all units by name."""
        return {name: role for status in self._statuses for name, role in status.alive().items()}

    def _roles_of(self, unit: int) -> dict[str, Any] | None:
        return self._statuses[unit].roles()

    def _log_dir(self) -> Path:
        if self.settings.log_dir:
            return log_folder(self.settings.log_dir, "{log_dir}")
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
            present = len(self._alive())
            state = f"{present} of {expected} engines registered"
            loads = present == expected and not self._statuses[0].serves()
            state += ", no front end serves yet" if loads else ""
            if state != reported:
                reported = state
                self._progress(state)
            return state if present < expected or loads else ""

        self._supervisor.wait_until_ready(missing, self.settings.start_timeout_s)
