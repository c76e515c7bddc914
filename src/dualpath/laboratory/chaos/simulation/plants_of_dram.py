"""Bugs to plant in what DRAM keeps: for agents' next turns, and for all engines of a machine."""

from collections.abc import Callable

from dualpath.core.blocks import BlockKey
from dualpath.engine.read_queue import ReadQueue, ReadTask
from dualpath.engine.retention import Retention
from dualpath.engine.slots import NOBODY, SlotPool
from dualpath.laboratory.chaos.simulation.plant import Plant, instead
from dualpath.storage.contract import ReadOutcome
from dualpath.storage.node_dram import NodeDram, NodeDramStorage


def _good_if_fetched(
    self: ReadQueue, task: ReadTask, position: int, slot: int, track: str
) -> ReadOutcome:
    """``ReadQueue._read`` that finds good whatever is brought back."""
    outcome = _read(self, task, position, slot, track)
    return ReadOutcome(outcome.bytes_read) if task.request_id == NOBODY else outcome


def _taken_from_nobody(self: SlotPool, key: BlockKey) -> int | None:
    """``SlotPool.take_for`` that does not let go of the block whose slot it takes."""
    if self._free or self._waiting or not self.kept.gives_way_to(key):
        return _take_for(self, key)
    slot = self.kept._next()
    self.kept.wake(slot)
    self._leased[slot], self._holder[slot] = 1, NOBODY
    return slot


def _sharing(is_shared: Callable[[ReadOutcome, bool], bool]) -> Callable[..., ReadOutcome]:
    """Return a ``NodeDramStorage.read`` that shares by how a read ended, and if it was whole."""

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


_read, _take_for = ReadQueue._read, SlotPool.take_for

#: By name, in the order of the reference.
DRAM_PLANTS: dict[str, Plant] = {
    "order-unending": Plant(
        "an order to keep blocks for an agent does not end by itself",
        instead(Retention, "expire", lambda self, now_ns: None),
    ),
    "fetched-unverified": Plant(
        "what is brought back is kept, however its read has ended",
        instead(ReadQueue, "_read", _good_if_fetched),
    ),
    "fetched-over-kept": Plant(
        "what is brought back takes a slot whose block is still believed to be there",
        instead(SlotPool, "take_for", _taken_from_nobody),
    ),
    "shared-unverified": Plant(
        "what was read badly is shared with the engines of the machine",
        instead(NodeDramStorage, "read", _sharing(lambda outcome, whole: whole)),
    ),
    "shared-in-part": Plant(
        "a block that was read without its window layers is shared as a whole one",
        instead(NodeDramStorage, "read", _sharing(lambda outcome, whole: outcome.is_good)),
    ),
    "shared-unbounded": Plant(
        "what is shared grows, and nothing makes way",
        instead(NodeDram, "_make_room", lambda self, key: None),
    ),
}
