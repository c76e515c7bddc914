"""Where a namespace's blocks lie on a file system.

``<root>/<model>_<digest>/<hhh>/<hh>/<key in hex>.kv``, the fan-out vLLM's file tier uses:
4096 × 256 directories keep each of them small at millions of blocks.  ``namespace.json`` beside
them says in clear what the digest stands for.  Half-written files live in ``tmp/``, named after
their writer, and are linked to their final name only when whole; what dead writers of this host
left there is removed at the next start.
"""

import errno
import logging
import os
import re
import stat
from itertools import count
from pathlib import Path

import msgspec

from dualpath.core.blocks import BlockKey, StoreNamespace
from dualpath.core.errors import ConfigError, StorageError
from dualpath.storage.host_process import is_running, number_space

log = logging.getLogger(__name__)

_MODEL_CHARACTERS = 80
#: The umask takes rights away; whoever is neither the user nor in the group never has any.
_FILE_MODE, _FOLDER_MODE = 0o660, 0o770
#: Where a namespace's half-written files lie.
TEMPORARY_FOLDER = "tmp"
#: What the names of block files end with.
BLOCK_SUFFIX = ".kv"
_BLOCK = re.compile(rf".*/([0-9a-f]{{64}}){re.escape(BLOCK_SUFFIX)}")
#: What file systems say that know no hard links.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
#: Why a block is bad whose name something else has.
NOT_A_FILE = "not a file"

#: Numbers temporary files; shared by all directories a process has open, also of one namespace.
_numbers = count()


def namespace_name(namespace: StoreNamespace) -> str:
    """Return the name of a namespace: letters, digits and ``-._``."""
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", namespace.model).strip("-.")[-_MODEL_CHARACTERS:]
    return f"{slug or 'model'}_{namespace.digest()}"


def block_name(key: BlockKey) -> str:
    """Return where a block lies within its namespace, without suffix."""
    name = key.hex()
    return f"{name[:3]}/{name[3:5]}/{name}"


def object_name(namespace: str, key: BlockKey) -> str:
    """Return where a block lies within its storage; ``namespace`` is a ``namespace_name``."""
    return f"{namespace}/{block_name(key)}{BLOCK_SUFFIX}"


def key_of(name: str) -> BlockKey | None:
    """Return the key of the block that an ``object_name`` is of, None for any other name."""
    found = _BLOCK.fullmatch(name)
    return None if found is None else bytes.fromhex(found[1])


class NamespaceDirectory:
    """Opens (creating if needed) one namespace's directory and names the files in it.

    Raises ``ConfigError`` if ``root`` cannot be used or holds another namespace under this
    name.
    """

    def __init__(self, root: Path, namespace: StoreNamespace, suffix: str) -> None:
        self.path = root / namespace_name(namespace)
        self.temporary = self.path / TEMPORARY_FOLDER
        self._namespace = namespace
        self._suffix = suffix
        self._writer = f"{number_space()}-{os.getpid()}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._make_folders()
            self._device = root.stat().st_dev
            self._claim(namespace)
        except OSError as error:
            raise ConfigError(
                f"storage directory {root} cannot be used ({error.strerror}); "
                "give a writable directory"
            ) from error
        self._remove_stale()

    @property
    def name_file(self) -> Path:
        """The file that says in clear what the namespace is."""
        return self.path / "namespace.json"

    def block_path(self, key: BlockKey) -> str:
        """Return the final path of a block (str: this is on the look-up path)."""
        return f"{self.path}/{block_name(key)}{self._suffix}"

    def has(self, key: BlockKey) -> bool:
        """Return whether there is a file of a block; raises ``StorageError`` if nobody can say."""
        path = self.block_path(key)
        try:
            return stat.S_ISREG(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise StorageError(
                f"nobody can say whether {path} exists: {error.strerror}; see the file system and "
                "the rights on it"
            ) from error

    def temporary_path(self) -> str:
        """Return a path for a half-written file that no other writer uses."""
        return f"{self.temporary}/{self._writer}-{next(_numbers)}"

    def restore(self) -> None:
        """Make the directory again that somebody has removed.

        Raises ``FileNotFoundError`` where its root is gone, or another file system lies there (a
        mount is lost, and what is under its name must not fill up instead).
        """
        root = self.path.parent
        if root.stat().st_dev != self._device:
            raise FileNotFoundError(errno.ENOENT, "the file system of the storage is gone", root)
        self._make_folders()
        self._claim(self._namespace)

    def discard(self, path: str, reason: str) -> None:
        """Remove what lies at a block's name and is none; a directory only if it is empty."""
        log.warning("stored block %s is bad (%s) and is removed", path, reason)
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                os.rmdir(path)
            else:
                os.unlink(path)
        except OSError as error:
            log.warning("bad block %s cannot be removed: %s; remove it by hand", path, error)

    def publish(self, temporary: str, key: BlockKey) -> bool:
        """Give a whole file its final name; return False if the name was taken already.

        A hard link, because it fails where the name exists; a rename where the file system knows
        no hard links.  What is no file but has the name makes way.  ``temporary`` is gone
        afterwards.
        """
        final = self.block_path(key)
        try:
            self._link(temporary, final, key)
        except FileExistsError:
            os.unlink(temporary)
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            os.rename(temporary, final)
            return True
        os.unlink(temporary)
        return True

    def _link(self, temporary: str, final: str, key: BlockKey) -> None:
        try:
            _link(temporary, final)
        except FileExistsError:
            if self.has(key):
                raise
            self.discard(final, NOT_A_FILE)
            _link(temporary, final)

    def _make_folders(self) -> None:
        for folder in (self.path, self.temporary):
            folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)

    def _claim(self, namespace: StoreNamespace) -> None:
        path = self.name_file
        # What is claimed already can be read, also where the disk takes nothing more.
        if not path.exists():
            self._write_name(namespace)
        try:
            with open(open_regular(str(path), os.O_RDONLY), "rb") as file:
                found = msgspec.json.decode(file.read(), type=StoreNamespace)
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
            with open(temporary, "xb", opener=private) as file:
                file.write(content)
            if not self.name_file.exists():
                os.rename(temporary, self.name_file)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _remove_stale(self) -> None:
        for path in self.temporary.iterdir():
            writer = path.name.rpartition("-")[0]
            host, _, pid = writer.rpartition("-")
            if not pid.isdecimal() or host != number_space() or is_running(int(pid)):
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # no file of ours
                log.warning("%s is left where it is: %s", path, error)


class NotAFileError(OSError):
    """Something else than a file has the name of one: a directory, a FIFO, a device."""


def open_regular(path: str, flags: int) -> int:
    """Open a file for reading; raises ``NotAFileError``, and never waits, for anything else."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise NotAFileError(errno.EBADF, NOT_A_FILE, path)


def private(path: str, flags: int) -> int:
    """Open as ``open`` does, for the user and the group: KV tells what was in a prompt."""
    return os.open(path, flags, _FILE_MODE)


def _link(temporary: str, final: str) -> None:
    try:
        os.link(temporary, final)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(final), exist_ok=True)
        os.link(temporary, final)


def refused(action: str, path: str, needed_bytes: int, error: OSError) -> StorageError:
    """Return the error for a device that refuses a write, with what is free and what to do."""
    folder = os.path.dirname(path)
    try:
        free: object = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    except OSError:
        free = "unknown"
    return StorageError(
        f"{action} of {needed_bytes} bytes in {folder} refused ({error.strerror}); "
        f"{free} bytes are free there; free space, lift the quota or give another directory"
    )
