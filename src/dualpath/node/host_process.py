"""Identity and liveness of processes on this machine.

A prefill engine's transfers write into other engines' memory.  They are known to have stopped when
its process has exited, which only its own machine can confirm.  The same check finds storage files
that a dead writer has left.

A process counts as dead on positive evidence only: the kernel has no process of its number, or that
process has exited, or it is shown to have started at another time.  ``/proc`` alone is no evidence:
it may hide processes of other users (``hidepid``, ``ProtectProc``), and it may be the process table
of another PID namespace (``docker run -v /proc:/proc``), where the same numbers have other owners.
"""

import hashlib
import os
import select
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple, Protocol

from dualpath.core.cluster import HostProcess
from dualpath.node.system_calls import KERNEL, SystemCalls

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
#: Enough of the boot ID's hash to tell machines of one name apart in the names of files.
_BOOT_HEX = 8


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


def process_stat(process_id: int | str) -> ProcessStat | None:
    """Return a process's entry in /proc, None if /proc does not show such a process.

    That is no proof of its death, see the module's docstring.
    """
    try:
        text = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
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


# -------------------------------------------------------------------------------- proof of death


class Sight(Enum):
    """What the kernel reports of a process number; ``UNKNOWN`` if it gives no answer."""

    ABSENT = auto()
    EXITED = auto()
    ALIVE = auto()
    UNKNOWN = auto()


class ProcessTable(Protocol):
    """The view of a machine's processes that one process has."""

    def host(self) -> str:
        """Return an identifier of the process table since the machine's last boot.

        Two processes have the same one exactly if a number means the same process to both, and
        times since boot are equal.  Empty if this cannot be established.
        """
        ...

    def sight(self, pid: int) -> Sight:
        """Ask the kernel, which knows processes of all users of its PID namespace."""
        ...

    def start_ticks(self, pid: int) -> int | None:
        """Return when a process started, in clock ticks since boot, None if it is hidden."""
        ...


class KernelProcessTable:
    """The process table of this machine: pidfd and signal 0, and ``/proc`` for times."""

    def host(self) -> str:
        """See ``ProcessTable``.  It has the boot ID, since numbers start again after each boot.

        The namespace of times is part of it: ``/proc`` shifts start times by the reader's.
        """
        try:
            if not _proc_is_own():
                return ""
            with open(_BOOT_ID, encoding="ascii") as file:
                boot = file.read().strip()
            return f"{_namespace_host(KERNEL)}/{boot}/{_time_namespace()}"
        except (OSError, UnicodeDecodeError):
            return ""

    def sight(self, pid: int) -> Sight:
        """See ``ProcessTable``."""
        try:
            if not is_running(pid):
                return Sight.ABSENT
        except OSError:
            return Sight.UNKNOWN
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return Sight.ABSENT
        except OverflowError:
            return Sight.UNKNOWN
        except (OSError, AttributeError):
            # No pidfd in this kernel or container, or the number is that of a thread.
            return Sight.ALIVE
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            # Readable when all its threads have exited; a zombie's main thread alone does not do.
            return Sight.EXITED if poll.poll(0) else Sight.ALIVE
        finally:
            os.close(descriptor)

    def start_ticks(self, pid: int) -> int | None:
        """See ``ProcessTable``."""
        try:
            stat = process_stat(pid)
        except (OSError, ValueError, IndexError):
            return None
        return None if stat is None else stat.start_ticks


#: The process table of this machine.
THIS_MACHINE: ProcessTable = KernelProcessTable()


def has_exited(process: HostProcess, table: ProcessTable = THIS_MACHINE) -> bool:
    """Whether a process and all other ranks of its engine are shown to have exited.

    False if that is unknown: for processes of other machines and of other PID namespaces, and while
    a process of another user that ``/proc`` hides has its number.
    """
    return _is_dead(process, table) and all(has_exited(rank, table) for rank in process.ranks)


def _is_dead(process: HostProcess, table: ProcessTable) -> bool:
    if not process.host or process.pid <= 0 or process.host != table.host():
        return False
    match table.sight(process.pid):
        case Sight.ABSENT | Sight.EXITED:
            return True
        case Sight.ALIVE:
            # Another start time shows that its number was used again after its death.
            started_ticks = table.start_ticks(process.pid)
            return started_ticks is not None and started_ticks != process.start_ticks
        case Sight.UNKNOWN:
            return False


def this_process() -> HostProcess:
    """Return the identity of this process, for liveness probes on this machine.

    It is empty, and no probe ever confirms this process's death, if ``/proc`` belongs to another
    PID namespace than this process.
    """
    host, stat = THIS_MACHINE.host(), process_stat("self")
    if stat is None or not host:
        return HostProcess()
    return HostProcess(host=host, pid=os.getpid(), start_ticks=stat.start_ticks)


def _proc_is_own() -> bool:
    """Whether ``/proc`` has the process numbers of this process's PID namespace.

    ``NSpid`` lists this process's numbers from the namespace of ``/proc`` down to its own one.
    """
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return line.split()[1:] == [str(os.getpid())]
    return False


def _time_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/time").st_ino
    except OSError:  # Linux before 5.6 has one time for all.
        return 0


def _namespace_host(calls: SystemCalls) -> str:
    return f"{calls.uname().nodename}-{calls.stat('/proc/self/ns/pid').st_ino}"


# --------------------------------------------------------------------------- owners of shared files


def file_owner_host(calls: SystemCalls = KERNEL) -> str:
    """Return a name of this boot of this machine and of the PID namespace, for names of files.

    Machines and containers may share a host name; their boots have different IDs.  Raises
    ``OSError``.
    """
    descriptor = calls.open(_BOOT_ID, os.O_RDONLY | os.O_CLOEXEC)
    try:
        boot = calls.read(descriptor, 64).strip()
    finally:
        calls.close(descriptor)
    return f"{_namespace_host(calls)}-{hashlib.sha256(boot).hexdigest()[:_BOOT_HEX]}"


def is_running(process_id: int, calls: SystemCalls = KERNEL) -> bool:
    """Whether this PID namespace has the process; True for numbers out of range."""
    try:
        calls.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
