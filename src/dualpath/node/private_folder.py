"""Folders and logs that belong to this user alone, also below /dev/shm and /tmp.

In a folder where everybody may create names, another user can create ours first: as a folder of
their own, or as a link to one.  Who owns a folder decides what this process reads in it: with a
folder of shared DRAM that is KV, with a cache the identity of weights.  So a folder is used only if
nobody else may change it, or the names on the way to it.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dualpath.core.errors import ConfigError

log = logging.getLogger(__name__)

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_EVERYBODY_ELSE = stat.S_IRWXG | stat.S_IRWXO
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: File systems with files in memory.
_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


def private_folder(path: str | Path, name: str) -> str:
    """Create a folder with mode 0700, or check an existing one and give it that mode.

    Returns its absolute path, which is to be used: a path that ends with a slash or a dot would
    lead through a link.  ``name`` is what errors call it.  Raises ``ConfigError`` if the folder is
    another user's or a link, if others may write to it, or if others may replace it or a folder on
    the way to it.
    """
    path = os.path.abspath(path)
    _make(path, name)
    _check_way(Path(path), name)
    with _opened(path, name) as descriptor:
        mode = _owned(descriptor, path, name, _OTHERS_MAY_WRITE)
        if mode & _EVERYBODY_ELSE:
            os.fchmod(descriptor, 0o700)
            log.info("%s %s had mode %o and has 700 now", name, path, mode)
    return path


def log_folder(path: str | Path, name: str) -> Path:
    """Create a folder of logs with mode 0700; an existing one keeps its mode.

    Returns its absolute path, as ``private_folder``.  Raises ``ConfigError`` if it is another
    user's, a link, or writable for every user.
    """
    path = os.path.abspath(path)
    _make(path, name)
    with _opened(path, name) as descriptor:
        _owned(descriptor, path, name, stat.S_IWOTH)
    return Path(path)


def open_log(path: str | Path) -> int:
    """Open a log of this user for appending, readable by this user only; return its descriptor.

    Raises ``ConfigError`` for a link, for a file of another user, and for what is not a file,
    except ``/dev/null``.
    """
    if os.fspath(path) == os.devnull:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(
            f"log {str(path)!r} cannot be opened ({error.strerror}); remove what has its name, or "
            "choose another folder"
        ) from error
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise ConfigError(
            f"log {str(path)!r} is not a file of this user; remove it, or choose another folder"
        )
    if found.st_mode & _EVERYBODY_ELSE:
        os.fchmod(descriptor, 0o600)
    return descriptor


def file_system(path: str | Path, mounts: str | None = None) -> str:
    """Return the type of the file system that has a path, empty if it is unknown.

    ``mounts`` is the text of ``/proc/self/mountinfo``.
    """
    try:
        device = os.stat(path).st_dev
        text = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    except (OSError, UnicodeDecodeError):
        return ""
    number, found = f"{os.major(device)}:{os.minor(device)}", ""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [number]:
            found = after.split()[0]
    return found


def warn_if_on_disk(path: str | Path, name: str) -> None:
    """Log a warning if a folder that should be in memory is on a disk."""
    kind = file_system(path)
    if kind and kind not in _MEMORY:
        log.warning(
            "%s %s is on a file system of type %s, which is not in memory: blocks are written to "
            "a disk and read from it; give a folder in a tmpfs, such as /dev/shm/kv",
            *(name, path, kind),
        )


def _make(path: str | Path, name: str) -> None:
    try:
        for folder in (*reversed(Path(path).parents), Path(path)):
            if not folder.exists():
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(0o700)
    except OSError as error:
        raise ConfigError(
            f"{name} {str(path)!r} cannot be created ({error.strerror}); give a folder that this "
            "user may write to"
        ) from error


@contextlib.contextmanager
def _opened(path: str | Path, name: str) -> Iterator[int]:
    try:
        descriptor = os.open(path, _FOLDER)
    except OSError as error:
        what = "is a link" if os.path.islink(path) else f"cannot be opened ({error.strerror})"
        raise ConfigError(
            f"{name} {str(path)!r} {what}; give a folder of this user, or one that does not exist"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _owned(descriptor: int, path: str | Path, name: str, forbidden: int) -> int:
    """Return the mode of an open folder; raises ``ConfigError`` if it is not ours alone."""
    found = os.fstat(descriptor)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{name} {str(path)!r} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}; remove it, or give a folder that does not exist"
        )
    if mode & forbidden:
        everybody = "world-writable" if mode & stat.S_IWOTH else "writable for its group"
        raise ConfigError(
            f"{name} {str(path)!r} is {everybody} (mode {mode:o}), so others may have put files "
            "there; remove it, or give a folder of your own in it"
        )
    return mode


def _check_way(path: Path, name: str) -> None:
    """Raise ``ConfigError`` if another user may replace the folder or one on the way to it."""
    trusted = {0, os.geteuid(), *_unmapped_users()}
    for folder in (parent := Path(os.path.realpath(path.absolute().parent)), *parent.parents):
        found = os.stat(folder)
        sticky = found.st_mode & stat.S_ISVTX
        if found.st_uid not in trusted:
            why = f"belongs to user {found.st_uid}, who may replace what is in it"
        elif found.st_mode & stat.S_IWOTH and not sticky:
            why = "is world-writable without the sticky bit, so that everybody may replace it"
        else:
            continue
        raise ConfigError(f"{name} {str(path)!r}: {str(folder)!r} {why}; give another folder")


def _unmapped_users() -> set[int]:
    """Return the number that stands for root outside of this process's user namespace."""
    try:
        whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
        return set() if whole else {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except (OSError, ValueError):
        return set()
