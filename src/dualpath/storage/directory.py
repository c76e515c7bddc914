"""Where a namespace's blocks lie on a file system.

``<root>/<model>_<digest>_r<rank>/<hhh>/<hh>/<key in hex>.kv``, the fan-out vLLM's file tier uses:
4096 × 256 directories keep each of them small at millions of blocks.  ``namespace.json`` beside
them says in clear what the digest stands for.  Half-written files live in ``tmp/``, named after
their writer, and are linked to their final name only when whole; what dead writers of this host
left there is removed at the next start.
"""

import errno
import os
import re
import socket
from itertools import count
from pathlib import Path

import msgspec

from dualpath.core.blocks import BlockKey, StoreNamespace
from dualpath.core.errors import ConfigError, StorageError

_MODEL_CHARACTERS = 80

#: Numbers temporary files; shared by all directories a process has open, also of one namespace.
_numbers = count()


def namespace_name(namespace: StoreNamespace) -> str:
    """Return the name of a namespace: letters, digits and ``-._``."""
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", namespace.model).strip("-.")[-_MODEL_CHARACTERS:]
    return f"{slug or 'model'}_{namespace.digest()}_r{namespace.rank}"


def block_name(key: BlockKey) -> str:
    """Return where a block lies within its namespace, without suffix."""
    name = key.hex()
    return f"{name[:3]}/{name[3:5]}/{name}"


class NamespaceDirectory:
    """Opens (creating if needed) one namespace's directory and names the files in it.

    Raises ``ConfigError`` if ``root`` cannot be used or holds another namespace under this
    name.
    """

    def __init__(self, root: Path, namespace: StoreNamespace, suffix: str) -> None:
        self.path = root / namespace_name(namespace)
        self.temporary = self.path / "tmp"
        self._namespace = namespace
        self._suffix = suffix
        self._writer = _writer_tag(os.getpid())
        try:
            self.temporary.mkdir(parents=True, exist_ok=True)
            self._device = root.stat().st_dev
            self._claim(namespace)
        except OSError as error:
            raise ConfigError(
                f"storage directory {root} cannot be used ({error.strerror}); "
                "give a writable directory"
            ) from error
        self._remove_stale()

    def block_path(self, key: BlockKey) -> str:
        """Return the final path of a block (str: this is on the look-up path)."""
        return f"{self.path}/{block_name(key)}{self._suffix}"

    def has(self, key: BlockKey) -> bool:
        """Return whether there is a file of a block; raises ``StorageError`` if nobody can say."""
        path = self.block_path(key)
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise StorageError(
                f"nobody can say whether {path} exists: {error.strerror}; see the file system and "
                "the rights on it"
            ) from error
        return True

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
        for folder in (self.path, self.temporary):
            folder.mkdir(exist_ok=True)
        self._claim(self._namespace)

    def publish(self, temporary: str, key: BlockKey) -> bool:
        """Give a whole file its final name; return False if the name was taken already.

        A hard link, because it fails where the name exists; a rename where the file system knows
        no hard links.  ``temporary`` is gone afterwards.
        """
        final = self.block_path(key)
        try:
            _link(temporary, final)
        except FileExistsError:
            os.unlink(temporary)
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            os.rename(temporary, final)
            return True
        os.unlink(temporary)
        return True

    def _claim(self, namespace: StoreNamespace) -> None:
        path = self.path / "namespace.json"
        content = msgspec.json.format(msgspec.json.encode(namespace), indent=2)
        temporary = self.temporary_path()
        with open(temporary, "xb") as file:
            file.write(content)
        try:
            if not path.exists():
                os.rename(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        try:
            found = msgspec.json.decode(path.read_bytes(), type=StoreNamespace)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path} is not readable as a namespace ({error}); "
                f"move {self.path} away or give another storage directory"
            ) from error
        if found != namespace:
            raise ConfigError(
                f"{self.path} belongs to {found}, not to {namespace}; "
                "give another storage directory"
            )

    def _remove_stale(self) -> None:
        for path in self.temporary.iterdir():
            writer = path.name.rpartition("-")[0]
            host, _, pid = writer.rpartition("-")
            if pid.isdigit() and host == _host_tag() and not _is_running(int(pid)):
                path.unlink(missing_ok=True)


def _link(temporary: str, final: str) -> None:
    try:
        os.link(temporary, final)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(final), exist_ok=True)
        os.link(temporary, final)


def _host_tag() -> str:
    """Name this host and process-number space; containers may share a host name."""
    space = os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0
    return f"{socket.gethostname()}-{space}"


def _writer_tag(pid: int) -> str:
    return f"{_host_tag()}-{pid}"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
