"""Full Blocks in DRAM that the engines of a node share: files in a directory that lies in memory.

What one of them has read from storage or written to it, the others find there, so that a prefix
they have in common lies there once and passes the storage NIC once.  The files are those of
``storage.posix``, with key and checksum, whole under their names or not there: whoever dies at any
line leaves what a crash leaves on a disk.  Nobody allocates, counts or locks across processes.

How much lies there is bounded without a count.  The first bits of its key put a block into one of
many *sets*, each with an equal share of the bound.  Who adds a block looks at what its set has and
removes what was used longest ago until there is room: a set-associative cache with files as lines.
Two who add to one set at a moment may exceed its share by what they bring; the next makes up for
it.  A set needs no order of chains: what is gone here is still in storage.

Used is when a file was last read here or written; its time of change says it, as ``atime`` is not
kept everywhere.

``lying`` is what an engine knows of all this, for the router (``storage.lying_blocks``).
"""

import contextlib
import logging
import mmap
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dualpath.core.blocks import BlockKey, StoreNamespace
from dualpath.core.errors import ConfigError, StorageError
from dualpath.storage.block_file import STAYING
from dualpath.storage.block_header import HEADER_BYTES
from dualpath.storage.contract import BlockStorage, ReadOutcome
from dualpath.storage.directory import BLOCK_SUFFIX, key_of
from dualpath.storage.lying_blocks import LyingBlocks
from dualpath.storage.posix import PosixStorage
from dualpath.storage.survey import is_namespace
from dualpath.storage.system_calls import KERNEL, SystemCalls
from dualpath.storage.wrapping import WrappingStorage

if TYPE_CHECKING:
    from dualpath.storage.key_ring import KeyRing

log = logging.getLogger(__name__)

#: Folders of a namespace, by the first 12 bits of a key, and the most sets.
_FOLDERS = 1 << 12
_FEW_FOLDERS = 16
#: Fewer blocks in a set would let it overflow too often while others have room.
_LEAST_BLOCKS = 32


class _File(NamedTuple):
    used_ns: int
    path: str
    bytes: int


