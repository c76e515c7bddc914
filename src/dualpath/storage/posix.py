"""Full Blocks as files: local NVMe, NFS, a 3FS mount, anything with POSIX semantics.

One file per block, written under a temporary name and then linked to its final one, so that a
crash at any point leaves either the complete block or nothing.  Reads go straight into the
caller's (registered) memory with ``preadv``, on the caller's thread; the kernel call and the
checksum both release the GIL, so that several threads read in parallel.

NIXL's POSIX plugin (libaio) can read instead (``nixl+posix://``): measured side by side it reached
0.93 to 1.00 of this rate at the same CPU cost (``benchmarks/storage_read.py``), so the simpler code
is the default.

Direct I/O bypasses the page cache: stored KV is larger than DRAM and read once per turn, so the
page cache would not help.  Blocks that direct I/O cannot read (unaligned memory or size, a file
system without it) are read through the page cache.
"""

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, StoreNamespace
from dualpath.core.errors import ConfigError, StorageError
from dualpath.storage import block_file
from dualpath.storage.block_header import HEADER_BYTES
from dualpath.storage.checks import check_destination, check_sources, run_origins
from dualpath.storage.contract import ReadOutcome
from dualpath.storage.directory import BLOCK_SUFFIX, NamespaceDirectory, block_name, refused
from dualpath.storage.protection import block_codec
from dualpath.storage.reading import FileReader, KernelReader
from dualpath.storage.sections import FileOrder, Sections
from dualpath.storage.system_calls import (
    KERNEL,
    NOT_A_FILE,
    NotAFileError,
    SystemCalls,
    create_file,
    open_regular,
)

if TYPE_CHECKING:
    from dualpath.storage.key_ring import KeyRing

logger = logging.getLogger(__name__)

DirectIo = bool | Literal["auto"]

#: Alignment that direct I/O needs on most devices: a logical sector.  A Full Block of 61 layers of
#: 42 KiB is not a multiple of 4096.  Where a device needs more, the kernel refuses and the page
#: cache is used.
DIRECT_ALIGNMENT_BYTES = 512


