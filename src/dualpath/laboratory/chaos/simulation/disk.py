"""Simulated file systems: files, names, folders.

One is mounted by all machines; each machine has another one in memory, shared by its engines.

A file outlives its names as long as a descriptor is open.  Nothing here waits or fails randomly;
the system calls of processes do that (``calls``).
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence

from dualpath.storage.directory import BLOCK_SUFFIX, TEMPORARY_FOLDER

#: Path of the storage, and of the DRAM shared by the engines of a machine.
ROOT = "/kv"
NODE_DRAM_ROOT = "/dram"
_DEVICE = 1
_FOLDER = stat.S_IFDIR | 0o770
_FILE = stat.S_IFREG | 0o660


class File:
    """A file; ``writer`` is the process that created it."""

    __slots__ = ("content", "corrupted", "writer", "written_s")

    def __init__(self, writer: str, now_s: float) -> None:
        self.writer = writer
        self.content = bytearray()
        self.written_s = now_s
        #: Whether bits of it were flipped since it was written.
        self.corrupted = False

    def status(self) -> os.stat_result:
        """Return what ``stat`` returns."""
        return _status(_FILE, len(self.content), self.written_s)


class Disk:
    """Files by path, and the entries of each folder; methods raise ``OSError``.

    Without ``links`` it does not support hard links.
    """

    def __init__(self, *, links: bool) -> None:
        self.links = links
        self.files: dict[str, File] = {}
        self.folders: dict[str, dict[str, None]] = {"/": {}}
        #: Paths whose removal an injected fault has refused.
        self.unlink_refused: set[str] = set()

    def status(self, path: str) -> os.stat_result:
        """Return what ``stat`` returns."""
        if (file := self.files.get(path)) is not None:
            return file.status()
        if path in self.folders:
            return _status(_FOLDER, 0, 0.0)
        raise self._no_such(path)

    def file(self, path: str) -> File:
        """Return a file."""
        if (file := self.files.get(path)) is not None:
            return file
        if path in self.folders:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise self._no_such(path)

    def create(self, path: str, file: File) -> None:
        """Add a new file."""
        folder, name = self._free_place(path)
        folder[name] = None
        self.files[path] = file

    def link(self, source: str, target: str) -> None:
        """Add a hard link; without support for links the target is checked all the same."""
        file = self.file(source)
        self._free_place(target)
        if not self.links:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), target)
        self.create(target, file)

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing the target if it exists."""
        file = self.file(source)
        folder, name = self._place(target)
        if target in self.folders:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        self.unlink(source)
        folder[name] = None
        self.files[target] = file

    def unlink(self, path: str) -> None:
        """Remove a name."""
        self.file(path)
        folder, name = self._place(path)
        del folder[name], self.files[path]

    def mkdir(self, path: str) -> None:
        """Make a folder."""
        folder, name = self._free_place(path)
        folder[name] = None
        self.folders[path] = {}

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        if path not in self.folders:
            raise self._no_such(path)
        if self.folders[path]:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        folder, name = self._place(path)
        del folder[name], self.folders[path]

    def names(self, path: str) -> list[str]:
        """List a folder."""
        if path not in self.folders:
            raise self._no_such(path)
        return list(self.folders[path])

    def blocks(self) -> Iterator[tuple[str, File]]:
        """Yield all files with the name of a block."""
        return ((path, f) for path, f in self.files.items() if path.endswith(BLOCK_SUFFIX))

    def half_written(self) -> Iterator[tuple[str, File]]:
        """Yield all files with a temporary name."""
        within = f"/{TEMPORARY_FOLDER}/"
        return ((path, file) for path, file in self.files.items() if within in path)

    def temporaries_of(self, writer: str) -> list[str]:
        """Return the temporary files of one process whose removal was not refused."""
        written = [path for path, file in self.half_written() if file.writer == writer]
        return [path for path in written if path not in self.unlink_refused]

    def _place(self, path: str) -> tuple[dict[str, None], str]:
        folder, _, name = path.rpartition("/")
        found = self.folders.get(folder or "/")
        if found is None:
            raise self._no_such(path)
        return found, name

    def _free_place(self, path: str) -> tuple[dict[str, None], str]:
        folder, name = self._place(path)
        if name in folder:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return folder, name

    def _no_such(self, path: str) -> OSError:
        if path.rpartition("/")[0] in self.files:
            return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


class Entry:
    """One entry of a listed folder; ``storage.system_calls.Entry``."""

    __slots__ = ("_disk", "name", "path")

    def __init__(self, disk: Disk, folder: str, name: str) -> None:
        self._disk = disk
        self.name = name
        self.path = f"{folder}/{name}"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """See ``os.DirEntry``."""
        return self.path in self._disk.folders

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """See ``os.DirEntry``."""
        return self.path in self._disk.files

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """See ``os.DirEntry``."""
        return self._disk.status(self.path)


class Listing:
    """The entries of a folder at the time of the call; ``os.scandir``."""

    def __init__(self, disk: Disk, folder: str, names: Sequence[str]) -> None:
        self._entries = [Entry(disk, folder, name) for name in names]

    def __enter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __exit__(self, *error: object) -> None:
        """Nothing to close."""


def object_path(name: str) -> str:
    """Return the path of an object of the storage."""
    return f"{ROOT}/{name}"


def _status(mode: int, size: int, written_s: float) -> os.stat_result:
    times = (int(written_s),) * 3
    exactly = {"st_mtime": written_s, "st_mtime_ns": int(written_s * 1e9)}
    return os.stat_result((mode, 1, _DEVICE, 1, 0, 0, size, *times), exactly)
