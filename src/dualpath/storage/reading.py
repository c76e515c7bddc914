"""How stored bytes get into memory: by the kernel and our own S3 client, or by plugins of others.

Names, look-ups, writes and what makes a block believed are the same for all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dualpath.core.errors import ConfigError
from dualpath.storage.system_calls import KERNEL, SystemCalls

#: What one call takes (IOV_MAX).
_MOST_BUFFERS = 1024


class FileReader(Protocol):
    """Reads files; for use by several threads."""

    def fill_from_file(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers with an open file's first bytes; return how many, fewer at its end only.

        Returns when nothing writes to them any more.  Raises ``OSError``, with ``EINVAL`` where
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
    """See ``FileReader``: ``preadv``, which runs without the interpreter's lock."""

    def __init__(self, calls: SystemCalls = KERNEL) -> None:
        self._calls = calls

    def fill_from_file(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        """Read, several buffers a call."""
        done, left = 0, list(buffers)
        while left:
            more = self._calls.preadv(descriptor, left[:_MOST_BUFFERS], done)
            if more == 0:
                break
            done += more
            while left and more >= left[0].nbytes:
                more -= left.pop(0).nbytes
            if more:
                left[0] = left[0][more:]
        return done

    def close(self) -> None:
        """Nothing to give back."""
