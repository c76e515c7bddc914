"""Full Blocks as files: local NVMe, NFS, a 3FS mount, anything with POSIX semantics.

One file per block, written under a temporary name and then linked to its final one, so that a
crash at any point leaves either the complete block or nothing.  Reads go straight into the
caller's (registered) memory with ``preadv``, on the caller's thread; the kernel call and the
checksum both release the GIL, so that several threads read in parallel.

NIXL's POSIX plugin (libaio) does not read faster: measured side by side it reached 0.93 to 1.00 of
this rate at the same CPU cost (``dualpath_lab.benchmarks.storage_read``).

Direct I/O bypasses the page cache: stored KV is larger than DRAM and read once per turn, so the
page cache would not help.  Blocks that direct I/O cannot read (unaligned memory or size, a file
system without it) are read through the page cache.
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, StoreNamespace
from dualpath.core.errors import ConfigError, StorageError
from dualpath.node.host_process import file_owner_host, is_running
from dualpath.node.system_calls import (
    KERNEL,
    NOT_A_FILE,
    NotAFileError,
    SystemCalls,
    create_file,
    foreign_link,
    open_regular,
    read_content,
)
from dualpath.storage import block_file
from dualpath.storage.block_file import HEADER_BYTES, FileOrder, Sections
from dualpath.storage.compression import Compressor
from dualpath.storage.contract import (
    ReadOutcome,
    WriteOutcome,
    all_written,
    check_destination,
    check_sources,
    run_origins,
)
from dualpath.storage.readers import FileReader, KernelReader
from dualpath.storage.sealed_blocks import block_codec

if TYPE_CHECKING:
    from dualpath.storage.sealed_blocks import KeyRing

# --------------------------------------------------------------------------------------- directory
# The directory of a namespace's blocks on a file system.
#
# ``<root>/<model>_<digest>/<hhh>/<hh>/<key in hex>.kv``, the fan-out that vLLM's file tier uses:
# 4096 × 256 directories keep each of them small at millions of blocks.  ``namespace.json`` beside
# them describes the namespace that the digest identifies.  Half-written files are in ``tmp/``,
# named after their writer, and are linked to their final name when they are complete.  Temporary
# files of dead processes of this host are removed at the next start.

log = logging.getLogger(__name__)

_MODEL_CHARACTERS = 80
#: For the user and the group, as the mode of files.
_FOLDER_MODE = 0o770
#: How many temporary files that could not be removed are tried again per call.
_TRIED_AGAIN = 8
#: The folder of a namespace's half-written files.
TEMPORARY_FOLDER = "tmp"
#: The description of a namespace, as JSON.
NAME_FILE = "namespace.json"
#: Suffix of block files.
BLOCK_SUFFIX = ".kv"
#: A folder's or file's name in a storage; "." and ".." are none.
_PART = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,255}")
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]+_[0-9a-f]{16}[A-Za-z0-9_.-]*")
_BLOCK = re.compile(rf".*/([0-9a-f]{{64}}){re.escape(BLOCK_SUFFIX)}")
#: Error numbers of file systems without hard links.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def namespace_name(namespace: StoreNamespace) -> str:
    """Return the name of a namespace: letters, digits and ``-._``."""
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", namespace.model).strip("-.")[-_MODEL_CHARACTERS:]
    return f"{slug or 'model'}_{namespace.digest()}"


def is_namespace(folder: str) -> bool:
    """Whether a folder's name is that of a namespace; other folders are never touched."""
    return is_folder_name(folder) and _NAMESPACE.fullmatch(folder) is not None


def is_folder_name(name: str) -> bool:
    """Whether a name that was read from a storage names a folder or file directly in another."""
    return _PART.fullmatch(name) is not None


def is_object_name(name: str) -> bool:
    """Whether a name that was read from a storage, with folders, stays below the storage's root."""
    return all(map(is_folder_name, name.split("/")))


def block_name(key: BlockKey) -> str:
    """Return the path of a block within its namespace, without suffix."""
    name = key.hex()
    return f"{name[:3]}/{name[3:5]}/{name}"


def object_name(namespace: str, key: BlockKey) -> str:
    """Return the path of a block within its storage; ``namespace`` is a ``namespace_name``."""
    return f"{namespace}/{block_name(key)}{BLOCK_SUFFIX}"


