"""A description of this machine, for reports."""

import os
import platform
from pathlib import Path

import msgspec


class ClientMachine(msgspec.Struct, frozen=True):
    """The machine on which the client ran; memory in bytes."""

    cpu_count: int
    cpu_model: str
    memory_bytes: int
    platform: str
    python: str

    @property
    def cores(self) -> str:
        """The number and model of its cores."""
        return f"{self.cpu_count} cores ({self.cpu_model})"


def this_machine() -> ClientMachine:
    """Return CPU count, CPU model, memory, platform and Python version."""
    return ClientMachine(
        cpu_count=len(os.sched_getaffinity(0)),
        cpu_model=cpu_model(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
    )


def cpu_model() -> str:
    """Return the model of this machine's CPU, "unknown" if the system does not have it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"