class PosixStorage:
    """See ``dualpath.storage.contract.BlockStorage``.

    ``root``: a directory, created if absent.  ``direct_io``: bypass the page cache; ``"auto"``
    does where the file system allows it.  ``sync``: ``fsync`` each block before it becomes
    visible; without it a power failure may lose or tear recent blocks, which the checksum detects.
    ``keys``: storage keys of a namespace whose blocks are sealed.  ``reader``: reads the files,
    closed with this storage.  ``calls``: system calls.  ``name_of``: see ``NamespaceDirectory``.

    Raises ``ConfigError`` for an unusable root, a root that holds another namespace under the
    same name, missing keys of a sealed namespace, or ``direct_io=True`` on a file system without
    it.
    """

    def __init__(
        self,
        root: str | Path,
        namespace: StoreNamespace,
        *,
        direct_io: DirectIo = "auto",
        sync: bool = False,
        keys: "KeyRing | None" = None,
        reader: FileReader | None = None,
        calls: SystemCalls = KERNEL,
        name_of: Callable[[BlockKey], str] = block_name,
    ) -> None:
        self.parallel_lookups = 1
        self.namespace = namespace
        self.geometry = namespace.geometry
        self._codec = block_codec(namespace, keys)
        self._order = FileOrder(namespace.geometry)
        self._directory = NamespaceDirectory(Path(root), namespace, BLOCK_SUFFIX, calls, name_of)
        self._calls = calls
        self._sync = sync
        self._direct = self._choose_direct(direct_io)
        self._reader = reader or KernelReader(calls)
        # A pool of header buffers; it grows to the number of concurrent reads.
        self._headers: list[memoryview] = []

    @property
    def path(self) -> Path:
        """The namespace's directory."""
        return self._directory.path

    @property
    def uses_direct_io(self) -> bool:
        """Whether aligned reads bypass the page cache."""
        return self._direct

    def block_path(self, key: BlockKey) -> Path:
        """Return the path of a block's file, whether it exists or not."""
        return Path(self._directory.block_path(key))

    def is_stored(self, key: BlockKey) -> bool:
        """Return whether a block has a file."""
        return self._directory.has(key)

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read and verify a block; a corrupt one is removed so that it can be written again."""
        flat = check_destination(self.geometry, destination)
        header = self._headers.pop() if self._headers else _header_buffer()
        try:
            return self._read(key, header, self._order.of(flat, whole=whole))
        finally:
            self._headers.append(header)

    def _read(self, key: BlockKey, header: memoryview, payload: Sections) -> ReadOutcome:
        path = self._directory.block_path(key)
        try:
            length, verifier = self._read_file(path, header, payload)
        except (FileNotFoundError, NotADirectoryError):
            return ReadOutcome(0, block_file.MISSING)
        except NotAFileError:
            self._directory.discard(path, NOT_A_FILE)
            return ReadOutcome(0, NOT_A_FILE)
        except OSError as error:
            logger.warning("read of %s failed: %s", path, error)
            return ReadOutcome(0, f"read error: {error.strerror}")
        payload_bytes = max(length - HEADER_BYTES, 0)
        reason = block_file.defect_of_length(verifier, key, header, payload, payload_bytes)
        if reason in block_file.UNREADABLE_HERE:
            logger.warning("cannot read stored block %s (%s); it is not removed", path, reason)
        elif reason is not None:
            self._directory.discard(path, reason)
        return ReadOutcome(payload_bytes, reason)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> int:
        """Persist new blocks one by one; see the contract."""
        flat = check_sources(self.geometry, keys, sources)
        blocks = zip(keys, flat, run_origins(keys, origin), strict=True)
        return sum(self._write_one(*block) for block in blocks)

    def used(self, key: BlockKey) -> None:
        """Do nothing: this backend does not evict."""

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _choose_direct(self, wanted: DirectIo) -> bool:
        if wanted is False:
            return False
        possible = hasattr(os, "O_DIRECT")
        if possible:
            probe = str(self._directory.name_file)
            try:
                self._calls.close(open_regular(probe, os.O_RDONLY | os.O_DIRECT, self._calls))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise refused("reading", probe, 0, error, self._calls) from error
                possible = False
        if wanted is True and not possible:
            raise ConfigError(
                f"file system of {self.path} does not support O_DIRECT; set direct_io to false or "
                "auto"
            )
        return possible

    def _read_file(
        self, path: str, header: memoryview, payload: Sections
    ) -> tuple[int, block_file.BlockVerifier]:
        if self._direct and all(map(_is_aligned, payload.buffers)):
            try:
                return self._read_head(path, os.O_RDONLY | os.O_DIRECT, header, payload)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return self._read_head(path, os.O_RDONLY, header, payload)

    def _read_head(
        self, path: str, flags: int, header: memoryview, payload: Sections
    ) -> tuple[int, block_file.BlockVerifier]:
        """Return the bytes read, and the verifier of this attempt."""
        verifier = self._codec.verifier(payload)
        buffers = [header, *payload.buffers]
        descriptor = open_regular(path, flags, self._calls)
        try:
            length = self._reader.fill_from_file(descriptor, buffers, verifier.received)
        finally:
            self._calls.close(descriptor)
        return length, verifier

    def _write_one(self, key: BlockKey, source: memoryview, origin: BlockOrigin) -> bool:
        if self._directory.has(key):
            return False
        buffers = self._codec.encoded(key, self._order.of(source), origin)
        temporary = self._directory.temporary_path()
        try:
            try:
                create_file(temporary, buffers, self._calls, sync=self._sync)
            except FileNotFoundError:
                self._directory.restore()
                create_file(temporary, buffers, self._calls, sync=self._sync)
            return self._directory.publish(temporary, key)
        except StorageError:  # the state of the block's final name is unknown
            self._directory.remove_temporary(temporary)
            raise
        except OSError as error:
            self._directory.remove_temporary(temporary)
            needed_bytes = HEADER_BYTES + source.nbytes
            raise refused("write", temporary, needed_bytes, error, self._calls) from error


def _is_aligned(view: memoryview) -> bool:
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return address % DIRECT_ALIGNMENT_BYTES == 0 and view.nbytes % DIRECT_ALIGNMENT_BYTES == 0


def _header_buffer() -> memoryview:
    """Return memory for a header that direct I/O may read into."""
    return memoryview(mmap.mmap(-1, HEADER_BYTES))
