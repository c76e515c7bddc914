"""Identity and liveness of processes on this machine, from ``/proc``.

A prefill engine's transfers write into other engines' memory.  They are known to have stopped when
its process has exited, which only its own machine can confirm.  The same check finds storage files
that a dead writer has left.
"""

import os
from pathlib import Path
from typing import NamedTuple

from dualpath.core.cluster import HostProcess
from dualpath.node.system_calls import KERNEL, SystemCalls

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDED = "ZX"


class ProcessStat(NamedTuple):
    """State, parent, process group and times (in clock ticks) of a process.

    ``cpu_ticks`` includes children that it has waited for; ``start_ticks`` counts from boot.
    """

    state: str
    parent: int
    group: int
    cpu_ticks: int
    start_ticks: int

    @property
    def is_zombie(self) -> bool:
        """Whether it has exited and its parent has not waited for it."""
        return self.state == "Z"


def process_stat(process_id: int) -> ProcessStat | None:
    """Return a process's entry in /proc, None if there is no such process."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The process name may contain spaces and brackets; the fields after it do not.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        cpu_ticks=sum(map(int, fields[11:15])),
        start_ticks=int(fields[19]),
    )


def pid_namespace(calls: SystemCalls = KERNEL) -> str:
    """Return host name and PID namespace: containers may share a host name."""
    return f"{calls.uname().nodename}-{calls.stat('/proc/self/ns/pid').st_ino}"


def host_id() -> str:
    """Return an identifier of this machine since its last boot, empty if unknown.

    It includes the boot ID, as process numbers start again after each boot.
    """
    try:
        return f"{pid_namespace()}/{_BOOT_ID.read_text().strip()}"
    except OSError:
        return ""


def is_running(process_id: int, calls: SystemCalls = KERNEL) -> bool:
    """Whether this ``pid_namespace`` has the process; True for numbers out of range."""
    try:
        calls.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def this_process() -> HostProcess:
    """Return the identity of this process, for liveness probes on this machine."""
    stat, host = process_stat(os.getpid()), host_id()
    if stat is None or not host:
        return HostProcess()
    return HostProcess(host=host, pid=os.getpid(), start_ticks=stat.start_ticks)


def has_exited(process: HostProcess) -> bool:
    """Whether a process and all other ranks of its engine have exited.

    False for processes of other machines: only their own machine can confirm it.
    """
    return _is_dead(process) and all(map(has_exited, process.ranks))


def _is_dead(process: HostProcess) -> bool:
    if not process.host or process.host != host_id():
        return False
    stat = process_stat(process.pid)
    if stat is None or stat.start_ticks != process.start_ticks:
        return True
    # A process is a zombie as soon as its main thread exits, even while other threads still run.
    return stat.state in _ENDED and len(_threads(process.pid)) <= 1


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