def key_of(name: str) -> BlockKey | None:
    """Return the block key in an ``object_name``, None for any other name."""
    found = _BLOCK.fullmatch(name)
    return None if found is None else bytes.fromhex(found[1])


def namespaces_in(root: Path) -> Iterator[tuple[Path, StoreNamespace]]:
    """Yield folder and namespace of all namespaces in a directory, sorted by name.

    Raises ``ConfigError`` for a namespace file that cannot be read.
    """
    for path in sorted(root.glob(f"*/{NAME_FILE}")):
        try:
            yield path.parent, msgspec.json.decode(path.read_bytes(), type=StoreNamespace)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"{path} is not readable as a namespace ({error}); give a storage's directory"
            ) from error


class NamespaceDirectory:
    """Opens (creating if needed) one namespace's directory and names the files in it.

    ``name_of`` returns a block's path in the directory, without suffix.

    Raises ``ConfigError`` if ``root`` cannot be used or holds another namespace under this
    name.
    """

    def __init__(
        self,
        root: Path,
        namespace: StoreNamespace,
        suffix: str,
        calls: SystemCalls = KERNEL,
        name_of: Callable[[BlockKey], str] = block_name,
        *,
        min_bytes: int = HEADER_BYTES,
    ) -> None:
        """Create or open the directory; a file below ``min_bytes`` counts as missing."""
        self._min_bytes = min_bytes
        self.path = root / namespace_name(namespace)
        self._name_of = name_of
        self.temporary = self.path / TEMPORARY_FOLDER
        self._namespace = namespace
        self._suffix = suffix
        self._calls = calls
        #: Temporary files that could not be removed.
        self._refused: dict[str, None] = {}
        try:
            self._host = file_owner_host(calls)
            self._writer = f"{self._host}-{calls.getpid()}"
            calls.makedirs(str(root), exist_ok=True)
            self._make_folders()
            self._device = calls.stat(str(root)).st_dev
            self._claim(namespace)
        except OSError as error:
            raise ConfigError(
                f"storage directory {root} cannot be used ({error.strerror}); "
                "give a writable directory"
            ) from error
        self._remove_stale()

    @property
    def name_file(self) -> Path:
        """The file that describes the namespace."""
        return self.path / NAME_FILE

    def block_path(self, key: BlockKey) -> str:
        """Return the final path of a block (str: this is on the look-up path)."""
        return f"{self.path}/{self._name_of(key)}{self._suffix}"

    def has(self, key: BlockKey) -> bool:
        """Return whether a block has a file; raises ``StorageError`` if that cannot be checked.

        A file that is too short for any block, such as the empty ones that a power cut leaves,
        counts as missing, so that the next writer of the block replaces it.
        """
        path = self.block_path(key)
        try:
            status = self._calls.stat(path)
            return stat.S_ISREG(status.st_mode) and status.st_size >= self._min_bytes
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise StorageError(
                f"cannot check whether {path} exists: {error.strerror}; check the file system and "
                "its permissions"
            ) from error

    def temporary_path(self) -> str:
        """Return a path for a half-written file that no other writer uses."""
        return f"{self.temporary}/{self._writer}-{self._calls.urandom(8).hex()}"

    def restore(self) -> None:
        """Create the directory again after it was removed.

        Raises ``FileNotFoundError`` if its root was removed or is on another file system: after a
        mount is lost, the file system below the mount point must not be filled instead.
        """
        root = str(self.path.parent)
        if self._calls.stat(root).st_dev != self._device:
            raise FileNotFoundError(errno.ENOENT, "the storage is not mounted any more", root)
        self._make_folders()
        self._claim(self._namespace)

    def discard(self, path: str, reason: str) -> None:
        """Remove a corrupt block or whatever has its name; a directory only if it is empty."""
        if (link := foreign_link(str(self.path.parent), path)) is not None:
            log.warning(
                "corrupt block %s (%s) is not removed: %s is a link of another user; remove that",
                *(path, reason, link),
            )
            return
        log.warning("removing corrupt block %s (%s)", path, reason)
        try:
            if stat.S_ISDIR(self._calls.lstat(path).st_mode):
                self._calls.rmdir(path)
            else:
                self._calls.unlink(path)
        except OSError as error:
            log.warning("cannot remove corrupt block %s: %s; remove it by hand", path, error)

    def publish(self, temporary: str, key: BlockKey, *, replaces: bool = False) -> bool:
        """Give a complete file its final name; return False if the block exists already.

        Uses a hard link, because that fails if the name exists; a rename on file systems without
        hard links, and where it ``replaces`` a block.  Anything of that name that is not a file is
        removed.  ``temporary`` is removed.
        """
        final = self.block_path(key)
        if replaces:
            self._calls.rename(temporary, final)
            return True
        try:
            self._link(temporary, final, key)
        except FileExistsError:
            self.remove_temporary(temporary)
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            self._calls.rename(temporary, final)
            return True
        self.remove_temporary(temporary)
        return True

    def remove_temporary(self, temporary: str) -> None:
        """Remove a temporary file if it exists; failed removals are tried again in later calls."""
        for path in (temporary, *tuple(self._refused)[:_TRIED_AGAIN]):
            try:
                self._unlink(path)
            except OSError as error:
                if path not in self._refused:
                    log.warning("cannot remove %s, trying again later: %s", path, error)
                self._refused[path] = None
            else:
                self._refused.pop(path, None)

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._calls.unlink(path)

    def _link(self, temporary: str, final: str, key: BlockKey) -> None:
        try:
            self._link_once(temporary, final)
        except FileExistsError:
            if self.has(key):
                raise
            self.discard(final, NOT_A_FILE)
            self._link_once(temporary, final)

    def _link_once(self, temporary: str, final: str) -> None:
        try:
            self._calls.link(temporary, final)
        except FileNotFoundError:
            self._calls.makedirs(os.path.dirname(final), exist_ok=True)
            self._calls.link(temporary, final)

    def _make_folders(self) -> None:
        for folder in (self.path, self.temporary):
            try:
                self._calls.mkdir(str(folder), _FOLDER_MODE)
            except FileExistsError:
                if not stat.S_ISDIR(self._calls.stat(str(folder)).st_mode):
                    raise

    def _claim(self, namespace: StoreNamespace) -> None:
        path = str(self.name_file)
        # Write only if needed: an existing namespace can be read from a full disk.
        if not self._has_content(path):
            self._write_name(namespace)
        try:
            found = msgspec.json.decode(read_content(path, calls=self._calls), type=StoreNamespace)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not readable as a namespace ({error}); "
                f"move {self.path} away or give another storage directory"
            ) from error
        if found != namespace:
            raise ConfigError(
                f"{self.path} belongs to {found}, not to {namespace}; "
                "give another storage directory"
            )

    def _write_name(self, namespace: StoreNamespace) -> None:
        content = msgspec.json.format(msgspec.json.encode(namespace), indent=2)
        temporary = self.temporary_path()
        try:
            create_file(temporary, [memoryview(content)], self._calls)
            if not self._has_content(str(self.name_file)):
                self._calls.rename(temporary, str(self.name_file))
        finally:
            self.remove_temporary(temporary)

    def _has_content(self, path: str) -> bool:
        try:
            status = self._calls.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return status.st_size > 0 or not stat.S_ISREG(status.st_mode)

    def _remove_stale(self) -> None:
        try:
            with self._calls.scandir(str(self.temporary)) as entries:
                found = [entry.name for entry in entries]
        except OSError as error:
            log.warning("stale files in %s are not removed: %s", self.temporary, error)
            return
        for name in found:
            host, _, pid = name.rpartition("-")[0].rpartition("-")
            ours = pid.isdecimal() and host == self._host
            if not ours or is_running(int(pid), self._calls):
                continue
            try:
                self._unlink(f"{self.temporary}/{name}")
            except OSError as error:  # not one of our files
                log.warning("%s/%s is not removed: %s", self.temporary, name, error)


