"""System calls of the storage in a process under test, which fail as those of a faulty disk.

The storage's own code is unchanged.  Its system calls fail as on a disk that is full, broken, slow
or read-only, in a share of cases that the campaign sets.
"""

import errno
import os
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from dualpath.laboratory.chaos.gate import DiskFault
from dualpath.laboratory.chaos.matrix import Fault, Step
from dualpath.storage import factory
from dualpath.storage.posix import PosixStorage

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_ON_READ = {Fault.IO_ERROR: errno.EIO}
_ON_WRITE = {Fault.IO_ERROR: errno.EIO, Fault.FULL: errno.ENOSPC, Fault.READ_ONLY: errno.EROFS}
_ON_CHANGE = {Fault.FULL: errno.ENOSPC, Fault.READ_ONLY: errno.EROFS}
#: Calls that change a directory.
_CHANGES = ("link", "rename", "unlink")
_FOLDERS = ("mkdir", "makedirs")
_READS = ("preadv", "read")

Errors = dict[Fault, int]


class FaultyDisk:
    """``SystemCalls`` that forward to the kernel or fail.

    ``fault`` returns the current fault of the disk; ``reached`` and ``expects`` are those of a
    ``FailpointClient``; ``chance`` decides which calls fail.
    """

    def __init__(
        self,
        fault: Callable[[], DiskFault],
        reached: Callable[[Step], None],
        expects: Callable[[Step], bool],
        chance: random.Random,
    ) -> None:
        self._fault = fault
        self._reached = reached
        self._expects = expects
        self._chance = chance
        for names, errors in ((_READS, _ON_READ), (("fsync",), _ON_WRITE), (_CHANGES, _ON_CHANGE)):
            for name in names:
                setattr(self, name, self._failing(getattr(os, name), errors))
        for name in _FOLDERS:
            setattr(self, name, self._failing_mkdir(getattr(os, name)))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        return getattr(os, name)

    def install(self) -> None:
        """Make the file storage of this process use these system calls."""
        vars(factory)["PosixStorage"] = partial(PosixStorage, calls=self)

    def open(self, path: str, flags: int, mode: int = 0o777, **more: int | None) -> int:
        """Like ``os.open``."""
        if flags & _WRITING:
            self._fail_sometimes(_ON_CHANGE)
        return os.open(path, flags, mode, **more)

    def write(self, descriptor: int, content: memoryview) -> int:
        """Write all of it, or half: a full disk and an armed failpoint take effect in between."""
        fault = self._fault().fault
        if len(content) > 1 and (fault is Fault.FULL or self._expects(Step.PERSISTING)):
            half = os.write(descriptor, content[: len(content) // 2])
            self._reached(Step.PERSISTING)
            self._fail_sometimes(_ON_WRITE)
            return half
        self._fail_sometimes(_ON_WRITE)
        return os.write(descriptor, content)

    def _failing(self, call: Callable[..., Any], errors: Errors) -> Callable[..., Any]:
        def failing(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - as the call itself
            self._fail_sometimes(errors)
            return call(*args, **named)

        return failing

    def _failing_mkdir(self, make: Callable[..., None]) -> Callable[..., None]:
        def failing(path: str, *args: Any, **named: Any) -> None:  # noqa: ANN401 - as the call
            if not os.path.lexists(path):  # a faulty disk, too, reports that a folder exists
                self._fail_sometimes(_ON_CHANGE)
            make(path, *args, **named)

        return failing

    def _fail_sometimes(self, errors: Errors) -> None:
        current = self._fault()
        if current.fault is None or self._chance.random() >= current.share:
            return
        if current.fault is Fault.SLOW:
            time.sleep(current.delay_s)
        elif (code := errors.get(current.fault)) is not None:
            raise OSError(code, os.strerror(code))
