"""A storage as a tree of named objects: the janitor's view of it, of blocks and its own files.

``create`` is atomic: if two processes create the same name at the same time, one succeeds.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.errors import StorageError
from dualpath.core.names import in_one_line
from dualpath.node.system_calls import (
    KERNEL,
    NotAFileError,
    SystemCalls,
    create_file,
    foreign_link,
    read_content,
)
from dualpath.storage.posix import (
    NAME_FILE,
    NO_LINKS,
    TEMPORARY_FOLDER,
    is_folder_name,
    is_object_name,
)


class ObjectInfo(msgspec.Struct, frozen=True):
    """One object: its name below the root, its size, and when it was written (Unix time)."""

    name: str
    bytes: int
    written_s: float


class ObjectTree(Protocol):
    """Objects under names such as ``janitor/lease/00000001``; thread-safe.

    Names consist of letters, digits and ``/-._``, and no part is ``.`` or ``..``: all methods
    raise ``StorageError`` for other ones, and objects with other names are not listed.  They also
    raise it if the storage does not answer or refuses.  Writes are atomic.
    """

    def create(self, name: str, content: bytes) -> bool:
        """Store an object unless the name exists; return whether it was stored."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Store an object, replacing any object of this name."""
        ...

    def get(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Return an object's first ``max_bytes``, or all of it; None if there is no object."""
        ...

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects, in order where possible; return how many existed.

        S3 does not report whether an object existed: there, all names count.
        """
        ...

    def folders(self, prefix: str) -> list[str]:
        """Return the sorted names of direct subfolders of a folder (``""`` or ``…/``)."""
        ...

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects below a folder (``""`` or ``…/``), at any depth.

        Objects created or removed during the iteration may or may not be included.
        """
        ...


def namespace_of(tree: ObjectTree, name: str) -> StoreNamespace | None:
    """Return the namespace of a storage's folder; None if it has none that can be read."""
    try:
        content = tree.get(f"{name}/{NAME_FILE}") or b""
        return msgspec.json.decode(content, type=StoreNamespace)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def checked_name(name: str) -> str:
    """Return the name of an object or folder; raises ``StorageError`` if it may leave the root."""
    if name and not is_object_name(name.removesuffix("/")):
        raise StorageError(
            f"{in_one_line(name, 80)!r} is not the name of an object in a storage; an entry in the "
            "storage's journal or index was not written by an engine, remove it"
        )
    return name


# ---------------------------------------------------------------------------------- memory objects
# Objects in a dict, for tests and simulations.


class MemoryObjects:
    """See ``dualpath.storage.objects.ObjectTree``; ``now_s`` is the clock of ``written_s``."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    def create(self, name: str, content: bytes) -> bool:
        """See the contract."""
        checked_name(name)
        with self._lock:
            if name in self._objects:
                return False
            self._objects[name] = (bytes(content), self._now_s())
            return True

    def replace(self, name: str, content: bytes) -> None:
        """See the contract."""
        with self._lock:
            self._objects[checked_name(name)] = (bytes(content), self._now_s())

    def get(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """See the contract."""
        with self._lock:
            found = self._objects.get(checked_name(name))
        return None if found is None else found[0][:max_bytes]

    def remove(self, names: Sequence[str]) -> int:
        """See the contract."""
        with self._lock:
            return sum(
                self._objects.pop(name, None) is not None for name in map(checked_name, names)
            )

    def folders(self, prefix: str) -> list[str]:
        """See the contract."""
        checked_name(prefix)
        with self._lock:
            below = [name[len(prefix) :] for name in self._objects if name.startswith(prefix)]
        return sorted({head for head, slash, _ in (n.partition("/") for n in below) if slash})

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """See the contract."""
        checked_name(prefix)
        with self._lock:
            found = [
                ObjectInfo(name, len(content), written_s)
                for name, (content, written_s) in self._objects.items()
                if name.startswith(prefix)
            ]
        yield from found


# ----------------------------------------------------------------------------------- posix objects
# Objects as files below a directory.

#: Folder of the janitor's half-written files; blocks have their own.
_TEMPORARY = f"janitor/{TEMPORARY_FOLDER}"
_GONE = (FileNotFoundError, NotADirectoryError)


class PosixObjects:
    """See ``dualpath.storage.objects.ObjectTree``; ``root`` need not exist.

    Folders that are links of another user are treated as absent: they would lead out of the root.
    """

    def __init__(self, root: str | Path, calls: SystemCalls = KERNEL) -> None:
        self._root = str(root)
        self._calls = calls

    def create(self, name: str, content: bytes) -> bool:
        """Write a temporary file and hard-link it to its name, which fails if the name exists."""
        path = self._path(name)
        with self._storage_errors("create", path), self._written(content) as temporary:
            self._refuse_links(path)
            self._calls.makedirs(os.path.dirname(path), mode=0o770, exist_ok=True)
            try:
                self._calls.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                return self._created_without_links(path, content)
        return True

    def replace(self, name: str, content: bytes) -> None:
        """Write a temporary file and rename it."""
        path = self._path(name)
        with self._storage_errors("replace", path), self._written(content) as temporary:
            self._refuse_links(path)
            self._calls.makedirs(os.path.dirname(path), mode=0o770, exist_ok=True)
            self._calls.rename(temporary, path)

    def get(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Read a file."""
        path = self._path(name)
        with self._storage_errors("read", path):
            try:
                self._refuse_links(path)
                return read_content(path, max_bytes, self._calls)
            except (*_GONE, NotAFileError):
                return None

    def remove(self, names: Sequence[str]) -> int:
        """Unlink files, in order."""
        removed = 0
        for name in names:
            path = self._path(name)
            with self._storage_errors("remove", path), contextlib.suppress(*_GONE):
                self._refuse_links(path)
                self._calls.unlink(path)
                removed += 1
        return removed

    def folders(self, prefix: str) -> list[str]:
        """List a directory's directories."""
        path = self._path(prefix)
        with self._storage_errors("list", path):
            try:
                self._refuse_links(path)
                with self._calls.scandir(path) as entries:
                    return sorted(
                        e.name
                        for e in entries
                        if is_folder_name(e.name) and e.is_dir(follow_symlinks=False)
                    )
            except _GONE:
                return []

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Walk a directory, in the order of the file system."""
        path = self._path(prefix)
        with self._storage_errors("list", path):
            try:
                self._refuse_links(path)
                with self._calls.scandir(path) as scan:
                    entries = list(scan)
            except _GONE:
                return
        for entry in entries:
            if not is_folder_name(entry.name):
                continue
            name = f"{prefix}{entry.name}"
            with self._storage_errors("list", entry.path):
                if entry.is_dir(follow_symlinks=False):
                    yield from self.objects(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield ObjectInfo(name, found.st_size, found.st_mtime)

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked_name(name)}"

    def _refuse_links(self, path: str) -> None:
        """Raise ``NotADirectoryError`` if a folder of this path is another user's link."""
        if (link := foreign_link(self._root, path)) is not None:
            raise NotADirectoryError(errno.ENOTDIR, "a folder is a link of another user", link)

    @contextlib.contextmanager
    def _written(self, content: bytes) -> Iterator[str]:
        folder = self._path(_TEMPORARY)
        self._refuse_links(f"{folder}/")
        self._calls.makedirs(folder, mode=0o770, exist_ok=True)
        temporary = f"{folder}/{self._calls.urandom(16).hex()}"
        try:
            create_file(temporary, [memoryview(content)], self._calls)
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                self._calls.unlink(temporary)

    def _created_without_links(self, path: str, content: bytes) -> bool:
        """Create on a file system without hard links: not atomic, the name exists first."""
        try:
            create_file(path, [memoryview(content)], self._calls)
        except FileExistsError:
            return False
        return True

    @contextlib.contextmanager
    def _storage_errors(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot {action} {path}: {error.strerror or error}; check the file system and its "
                "permissions"
            ) from error