def refused(
    action: str, path: str, needed_bytes: int, error: OSError, calls: SystemCalls = KERNEL
) -> StorageError:
    """Return the error of a refused write, with the free space and the remedy."""
    folder = os.path.dirname(path)
    try:
        space = calls.statvfs(folder)
        free: object = space.f_bavail * space.f_frsize
    except OSError:
        free = "unknown"
    return StorageError(
        f"{action} of {needed_bytes} bytes in {folder} refused ({error.strerror}); "
        f"{free} bytes are free there; free space, lift the quota or give another directory"
    )


# ----------------------------------------------------------------------------------------- lengths
# Storage of Oracle runs (§7.2): it records which blocks exist and stores no payload.
#
# Each block is an empty file, so that the blocks survive restarts and are shared by engines, as
# real blocks are.

ORACLE = "oracle"


def copy_lengths(source: str | Path, root: str | Path) -> int:
    """Mark the blocks of a directory of real blocks under ``root``, so that Oracle hits them too.

    Returns how many blocks were marked.  Raises ``ConfigError`` for an unusable ``root`` and for
    an unreadable namespace in ``source``.
    """
    marked = 0
    for folder, namespace in namespaces_in(Path(source)):
        if namespace.mode == ORACLE:
            continue
        storage = LengthOnlyStorage(root, msgspec.structs.replace(namespace, mode=ORACLE))
        blank = memoryview(bytes(namespace.geometry.full_block_bytes))
        for block in folder.rglob(f"*{BLOCK_SUFFIX}"):
            if key := key_of(block.as_posix()):
                marked += storage.write([key], [blank]).new
    return marked


