"""Changes of where an engine's blocks outside HBM are, for their publication (``vllm.kv_events``).

The data plane notes the blocks that are now in this engine's DRAM cache or in storage.  These are
hints, like the updates that the router gets: a block may be evicted, also from storage by another
process, before a subscriber uses it.
"""

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from dualpath.core.blocks import BlockKey, chain_root
from dualpath.engine.threads import OS_THREADS, Threads

#: Blocks that wait to be published; beyond it the oldest events are dropped.
MOST_BLOCKS = 1 << 16


class Medium(StrEnum):
    """Where a block is, in vLLM's words for KV events."""

    DRAM = "CPU"
    STORAGE = "STORAGE"


class BlockEvent(NamedTuple):
    """Blocks that are at a place now, or no longer; ``parent`` precedes the first one, if known."""

    medium: Medium
    keys: tuple[BlockKey, ...]
    stored: bool
    parent: BlockKey | None = None


class BlockEvents:
    """Events since the last ``take``; collects none until ``enabled``.  Thread-safe."""

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self.enabled = False
        self.dropped_blocks = 0
        self._lock = threads.lock()
        self._events: deque[BlockEvent] = deque()
        self._blocks = 0

    def stored(
        self, medium: Medium, keys: Sequence[BlockKey], parent: BlockKey | None = None
    ) -> None:
        """Note that blocks are at a place now; the root of all chains counts as no parent."""
        if self.enabled:
            before = None if parent == chain_root() else parent or None
            self._add(BlockEvent(medium, tuple(keys), True, before))

    def removed(self, medium: Medium, keys: Sequence[BlockKey]) -> None:
        """Note that blocks are at a place no longer."""
        self._add(BlockEvent(medium, tuple(keys), False))

    def take(self) -> list[BlockEvent]:
        """Return the events since the last call, in order."""
        with self._lock:
            taken = list(self._events)
            self._events.clear()
            self._blocks = 0
            return taken

    def _add(self, event: BlockEvent) -> None:
        if not self.enabled or not event.keys:
            return
        with self._lock:
            self._events.append(event)
            self._blocks += len(event.keys)
            while self._blocks > MOST_BLOCKS and len(self._events) > 1:
                dropped = len(self._events.popleft().keys)
                self._blocks -= dropped
                self.dropped_blocks += dropped
