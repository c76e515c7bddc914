"""Count of the stored blocks that a process has loaded, in a file that survives a SIGKILL."""

import mmap
import struct
import threading
from pathlib import Path

_COUNTS = struct.Struct("<QQ")


class BlockCounter:
    """Counts of one run of a process: blocks loaded and verified, and blocks refused.

    They are in a memory-mapped file, so that the last count before a SIGKILL is preserved.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_COUNTS.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _COUNTS.size)
        self._lock = threading.Lock()
        self._good = self._bad = 0

    def add(self, *, good: bool) -> None:
        """Count a block; may be called from any thread."""
        with self._lock:
            self._good += good
            self._bad += not good
            _COUNTS.pack_into(self._memory, 0, self._good, self._bad)


def loaded_blocks(folder: Path) -> tuple[int, int]:
    """Return the sum of (good, refused) blocks over all counters in a folder."""
    counts = [_COUNTS.unpack(path.read_bytes()) for path in folder.iterdir()]
    return sum(good for good, _ in counts), sum(bad for _, bad in counts)
