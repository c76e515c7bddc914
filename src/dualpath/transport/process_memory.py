"""A transport between processes of one machine over the kernel's cross-memory attach, without NIXL.

``process_vm_readv`` and ``process_vm_writev`` copy between this process and another one, at the
addresses of its regions there: a transfer is copied completely by its first poll.  Emulated engines
use it if NIXL is not installed (``--transport memory``); DRAM only.  The other process takes no
part in the copy, and may hang.

The kernel requires permission to trace the other process: the same user and, under Yama, the other
process's consent, which every agent gives to all processes of its user.  Memory cannot be
deregistered: it is reachable until the process exits, so a stopping engine must exit its process.
"""

import ctypes
import os
from collections.abc import Callable, Collection

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import HostProcess
from dualpath.core.errors import ConfigError, PeerLostError
from dualpath.transport.contract import AgentInfo, Direction, RegionInfo
from dualpath.transport.copy_transport import CopyTransfer, CopyTransport

#: Most pieces per system call (IOV_MAX).
_MAX_PIECES_PER_CALL = 1024
#: Most bytes per system call; the kernel's limit is 2 GiB less a page.
_MAX_BYTES_PER_CALL = 1 << 30

_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)
_libc = ctypes.CDLL(None, use_errno=True)

_REMEDY = (
    "the kernel must let processes of one user access each other's memory (containers: "
    "--cap-add SYS_PTRACE and one PID namespace); otherwise omit --transport memory and install "
    "NIXL"
)


class ProcessFabric:
    """Reaches other processes of this machine; see ``transport.copying.Fabric``.

    ``this`` is the agent's own process, ``has_exited`` checks another one.
    """

    def __init__(self, this: HostProcess, has_exited: Callable[[HostProcess], bool]) -> None:
        self._this = this
        self._has_exited = has_exited
        self._processes: dict[str, HostProcess] = {}

    def join(self, agent: str) -> bytes:
        """Allow access to this process; raises ``ConfigError`` if the kernel refuses it."""
        probe = np.zeros(8, dtype=np.uint8)
        address = np.array([probe.ctypes.data], dtype=np.int64)
        _libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS)  # fails harmlessly on kernels without Yama
        refused = _move(os.getpid(), Direction.READ, address, address, probe.nbytes)
        if refused is not None or not self._this.host:
            raise ConfigError(
                f"transport memory: {refused or 'this machine has no boot ID'}; {_REMEDY}"
            )
        self._processes[agent] = self._this
        return msgspec.msgpack.encode(self._this)

    def kill(self, agent: str) -> None:
        """Remove an agent."""
        self._processes.pop(agent, None)

    def reach(self, peer: AgentInfo) -> None:
        """Store a peer's process; raises ``PeerLostError`` if its memory cannot be reached."""
        try:
            process = msgspec.msgpack.decode(peer.metadata, type=HostProcess)
        except (msgspec.DecodeError, msgspec.ValidationError):
            raise PeerLostError(
                f"agent {peer.agent!r} has another transport; give all engines the same --transport"
            ) from None
        if process.host != self._this.host:
            raise PeerLostError(
                f"agent {peer.agent!r} is on another machine, which --transport memory does not "
                "reach; give all engines --transport nixl"
            )
        self._processes[peer.agent] = process
        if (obstacle := self._obstacle(peer.agent) or _unreachable(process, peer)) is not None:
            self.kill(peer.agent)
            raise PeerLostError(f"agent {peer.agent!r} cannot be reached: {obstacle}")

    def is_alive(self, agent: str) -> bool:
        """Whether the agent is this one or a connected peer, and its process has not exited."""
        return agent in self._processes and self._obstacle(agent) is None

    def stalls(self, agent: str) -> bool:
        """Return False: a process's memory can be reached even while it is suspended."""
        return False

    def copy(self, transfer: CopyTransfer) -> str | None:
        """Copy, unless the peer's process has exited: its process number may have been reused."""
        if (obstacle := self._obstacle(transfer.peer)) is not None:
            return obstacle
        process = self._processes[transfer.peer]
        step = max(1, min(_MAX_PIECES_PER_CALL, _MAX_BYTES_PER_CALL // transfer.piece_bytes))
        for first in range(0, transfer.here.size, step):
            here, there = transfer.here[first : first + step], transfer.there[first : first + step]
            why = _move(process.pid, transfer.direction, here, there, transfer.piece_bytes)
            if why is not None:
                return f"transfer with {transfer.peer!r} failed: {why}"
        return None

    def _obstacle(self, agent: str) -> str | None:
        process = self._processes.get(agent)
        return f"agent {agent!r} is dead" if process is None or self._has_exited(process) else None


class ProcessMemoryTransport(CopyTransport):
    """One agent on a ``ProcessFabric``."""

    def __init__(
        self,
        agent: str,
        this: HostProcess,
        has_exited: Callable[[HostProcess], bool],
        *,
        traffic_classes: Collection[str] = ("kv",),
    ) -> None:
        super().__init__(agent, ProcessFabric(this, has_exited), traffic_classes=traffic_classes)

    def register(self, region: RegionInfo, keep_alive: object) -> None:
        """Register memory; raises ``ConfigError`` also for device memory."""
        if region.memory != "DRAM":
            raise ConfigError(
                f"region {region.name!r} is in {region.memory}, which --transport memory cannot "
                "access; use --transport nixl"
            )
        super().register(region, keep_alive)


def _unreachable(process: HostProcess, peer: AgentInfo) -> str | None:
    """Read a byte of a peer's first region; return the error, None on success."""
    if not peer.regions:
        return None
    byte = np.zeros(1, dtype=np.uint8)
    here = np.array([byte.ctypes.data], dtype=np.int64)
    there = np.array([peer.regions[0].base_address], dtype=np.int64)
    why = _move(process.pid, Direction.READ, here, there, 1)
    return None if why is None else f"{why}; {_REMEDY}"


def _move(
    pid: int,
    direction: Direction,
    here: NDArray[np.int64],
    there: NDArray[np.int64],
    piece_bytes: int,
) -> str | None:
    """Copy pieces between this process and another; return the error, None on success."""
    call = _libc.process_vm_readv if direction is Direction.READ else _libc.process_vm_writev
    call.restype = ctypes.c_ssize_t
    local, remote = _vectors(here, piece_bytes), _vectors(there, piece_bytes)
    moved = call(
        ctypes.c_int(pid),
        *(ctypes.c_void_p(local.ctypes.data), ctypes.c_ulong(len(local))),
        *(ctypes.c_void_p(remote.ctypes.data), ctypes.c_ulong(len(remote))),
        ctypes.c_ulong(0),
    )
    if moved < 0:
        return os.strerror(ctypes.get_errno())
    expected = here.size * piece_bytes
    return None if moved == expected else f"{moved} of {expected} bytes moved"


def _vectors(addresses: NDArray[np.int64], piece_bytes: int) -> NDArray[np.uint64]:
    vectors = np.empty((addresses.size, 2), dtype=np.uint64)
    vectors[:, 0], vectors[:, 1] = addresses, piece_bytes
    return vectors
