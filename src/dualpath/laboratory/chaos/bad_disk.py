"""``os`` and ``open`` as the storage's modules see them in a process under test: a bad disk.

The code of the storage runs as it is; its calls of the kernel fail as those of a disk that is full,
broken, slow or read-only, in as many cases as the campaign says.
"""

import errno
import os
import random
import time
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, Self

from dualpath.laboratory.chaos.gate import Disk
from dualpath.laboratory.chaos.matrix import Fault, Step
from dualpath.storage import directory, posix, reading

#: The storage's modules that ask the kernel for blocks.
BLOCK_MODULES = (posix, directory, reading)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_ON_READ = {Fault.IO_ERROR: errno.EIO}
_ON_WRITE = {Fault.IO_ERROR: errno.EIO, Fault.FULL: errno.ENOSPC, Fault.READ_ONLY: errno.EROFS}
_ON_CHANGE = {Fault.FULL: errno.ENOSPC, Fault.READ_ONLY: errno.EROFS}
#: Calls that fail as a change of a directory does.
_CHANGES = ("link", "rename", "unlink", "mkdir", "makedirs")
_READS = ("preadv", "pread", "readv", "read")
_WRITES = ("write", "pwrite", "writev", "fsync")

Errors = dict[Fault, int]


class BadDisk:
    """Stands for the module ``os``: everything that is not troubled is the real thing.

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
        for names, errors in ((_READS, _ON_READ), (_WRITES, _ON_WRITE), (_CHANGES, _ON_CHANGE)):
            for name in names:
                setattr(self, name, self._troubled(getattr(os, name), errors))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        return getattr(os, name)

    def install(self, *modules: ModuleType) -> None:
        """Let these modules see this disk and no other."""
        for module in modules:
            vars(module)["os"] = self
            vars(module)["open"] = self.open_file

    def open(self, path: str, flags: int, mode: int = 0o777, **more: int | None) -> int:
        """As ``os.open``."""
        if flags & _WRITING:
            self._suffer(_ON_CHANGE)
        return os.open(path, flags, mode, **more)

    def open_file(self, path: str, mode: str = "r", **more: Any) -> Any:  # noqa: ANN401 - a file
        """As ``open``; what is written without a buffer may fail half-way."""
        if "r" not in mode:
            self._suffer(_ON_CHANGE)
        file = open(path, mode, **more)  # noqa: SIM115 - the caller closes it
        return _File(file, self._write) if more.get("buffering") == 0 else file

    def _write(self, write: Callable[[memoryview], int], content: memoryview) -> int:
        """Write, perhaps only half of it: that is when a full disk says so and a process dies."""
        fault = self._trouble().fault
        if len(content) > 1 and (fault is Fault.FULL or self._expects(Step.PERSISTING)):
            half = write(content[: len(content) // 2])
            self._reached(Step.PERSISTING)
            self._suffer(_ON_WRITE)
            return half
        self._suffer(_ON_WRITE)
        return write(content)

    def _troubled(self, call: Callable[..., Any], errors: Errors) -> Callable[..., Any]:
        def troubled(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - as the call itself
            self._suffer(errors)
            return call(*args, **named)

        return troubled

    def _suffer(self, errors: Errors) -> None:
        trouble = self._trouble()
        if trouble.fault is None or self._chance.random() >= trouble.share:
            return
        if trouble.fault is Fault.SLOW:
            time.sleep(trouble.delay_s)
        elif (code := errors.get(trouble.fault)) is not None:
            raise OSError(code, os.strerror(code))


class _File:
    """An unbuffered file whose writes go through ``write``."""

    def __init__(
        self,
        file: Any,  # noqa: ANN401 - what ``open`` returns
        write: Callable[[Callable[[memoryview], int], memoryview], int],
    ) -> None:
        self._file = file
        self._through = write

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the file has
        return getattr(self._file, name)

    def write(self, content: memoryview) -> int:
        """As a file's ``write``."""
        return self._through(self._file.write, memoryview(content))
