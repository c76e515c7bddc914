"""The directory of a namespace's blocks on a file system.

``<root>/<model>_<digest>/<hhh>/<hh>/<key in hex>.kv``, the fan-out that vLLM's file tier uses:
4096 × 256 directories keep each of them small at millions of blocks.  ``namespace.json`` beside
them describes the namespace that the digest identifies.  Half-written files are in ``tmp/``, named
after their writer, and are linked to their final name when they are complete.  Temporary files
of dead processes of this host are removed at the next start.
"""

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from dualpath.core.blocks import BlockKey, StoreNamespace
from dualpath.core.errors import ConfigError, StorageError
from dualpath.storage.host_process import is_running, pid_namespace
from dualpath.storage.system_calls import (
    KERNEL,
    NOT_A_FILE,
    SystemCalls,
    create_file,
    read_content,
)

log = logging.getLogger(__name__)

_MODEL_CHARACTERS = 80
#: For the user and the group, as the mode of files.
_FOLDER_MODE = 0o770
#: How many temporary files that could not be removed are tried again per call.
_TRIED_AGAIN = 8
#: The folder of a namespace's half-written files.
TEMPORARY_FOLDER = "tmp"
#: The description of a namespace, as JSON.
_NAME_FILE = "namespace.json"
#: Suffix of block files.
BLOCK_SUFFIX = ".kv"
_BLOCK = re.compile(rf".*/([0-9a-f]{{64}}){re.escape(BLOCK_SUFFIX)}")
#: Error numbers of file systems without hard links.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def namespace_name(namespace: StoreNamespace) -> str:
    """Return the name of a namespace: letters, digits and ``-._``."""
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", namespace.model).strip("-.")[-_MODEL_CHARACTERS:]
    return f"{slug or 'model'}_{namespace.digest()}"


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
    for path in sorted(root.glob(f"*/{_NAME_FILE}")):
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
    ) -> None:
        self.path = root / namespace_name(namespace)
        self._name_of = name_of
        self.temporary = self.path / TEMPORARY_FOLDER
        self._namespace = namespace
        self._suffix = suffix
        self._calls = calls
        #: Temporary files that could not be removed.
        self._refused: dict[str, None] = {}
        try:
            self._host = pid_namespace(calls)
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
        return self.path / _NAME_FILE

    def block_path(self, key: BlockKey) -> str:
        """Return the final path of a block (str: this is on the look-up path)."""
        return f"{self.path}/{self._name_of(key)}{self._suffix}"

    def has(self, key: BlockKey) -> bool:
        """Return whether a block has a file; raises ``StorageError`` if that cannot be checked."""
        path = self.block_path(key)
        try:
            return stat.S_ISREG(self._calls.stat(path).st_mode)
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
        log.warning("removing corrupt block %s (%s)", path, reason)
        try:
            if stat.S_ISDIR(self._calls.lstat(path).st_mode):
                self._calls.rmdir(path)
            else:
                self._calls.unlink(path)
        except OSError as error:
            log.warning("cannot remove corrupt block %s: %s; remove it by hand", path, error)

    def publish(self, temporary: str, key: BlockKey) -> bool:
        """Give a complete file its final name; return False if the block exists already.

        Uses a hard link, because that fails if the name exists; a rename on file systems without
        hard links.  Anything of that name that is not a file is removed.  ``temporary`` is removed.
        """
        final = self.block_path(key)
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
        if not self._exists(path):
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
            if not self._exists(str(self.name_file)):
                self._calls.rename(temporary, str(self.name_file))
        finally:
            self.remove_temporary(temporary)

    def _exists(self, path: str) -> bool:
        try:
            self._calls.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _remove_stale(self) -> None:
        with self._calls.scandir(str(self.temporary)) as entries:
            found = [entry.name for entry in entries]
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
