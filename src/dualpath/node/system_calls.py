"""The system calls used for files and process liveness, as a replaceable interface.

In production it is the module ``os``.  The fault simulation provides its own implementation, in
which a process may die, block or fail at every call.
"""

# ruff: noqa: D102 - see the documentation of ``os``

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

#: For the user and the group, less the umask; others have no access, as KV reveals prompts.
_FILE_MODE = 0o660
#: Defect of a block if a directory, FIFO or device has its name.
NOT_A_FILE = "not a file"


class Host(Protocol):
    """Result of ``os.uname``."""

    @property
    def nodename(self) -> str:
        """The machine's name."""
        ...


class FileSpace(Protocol):
    """Result of ``os.statvfs``."""

    @property
    def f_bavail(self) -> int:
        """Free blocks."""
        ...

    @property
    def f_frsize(self) -> int:
        """Bytes of a block."""
        ...


class Entry(Protocol):
    """One entry of ``os.scandir``."""

    @property
    def name(self) -> str:
        """The name in the folder."""
        ...

    @property
    def path(self) -> str:
        """The path including the folder's."""
        ...

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a folder."""
        ...

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a regular file."""
        ...

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size and times."""
        ...


class SystemCalls(Protocol):
    """The same functions as in the module ``os``; they raise ``OSError``."""

    def open(self, path: str, flags: int, mode: int = 0o777, /) -> int: ...
    def close(self, descriptor: int, /) -> None: ...
    def write(self, descriptor: int, content: memoryview, /) -> int: ...
    def read(self, descriptor: int, max_bytes: int, /) -> bytes: ...
    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...
    def fsync(self, descriptor: int, /) -> None: ...
    def fstat(self, descriptor: int, /) -> os.stat_result: ...
    def stat(self, path: str, /) -> os.stat_result: ...
    def lstat(self, path: str, /) -> os.stat_result: ...
    def link(self, source: str, target: str, /) -> None: ...
    def rename(self, source: str, target: str, /) -> None: ...
    def unlink(self, path: str, /) -> None: ...
    def utime(self, path: str, /) -> None: ...
    def mkdir(self, path: str, mode: int = 0o777, /) -> None: ...
    def makedirs(self, path: str, mode: int = 0o777, exist_ok: bool = False) -> None: ...
    def rmdir(self, path: str, /) -> None: ...
    def scandir(self, path: str, /) -> AbstractContextManager[Iterator[Entry]]: ...
    def statvfs(self, path: str, /) -> FileSpace: ...
    def uname(self) -> Host: ...
    def getpid(self) -> int: ...
    def kill(self, process_id: int, number: int, /) -> None: ...
    def urandom(self, count: int, /) -> bytes: ...


#: The system calls of this machine.
KERNEL: SystemCalls = os


class NotAFileError(OSError):
    """The path is not a regular file but a directory, a FIFO or a device."""


def open_regular(path: str, flags: int, calls: SystemCalls = KERNEL) -> int:
    """Open a regular file for reading; raises ``NotAFileError`` otherwise, without blocking."""
    descriptor = calls.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(calls.fstat(descriptor).st_mode):
            return descriptor
    except OSError:
        calls.close(descriptor)
        raise
    calls.close(descriptor)
    raise NotAFileError(errno.EBADF, NOT_A_FILE, path)


def read_content(path: str, max_bytes: int | None = None, calls: SystemCalls = KERNEL) -> bytes:
    """Return a regular file's first bytes, or all; raises ``OSError``."""
    descriptor = open_regular(path, os.O_RDONLY, calls)
    try:
        wanted = calls.fstat(descriptor).st_size if max_bytes is None else max_bytes
        parts: list[bytes] = []
        while wanted > 0 and (part := calls.read(descriptor, wanted)):
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)
    finally:
        calls.close(descriptor)


def foreign_link(root: str, path: str) -> str | None:
    """Return the first folder between ``root`` and a file below it that is another user's link.

    Who may write to a storage could lead a process out of it with such a link.  Links of this
    user and of root are an operator's choice.  Paths that do not exist have none, so that those of
    a simulated disk pass.
    """
    folder = root.rstrip("/")
    for name in path[len(folder) :].split("/")[1:-1]:
        folder = f"{folder}/{name}"
        try:
            found = os.lstat(folder)
        except OSError:
            return None
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            return folder
    return None


def create_file(
    path: str, buffers: Sequence[memoryview], calls: SystemCalls = KERNEL, *, sync: bool = False
) -> None:
    """Create a file for the user and the group; raises ``OSError``, also if it exists.

    ``sync``: call ``fsync`` before returning.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    descriptor = calls.open(path, flags, _FILE_MODE)
    try:
        for part in buffers:
            done = 0
            while done < part.nbytes:
                done += calls.write(descriptor, part[done:])
        if sync:
            calls.fsync(descriptor)
    finally:
        calls.close(descriptor)
