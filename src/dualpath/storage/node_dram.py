"""Full Blocks in DRAM shared by the engines of a node: files in a tmpfs directory.

A block that one engine has read from storage or written to it is a DRAM hit for the others, so that
a common prefix is in DRAM once and passes the storage NIC once.  The files are those of
``storage.posix``, with key and checksum, written atomically: a process that dies at any point
leaves what a crash leaves on a disk.  The processes share no allocator, counters or locks.

The size is bounded without a shared counter.  The first bits of a block's key select one of many
*sets*, each with an equal share of the bound.  A process that adds a block lists the block's set
and evicts the least recently used files until there is room: a set-associative cache with files as
lines.  Two processes that add to one set at the same moment may exceed its share; the next one
evicts the excess.  Eviction ignores the order of chains: evicted blocks are still in storage.

A file's last use is its modification time, set when it is read or written, as ``atime`` is not
maintained on every file system.  After the clock was stepped back, older files have times in the
future.  They are evicted first, since none of them was used after the step.

``index`` has the blocks as far as this engine knows, for the router (``SharedDramIndex``).
"""

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dualpath.core.blocks import BlockKey, StoreNamespace
from dualpath.core.errors import ConfigError, StorageError
from dualpath.core.recent import KeyUpdates
from dualpath.node.private_folder import private_folder, warn_if_on_disk
from dualpath.node.system_calls import KERNEL, SystemCalls
from dualpath.storage.block_file import HEADER_BYTES, UNREADABLE_HERE
from dualpath.storage.contract import BlockStorage, ReadOutcome
from dualpath.storage.posix import BLOCK_SUFFIX, PosixStorage, is_namespace, key_of
from dualpath.storage.wrapping import WrappingStorage

if TYPE_CHECKING:
    from dualpath.storage.sealed_blocks import KeyRing

# ------------------------------------------------------------------------------------ lying blocks
# Index of the blocks in a node's shared DRAM, as one engine has seen them, for the router.
#
# Each engine reports the blocks that it added, read or removed itself; the reports of all engines
# of the node together are complete, except for changes that a process did not report before it
# died.


