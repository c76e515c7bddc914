"""What storage asks of the kernel: files, and who runs on this machine.

The module ``os`` is it.  A simulation brings its own, in which a process may end, wait or be
refused at every call.
"""

# ruff: noqa: D102 - the documentation of ``os`` says what each call does

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

#: The umask takes rights away; whoever is neither the user nor in the group never has any: KV tells
#: what was in a prompt.
_FILE_MODE = 0o660
#: Why a block is bad whose name something else has.
NOT_A_FILE = "not a file"


class Host(Protocol):
    """Who a machine is, as ``os.uname`` says."""

    @property
    def nodename(self) -> str:
        """Its name."""
        ...


class FileSpace(Protocol):
    """What a file system has left, as ``os.statvfs`` says."""

    @property
    def f_bavail(self) -> int:
        """Free blocks."""
        ...

    @property
    def f_frsize(self) -> int:
        """Bytes of a block."""
        ...


class Entry(Protocol):
    """One entry of a folder, as ``os.scandir`` lists it."""

    @property
    def name(self) -> str:
        """Its name in the folder."""
        ...

    @property
    def path(self) -> str:
        """The folder's path and its name."""
        ...

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a folder."""
        ...

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a regular file."""
        ...

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Say its size and times."""
        ...


class SystemCalls(Protocol):
    """Each as in the module ``os``; raises ``OSError``."""

    def open(self, path: str, flags: int, mode: int = 0o777, /) -> int: ...
    def close(self, descriptor: int, /) -> None: ...
    def write(self, descriptor: int, content: memoryview, /) -> int: ...
    def read(self, descriptor: int, most_bytes: int, /) -> bytes: ...
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


#: Those of the machine this runs on.
KERNEL: SystemCalls = os


class NotAFileError(OSError):
    """Something else than a file has the name of one: a directory, a FIFO, a device."""


def open_regular(path: str, flags: int, calls: SystemCalls = KERNEL) -> int:
    """Open a file for reading; raises ``NotAFileError``, and never waits, for anything else."""
    descriptor = calls.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(calls.fstat(descriptor).st_mode):
            return descriptor
    except OSError:
        calls.close(descriptor)
        raise
    calls.close(descriptor)
    raise NotAFileError(errno.EBADF, NOT_A_FILE, path)


def read_content(path: str, most_bytes: int | None = None, calls: SystemCalls = KERNEL) -> bytes:
    """Return a regular file's first bytes, or all; raises ``OSError``."""
    descriptor = open_regular(path, os.O_RDONLY, calls)
    try:
        wanted = calls.fstat(descriptor).st_size if most_bytes is None else most_bytes
        parts: list[bytes] = []
        while wanted > 0 and (part := calls.read(descriptor, wanted)):
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)
    finally:
        calls.close(descriptor)


def create_file(
    path: str, buffers: Sequence[memoryview], calls: SystemCalls = KERNEL, *, sync: bool = False
) -> None:
    """Write a file that must not exist, for the user and the group; raises ``OSError``.

    ``sync``: the device has it at the end.
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
