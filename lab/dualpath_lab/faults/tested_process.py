"""A process under test: `dualpath emulate` with failpoints, and with a disk that may be faulty.

python -m dualpath_lab.faults.tested_process '{"socket": ...}' prefill --model ...
"""

import errno
import mmap
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from dualpath.launch.commands import ENGINE_ENTRY, ROUTER_ENTRY
from dualpath.launch.forked_engine import prepare_engine, run_entry
from dualpath.storage import factory
from dualpath.storage.contract import ReadOutcome
from dualpath.storage.posix import PosixStorage
from dualpath.storage.wrapping import LookupCachingStorage
from dualpath_lab.emulated.rank_processes import ConnectedFollower, RankConnection
from dualpath_lab.faults.failpoint_channel import DiskFault, FailpointClient
from dualpath_lab.faults.failpoints import FAILPOINTS, EngineKind, install_failpoints
from dualpath_lab.faults.matrix import Component, Fault, Step, follower_name

# ---------------------------------------------------------------------------------------- bad disk
# System calls of the storage in a process under test, which fail as those of a faulty disk.
#
# The storage's own code is unchanged.  Its system calls fail as on a disk that is full, broken,
# slow or read-only, in a share of cases that the campaign sets.

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


# ------------------------------------------------------------------------------------------- tally
# Count of the stored blocks that a process has loaded, in a file that survives a SIGKILL.

_COUNTS = struct.Struct("<QQ")


class BlockCounter:
    """Counts of one run of a process: blocks loaded and verified, and blocks refused.

    They are in a memory-mapped file, so that the last count before a SIGKILL is preserved.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_COUNTS.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _COUNTS.size)
        self._lock = threading.Lock()
        self._good = self._bad = 0

    def add(self, *, good: bool) -> None:
        """Count a block; may be called from any thread."""
        with self._lock:
            self._good += good
            self._bad += not good
            _COUNTS.pack_into(self._memory, 0, self._good, self._bad)


def loaded_blocks(folder: Path) -> tuple[int, int]:
    """Return the sum of (good, refused) blocks over all counters in a folder."""
    counts = [_COUNTS.unpack(path.read_bytes()) for path in folder.iterdir()]
    return sum(good for good, _ in counts), sum(bad for _, bad in counts)


#: The entry point of a process under test.
ENTRY = "dualpath_lab.faults.tested_process:main"


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a process under test: its name, the campaign's socket, where it counts blocks.

    The campaign arms its failpoints under ``failpoint_name``.  ``tallies`` is the folder of block
    counts; paths are absolute.
    """

    process: str
    failpoint_name: str
    kind: EngineKind
    component: Component
    socket: str
    tallies: str
    seed: int

    def argument(self) -> str:
        """Encode it as the first argument of the process."""
        return msgspec.json.encode(self).decode()


def prepare(settings: ProcessSettings) -> None:
    """Connect to the campaign and install the failpoints of this process."""
    failpoints = FailpointClient(Path(settings.socket), settings.failpoint_name)
    points = FAILPOINTS[settings.kind]
    parts = [component for component in points if component.failure_domain is settings.component]
    for component in parts:
        install_failpoints(points[component], failpoints.reached)
    if settings.kind is EngineKind.EMULATED and settings.component.is_engine:
        _rename_ranks(failpoints, settings.failpoint_name)
    if settings.component.is_engine:
        _count_loads(BlockCounter(Path(settings.tallies) / f"{settings.process}-{os.getpid()}"))
        chance = random.Random(f"{settings.seed} {settings.process}")
        FaultyDisk(
            lambda: failpoints.disk, failpoints.reached, failpoints.expects, chance
        ).install()


def _rename_ranks(failpoints: FailpointClient, engine: str) -> None:
    begin = ConnectedFollower.__init__

    def named(self: ConnectedFollower, rank: int, size: int, connection: RankConnection) -> None:
        begin(self, rank, size, connection)
        failpoints.rename(follower_name(engine, rank))

    ConnectedFollower.__init__ = named  # type: ignore[assignment, method-assign]


def _count_loads(tally: BlockCounter) -> None:
    # Counts blocks that an engine gets; look-ups that find nothing are not counted.
    read = LookupCachingStorage.read

    def counted(
        self: LookupCachingStorage, key: bytes, destination: memoryview, *, whole: bool = True
    ) -> ReadOutcome:
        outcome = read(self, key, destination, whole=whole)
        tally.add(good=outcome.is_good)
        return outcome

    LookupCachingStorage.read = counted  # type: ignore[method-assign]


def main() -> NoReturn:
    """Run the command after the first argument, with the failpoints installed."""
    settings = msgspec.json.decode(sys.argv.pop(1), type=ProcessSettings)
    is_vllm_engine = settings.kind is EngineKind.VLLM and settings.component.is_engine
    if is_vllm_engine:
        prepare_engine()
    prepare(settings)
    run_entry(ENGINE_ENTRY if is_vllm_engine else ROUTER_ENTRY, sys.argv[1:])
