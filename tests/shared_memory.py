"""Files in shared memory that no other process has mapped: what was left behind."""

import os
import re
from pathlib import Path

from dualpath.ops.launch.process import all_processes

_FOLDER = Path("/dev/shm")


def shared_memory() -> set[str]:
    """Return the names of all files in shared memory."""
    return set(os.listdir(_FOLDER)) if _FOLDER.exists() else set()


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Return names that were not there before and that no other process has mapped."""
    left = shared_memory() - before
    return (left - _in_use()) & shared_memory()


def _in_use() -> set[str]:
    names: set[str] = set()
    for pid in {pid for pid, _ in all_processes()} - {os.getpid()}:
        try:
            names |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
        except OSError:  # Ended in the meantime, or another user's.
            continue
    return names