class LengthOnlyStorage:
    """See ``dualpath.storage.contract.BlockStorage``, except that no payload is read or written.

    ``read`` does not change its destination and reports 0 bytes.  Raises ``ConfigError`` for a
    namespace of another mode than ``"oracle"``, so that empty and real blocks are never mixed.
    """

    def __init__(self, root: str | Path, namespace: StoreNamespace) -> None:
        if namespace.mode != ORACLE:
            raise ConfigError(
                f"namespace of mode {namespace.mode!r} cannot be length-only; "
                f"set its mode to {ORACLE!r}"
            )
        self.parallel_lookups = 1
        self.namespace = namespace
        self.geometry = namespace.geometry
        self._directory = NamespaceDirectory(Path(root), namespace, ".length", min_bytes=0)

    def is_stored(self, key: BlockKey) -> bool:
        """Return whether a block has a marker."""
        return self._directory.has(key)

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Return the outcome of a read, without reading."""
        check_destination(self.geometry, destination)
        return ReadOutcome(0, None if self.is_stored(key) else block_file.MISSING)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> WriteOutcome:
        """Mark the blocks as existing; they take no payload bytes."""
        check_sources(self.geometry, keys, sources)
        return all_written((self._mark(key), 0) for key in keys)

    def used(self, key: BlockKey) -> None:
        """Do nothing: this backend does not evict."""

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _mark(self, key: BlockKey) -> bool:
        path = self._directory.block_path(key)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            create_file(path, [])
        except FileExistsError:
            return False
        except OSError as error:
            raise refused("marker", path, 0, error) from error
        return True


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
    ``keys``: storage keys of a namespace with sealed blocks.  ``compressor`` compresses written
    blocks.  ``reader``: reads the files, closed with this storage.  ``calls``: system calls.
    ``name_of``: see ``NamespaceDirectory``.

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
        compressor: Compressor | None = None,
        reader: FileReader | None = None,
        calls: SystemCalls = KERNEL,
        name_of: Callable[[BlockKey], str] = block_name,
    ) -> None:
        self.parallel_lookups = 1
        self.namespace = namespace
        self.geometry = namespace.geometry
        self._codec = block_codec(namespace, keys, compressor)
        self._order = FileOrder(namespace.geometry)
        self._directory = NamespaceDirectory(Path(root), namespace, BLOCK_SUFFIX, calls, name_of)
        self._calls = calls
        self._sync = sync
        self._direct = self._choose_direct(direct_io)
        self._reader = reader or KernelReader(calls)
        self._reports = block_file.AbsentReports()
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
        """Return whether a block has a file, in a sealed namespace one that a key here opens."""
        return self._directory.has(key) and not (self._codec.has_keys and self._unreadable(key))

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
        wire_bytes = 0
        try:
            first_bytes = self._codec.first_bytes(payload)
            length, verifier = self._read_file(path, header, payload, first_bytes)
            arrived_bytes = max(length - HEADER_BYTES, 0)
            if block_file.needs_more(header, payload, first_bytes, arrived_bytes):
                wire_bytes = arrived_bytes
                length, verifier = self._read_file(path, header, payload, payload.size_bytes)
        except (FileNotFoundError, NotADirectoryError):
            return ReadOutcome(wire_bytes, block_file.MISSING)
        except NotAFileError:
            self._directory.discard(path, NOT_A_FILE)
            return ReadOutcome(wire_bytes, NOT_A_FILE)
        except OSError as error:
            logger.warning("read of %s failed: %s", path, error)
            return ReadOutcome(wire_bytes, f"read error: {error.strerror}")
        payload_bytes = max(length - HEADER_BYTES, 0)
        wire_bytes += payload_bytes
        reason = block_file.defect_of_length(verifier, key, header, payload, payload_bytes)
        if reason in block_file.UNREADABLE_HERE:
            self._reports.absent(path, reason)
        elif reason is not None:
            self._directory.discard(path, reason)
        return ReadOutcome(wire_bytes, reason)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> WriteOutcome:
        """Persist new blocks one by one; see the contract."""
        flat = check_sources(self.geometry, keys, sources)
        blocks = zip(keys, flat, run_origins(keys, origin), strict=True)
        return all_written(self._write_one(*block) for block in blocks)

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
        self, path: str, header: memoryview, payload: Sections, payload_bytes: int
    ) -> tuple[int, block_file.BlockVerifier]:
        """Read the header and the first ``payload_bytes`` behind it."""
        if self._direct and all(map(_is_aligned, payload.buffers)):
            flags = os.O_RDONLY | os.O_DIRECT
            try:
                return self._read_head(path, flags, header, payload, payload_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return self._read_head(path, os.O_RDONLY, header, payload, payload_bytes)

    def _read_head(
        self, path: str, flags: int, header: memoryview, payload: Sections, payload_bytes: int
    ) -> tuple[int, block_file.BlockVerifier]:
        """Return the bytes read, and the verifier of this attempt."""
        verifier = self._codec.verifier(payload)
        buffers = block_file.first_of([header, *payload.buffers], HEADER_BYTES + payload_bytes)
        descriptor = open_regular(path, flags, self._calls)
        try:
            length = self._reader.fill_from_file(descriptor, buffers, verifier.received)
        finally:
            self._calls.close(descriptor)
        return length, verifier

    def _unreadable(self, key: BlockKey) -> str | None:
        """Return why this process cannot read a stored block, None if it may be able to."""
        return self._unreadable_header(key, self._header(key))

    def _header(self, key: BlockKey) -> bytes:
        """Return the header of a stored block, empty if it is missing."""
        path = self._directory.block_path(key)
        try:
            return read_content(path, HEADER_BYTES, self._calls)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            raise StorageError(
                f"cannot read the header of {path}: {error.strerror}; check the file system and "
                "its permissions"
            ) from error

    def _unreadable_header(self, key: BlockKey, header: bytes) -> str | None:
        reason = self._codec.unreadable(header) if header else None
        if reason is not None:
            self._reports.absent(self._directory.block_path(key), reason)
        return reason

    def _write_one(
        self, key: BlockKey, source: memoryview, origin: BlockOrigin
    ) -> tuple[bool, int]:
        """Return whether the block is new, and its payload bytes as it is stored."""
        replaces = False
        if self._directory.has(key):
            header = self._header(key)
            replaces = self._unreadable_header(key, header) is not None
            if not replaces:
                return False, block_file.payload_bytes_of(header, source.nbytes)
        buffers = self._codec.encoded(key, self._order.of(source), origin)
        temporary = self._directory.temporary_path()
        try:
            try:
                create_file(temporary, buffers, self._calls, sync=self._sync)
            except FileNotFoundError:
                self._directory.restore()
                create_file(temporary, buffers, self._calls, sync=self._sync)
            is_new = self._directory.publish(temporary, key, replaces=replaces)
        except StorageError:  # the state of the block's final name is unknown
            self._directory.remove_temporary(temporary)
            raise
        except OSError as error:
            self._directory.remove_temporary(temporary)
            needed_bytes = sum(part.nbytes for part in buffers)
            raise refused("write", temporary, needed_bytes, error, self._calls) from error
        return is_new, sum(part.nbytes for part in buffers[1:])


def _is_aligned(view: memoryview) -> bool:
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return address % DIRECT_ALIGNMENT_BYTES == 0 and view.nbytes % DIRECT_ALIGNMENT_BYTES == 0


def _header_buffer() -> memoryview:
    """Return memory for a header that direct I/O may read into."""
    return memoryview(mmap.mmap(-1, HEADER_BYTES))
