"""Writes files at paths that users give; nothing else in the code opens such files for writing.

A new or regular file is written beside its place and renamed when it is complete: a reader never
sees a part of it, and a full disk leaves the earlier file as it was.  Everything else is written
into and never replaced: devices, pipes and descriptors such as /dev/stdout.  Symbolic links are
followed and remain.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

#: Errors with which a folder refuses new files, where a file in it may still be writable.
_NO_NEW_FILES = (errno.EACCES, errno.EPERM, errno.EROFS)
#: Errors with which a folder refuses the replacement of a file that is mounted there.
_MOUNTED = (errno.EBUSY, errno.EXDEV)
#: The name of a partial file begins with that much of the file's name; names have 255 bytes.
_NAME_CHARACTERS = 50
_MAX_LINKS = 40
_DESCRIPTOR = re.compile(r"/dev/fd/(\d{1,9})")


def write_whole(
    path: str | Path, content: bytes, *, folders: bool = False, private: bool = False
) -> None:
    """Write a file, with ``folders`` also its parents; raises ``OSError`` with the path.

    A ``private`` file can be read by its user alone, and so can parents that are created for it.
    """
    with OutputFile(path, folders=folders, private=private) as file:
        file.write(content)


def not_writable(path: str | Path) -> str | None:
    """Return why a file cannot be written at a path, without a change of anything; None if it can.

    The disk may be full all the same.
    """
    try:
        with _named_errors(str(path)):
            target = _followed(str(path))
            if _DESCRIPTOR.fullmatch(target):
                os.fstat(int(target.rpartition("/")[2]))
                return None
            try:
                mode = os.stat(target).st_mode
            except FileNotFoundError:
                folder = Path(target).parent
                folder.stat()
                return not_creatable(folder)
            else:
                if stat.S_ISDIR(mode):
                    return os.strerror(errno.EISDIR)
                allowed = os.access(target, os.W_OK)
    except OSError as error:
        return error.strerror or str(error)
    return None if allowed else os.strerror(errno.EACCES)


def not_creatable(folder: Path) -> str | None:
    """Return why a folder cannot be created or, if it exists, written; None if it can.

    An unnamed file is opened in the nearest folder that exists: some file systems refuse what the
    permissions allow.
    """
    nearest = folder.expanduser().absolute()
    try:
        while True:
            try:
                mode = os.stat(nearest).st_mode
                break
            except FileNotFoundError:
                nearest = nearest.parent
        if not stat.S_ISDIR(mode):
            return os.strerror(errno.ENOTDIR)
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return error.strerror or str(error)


class OutputFile:
    """One file that is being written; as a context manager it is discarded after an error.

    All methods raise ``OSError`` with the path as ``filename``.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        folders: bool = False,
        wait: bool = True,
        private: bool = False,
    ) -> None:
        """Open the file, with ``folders`` create its parents.

        ``private``: see ``write_whole``.  ``wait``: until a process reads if it is a named pipe;
        otherwise that is an ``OSError``.
        """
        self._path = str(path)
        self._partial = ""
        self._new_mode = 0o600 if private else 0o666
        with self._named_errors():
            if folders:
                mode = 0o700 if private else 0o777
                Path(path).expanduser().parent.mkdir(mode, parents=True, exist_ok=True)
            self._target = _followed(self._path)
            self._file = os.fdopen(self._opened(wait), "wb")

    def write(self, content: bytes) -> None:
        """Append to what is written."""
        with self._named_errors():
            self._file.write(content)

    def commit(self) -> None:
        """Complete the file and put it in its place; idempotent."""
        try:
            with self._named_errors():
                self._file.close()
                if self._partial:
                    self._replace()
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the file; if it is not complete, leave what was in its place.  Idempotent."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._partial:
            with contextlib.suppress(OSError):
                os.unlink(self._partial)
            self._partial = ""

    def leave(self) -> str:
        """Close the file where it is, complete or not, and return its path."""
        with contextlib.suppress(OSError):
            self._file.close()
        left, self._partial = self._partial or self._path, ""
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()

    def _opened(self, wait: bool) -> int:
        """Return the descriptor of a partial file, or of the target if that is written into."""
        try:
            status = os.stat(self._target)
        except FileNotFoundError:
            status = None
        mode = self._new_mode if status is None else stat.S_IMODE(status.st_mode)
        # A replacement would belong to this user.
        own = status is None or (stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid())
        if own and _DESCRIPTOR.fullmatch(self._target) is None:
            try:
                return self._open_partial(mode, known=status is not None)
            except OSError as error:
                if status is None or error.errno not in _NO_NEW_FILES:
                    raise
        return _open_in_place(self._target, wait, self._new_mode)

    def _open_partial(self, mode: int, *, known: bool) -> int:
        folder, _, name = self._target.rpartition("/")
        partial = f"{folder}/{name[:_NAME_CHARACTERS]}.{secrets.token_hex(4)}.partial"
        if len(os.fsencode(name)) > 255:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), self._path)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        self._partial = partial
        if known:
            os.fchmod(descriptor, mode)  # without the umask
        return descriptor

    def _replace(self) -> None:
        try:
            os.replace(self._partial, self._target)
            self._partial = ""
        except OSError as error:
            if error.errno not in _MOUNTED:
                raise
            with open(self._partial, "rb") as source, open_in_place(self._target) as target:
                while chunk := source.read(1 << 20):
                    target.write(chunk)

    def _named_errors(self) -> contextlib.AbstractContextManager[None]:
        return _named_errors(self._path)


def open_in_place(path: str | Path, *, wait: bool = True, private: bool = False) -> BinaryIO:
    """Return a file that is written from its beginning, for logs that are read meanwhile.

    ``wait`` and ``private``: see ``OutputFile``.  Raises ``OSError`` with the path.
    """
    with _named_errors(str(path)):
        mode = 0o600 if private else 0o666
        return os.fdopen(_open_in_place(_followed(str(path)), wait, mode), "wb")


def _open_in_place(target: str, wait: bool, mode: int) -> int:
    found = _DESCRIPTOR.fullmatch(target)
    if found is not None:
        return os.dup(int(found[1]))  # goes on where the descriptor is; opening it would start anew
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | (0 if wait else os.O_NONBLOCK)
    try:
        descriptor = os.open(target, flags, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no process reads this pipe") from error
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _followed(path: str) -> str:
    """Return an absolute path that ends with no symbolic link; descriptors are /dev/fd/N."""
    followed = os.path.abspath(os.path.expanduser(path))
    own_descriptors = f"/proc/{os.getpid()}/fd"
    for _ in range(_MAX_LINKS):
        folder, name = os.path.realpath(os.path.dirname(followed)), os.path.basename(followed)
        if folder == own_descriptors and name.isdecimal():
            return f"/dev/fd/{name}"
        followed = os.path.join(folder, name)
        try:
            link = os.readlink(followed)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return followed  # no link
            raise
        followed = os.path.join(folder, link)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


@contextlib.contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """Name the path that the user gave in errors, in place of one that was derived from it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from error
    except ValueError as error:  # a NUL character
        raise OSError(errno.EINVAL, str(error), path) from error
