"""Load of the machine: its busy share, CPU time of processes."""

import contextlib
import os
import resource
from pathlib import Path

from dualpath.node.host_process import process_stat

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STAT = Path("/proc/stat")
#: Columns of the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal.
_IDLE, _IOWAIT, _COUNTED = 3, 4, 8

#: Above this share of busy cores shaped links no longer hold their rates.
BUSY_LIMIT = 0.85


class BusyMeter:
    """The busy share of all cores since the creation; stolen time counts as busy."""

    def __init__(self) -> None:
        self._before = _ticks()

    def busy(self) -> float:
        """Return the share since the creation, 0 to 1."""
        moved = [now - then for now, then in zip(_ticks(), self._before, strict=True)]
        total = sum(moved)
        return 1 - (moved[_IDLE] + moved[_IOWAIT]) / total if total else 0.0


def own_cpu_s() -> float:
    """Return the CPU seconds of this process and its threads, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def process_cpu_s(process_id: int) -> float:
    """Return CPU seconds of a process and all its descendants; 0 if it has ended.

    Ended descendants are included if their parents have waited for them.
    """
    stat = process_stat(process_id)
    if stat is None:
        return 0.0
    children: list[int] = []
    for file in Path(f"/proc/{process_id}").glob("task/*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, file.read_text().split())
    return stat.cpu_ticks / _TICKS_PER_S + sum(map(process_cpu_s, children))


def _ticks() -> list[int]:
    first, _, _ = _STAT.read_text(encoding="utf-8").partition("\n")
    return [int(word) for word in first.split()[1 : 1 + _COUNTED]]
