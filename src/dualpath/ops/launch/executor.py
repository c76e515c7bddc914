"""Where the processes of a cluster run: what its supervisor asks of a machine or a Ray cluster.

A unit of processes gets its place first; its command lines are made there, as addresses and ports
are those of the node.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from dualpath.ops.launch.managed_process import ManagedProcess
from dualpath.ops.launch.units import Unit


class Place(Protocol):
    """Where a unit runs."""

    @property
    def host(self) -> str:
        """Where processes of other units reach those of this one."""
        ...

    @property
    def devices(self) -> Sequence[str]:
        """The devices of all its processes, in order; none on CPUs."""
        ...

    def claim_port(self) -> int:
        """Return a port that is free there."""
        ...


class Launch(msgspec.Struct, frozen=True):
    """One process to be: its command "module:function", arguments, and variables of its own.

    Variables may be secrets: they are on no command line.
    """

    entry: str
    command: list[str]
    environment: dict[str, str]


#: Makes the launches of all processes of a unit, in their order, for the place it has got.
Launches = Callable[[Place], Sequence[Launch]]


class Executor(ABC):
    """Starts processes; ``tests/contract/test_executor_contract.py`` holds for every kind."""

    #: Whether all processes run on this machine, and reach each other by its loopback address.
    one_machine: bool

    @property
    @abstractmethod
    def host(self) -> str:
        """Where engines find what runs on this machine."""

    @property
    @abstractmethod
    def on_cpus(self) -> bool:
        """Whether engines have no device but the CPUs; known once places are reserved."""

    @abstractmethod
    def reserve(self, units: Sequence[Unit]) -> None:
        """Find a place for every unit.

        Raises ``ConfigError`` with what is missing.  Nothing is reserved then.
        """

    @abstractmethod
    def start(self, unit: Unit, launches: Launches, logs: Path) -> Sequence[ManagedProcess]:
        """Start a unit, for the first time or again, with a log ``NAME.log`` for each process.

        It does not wait for a place: until there is one, the processes run, with nothing to say.
        """

    @abstractmethod
    def close(self) -> None:
        """Give all places back, when all processes have ended; idempotent."""
