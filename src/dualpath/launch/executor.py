"""Interface of executors, which run the processes of a cluster on this machine or on Ray.

A unit of processes is placed first; then its command lines are built, as they contain addresses and
ports of its node.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from dualpath.core.cluster import Role, UnitShape
from dualpath.launch.commands import engine_id, rank_id
from dualpath.launch.devices import DevicePlan, usable_devices
from dualpath.launch.fork_server import VLLM_MODULES, ForkedProcess
from dualpath.launch.ports import LOOPBACK, claim_port
from dualpath.launch.process import LocalProcess, ManagedProcess
from dualpath.launch.settings import LocalClusterSettings

# ------------------------------------------------------------------------------------------- units
# Units of a cluster: processes that stop and start together, on one node.

ROUTER = "router"
STANDBY = "router-standby"


class Unit(msgspec.Struct, frozen=True):
    """Names of a unit and its processes; for engines also role and ``index`` of the node."""

    name: str
    processes: tuple[str, ...]
    role: Role | None = None
    index: int = 0
    #: Devices of each process, 0 on CPUs.
    devices: int = 0


def router_units(settings: LocalClusterSettings) -> list[Unit]:
    """Return the router, and the standby router if there is one."""
    return [Unit(name, (name,)) for name in (ROUTER, STANDBY)[: 1 + settings.standby]]


def engine_units(settings: LocalClusterSettings) -> Iterator[Unit]:
    """Yield prefill engines, then decode engines."""
    for role, count in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for index in range(count):
            yield engine_unit(settings, role, index)


def engine_unit(
    settings: LocalClusterSettings, role: Role, index: int, ranks: int | None = None
) -> Unit:
    """Return the engines of a node: one, or the ranks of a data-parallel group.

    Their names are of ``role``; their number is ``ranks``, or that of the settings.
    """
    size = ranks or settings.ranks(role)
    names = tuple(rank_id(role, index, rank, size) for rank in range(size))
    return Unit(engine_id(role, index), names, role, index, settings.devices_per_rank(role))


def too_few_devices(settings: LocalClusterSettings, name: str, shape: UnitShape) -> str | None:
    """Return why a unit's devices do not suffice for a shape, None if they do."""
    unit = next(u for u in engine_units(settings) if u.name == name)
    assert unit.role is not None
    if unit.devices != (needs := settings.devices_per_rank(shape.role)):
        return (
            f"each of its ranks has {unit.devices} devices, and one of the other role needs "
            f"{needs}; give --prefill-tp and --decode-tp the same value"
        )
    if shape.ranks > (most := len(unit.processes)):
        return f"it has devices for {most} ranks; start with a larger --{unit.role.value}-dp"
    return None


class Place(Protocol):
    """The node and devices of a unit."""

    @property
    def host(self) -> str:
        """The address at which processes of other units reach this one."""
        ...

    @property
    def devices(self) -> Sequence[str]:
        """The devices of all its processes, in order; empty on CPUs."""
        ...

    def claim_port(self) -> int:
        """Return a free port of the node."""
        ...


class Launch(msgspec.Struct, frozen=True):
    """A process to start: entry point "module:function", arguments, and environment variables.

    Secrets are passed as variables, never on a command line.
    """

    entry: str
    command: list[str]
    environment: dict[str, str]


#: Returns the launches of all processes of a unit, in order, for its place.
Launches = Callable[[Place], Sequence[Launch]]


class Executor(ABC):
    """Starts processes; ``tests/contract/test_executor_contract.py`` tests every executor."""

    #: Whether all processes run on this machine and use its loopback address.
    one_machine: bool

    @property
    @abstractmethod
    def host(self) -> str:
        """The address at which engines reach processes on this machine."""

    @property
    @abstractmethod
    def on_cpus(self) -> bool:
        """Whether engines run on CPUs; known after ``reserve``."""

    @abstractmethod
    def reserve(self, units: Sequence[Unit]) -> None:
        """Reserve a place for every unit.

        Raises ``ConfigError`` that names the missing resources; then nothing is reserved.
        """

    @abstractmethod
    def start(self, unit: Unit, launches: Launches, logs: Path) -> Sequence[ManagedProcess]:
        """Start or restart a unit, with a log ``NAME.log`` in ``logs`` for each process.

        Does not wait for a place: until the unit has one, its processes are reported as running.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all places, after all processes have exited; idempotent."""


# ---------------------------------------------------------------------------------- local executor
# Runs processes on this machine: forked from one server, on the loopback address.


class LocalExecutor(Executor):
    """See the base class; ``preload``: modules that the fork server imports."""

    one_machine = True
    host = LOOPBACK

    def __init__(
        self, settings: LocalClusterSettings, preload: Sequence[str] = VLLM_MODULES
    ) -> None:
        self._settings = settings
        self._preload = preload
        self._devices = DevicePlan(settings, ())

    @property
    def on_cpus(self) -> bool:
        """See the base class."""
        return self._devices.on_cpus

    def reserve(self, units: Sequence[Unit]) -> None:
        """See the base class; the resources are the devices."""
        self._devices = DevicePlan(self._settings, usable_devices(self._settings.devices))

    def start(self, unit: Unit, launches: Launches, logs: Path) -> Sequence[LocalProcess]:
        """See the base class."""
        devices: list[str] = []
        if unit.role is not None:
            for rank in range(len(unit.processes)):
                devices += self._devices.of(unit.role, unit.index, rank)
        return [
            ForkedProcess(
                *(name, launch.entry, launch.command, logs / f"{name}.log", launch.environment),
                preload=self._preload,
            )
            for name, launch in zip(unit.processes, launches(_LocalPlace(devices)), strict=True)
        ]

    def close(self) -> None:
        """See the base class: there is nothing to release."""


class _LocalPlace:
    """A place on this machine."""

    host = LOOPBACK

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = devices

    def claim_port(self) -> int:
        """See ``Place``."""
        return claim_port()
