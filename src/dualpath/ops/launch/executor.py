"""Interface of executors, which run the processes of a cluster on this machine or on Ray.

A unit of processes is placed first; then its command lines are built, as they contain addresses and
ports of its node.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from dualpath.ops.launch.managed_process import ManagedProcess
from dualpath.ops.launch.units import Unit


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
