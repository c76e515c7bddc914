"""The storage of a simulated cluster: shared, slow at times, and not to be relied on."""

from collections.abc import Callable, Sequence

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin
from dualpath.core.errors import StorageError
from dualpath.laboratory.chaos.simulation.threads import SimThreads
from dualpath.storage.checks import own_origins
from dualpath.storage.contract import ReadOutcome
from dualpath.storage.memory import MemoryStorage

_DELAYS_S = (0.0002, 0.0005, 0.001, 0.003)
#: How often what takes unusually long fails in the end, having written something all the same.
_SLOW_FAIL = 0.5


class StorageFaults:
    """How often an operation on the storage goes wrong now."""

    def __init__(self) -> None:
        self.slow = 0.0
        self.slow_s = (0.1, 6.0)
        self.failing = 0.0
        self.full = False
        self.corrupting = 0.0
        self.injected = 0


class SimStorage:
    """One engine's access to the storage of all: ``storage.contract.BlockStorage``."""

    def __init__(
        self,
        shared: MemoryStorage,
        threads: SimThreads,
        faults: StorageFaults,
        check: Callable[[memoryview], None],
    ) -> None:
        self.geometry = shared.geometry
        self.parallel_lookups = 2
        self._shared = shared
        self._threads = threads
        self._world = threads.world
        self._faults = faults
        self._check = check

    def is_stored(self, key: BlockKey) -> bool:
        """Look up, which takes a while; raises ``StorageError`` when the storage fails."""
        self._take_time("look-up")
        if self._happens(self._faults.failing, "look-up fails"):
            raise StorageError("the adversary fails the look-up")
        return self._shared.is_stored(key)

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read, with bytes that arrive late, or broken, or not at all."""
        slow = self._take_time("read")
        self._check(destination)
        failing = _SLOW_FAIL if slow else self._faults.failing
        if self._happens(failing, "read fails"):
            destination[: len(destination) // 2] = bytes(len(destination) // 2)
            return ReadOutcome(0, "read error: the adversary")
        if self._happens(self._faults.corrupting, f"block {key.hex()[:8]} rots"):
            try:
                self._shared.corrupt(
                    key, offset_bytes=self._world.chance.randrange(len(destination))
                )
            except KeyError:
                return ReadOutcome(0, "missing")
        return self._shared.read(key, destination, whole=whole)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> int:
        """Write one block after the other, each taking a while."""
        new = 0
        for key, source, own in zip(keys, sources, own_origins(keys, origin), strict=True):
            self._take_time("write")
            if self._faults.full or self._happens(self._faults.failing, "write fails"):
                raise StorageError("the adversary fails the write")
            new += self._shared.write([key], [source], own)
        return new

    def used(self, key: BlockKey) -> None:
        """Nothing is removed here."""

    def close(self) -> None:
        """Nothing is held."""

    def _take_time(self, what: str) -> bool:
        """Wait; return whether it took unusually long."""
        self._world.moment()
        delay_s = self._world.pick(_DELAYS_S)
        if self._faults.slow and self._world.chance.random() < self._faults.slow:
            delay_s = self._world.chance.uniform(*self._faults.slow_s)
            self._faults.injected += 1
            self._world.note(self._threads.process.name, f"{what} takes {delay_s:.3f} s")
        self._threads.sleep(delay_s)
        return delay_s >= self._faults.slow_s[0]

    def _happens(self, how_often: float, what: str) -> bool:
        if not how_often or self._world.chance.random() >= how_often:
            return False
        self._faults.injected += 1
        self._world.note(self._threads.process.name, what)
        return True
