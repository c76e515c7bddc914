"""Readers of stored files: the kernel's ``preadv``, or plugins of NIXL.

Names, look-ups, writes and verification are the same for all of them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from dualpath.core.errors import ConfigError
from dualpath.node.system_calls import KERNEL, SystemCalls
from dualpath.storage.block_file import first_of

#: Most buffers per call (IOV_MAX).
_MAX_BUFFERS = 1024
#: Most bytes per system call while several threads read: a thread verifies the piece it has read
#: while other threads use the device (``lab/dualpath_lab/benchmarks/storage_read.py``).
PIECE_BYTES = 1 << 20
#: Up to this many concurrent reads, blocks are read in one call: verifying between pieces would
#: leave the device idle.
_FEW_READS = 3
#: Alignment of pieces, sufficient for direct I/O on any device.
_PIECE_ALIGNMENT_BYTES = 4096

OnProgress = Callable[[int], None]
"""Called with how many bytes from the beginning of a file are in memory."""


def ignore_progress(file_bytes: int) -> None:
    """Do nothing; see ``OnProgress``."""


class FileReader(Protocol):
    """Reads files; thread-safe."""

    def fill_from_file(
        self,
        descriptor: int,
        buffers: Sequence[memoryview],
        on_progress: OnProgress = ignore_progress,
    ) -> int:
        """Fill buffers from the beginning of an open file; return how many bytes were read.

        Returns fewer bytes than requested only at the end of the file.  ``on_progress`` may be
        called on this thread while the rest is read.  No read is pending after the return.  Raises
        ``OSError``, with ``EINVAL`` if the file is open for direct I/O and cannot be read that way.
        """
        ...

    def close(self) -> None:
        """Release all resources; idempotent."""
        ...


#: Opens a NIXL plugin; raises ``ConfigError`` if it cannot be used.
OpenPlugin = Callable[[str], FileReader]


def refuse_plugins(plugin: str) -> FileReader:
    """Raise ``ConfigError``: the default of processes that do not use plugins."""
    raise ConfigError(
        f"storage through NIXL's plugin {plugin} is for engines; give the directory itself, which "
        "has the same blocks"
    )


class KernelReader:
    """See ``FileReader``: reads with ``preadv``, which releases the GIL.

    ``piece_bytes``: about the most bytes per call while more than a few threads read.
    """

    def __init__(self, calls: SystemCalls = KERNEL, piece_bytes: int = PIECE_BYTES) -> None:
        self._calls = calls
        self._piece_bytes = piece_bytes
        self._under_way: set[int] = set()

    def fill_from_file(
        self,
        descriptor: int,
        buffers: Sequence[memoryview],
        on_progress: OnProgress = ignore_progress,
    ) -> int:
        """Read in pieces of equal size, several buffers per call."""
        self._under_way.add(descriptor)
        try:
            return self._fill(descriptor, list(buffers), on_progress)
        finally:
            self._under_way.discard(descriptor)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _fill(self, descriptor: int, left: list[memoryview], on_progress: OnProgress) -> int:
        done = 0
        piece_bytes = self._equal_pieces(sum(buffer.nbytes for buffer in left))
        while left:
            wanted = first_of(left[:_MAX_BUFFERS], piece_bytes)
            more = self._calls.preadv(descriptor, wanted, done)
            if more == 0:
                break
            done += more
            on_progress(done)
            while left and more >= left[0].nbytes:
                more -= left.pop(0).nbytes
            if more:
                left[0] = left[0][more:]
        return done

    def _equal_pieces(self, size_bytes: int) -> int:
        few = len(self._under_way) <= _FEW_READS
        pieces = 1 if few else max(-(-size_bytes // self._piece_bytes), 1)
        aligned = -(-size_bytes // (pieces * _PIECE_ALIGNMENT_BYTES))
        return max(aligned, 1) * _PIECE_ALIGNMENT_BYTES
