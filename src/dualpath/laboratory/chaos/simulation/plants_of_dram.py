"""Planted bugs of DRAM: blocks retained for agents' next turns, and blocks shared by engines."""

from collections.abc import Callable

from dualpath.core.blocks import BlockKey
from dualpath.engine.read_queue import ReadQueue, ReadTask
from dualpath.engine.retention import Retention
from dualpath.engine.slots import NO_REQUEST, SlotPool
from dualpath.laboratory.chaos.simulation.plant import PlantedBug, replaced
from dualpath.storage.contract import ReadOutcome
from dualpath.storage.node_dram import NodeDram, NodeDramStorage


def _good_if_fetched(
    self: ReadQueue, task: ReadTask, position: int, slot: int, track: str
) -> ReadOutcome:
    """``ReadQueue._read`` that reports every prefetched block as good."""
    outcome = _read(self, task, position, slot, track)
    return ReadOutcome(outcome.bytes_read) if task.request_id == NO_REQUEST else outcome


def _allocated_without_eviction(self: SlotPool, key: BlockKey) -> int | None:
    """``SlotPool.allocate_for`` that does not evict the block whose slot it leases."""
    if self._free or self._waiting or not self.cached.would_evict_for(key):
        return _allocate_for(self, key)
    slot = self.cached._next()
    self.cached.touch(slot)
    self._ref_count[slot], self._writer[slot] = 1, NO_REQUEST
    return slot


def _sharing(is_shared: Callable[[ReadOutcome, bool], bool]) -> Callable[..., ReadOutcome]:
    """Return a ``NodeDramStorage.read`` that shares a block if ``is_shared(outcome, whole)``."""

    def read(
        self: NodeDramStorage, key: BlockKey, destination: memoryview, *, whole: bool = True
    ) -> ReadOutcome:
        if (found := self.dram.read(key, destination, whole=whole)) is not None:
            return found
        outcome = self.inner.read(key, destination, whole=whole)
        if is_shared(outcome, whole):
            self.dram.add(key, destination)
        return outcome

    return read


_read, _allocate_for = ReadQueue._read, SlotPool.allocate_for

#: By name, in the order of docs/reference/simulated-faults.md.
DRAM_BUGS: dict[str, PlantedBug] = {
    "retention-unending": PlantedBug(
        "the retention of an agent's blocks does not expire",
        replaced(Retention, "expire", lambda self, now_ns: None),
    ),
    "prefetched-unverified": PlantedBug(
        "a prefetched block is cached even if its read failed",
        replaced(ReadQueue, "_read", _good_if_fetched),
    ),
    "prefetched-over-cached": PlantedBug(
        "a prefetched block takes a slot whose block is not removed from the cache",
        replaced(SlotPool, "allocate_for", _allocated_without_eviction),
    ),
    "shared-unverified": PlantedBug(
        "a block whose read failed is shared with the engines of the machine",
        replaced(NodeDramStorage, "read", _sharing(lambda outcome, whole: whole)),
    ),
    "shared-in-part": PlantedBug(
        "a block that was read without its window layers is shared as complete",
        replaced(NodeDramStorage, "read", _sharing(lambda outcome, whole: outcome.is_good)),
    ),
    "shared-unbounded": PlantedBug(
        "nothing is evicted from shared DRAM",
        replaced(NodeDram, "_make_room", lambda self, key: None),
    ),
}
