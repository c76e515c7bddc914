"""How stored bytes get into memory: by the kernel and our own S3 client, or by plugins of others.

Names, look-ups, writes and what makes a block believed are the same for all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dualpath.core.errors import ConfigError
from dualpath.storage.system_calls import KERNEL, SystemCalls

#: What one call takes (IOV_MAX).
_MOST_BUFFERS = 1024
#: What one call of the kernel's reads, at most, where many read at a time: of a larger block, what
#: has come is verified while the others read (``benchmarks/storage_read.py``).
PIECE_BYTES = 1 << 20
#: With so few reads under way nobody would use the device while a piece is verified.
_FEW_READS = 3
#: Pieces begin where direct I/O may begin on any device.
_PIECE_ALIGNMENT_BYTES = 4096

Arrived = Callable[[int], None]
"""Is told how many bytes of a file's beginning are in memory by now."""


def nobody(file_bytes: int) -> None:
    """Nobody wants to know."""


class FileReader(Protocol):
    """Reads files; for use by several threads."""

    def fill_from_file(
        self, descriptor: int, buffers: Sequence[memoryview], arrived: Arrived = nobody
    ) -> int:
        """Fill buffers with an open file's first bytes; return how many, fewer at its end only.

        ``arrived`` may be told of a part of them, on this thread, before the rest is read.  Returns
        when nothing writes to them any more.  Raises ``OSError``, with ``EINVAL`` where
        the file is open for direct I/O and that cannot be.
        """
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...


class ObjectReader(Protocol):
    """Reads objects of one bucket; for use by several threads."""

    def fill_from_object(self, name: str, buffers: Sequence[memoryview]) -> int:
        """Fill buffers with an object's first bytes, of which it has that many; return how many.

        ``name`` is its whole name in the bucket.  Returns when nothing writes to them any more.
        Raises ``OSError``.
        """
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...


class PluginReader(FileReader, ObjectReader, Protocol):
    """Reads whichever of both its plugin is for."""


#: Opens a plugin of NIXL with its parameters; raises ``ConfigError`` where it cannot be used.
OpenPlugin = Callable[[str, Mapping[str, str]], PluginReader]


def no_plugins(plugin: str, parameters: Mapping[str, str]) -> PluginReader:
    """Refuse: whoever opens this storage reads by no plugin."""
    raise ConfigError(
        f"storage through NIXL's plugin {plugin} is for engines; give the directory or the s3:// "
        "bucket itself, where the same blocks lie"
    )


class KernelReader:
    """See ``FileReader``: ``preadv``, which runs without the interpreter's lock.

    ``piece_bytes`` is about the most that one call reads while more than a few read.
    """

    def __init__(self, calls: SystemCalls = KERNEL, piece_bytes: int = PIECE_BYTES) -> None:
        self._calls = calls
        self._piece_bytes = piece_bytes
        self._under_way: set[int] = set()

    def fill_from_file(
        self, descriptor: int, buffers: Sequence[memoryview], arrived: Arrived = nobody
    ) -> int:
        """Read, in pieces of equal size, several buffers a call."""
        self._under_way.add(descriptor)
        try:
            return self._fill(descriptor, list(buffers), arrived)
        finally:
            self._under_way.discard(descriptor)

    def close(self) -> None:
        """Nothing to give back."""

    def _fill(self, descriptor: int, left: list[memoryview], arrived: Arrived) -> int:
        done = 0
        piece_bytes = self._equal_pieces(sum(buffer.nbytes for buffer in left))
        while left:
            wanted = _first(left[:_MOST_BUFFERS], piece_bytes)
            more = self._calls.preadv(descriptor, wanted, done)
            if more == 0:
                break
            done += more
            arrived(done)
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


def _first(buffers: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    """Return what the first ``size_bytes`` of buffers are, without empty ones at the end."""
    found = []
    for buffer in buffers:
        if size_bytes <= 0:
            break
        found.append(buffer[:size_bytes])
        size_bytes -= found[-1].nbytes
    return found