class NodeDram:
    """One engine's access to ``root``, of which all engines together fill ``bound_bytes``.

    ``keys``: of a namespace whose blocks are sealed, here as in storage.  ``calls``: of the
    machine.  Methods may be called by any thread and never fail: what cannot be had is in storage.
    ``keeps`` False: nothing is.  ``mark`` tells the directory from any other one of its machine,
    whatever its path is in a container; ``capacity_blocks`` fit into it.

    Raises ``ConfigError`` for a directory that cannot be used or that every user may write to,
    and for a bound below one block.
    """

    def __init__(
        self,
        root: str | Path,
        namespace: StoreNamespace,
        bound_bytes: int,
        *,
        keys: "KeyRing | None" = None,
        calls: SystemCalls = KERNEL,
    ) -> None:
        self.keeps = True
        self._block_bytes = in_pages(HEADER_BYTES + namespace.geometry.full_block_bytes)
        if bound_bytes < self._block_bytes:
            raise ConfigError(
                f"dram_bytes is {bound_bytes}, and a block takes {self._block_bytes} in dram_dir; "
                "give some blocks' worth, or no dram_dir"
            )
        self._root, self._calls = str(root), calls
        self.files = PosixStorage(
            root, namespace, direct_io=False, keys=keys, calls=calls, name_of=_name
        )
        root_status = calls.stat(self._root)
        if root_status.st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"every user may write to dram_dir {root}; give a directory of your own in it"
            )
        self.mark = f"{root_status.st_dev:x}-{root_status.st_ino:x}"
        self.capacity_blocks = bound_bytes // self._block_bytes
        sets = _set_count(self.capacity_blocks)
        self._set_folders, self._set_bytes = _FOLDERS // sets, bound_bytes // sets
        self.lying = LyingBlocks(self.capacity_blocks, self._lying_now())
        self._lock = threading.Lock()
        self._evicted = 0
        self._complained = False

    @property
    def evicted(self) -> int:
        """Blocks that this engine has removed for others."""
        return self._evicted

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool) -> ReadOutcome | None:
        """Read and verify a block as ``BlockStorage.read``; None where it is not to be had."""
        if not self.keeps:
            return None
        outcome = self.files.read(key, destination, whole=whole)
        if outcome.reason in STAYING:
            # Others may read it, as in a storage.  Here it would keep one that all can read away.
            try:
                self._remove(str(self.files.block_path(key)))
            except OSError as error:
                self._complain("cannot remove a bad block", error)
        if not outcome.is_good:
            self.lying.gone(key)
            return None
        self._touch(key)
        self.lying.seen(key)
        return ReadOutcome(outcome.bytes_read, from_dram=True)

    def add(self, key: BlockKey, block: memoryview) -> None:
        """Let a whole block that is stored lie here as well."""
        if not self.keeps:
            return
        try:
            if self.files.is_stored(key):
                self._touch(key)
            else:
                self._make_room(key)
                self.files.write([key], [block])
                self._complained = False
        except (OSError, StorageError) as error:
            self._complain("takes no block", error)
        else:
            self.lying.seen(key)

    def close(self) -> None:
        """Let go; what lies there stays for others, and for the next start."""
        self.files.close()

    def _touch(self, key: BlockKey) -> None:
        with contextlib.suppress(OSError):  # removed meanwhile
            self._calls.utime(str(self.files.block_path(key)))

    def _make_room(self, key: BlockKey) -> None:
        lying = sorted(self._set_of(key))
        excess = sum(file.bytes for file in lying) + self._block_bytes - self._set_bytes
        for file in lying:
            if excess <= 0:
                return
            excess -= file.bytes
            if self._remove(file.path):
                with self._lock:
                    self._evicted += 1

    def _remove(self, path: str) -> bool:
        try:
            self._calls.unlink(path)
        except FileNotFoundError:  # somebody else needed room as well
            return False
        if (key := key_of(path)) is not None:
            self.lying.gone(key)
        return True

    def _lying_now(self) -> Iterator[BlockKey]:
        """Yield what others have left there of this namespace, by names alone."""
        with contextlib.suppress(OSError), self._calls.scandir(str(self.files.path)) as entries:
            for folder in [entry.path for entry in entries]:
                with contextlib.suppress(OSError), self._calls.scandir(folder) as blocks:
                    yield from filter(None, [key_of(block.path) for block in blocks])

    def _set_of(self, key: BlockKey) -> Iterator[_File]:
        """Yield what lies in a block's set, also of a model that is served no more."""
        first = _folder(key) // self._set_folders * self._set_folders
        with self._calls.scandir(self._root) as entries:
            namespaces = [entry.path for entry in entries if is_namespace(entry.name)]
        for namespace in namespaces:
            for folder in self._folders_of(namespace, first, first + self._set_folders - 1):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    yield from self._blocks_in(f"{namespace}/{folder}")

    def _folders_of(self, namespace: str, first: int, last: int) -> list[str]:
        """Return those of a set that may be there: few are tried, of many most are not."""
        if last - first < _FEW_FOLDERS:
            return [f"{folder:03x}" for folder in range(first, last + 1)]
        with self._calls.scandir(namespace) as entries:
            return [
                entry.name for entry in entries if f"{first:03x}" <= entry.name <= f"{last:03x}"
            ]

    def _blocks_in(self, folder: str) -> Iterator[_File]:
        with self._calls.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(BLOCK_SUFFIX):
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        info = entry.stat(follow_symlinks=False)
                        yield _File(info.st_mtime_ns, entry.path, in_pages(info.st_size))

    def _complain(self, trouble: str, error: Exception) -> None:
        # Once per trouble: with memory that is full every block would say so.
        level = logging.DEBUG if self._complained else logging.WARNING
        self._complained = True
        log.log(level, "dram_dir %s %s, storage has it: %s", self._root, trouble, error)


class NodeDramStorage(WrappingStorage):
    """``inner``, with the node's DRAM before it.

    A block is stored if ``inner`` has it; where it is read from is not the question then.
    """

    def __init__(self, inner: BlockStorage, dram: NodeDram) -> None:
        super().__init__(inner)
        self.dram = dram

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read from DRAM, else from the inner backend, for the others as well if it is whole."""
        if (found := self.dram.read(key, destination, whole=whole)) is not None:
            return found
        outcome = self.inner.read(key, destination, whole=whole)
        if whole and outcome.is_good:
            self.dram.add(key, destination)
        return outcome

    def close(self) -> None:
        """Close both."""
        super().close()
        self.dram.close()

    def _stored(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        for key, source in zip(keys, sources, strict=False):
            self.dram.add(key, source)


def _folder(key: BlockKey) -> int:
    return int.from_bytes(key[:2]) >> 4


def _name(key: BlockKey) -> str:
    """Return where a block lies in its namespace: one level of folders, listed for every block."""
    return f"{_folder(key):03x}/{key.hex()}"


def _set_count(blocks: int) -> int:
    """Return a power of two, so that sets are equal ranges of folders."""
    return 1 << max(min(blocks // _LEAST_BLOCKS, _FOLDERS).bit_length() - 1, 0)


def in_pages(size_bytes: int) -> int:
    """Return what a file of this size takes of memory."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
