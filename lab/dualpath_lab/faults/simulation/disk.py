"""Simulated file systems: files, names, folders.

All machines mount the storage's file system; each machine also has one in memory, which its engines
share.  A file exists as long as it has a name or an open descriptor.  ``Disk`` neither waits nor
fails randomly; the system calls of processes do (``SimCalls``).
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from greenlet import GreenletExit

from dualpath.core.cluster import HostProcess
from dualpath.storage.posix import BLOCK_SUFFIX, TEMPORARY_FOLDER
from dualpath_lab.faults.simulation.threads import SimThreads
from dualpath_lab.faults.simulation.world import World

#: Path of the storage, and of the DRAM shared by the engines of a machine.
ROOT = "/kv"
NODE_DRAM_ROOT = "/dram"
_DEVICE = 1
_FOLDER = stat.S_IFDIR | 0o770
_FILE = stat.S_IFREG | 0o660


#: The writer of files in /proc, which are read without faults.
_KERNEL = "kernel"


class File:
    """A file; ``writer`` is the process that created it."""

    __slots__ = ("content", "corrupted", "writer", "written_s")

    def __init__(self, writer: str, now_s: float) -> None:
        self.writer = writer
        self.content = bytearray()
        self.written_s = now_s
        #: Whether bits of the content were flipped since it was written.
        self.corrupted = False

    def status(self) -> os.stat_result:
        """Return what ``stat`` returns."""
        return _status(_FILE, len(self.content), self.written_s)


class Disk:
    """Files by path, and the entries of each folder; methods raise ``OSError``.

    ``links``: whether it supports hard links.
    """

    def __init__(self, *, links: bool) -> None:
        self.links = links
        self.files: dict[str, File] = {}
        self.folders: dict[str, dict[str, None]] = {"/": {}}
        #: Paths with an unlink call that an injected fault has refused.
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
        """Return one process's temporary files, without those that a fault has left there."""
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
    """One entry of a listed folder; ``node.system_calls.Entry``."""

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


# ------------------------------------------------------------------------------------------- calls
# System calls of simulated processes: at each one the thread may be preempted or killed, or the
# call may fail.

#: Probability that a thread is preempted at a call that changes a file.
_PREEMPTED = 0.2
#: Probability that one call of a failing operation fails: an operation consists of several calls.
_FAILS_AT_CALL = 0.2
#: Probability of a short read or write.
_SHORT = 0.2
_INODE = 4026531836


class StorageFaults:
    """Current probabilities of faults of an operation on the storage."""

    def __init__(self) -> None:
        self.slow = 0.0
        self.slow_s = (0.1, 6.0)
        self.failing = 0.0
        self.full = False
        self.corrupting = 0.0
        self.injected = 0


class Uname(NamedTuple):
    """See ``node.system_calls.Host``."""

    nodename: str


class Space(NamedTuple):
    """See ``node.system_calls.FileSpace``."""

    f_bavail: int = 0
    f_frsize: int = 4096