class SharedDramIndex:
    """The last ``capacity`` keys that were seen; older ones are evicted, as no more blocks fit.

    Thread-safe.
    """

    def __init__(self, capacity: int, seen: Iterable[BlockKey] = ()) -> None:
        self._lock = threading.Lock()
        self._capacity = capacity
        self._seen: dict[BlockKey, None] = {}
        self._news = KeyUpdates()
        for key in seen:
            self.add(key)

    def add(self, key: BlockKey) -> None:
        """Note that a block is in the node's DRAM."""
        with self._lock:
            if key in self._seen:
                del self._seen[key]  # re-insert as the latest
            else:
                self._news.note(key)
            self._seen[key] = None
            if len(self._seen) > self._capacity:
                del self._seen[next(iter(self._seen))]

    def remove(self, key: BlockKey) -> None:
        """Note that a block is not in the node's DRAM."""
        with self._lock:
            self._seen.pop(key, None)
            self._news.note(key)

    def report(self, *, begin: bool) -> None:
        """Start to record changes, beginning with all blocks present; or stop."""
        with self._lock:
            self._news.report(self._seen, begin=begin)

    def changes(self, limit: int) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return up to ``limit`` keys of blocks added, and of removed ones, since the last call."""
        with self._lock:
            return self._news.take(limit, self._seen)


log = logging.getLogger(__name__)

#: Folders of a namespace, by the first 12 bits of a key, and the most sets.
_FOLDERS = 1 << 12
_FEW_FOLDERS = 16
#: Smallest set: smaller ones would overflow too often while other sets have room.
_MIN_BLOCKS_PER_SET = 32


class _File(NamedTuple):
    used_ns: int
    path: str
    bytes: int

    def eviction_order(self, now_ns: int) -> tuple[bool, int, str]:
        """Return a sort key, the lowest for the file to be evicted first."""
        return self.used_ns <= now_ns, self.used_ns, self.path


class NodeDram:
    """One engine's access to ``root``, which all engines together fill up to ``bound_bytes``.

    ``keys``: storage keys of a namespace with sealed blocks, here as in storage.  ``calls``:
    system calls.  ``now_s``: the clock of modification times, Unix time.  Methods are thread-safe
    and do not raise: on a failure the block is read from storage.  With ``enabled`` False nothing
    is cached.  ``directory_id`` identifies the directory on its machine, independent of its path in
    a container; ``capacity_blocks`` fit into it.

    The directory belongs to one user, and so do all engines that share it: whoever may write to it
    decides which KV they read.  Raises ``ConfigError`` for a directory that cannot be used or that
    others may change (``node.private_folder``), and for a bound below one block.
    """

    def __init__(
        self,
        root: str | Path,
        namespace: StoreNamespace,
        bound_bytes: int,
        *,
        keys: "KeyRing | None" = None,
        calls: SystemCalls = KERNEL,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.enabled = True
        self._now_s = now_s
        self._block_bytes = page_rounded(HEADER_BYTES + namespace.geometry.full_block_bytes)
        if bound_bytes < self._block_bytes:
            raise ConfigError(
                f"dram_bytes is {bound_bytes}, and one block takes {self._block_bytes} in dram_dir;"
                " raise dram_bytes, or give no dram_dir"
            )
        if calls is KERNEL:  # A simulated disk has one user.
            root = private_folder(root, "dram_dir")
            warn_if_on_disk(root, "dram_dir")
        self._root, self._calls = str(root), calls
        self._parent = os.path.dirname(os.path.abspath(self._root))
        try:
            self.files = PosixStorage(
                root, namespace, direct_io=False, keys=keys, calls=calls, name_of=_name
            )
        except ConfigError as error:
            raise ConfigError(f"dram_dir: {error}") from error
        root_status = calls.stat(self._root)
        self._device = root_status.st_dev
        self.directory_id = f"{root_status.st_dev:x}-{root_status.st_ino:x}"
        self.capacity_blocks = bound_bytes // self._block_bytes
        sets = _set_count(self.capacity_blocks)
        self._set_folders, self._set_bytes = _FOLDERS // sets, bound_bytes // sets
        self.index = SharedDramIndex(self.capacity_blocks, self._stored_keys())
        self._lock = threading.Lock()
        self._evicted = 0
        self._warned = False

    @property
    def evicted(self) -> int:
        """Blocks that this engine has evicted."""
        return self._evicted

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool) -> ReadOutcome | None:
        """Read and verify a block as ``BlockStorage.read``; None if it is not in DRAM."""
        if not self.enabled:
            return None
        outcome = self.files.read(key, destination, whole=whole)
        if outcome.reason in UNREADABLE_HERE:
            # Unlike in storage, remove it: it takes the place of a block that is readable for all.
            try:
                self._remove(str(self.files.block_path(key)))
            except OSError as error:
                self._warn_once("cannot remove an unreadable block", error)
        if not outcome.is_good:
            self.index.remove(key)
            return None
        self._touch(key)
        self.index.add(key)
        return ReadOutcome(outcome.bytes_read, from_dram=True)

    def add(self, key: BlockKey, block: memoryview) -> None:
        """Cache a complete block that is in storage."""
        if not self.enabled:
            return
        try:
            if self.files.is_stored(key):
                self._touch(key)
            else:
                try:
                    self._make_room(key)
                except FileNotFoundError:
                    self._restore()
                self.files.write([key], [block])
                self._warned = False
        except (OSError, ConfigError, StorageError) as error:
            self._warn_once("cannot cache a block", error)
        else:
            self.index.add(key)

    def close(self) -> None:
        """Release resources; the blocks stay for other engines and for the next start."""
        self.files.close()

    def _restore(self) -> None:
        """Create the directory again after it was removed under the engines.

        Raises ``FileNotFoundError`` if a file system was mounted there: what is below the mount
        point must not be filled instead.
        """
        if self._calls.stat(self._parent).st_dev != self._device:
            raise FileNotFoundError(errno.ENOENT, "dram_dir is not mounted any more", self._root)
        if self._calls is KERNEL:
            private_folder(self._root, "dram_dir")
        else:
            self._calls.makedirs(self._root, exist_ok=True)
        log.warning("dram_dir %s was removed and is created again", self._root)

    def _touch(self, key: BlockKey) -> None:
        with contextlib.suppress(OSError):  # removed meanwhile
            self._calls.utime(str(self.files.block_path(key)))

    def _make_room(self, key: BlockKey) -> None:
        files = list(self._set_of(key))
        now_ns = int(self._now_s() * 1e9)
        files.sort(key=lambda file: file.eviction_order(now_ns))
        excess = sum(file.bytes for file in files) + self._block_bytes - self._set_bytes
        for file in files:
            if excess <= 0:
                return
            excess -= file.bytes
            if self._remove(file.path):
                with self._lock:
                    self._evicted += 1

    def _remove(self, path: str) -> bool:
        try:
            self._calls.unlink(path)
        except FileNotFoundError:  # evicted by another engine
            return False
        if (key := key_of(path)) is not None:
            self.index.remove(key)
        return True

    def _stored_keys(self) -> Iterator[BlockKey]:
        """Yield the keys of this namespace's blocks at the start, from file names alone."""
        with contextlib.suppress(OSError), self._calls.scandir(str(self.files.path)) as entries:
            for folder in [entry.path for entry in entries]:
                with contextlib.suppress(OSError), self._calls.scandir(folder) as blocks:
                    yield from filter(None, [key_of(block.path) for block in blocks])

    def _set_of(self, key: BlockKey) -> Iterator[_File]:
        """Yield the files in a block's set, of all namespaces, including unused ones."""
        first = _folder(key) // self._set_folders * self._set_folders
        with self._calls.scandir(self._root) as entries:
            namespaces = [entry.path for entry in entries if is_namespace(entry.name)]
        for namespace in namespaces:
            for folder in self._folders_of(namespace, first, first + self._set_folders - 1):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    yield from self._blocks_in(f"{namespace}/{folder}")

    def _folders_of(self, namespace: str, first: int, last: int) -> list[str]:
        """Return a set's folders; lists the existing ones if the set has many folders."""
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
                        yield _File(info.st_mtime_ns, entry.path, page_rounded(info.st_size))

    def _warn_once(self, failure: str, error: Exception) -> None:
        # One warning per failure period: with full memory every block would log one.
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(level, "dram_dir %s %s, using storage: %s", self._root, failure, error)


class NodeDramStorage(WrappingStorage):
    """``inner`` with the node's shared DRAM as a cache in front of it.

    A block counts as stored only if ``inner`` has it.
    """

    def __init__(self, inner: BlockStorage, dram: NodeDram) -> None:
        super().__init__(inner)
        self.dram = dram

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read from DRAM, else from the inner backend; a complete block is then cached in DRAM."""
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
    """Return a block's path in its namespace: one level of folders, as every add lists a set."""
    return f"{_folder(key):03x}/{key.hex()}"


def _set_count(blocks: int) -> int:
    """Return the number of sets, a power of two, so that each is an equal range of folders."""
    return 1 << max(min(blocks // _MIN_BLOCKS_PER_SET, _FOLDERS).bit_length() - 1, 0)


def page_rounded(size_bytes: int) -> int:
    """Return the memory that a file of this size takes: whole pages."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
