"""The calls of the kernel that the storage makes in a process under test: those of a bad disk.

The code of the storage runs as it is; its calls of the kernel fail as those of a disk that is full,
broken, slow or read-only, in as many cases as the campaign says.
"""

import errno
import os
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from dualpath.laboratory.chaos.gate import Disk
from dualpath.laboratory.chaos.matrix import Fault, Step
from dualpath.storage import factory
from dualpath.storage.posix import PosixStorage

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_ON_READ = {Fault.IO_ERROR: errno.EIO}
_ON_WRITE = {Fault.IO_ERROR: errno.EIO, Fault.FULL: errno.ENOSPC, Fault.READ_ONLY: errno.EROFS}
_ON_CHANGE = {Fault.FULL: errno.ENOSPC, Fault.READ_ONLY: errno.EROFS}
#: Calls that fail as a change of a directory does.
_CHANGES = ("link", "rename", "unlink")
_FOLDERS = ("mkdir", "makedirs")
_READS = ("preadv", "read")

Errors = dict[Fault, int]


class BadDisk:
    """``SystemCalls`` of which everything that is not troubled is the real thing.

    ``trouble`` says what is wrong at the moment, ``reached`` and ``expects`` are those of a
    ``Gate``; ``chance`` decides which calls fail.
    """

    def __init__(
        self,
        trouble: Callable[[], Disk],
        reached: Callable[[Step], None],
        expects: Callable[[Step], bool],
        chance: random.Random,
    ) -> None:
        self._trouble = trouble
        self._reached = reached
        self._expects = expects
        self._chance = chance
        for names, errors in ((_READS, _ON_READ), (("fsync",), _ON_WRITE), (_CHANGES, _ON_CHANGE)):
            for name in names:
                setattr(self, name, self._troubled(getattr(os, name), errors))
        for name in _FOLDERS:
            setattr(self, name, self._new_folder(getattr(os, name)))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        return getattr(os, name)

    def install(self) -> None:
        """Let the blocks that this process stores in files lie on this disk."""
        vars(factory)["PosixStorage"] = partial(PosixStorage, calls=self)

    def open(self, path: str, flags: int, mode: int = 0o777, **more: int | None) -> int:
        """As ``os.open``."""
        if flags & _WRITING:
            self._suffer(_ON_CHANGE)
        return os.open(path, flags, mode, **more)

    def write(self, descriptor: int, content: memoryview) -> int:
        """Write, perhaps only half of it: that is when a full disk says so and a process dies."""
        fault = self._trouble().fault
        if len(content) > 1 and (fault is Fault.FULL or self._expects(Step.PERSISTING)):
            half = os.write(descriptor, content[: len(content) // 2])
            self._reached(Step.PERSISTING)
            self._suffer(_ON_WRITE)
            return half
        self._suffer(_ON_WRITE)
        return os.write(descriptor, content)

    def _troubled(self, call: Callable[..., Any], errors: Errors) -> Callable[..., Any]:
        def troubled(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - as the call itself
            self._suffer(errors)
            return call(*args, **named)

        return troubled

    def _new_folder(self, make: Callable[..., None]) -> Callable[..., None]:
        def made(path: str, *args: Any, **named: Any) -> None:  # noqa: ANN401 - as the call itself
            if not os.path.lexists(path):  # of one that is there, also a bad disk says so
                self._suffer(_ON_CHANGE)
            make(path, *args, **named)

        return made

    def _suffer(self, errors: Errors) -> None:
        trouble = self._trouble()
        if trouble.fault is None or self._chance.random() >= trouble.share:
            return
        if trouble.fault is Fault.SLOW:
            time.sleep(trouble.delay_s)
        elif (code := errors.get(trouble.fault)) is not None:
            raise OSError(code, os.strerror(code))
