"""The storage of a simulated cluster: the real file storage on a simulated, unreliable disk."""

from collections.abc import Callable, Iterator, Sequence

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin
from dualpath.laboratory.chaos.simulation.calls import StorageFaults
from dualpath.laboratory.chaos.simulation.disk import Disk
from dualpath.laboratory.chaos.simulation.threads import SimThreads
from dualpath.storage.block_header import HEADER_BYTES
from dualpath.storage.checks import run_origins
from dualpath.storage.contract import ReadOutcome
from dualpath.storage.objects import ObjectInfo, ObjectTree
from dualpath.storage.posix import PosixStorage

_DELAYS_S = (0.0002, 0.0005, 0.001, 0.003)
#: Probability that a slow read fails after it has written part of its destination.
_SLOW_FAIL = 0.5


class Pace:
    """Delays of one process's operations on the storage."""

    def __init__(self, threads: SimThreads, faults: StorageFaults) -> None:
        self.world = threads.world
        self.faults = faults
        self._threads = threads

    def take_time(self, what: str) -> bool:
        """Wait; return whether the operation was slow."""
        self.world.maybe_fault()
        delay_s = self.world.pick(_DELAYS_S)
        if self.faults.slow and self.world.chance.random() < self.faults.slow:
            delay_s = self.world.chance.uniform(*self.faults.slow_s)
            self.faults.injected += 1
            self.world.note(self._threads.process.name, f"{what} takes {delay_s:.3f} s")
        self._threads.sleep(delay_s)
        return delay_s >= self.faults.slow_s[0]

    def happens(self, how_often: float, what: str) -> bool:
        """Whether a fault with this probability occurs now."""
        if not how_often or self.world.chance.random() >= how_often:
            return False
        self.faults.injected += 1
        self.world.note(self._threads.process.name, what)
        return True


class SimStorage:
    """One engine's access to the shared storage: ``storage.contract.BlockStorage``."""

    def __init__(
        self, inner: PosixStorage, disk: Disk, pace: Pace, check: Callable[[memoryview], None]
    ) -> None:
        self.geometry = inner.geometry
        self.parallel_lookups = 2
        self._inner = inner
        self._disk = disk
        self._pace = pace
        self._check = check

    def is_stored(self, key: BlockKey) -> bool:
        """Look up a block after a delay."""
        self._pace.take_time("look-up")
        return self._inner.is_stored(key)

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read a block after a delay; the read may fail or the block may be corrupted."""
        slow = self._pace.take_time("read")
        self._check(destination)
        if slow and self._pace.happens(_SLOW_FAIL, "read fails"):
            destination[: len(destination) // 2] = bytes(len(destination) // 2)
            return ReadOutcome(0, "read error: injected")
        if self._pace.happens(self._pace.faults.corrupting, f"block {key.hex()[:8]} is corrupted"):
            self._corrupt(key)
        return self._inner.read(key, destination, whole=whole)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> int:
        """Write one block after the other, each after a delay."""
        new = 0
        for key, source, own in zip(keys, sources, run_origins(keys, origin), strict=True):
            self._pace.take_time("write")
            new += self._inner.write([key], [source], own)
        return new

    def used(self, key: BlockKey) -> None:
        """See ``BlockStorage``; nothing to record here."""

    def close(self) -> None:
        """Close the files."""
        self._inner.close()

    def _corrupt(self, key: BlockKey) -> None:
        file = self._disk.files.get(str(self._inner.block_path(key)))
        if file is not None:
            file.corrupted = True
            file.content[self._pace.world.chance.randrange(HEADER_BYTES, len(file.content))] ^= 1


class SimTree:
    """One engine's access to other objects: ``storage.objects.ObjectTree`` with delays."""

    def __init__(self, inner: ObjectTree, pace: Pace) -> None:
        self._inner = inner
        self._pace = pace

    def create(self, name: str, content: bytes) -> bool:
        """Create an object after a delay."""
        self._pace.take_time("creating an object")
        return self._inner.create(name, content)

    def replace(self, name: str, content: bytes) -> None:
        """Replace an object after a delay."""
        self._pace.take_time("replacing an object")
        self._inner.replace(name, content)

    def get(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Return an object without a delay."""
        return self._inner.get(name, max_bytes)

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects one after the other, each after a delay."""
        removed = 0
        for name in names:
            self._pace.take_time("removing an object")
            removed += self._inner.remove([name])
        return removed

    def folders(self, prefix: str) -> list[str]:
        """List folders."""
        return self._inner.folders(prefix)

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """List objects."""
        return self._inner.objects(prefix)
