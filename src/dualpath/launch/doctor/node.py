"""Queries the node that it runs on; the source of all inputs of checks."""

import ctypes
import importlib.metadata
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from dualpath.core.addresses import tcp_address
from dualpath.core.errors import ConfigError
from dualpath.launch.doctor.network import RdmaPort
from dualpath.launch.doctor.software import VLLM_DISTRIBUTIONS, ProcessOutcome
from dualpath.launch.ports import free_port
from dualpath.node.sockets import resolved
from dualpath.transport.memory import allocate_shared, map_shared
from dualpath.transport.nic_pairing import PairedPort, local_nic_pairing

#: Generous, as importing vLLM on a busy machine is slow.
PROCESS_S = 180.0
CONNECT_S = 3.0

_TIME_ERROR = 5
#: Larger than the kernel's ``struct timex`` on any platform.
_TIMEX_BYTES = 512


class Node:
    """This machine; ``root`` is the folder of sysfs and procfs."""

    def __init__(self, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> None:
        self._root = root
        self.environment = environment

    def python_version(self) -> tuple[int, int]:
        """Return major and minor version of the interpreter."""
        return sys.version_info[:2]

    def vllm_distributions(self) -> dict[str, str]:
        """Return the versions of the installed distributions that provide ``vllm``."""
        found = {}
        for name in VLLM_DISTRIBUTIONS:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found

    def vllm_plugins(self) -> set[str]:
        """Return the names of the plugins that vLLM loads in every process."""
        return {p.name for p in importlib.metadata.entry_points(group="vllm.general_plugins")}

    def run_module(self, module: str) -> ProcessOutcome:
        """Run a module of ours as a process and wait for it to exit."""
        environment = {**self.environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            ended = subprocess.run(
                [sys.executable, "-m", module],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PROCESS_S,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ProcessOutcome(exit_code=None)
        return ProcessOutcome(ended.returncode, ended.stdout, ended.stderr)

    def available_bytes(self) -> int:
        """Return the memory available without swapping."""
        for line in self._read("proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return 0

    def sharing_refusal(self, size_bytes: int) -> str:
        """Return why processes cannot share a buffer of this size; empty if they can.

        Its pages are not touched, so that no memory is used.
        """
        try:
            memory = allocate_shared(size_bytes)
            assert memory.file is not None
            map_shared(memory.file.path, size_bytes)
        except ConfigError as failure:
            return str(failure)
        return ""

    def transparent_huge_pages(self) -> str:
        """Return the kernel's modes, the active one in brackets; empty without support."""
        return self._read("sys/kernel/mm/transparent_hugepage/enabled")

    def locked_memory_bytes(self) -> int | None:
        """Return the soft limit of locked memory; None for unlimited."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft

    def file_descriptors(self) -> tuple[int, int]:
        """Return the soft and hard limit of open files."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def clock_synchronised(self) -> bool | None:
        """Return whether the kernel's clock is synchronised; None if the kernel does not answer."""
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
        return None if state < 0 else state != _TIME_ERROR

    def rdma_ports(self) -> list[RdmaPort]:
        """Return the ports of all RDMA devices."""
        folder = self._root / "sys/class/infiniband"
        ports = sorted(folder.glob("*/ports/*")) if folder.is_dir() else []
        return [
            RdmaPort(
                device=port.parent.parent.name,
                port=port.name,
                state=_first_line(port / "state"),
                layer=_first_line(port / "link_layer"),
            )
            for port in ports
        ]

    def nics_of_gpus(self) -> dict[str, PairedPort]:
        """Return the RDMA port of each GPU, by PCI address."""
        return local_nic_pairing(self._root)

    def default_interface(self) -> str:
        """Return the interface of the default route; empty if there is none."""
        for line in self._read("proc/net/route").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 2 and fields[1] == "00000000":
                return fields[0]
        return ""

    def queueing_disciplines(self, interface: str) -> str | None:
        """Return the output of ``tc`` for an interface; None if tc cannot run."""
        try:
            ended = subprocess.run(
                ["tc", "qdisc", "show", "dev", interface],
                capture_output=True,
                text=True,
                timeout=PROCESS_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return ended.stdout

    def port_refusal(self, host: str, port: int) -> str:
        """Return why a port cannot be listened on; empty if it can."""
        try:
            free_port(host, port)
        except (OSError, OverflowError) as failure:
            return str(failure)
        return ""

    def connection_refusal(self, address: str) -> str:
        """Return why ``tcp://host:port`` cannot be connected to; empty if it can."""
        try:
            host, port = tcp_address(address)
            _, at = resolved(host)  # Of the family that engines use.
            socket.create_connection((at, port), timeout=CONNECT_S).close()
        except (OSError, ValueError) as failure:
            return str(failure)
        return ""

    def _read(self, path: str) -> str:
        try:
            return (self._root / path).read_text().strip()
        except OSError:
            return ""


def _first_line(file: Path) -> str:
    try:
        return file.read_text().partition("\n")[0]
    except OSError:
        return "unknown"
