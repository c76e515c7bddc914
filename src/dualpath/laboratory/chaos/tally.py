"""How many stored blocks a process has loaded, in a file that survives its death."""

import mmap
import struct
import threading
from pathlib import Path

_COUNTS = struct.Struct("<QQ")


class Tally:
    """Counts of one process life: blocks that arrived whole and verified, blocks refused.

    Kept in shared memory of a file, so that the last count before a SIGKILL is there.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_COUNTS.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _COUNTS.size)
        self._lock = threading.Lock()
        self._good = self._bad = 0

    def add(self, *, good: bool) -> None:
        """Count a block; from any thread."""
        with self._lock:
            self._good += good
            self._bad += not good
            _COUNTS.pack_into(self._memory, 0, self._good, self._bad)


def loaded_blocks(folder: Path) -> tuple[int, int]:
    """Return (good, refused) blocks over all tallies in a folder."""
    counts = [_COUNTS.unpack(path.read_bytes()) for path in folder.iterdir()]
    return sum(good for good, _ in counts), sum(bad for _, bad in counts)
