"""The cached blocks of a DRAM buffer, and the order in which they are evicted.

A hit begins with a prompt's first block, so a chain is evicted from its tail: only blocks without a
cached successor are candidates.  Of these the block with the farthest next use is evicted, or the
least recently used one where the next use cannot be predicted (``policy.reuse``).  When a block is
evicted, its predecessor inherits its last use if that is later, so that using a block counts as
using the blocks before it.  A block's *priority* precedes this order: blocks that are retained for
an agent are evicted last, blocks that will not be used again first.  Of retained blocks, the one
with the latest expected turn is evicted first.

Uses are counted in blocks.  The last use of an evicted block is stored for a while, so that
intervals longer than a block's stay in the cache are learned as well; a new block has the interval
of its predecessor.
"""

import heapq
from collections.abc import Iterable, Sequence
from enum import IntEnum

from dualpath.core.blocks import BlockKey
from dualpath.core.key_news import KeyUpdates
from dualpath.policy.reuse import ReuseForecast

#: For each slot the uses of this many evicted blocks are stored.
_EVICTED_PER_SLOT = 4
#: The heaps are rebuilt when one has more entries than this for each evictable block, plus a few.
_MAX_STALE = 4
_SPARE = 64


class EvictionPriority(IntEnum):
    """The first criterion of eviction; a lower priority is evicted first."""

    EVICT_FIRST = 0
    NORMAL = 1
    EVICT_LAST = 2


#: A block's priority and its last use, or of a retained block the negative time of its expected
#: use; the lowest is evicted first.
_LruOrder = tuple[EvictionPriority, int]
#: A block's priority, its next use and the second part of its LRU order, both negative; the lowest
#: is evicted first.
_ForecastOrder = tuple[EvictionPriority, int, int]


class _Block:
    def __init__(self, key: BlockKey, parent: BlockKey) -> None:
        self.key = key
        self.parent = parent
        self.used = 0
        self.order: _LruOrder = (EvictionPriority.NORMAL, 0)
        #: Between its last two uses; 0: unknown.
        self.interval = 0
        self.evictable = False