class DiskCalls:
    """``node.system_calls.SystemCalls`` of a process without faults.

    ``runs`` returns whether its machine has a process with a given number.  All machines have one
    name, as clones of a machine do; their boot IDs differ.
    """

    def __init__(
        self, disk: Disk, world: World, known: HostProcess, runs: Callable[[int], bool]
    ) -> None:
        self.disk = disk
        self.world = world
        self._known = known
        self.runs = runs
        self._open: dict[int, File] = {}
        self._opened = 2

    @property
    def descriptors(self) -> int:
        """Number of open descriptors."""
        return len(self._open)

    def open(self, path: str, flags: int, mode: int = 0o777, /) -> int:
        """Create a file, or open an existing one."""
        if path.startswith("/proc/"):
            file = File(_KERNEL, 0.0)
            file.content += self._known.host.encode()
        elif flags & os.O_CREAT:
            self._step(changes=True)
            file = File(self.writer, self.world.now_s)
            self.disk.create(path, file)
        else:
            self._step()
            file = self.disk.file(path)
        self._opened += 1
        self._open[self._opened] = file
        return self._opened

    @property
    def writer(self) -> str:
        """The process that is recorded as the writer of created files."""
        return "operator"

    def close(self, descriptor: int, /) -> None:
        """Close the descriptor."""
        del self._open[descriptor]

    def write(self, descriptor: int, content: memoryview, /) -> int:
        """Append."""
        self._step(changes=True)
        self._open[descriptor].content += content
        return len(content)

    def read(self, descriptor: int, max_bytes: int, /) -> bytes:
        """Read the file's first bytes; callers read a file only once."""
        file = self._open[descriptor]
        if file.writer != _KERNEL:
            self._step()
        return bytes(file.content[:max_bytes])

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """Fill buffers."""
        self._step()
        return self._filled(descriptor, buffers, offset)

    def _filled(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        content, done = memoryview(self._open[descriptor].content), offset
        for buffer in buffers:
            part = content[done : done + buffer.nbytes]
            buffer[: len(part)] = part
            done += len(part)
        return done - offset

    def fsync(self, descriptor: int, /) -> None:
        """Do nothing: simulated machines do not fail."""

    def fstat(self, descriptor: int, /) -> os.stat_result:
        """Return the status of an open file."""
        return self._open[descriptor].status()

    def stat(self, path: str, /) -> os.stat_result:
        """Return the status of a path."""
        if path.startswith("/proc/"):
            return os.stat_result((0, _INODE, 0, 1, 0, 0, 0, 0, 0, 0))
        self._step()
        return self.disk.status(path)

    lstat = stat

    def link(self, source: str, target: str, /) -> None:
        """Add a hard link."""
        self._step(changes=True)
        self.disk.link(source, target)

    def rename(self, source: str, target: str, /) -> None:
        """Rename a file."""
        self._step(changes=True)
        self.disk.rename(source, target)

    def unlink(self, path: str, /) -> None:
        """Remove a name."""
        self._step(changes=True)
        self.disk.unlink(path)

    def utime(self, path: str, /) -> None:
        """Set a file's modification time to now."""
        self._step(changes=True)
        self.disk.file(path).written_s = self.world.now_s

    def mkdir(self, path: str, mode: int = 0o777, /) -> None:
        """Make a folder."""
        self._step(changes=True)
        self.disk.mkdir(path)

    def makedirs(self, path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
        """Make folders one after the other, as ``os.makedirs`` does."""
        if path in self.disk.folders:
            if not exist_ok:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            return
        if path.count("/") > 1:
            self.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            self.mkdir(path)
        except FileExistsError:
            if not exist_ok or path not in self.disk.folders:
                raise

    def rmdir(self, path: str, /) -> None:
        """Remove an empty folder."""
        self._step(changes=True)
        self.disk.rmdir(path)

    def scandir(self, path: str, /) -> Listing:
        """List a folder."""
        self._step()
        folder = path.rstrip("/")
        return Listing(self.disk, folder, self.disk.names(folder))

    def statvfs(self, path: str, /) -> Space:
        """Return that the free space is unknown."""
        return Space()

    def uname(self) -> Uname:
        """Return the name of the machine."""
        return Uname("machine")

    def getpid(self) -> int:
        """Return the process's number."""
        return self._known.pid

    def kill(self, process_id: int, number: int, /) -> None:
        """Check that a process exists, as signal 0 does."""
        if not self.runs(process_id):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    def urandom(self, count: int, /) -> bytes:
        """Return random bytes, decided by the seed."""
        return self.world.chance.randbytes(count)

    def _step(self, *, changes: bool = False) -> None:
        """Called before each call; subclasses inject faults here."""


class SimCalls(DiskCalls):
    """System calls of a simulated process, with injected faults unless ``reliable`` is set."""

    def __init__(
        self,
        disk: Disk,
        threads: SimThreads,
        faults: StorageFaults,
        known: HostProcess,
        runs: Callable[[int], bool],
    ) -> None:
        super().__init__(disk, threads.world, known, runs)
        self.reliable = False
        self._threads = threads
        self._faults = faults

    @property
    def writer(self) -> str:
        """The process."""
        return self._threads.process.name

    def write(self, descriptor: int, content: memoryview, /) -> int:
        """Append, sometimes only a part; a full disk takes the first half."""
        self._step(changes=True)
        file, half = self._open[descriptor].content, len(content) // 2
        if self._faults.full and not self.reliable and (file or not half):
            self._faults.injected += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        short = self._faults.full or self.world.chance.random() < _SHORT
        count = half if half and short else len(content)
        file += content[:count]
        return count

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """Fill buffers, sometimes not all; a failing call has filled the first one."""
        try:
            self._step()
        except OSError:
            self._filled(descriptor, buffers[:1], offset)
            raise
        short = len(buffers) > 1 and self.world.chance.random() < _SHORT
        return self._filled(descriptor, buffers[:1] if short else buffers, offset)

    def unlink(self, path: str, /) -> None:
        """Remove a name, unless an injected fault refuses it.

        A temporary name is removed by its writer, or after the writer has exited.
        """
        try:
            self._step(changes=True)
        except OSError:
            self.disk.unlink_refused.add(path)
            raise
        file = self.disk.file(path)
        if f"/{TEMPORARY_FOLDER}/" in path and file.writer != self.writer:
            writer = self.world.processes.get(file.writer)
            if writer is not None and writer.alive:
                self.world.problem(f"{self.writer} removes {path} of {file.writer}, which is alive")
        self.disk.unlink(path)

    def _step(self, *, changes: bool = False) -> None:
        if not self._threads.process.alive:
            raise GreenletExit
        chance = self.world.chance
        if changes:
            self.world.maybe_fault()
            if chance.random() < _PREEMPTED:
                self._threads.preempt()
        failing = self._faults.failing
        if failing and not self.reliable and chance.random() < failing * _FAILS_AT_CALL:
            self._faults.injected += 1
            self.world.note(self.writer, "a system call fails")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
