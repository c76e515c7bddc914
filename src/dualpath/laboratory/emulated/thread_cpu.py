"""Where the CPU time of an engine goes, by thread (Linux)."""

import re
import threading
from pathlib import Path

_NS_PER_S = 1_000_000_000
#: Threads that are not Python's: those of NIXL and UCX, and of numpy where it has some.
NATIVE = "native"


def thread_cpu_s() -> dict[str, float]:
    """Return CPU seconds of every living thread by name; threads of one pool are one.

    A thread that has ended takes its time with it.
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        name = re.sub(r"[_-]\d+$", "", names.get(int(task.name), NATIVE))
        try:
            on_cpu_ns = int((task / "schedstat").read_text(encoding="ascii").split()[0])
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        found[name] = found.get(name, 0.0) + on_cpu_ns / _NS_PER_S
    return found