class CachedBlocks:
    """Cached blocks by slot and by key, each key once; owned by one ``SlotPool``.

    A block is *evictable* while its slot is neither leased nor pinned.  ``capacity`` is the number
    of slots.
    """

    def __init__(self, capacity: int) -> None:
        self.evictable = 0
        self.evicted = 0
        self._blocks: dict[int, _Block] = {}
        self._slots: dict[BlockKey, int] = {}
        #: Number of cached successors of a key, which need not be cached itself.
        self._successors: dict[BlockKey, int] = {}
        #: Keys whose blocks, cached or not, are evicted last, with the time of their expected use.
        self._retained: dict[BlockKey, int] = {}
        self._uses = 0
        #: Heap of (order, slot) of evictable blocks without successors, with stale entries.
        self._by_last_use: list[tuple[_LruOrder, int]] = []
        #: The same blocks by their next use.
        self._by_next_use: list[tuple[_ForecastOrder, int]] = []
        self._reuse = ReuseForecast(max(capacity, 1))
        #: Last use and interval of evicted blocks, the latest last.
        self._evicted_uses: dict[BlockKey, tuple[int, int]] = {}
        self._max_evicted_uses = _EVICTED_PER_SLOT * capacity
        self._updates = KeyUpdates()

    def __len__(self) -> int:
        """Number of cached blocks, evictable or not."""
        return len(self._blocks)

    @property
    def forecasts(self) -> bool:
        """Whether intervals repeat, so that the block with the farthest next use is evicted."""
        return self._reuse.believed

    def __contains__(self, slot: int) -> bool:
        """Whether a slot has a cached block."""
        return slot in self._blocks

    def items(self) -> list[tuple[int, BlockKey]]:
        """Return the slots of all cached blocks with their keys."""
        return [(slot, block.key) for slot, block in self._blocks.items()]

    def has(self, key: BlockKey) -> bool:
        """Whether a block is cached."""
        return key in self._slots

    @property
    def retained(self) -> int:
        """Number of retained keys, cached or not."""
        return len(self._retained)

    def is_retained(self, key: BlockKey) -> bool:
        """Whether a key is retained, cached or not."""
        return key in self._retained

    def cached_slots(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the slots of the longest cached prefix of ``keys``."""
        slots = []
        for key in keys:
            if (slot := self._slots.get(key)) is None:
                break
            slots.append(slot)
        return slots

    def add(self, slot: int, key: BlockKey, parent: BlockKey) -> bool:
        """Cache the complete block in a leased slot; False if its key is cached already.

        ``parent`` is the key before it, empty if unknown.
        """
        if key in self._slots:
            return False
        assert slot not in self._blocks, f"slot {slot} has a cached block already"
        block = self._blocks[slot] = _Block(key, parent)
        block.used, block.interval = self._evicted_uses.pop(key, (0, 0))
        block.order = EvictionPriority.NORMAL, block.used
        self._slots[key] = slot
        self._successors[parent] = self._successors.get(parent, 0) + 1
        self._updates.note(key)
        return True

    def make_evictable(self, slot: int) -> None:
        """The last lease or pin of the slot has ended: count a use of its block."""
        block = self._blocks[slot]
        self._uses += 1
        if not block.evictable:
            self.evictable += 1
            self._learn(block)
        block.used, block.evictable = self._uses, True
        block.order = self._order_of(block.key)
        self._push(slot, block)

    def retain(self, keys: Iterable[BlockKey], expected_ns: int) -> None:
        """Evict the blocks of these keys last, including blocks that are cached later.

        ``expected_ns`` is the time of their expected use, on any clock.
        """
        for key in keys:
            self._retained[key] = expected_ns
            self._reorder(key, (EvictionPriority.EVICT_LAST, -expected_ns))

    def unretain(
        self, keys: Iterable[BlockKey], priority: EvictionPriority = EvictionPriority.NORMAL
    ) -> None:
        """End the retention of these keys and give their cached blocks a priority."""
        for key in keys:
            self._retained.pop(key, None)
            if (slot := self._slots.get(key)) is not None:
                self._reorder(key, (priority, self._blocks[slot].used))

    def touch(self, slot: int) -> bool:
        """A slot is leased: its block is not evictable; return whether it was."""
        block = self._blocks[slot]
        was_evictable, block.evictable = block.evictable, False
        self.evictable -= was_evictable
        return was_evictable

    def is_evictable(self, slot: int) -> bool:
        """Whether the block in a slot may be evicted."""
        return self._blocks[slot].evictable

    def evict(self) -> int:
        """Evict the next block and return its slot; at least one has to be evictable."""
        slot = self._next()
        block = self._blocks[slot]
        assert block.evictable, f"slot {slot} is in use and cannot be evicted"
        self.evicted += 1
        self.evictable -= 1
        self._remove(slot, block)
        parent_slot = self._slots.get(block.parent)
        if parent_slot is not None:
            parent = self._blocks[parent_slot]
            parent.used = max(parent.used, block.used)
            parent.order = max(parent.order, block.order)
            self._push(parent_slot, parent)
        return slot

    def would_evict_for(self, key: BlockKey) -> bool:
        """Whether the next block to evict precedes the block of ``key``, if that were cached."""
        return self.evictable > 0 and self._blocks[self._next()].order < self._order_of(key)

    def evict_all(self) -> list[int]:
        """Evict all evictable blocks; return their slots."""
        return [self.evict() for _ in range(self.evictable)]

    def report_changes(self, *, begin: bool) -> None:
        """Begin to collect changes, all cached keys first; or end it."""
        self._updates.report(self._slots, begin=begin)

    def changes(self, limit: int) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return up to ``limit`` keys that were cached or evicted since the last call."""
        return self._updates.take(limit, self._slots)

    def _order_of(self, key: BlockKey) -> _LruOrder:
        """Return the order of a block that is used now."""
        expected_ns = self._retained.get(key)
        if expected_ns is None:
            return EvictionPriority.NORMAL, self._uses
        return EvictionPriority.EVICT_LAST, -expected_ns

    def _reorder(self, key: BlockKey, order: _LruOrder) -> None:
        if (slot := self._slots.get(key)) is not None:
            block = self._blocks[slot]
            block.order = order
            self._push(slot, block)

    def _learn(self, block: _Block) -> None:
        if block.used:
            interval = self._uses - block.used
            self._reuse.learn(interval, block.interval)
            block.interval = interval
        elif (slot := self._slots.get(block.parent)) is not None:
            block.interval = self._blocks[slot].interval

    def _next(self) -> int:
        while self._by_last_use and not self._is_current(*self._by_last_use[0]):
            heapq.heappop(self._by_last_use)
        if not self._by_last_use:
            # All evictable blocks have successors in use, whose requests mostly use them as well.
            return min((b.order, slot) for slot, b in self._blocks.items() if b.evictable)[1]
        slot = self._by_last_use[0][1]
        age, interval = self._uses - self._blocks[slot].used, self._blocks[slot].interval
        if not self.forecasts or self._reuse.given_up(age, interval):
            return slot
        while True:
            (priority, _, last_use), slot = self._by_next_use[0]
            if self._is_current((priority, -last_use), slot):
                return slot
            heapq.heappop(self._by_next_use)

    def _is_current(self, order: _LruOrder, slot: int) -> bool:
        """Whether a heap entry is not stale: its block is a candidate and has this order."""
        block = self._blocks.get(slot)
        return block is not None and block.order == order and self._is_candidate(block)

    def _forecast(self, block: _Block) -> _ForecastOrder:
        priority, last_use = block.order
        if priority is EvictionPriority.EVICT_LAST:
            return priority, last_use, -last_use
        return priority, -last_use - self._reuse.expected(block.interval), -last_use

    def _is_candidate(self, block: _Block) -> bool:
        return block.evictable and block.key not in self._successors

    def _push(self, slot: int, block: _Block) -> None:
        if self._is_candidate(block):
            heapq.heappush(self._by_last_use, (block.order, slot))
            heapq.heappush(self._by_next_use, (self._forecast(block), slot))
            longest = max(len(self._by_last_use), len(self._by_next_use))
            if longest > _MAX_STALE * self.evictable + _SPARE:
                self._rebuild_heaps()

    def _rebuild_heaps(self) -> None:
        candidates = [(slot, b) for slot, b in self._blocks.items() if self._is_candidate(b)]
        self._by_last_use = [(b.order, slot) for slot, b in candidates]
        self._by_next_use = [(self._forecast(b), slot) for slot, b in candidates]
        heapq.heapify(self._by_last_use)
        heapq.heapify(self._by_next_use)

    def _remove(self, slot: int, block: _Block) -> None:
        del self._blocks[slot], self._slots[block.key]
        self._evicted_uses[block.key] = block.used, block.interval
        if len(self._evicted_uses) > self._max_evicted_uses:
            del self._evicted_uses[next(iter(self._evicted_uses))]
        left = self._successors[block.parent] - 1
        if left:
            self._successors[block.parent] = left
        else:
            del self._successors[block.parent]
        self._updates.note(block.key)


def with_parents(keys: Iterable[BlockKey], parent: BlockKey) -> Iterable[tuple[BlockKey, BlockKey]]:
    """Return consecutive keys, each with its predecessor; ``parent`` is that of the first one."""
    for key in keys:
        yield key, parent
        parent = key
