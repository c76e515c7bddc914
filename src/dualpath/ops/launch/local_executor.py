"""Runs processes on this machine: forked from one server, on the loopback address."""

from collections.abc import Sequence
from pathlib import Path

from dualpath.ops.launch.devices import DevicePlan, usable_devices
from dualpath.ops.launch.executor import Executor, Launches
from dualpath.ops.launch.fork_server import VLLM_MODULES, ForkedProcess
from dualpath.ops.launch.ports import LOOPBACK, claim_port
from dualpath.ops.launch.process import LocalProcess
from dualpath.ops.launch.settings import LocalClusterSettings
from dualpath.ops.launch.units import Unit


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
