"""Processes of this machine, from its own tables: which one this is, and whether another has ended.

A prefill engine's transfers write into other engines' memory.  That its process has ended is the
proof that they do so no more, and the machine it ran on is the one to give it.  What a writer has
left in a storage is nobody's for the same reason.
"""

import os
from pathlib import Path
from typing import NamedTuple

from dualpath.core.cluster import HostProcess
from dualpath.storage.system_calls import KERNEL, SystemCalls

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDED = "ZX"


class ProcessStat(NamedTuple):
    """What the kernel says of a process: its state, parent, group and, in ticks, times.

    ``cpu_ticks`` are its own and those of children it has waited for; ``start_ticks`` since boot.
    """

    state: str
    parent: int
    group: int
    cpu_ticks: int
    start_ticks: int

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended and nobody has waited for it."""
        return self.state == "Z"


def process_stat(process_id: int) -> ProcessStat | None:
    """Return what /proc says of a process, None if there is none."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may hold spaces and brackets; the fields after it may not.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        cpu_ticks=sum(map(int, fields[11:15])),
        start_ticks=int(fields[19]),
    )


def number_space(calls: SystemCalls = KERNEL) -> str:
    """Name this host and its numbering of processes; containers may share a host name."""
    return f"{calls.uname().nodename}-{calls.stat('/proc/self/ns/pid').st_ino}"


def this_host() -> str:
    """Return the name under which processes of this machine know each other, empty if unknown.

    Numbers of processes are counted anew after each start of the machine: that is part of it.
    """
    try:
        return f"{number_space()}/{_BOOT_ID.read_text().strip()}"
    except OSError:
        return ""


def is_running(process_id: int, calls: SystemCalls = KERNEL) -> bool:
    """Whether this ``number_space`` has such a process; True for numbers that none can have."""
    try:
        calls.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def this_process() -> HostProcess:
    """Return what others need to ask this machine about this process."""
    stat, host = process_stat(os.getpid()), this_host()
    if stat is None or not host:
        return HostProcess()
    return HostProcess(host=host, pid=os.getpid(), start_ticks=stat.start_ticks)


def is_gone(process: HostProcess) -> bool:
    """Whether a process has ended, and every other rank of its engine with it.

    As far as this machine can tell; False for one of another.
    """
    return _has_ended(process) and all(map(is_gone, process.ranks))


def _has_ended(process: HostProcess) -> bool:
    if not process.host or process.host != this_host():
        return False
    stat = process_stat(process.pid)
    if stat is None or stat.start_ticks != process.start_ticks:
        return True
    # A process whose first thread has ended is a zombie while others of its threads still run.
    return stat.state in _ENDED and len(_threads(process.pid)) <= 1


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
