"""The PE or DE buffer: registered DRAM divided into Full Block slots (§4.1)."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import msgspec

from dualpath.core.blocks import BlockGeometry, BlockKey
from dualpath.core.errors import BufferTooSmallError
from dualpath.core.recent import KeyUpdates
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.policy.reuse import ReuseForecast
from dualpath.transport.contract import RegionInfo
from dualpath.transport.memory import RegisteredMemory, allocate_registered

# ----------------------------------------------------------------------------------- cached blocks
# The cached blocks of a DRAM buffer, and the order in which they are evicted.
#
# A hit begins with a prompt's first block, so a chain is evicted from its tail: only blocks without
# a cached successor are candidates.  Of these the block with the farthest next use is evicted, or
# the least recently used one where the next use cannot be predicted (``policy.reuse``).  When a
# block is evicted, its predecessor inherits its last use if that is later, so that using a block
# counts as using the blocks before it.  A block's *priority* precedes this order: blocks that are
# retained for an agent are evicted last, blocks that will not be used again first.  Of retained
# blocks, the one with the latest expected turn is evicted first.
#
# Uses are counted in blocks.  The last use of an evicted block is stored for a while, so that
# intervals longer than a block's stay in the cache are learned as well; a new block has the
# interval of its predecessor.

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
        #: Keys of blocks that are evicted last, cached or not, with the time of their expected use.
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

    def slots(self, keys: Sequence[BlockKey]) -> list[int] | None:
        """Return the slots of these blocks, None if one is not cached."""
        slots = [self._slots[key] for key in keys if key in self._slots]
        return slots if len(slots) == len(keys) else None

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
            # All evictable blocks have successors in use, and mostly the same requests use both.
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


# ------------------------------------------------------------------------------------------- slots
# The slots of a DRAM buffer: reservations, leases and pins, without memory or threads (§4.1).
#
# Four rules keep KV correct and exclude deadlocks:
#
# * Reservations are granted FIFO and as a whole.  A request never waits for a second reservation in
#   the same buffer, so no two requests can wait for each other.
# * A slot is free only when its reference count is 0 *and* it is not pinned.  Code that reads or
#   writes a slot's memory pins the slot for that time, so that a late write never reaches another
#   request's block.
# * A slot is quarantined instead of freed while its writer is not confirmed dead.
# * A slot with a cached block is read-only, also for the request that filled it.  The block stays
#   cached when the lease ends, while the slot counts as free.  A request that hits the block is
#   granted that slot; several requests may share it.

#: The owner of slots that belong to no request.
NO_REQUEST = ""


class Grant(msgspec.Struct, frozen=True):
    """A granted reservation; its first ``cached`` slots hold their blocks already."""

    request_id: str
    slots: tuple[int, ...]
    cached: int = 0


class _Waiting(msgspec.Struct, frozen=True):
    request_id: str
    count: int
    keys: Sequence[BlockKey]


class SlotPool:
    """Slots ``0 … capacity - 1`` with FIFO leases and pins; owned by one traffic manager.

    ``caching`` False: a block is evicted when its lease ends.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.caching = True
        self.cached = CachedBlocks(capacity)
        self._free: deque[int] = deque(range(capacity))
        #: Slots with a lease or a pin.
        self._in_use = 0
        self._pins = [0] * capacity
        self._ref_count = [0] * capacity
        #: The request that may write to a slot; None: read-only, quarantined or free.
        self._writer: list[str | None] = [None] * capacity
        self._leases: dict[str, list[int]] = {}
        self._waiting: deque[_Waiting] = deque()
        self._quarantine: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        """Number of slots that could be granted now, including those with evictable blocks."""
        return len(self._free) + self.cached.evictable

    @property
    def waiting(self) -> int:
        """Number of reservations that are not granted yet."""
        return len(self._waiting)

    def slots_of(self, request_id: str) -> tuple[int, ...]:
        """Return the slots a request holds, in block order; empty if none."""
        return tuple(self._leases.get(request_id, ()))

    def may_write(self, request_id: str, slot: int) -> bool:
        """Whether a request holds a slot that is not shared and not read-only."""
        return self._writer[slot] == request_id

    def is_leased(self, slot: int) -> bool:
        """Whether a slot is leased, to a request or to none, or quarantined."""
        return self._ref_count[slot] > 0

    def is_pinned(self, slot: int) -> bool:
        """Whether a slot's memory is being read or written."""
        return self._pins[slot] > 0

    def owner(self, slot: int) -> str | None:
        """Return the request for which KV may arrive in a slot; None if for none.

        None as well for a slot with a cached block, which is read-only.  Takes time in proportion
        to all leases.
        """
        if slot in self.cached:
            return None
        for slots_by_request in (self._leases, self._quarantine):
            for request_id, slots in slots_by_request.items():
                if slot in slots:
                    return request_id
        return None

    def request(self, request_id: str, count: int, keys: Sequence[BlockKey] = ()) -> list[Grant]:
        """Queue a reservation of ``count`` ≥ 1 slots; return the reservations granted now.

        ``keys`` are those of its first blocks: when the reservation is granted, the longest cached
        prefix of them gets its cached slots.  Raises ``BufferTooSmallError`` if the buffer could
        never hold the reservation.
        """
        if count > self.capacity:
            raise BufferTooSmallError(
                f"request {request_id} needs {count} Full Blocks of buffer, the whole buffer has "
                f"{self.capacity}; raise buffer_bytes or lower max_model_len"
            )
        self._waiting.append(_Waiting(request_id, count, keys[:count]))
        return self.grant()

    def grant(self) -> list[Grant]:
        """Grant reservations from the head of the queue while they fit."""
        granted = []
        while self._waiting and (grant := self._lease(self._waiting[0])) is not None:
            self._waiting.popleft()
            granted.append(grant)
        self._check_count()
        return granted

    def grant_now(self, request_id: str, count: int, keys: Sequence[BlockKey] = ()) -> Grant | None:
        """Grant a reservation as ``request``, None if it would have to wait: it is not queued."""
        wanted = _Waiting(request_id, count, keys[:count])
        grant = None if self._waiting else self._lease(wanted)
        self._check_count()
        return grant

    def _lease(self, wanted: _Waiting) -> Grant | None:
        """Grant a reservation if it fits."""
        request_id, count, keys = msgspec.structs.astuple(wanted)
        if count - len(keys) > self.free:
            return None
        cached = self.cached.cached_slots(keys)
        if count - len(cached) > self.free - sum(map(self.cached.is_evictable, cached)):
            return None
        assert request_id not in self._leases, f"request {request_id} has a lease already"
        for slot in cached:
            self._in_use += self.cached.touch(slot)
            self._ref_count[slot] += 1
        slots = cached + [self._allocate(request_id) for _ in range(count - len(cached))]
        self._leases[request_id] = slots
        return Grant(request_id, tuple(slots), len(cached))

    def lease_spare(
        self, request_id: str, keys: Sequence[BlockKey], cached: int, spare: int
    ) -> Grant | str:
        """Lease a slot per block to another engine's request, or return why not.

        The first ``cached`` of its blocks have to be cached.  Nothing waits, no block is evicted,
        and ``spare`` slots must be left that a reservation could get.
        """
        if self._waiting:
            return f"{len(self._waiting)} reservations wait for slots"
        slots = self.cached.slots(keys[:cached])
        if slots is None:
            return f"one of {cached} blocks is not cached any more"
        new = len(keys) - cached
        if new > len(self._free):
            return f"{new} blocks need slots, {len(self._free)} are free without an eviction"
        left = self.free - new - sum(map(self.cached.is_evictable, slots))
        if left < spare:
            return f"{left} slots would be left, {spare} are for requests of this engine"
        for slot in slots:
            self._in_use += self.cached.touch(slot)
            self._ref_count[slot] += 1
        leased = [*slots, *(self._allocate(request_id) for _ in range(new))]
        assert request_id not in self._leases, f"request {request_id} has a lease already"
        self._leases[request_id] = leased
        self._check_count()
        return Grant(request_id, tuple(leased), cached)

    def allocate(self) -> int | None:
        """Lease a free slot to no request; None if none is free.

        Does not overtake waiting reservations: with any of them queued it returns None.
        """
        return None if self._waiting or not self.free else self._allocate(NO_REQUEST)

    def allocate_for(self, key: BlockKey) -> int | None:
        """As ``allocate``; None also if all blocks to evict have a later order than ``key``."""
        return self.allocate() if self._free or self.cached.would_evict_for(key) else None

    def free_slot(self, slot: int) -> None:
        """End the lease of a slot from ``allocate``."""
        self._end_lease(slot)
        self._check_count()

    def cache_blocks(
        self, owner: str, slots: Iterable[int], keys: Iterable[BlockKey], parent: BlockKey
    ) -> None:
        """Cache the complete blocks in slots of a request, or of ``NO_REQUEST``.

        The slots are read-only from now on.  ``keys`` are their consecutive keys, with ``parent``
        before them.  Slots that ``owner`` may not write to, and blocks that are cached in another
        slot already, are skipped.
        """
        if not self.caching:
            return
        for slot, (key, before) in zip(slots, with_parents(keys, parent), strict=True):
            if self._writer[slot] == owner and self.cached.add(slot, key, before):
                assert self._ref_count[slot] == 1, f"slot {slot} is written and shared"
                self._writer[slot] = None

    def set_caching(self, *, enabled: bool) -> None:
        """Cache blocks from now on, or none: then evict all evictable blocks at once."""
        self.caching = enabled
        if not enabled:
            self._free.extend(self.cached.evict_all())

    def replace(self, request_id: str, slots: Iterable[int]) -> bool:
        """Exchange some of the request's slots for free ones; False if too few are free.

        The request must be able to write to the old slots, which become free once unpinned.
        """
        replaced = list(slots)
        if len(replaced) > self.free:
            return False
        held = self._leases[request_id]
        for old in replaced:
            held[held.index(old)] = self._allocate(request_id)
            self._end_lease(old)
        self._check_count()
        return True

    def release(self, request_id: str) -> bool:
        """End a request's lease or its waiting; True if it had either."""
        before = len(self._waiting)
        self._waiting = deque(w for w in self._waiting if w.request_id != request_id)
        slots = self._leases.pop(request_id, None)
        for slot in slots or ():
            self._end_lease(slot)
        self._check_count()
        return slots is not None or len(self._waiting) < before

    def quarantine(self, request_id: str) -> None:
        """Quarantine a request's slots until ``end_quarantine``.

        Its slots with cached blocks, to which no transfer writes, are freed instead.
        """
        for slot in self._leases.pop(request_id, ()):
            if self._writer[slot] is None:
                self._end_lease(slot)
            else:
                self._writer[slot] = None
                self._quarantine.setdefault(request_id, []).append(slot)

    def has_request(self, request_id: str) -> bool:
        """Whether a request has slots, waits for some, or has some in quarantine."""
        waits = any(waiting.request_id == request_id for waiting in self._waiting)
        return waits or request_id in self._leases or request_id in self._quarantine

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Requests with slots in quarantine."""
        return tuple(self._quarantine)

    @property
    def quarantined_slots(self) -> int:
        """Number of slots in quarantine."""
        return sum(map(len, self._quarantine.values()))

    def end_quarantine(self, request_id: str) -> None:
        """Free a request's quarantined slots: its writer is confirmed dead or has finished."""
        for slot in self._quarantine.pop(request_id, ()):
            self._end_lease(slot)
        self._check_count()

    def pin(self, slots: Iterable[int]) -> None:
        """Pin slots before their memory is read or written."""
        for slot in slots:
            assert self._ref_count[slot] or self._pins[slot], f"slot {slot} is free"
            self._pins[slot] += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """End a pin of each slot; raises ``ValueError`` for a slot that is not pinned."""
        for slot in slots:
            if self._pins[slot] < 1:
                raise ValueError(f"slot {slot} is not pinned")
            self._pins[slot] -= 1
            self._free_if_unused(slot)
        self._check_count()

    def _allocate(self, owner: str) -> int:
        slot = self._free.popleft() if self._free else self.cached.evict()
        assert not self._ref_count[slot], f"slot {slot} is leased and free"
        assert not self._pins[slot], f"slot {slot} is pinned and free"
        self._in_use += 1
        self._ref_count[slot], self._writer[slot] = 1, owner
        return slot

    def _end_lease(self, slot: int) -> None:
        assert self._ref_count[slot] > 0, f"slot {slot} is not leased"
        self._ref_count[slot] -= 1
        self._writer[slot] = None
        self._free_if_unused(slot)

    def _free_if_unused(self, slot: int) -> None:
        if self._ref_count[slot] or self._pins[slot]:
            return
        self._in_use -= 1
        if slot not in self.cached:
            self._free.append(slot)
        else:
            self.cached.make_evictable(slot)
            if not self.caching:
                self._free.extend(self.cached.evict_all())

    def _check_count(self) -> None:
        """Every slot is free, evictable or in use; a slot that is freed twice breaks the sum."""
        assert self.free + self._in_use == self.capacity, (
            f"{self.free} free slots and {self._in_use} in use of {self.capacity}"
        )


#: Names under which every engine registers its buffer and its staging slots for generated blocks.
BUFFER_REGION = "buffer"
STAGING_REGION = "staging"


def buffer_region(name: str, geometry: BlockGeometry, memory: RegisteredMemory) -> RegionInfo:
    """Return the region of memory that is divided into Full Blocks, for a transport."""
    size_bytes = geometry.full_block_bytes
    return RegionInfo(
        name=name,
        base_address=memory.address,
        stride_bytes=size_bytes,
        piece_bytes=size_bytes,
        pieces=memory.size_bytes // size_bytes,
    )


class BlockBuffer:
    """A ``SlotPool`` with its memory; all methods may be called from any thread.

    One region with a piece per slot, its Full Block (§A.5); transfers of Layer Blocks use views of
    it (``engine.hbm_layout``).  ``granted`` is called, outside the lock, for every reservation as
    soon as it fits.
    """

    def __init__(
        self,
        geometry: BlockGeometry,
        slots: int,
        granted: Callable[[Grant], None],
        threads: Threads = OS_THREADS,
        memory: RegisteredMemory | None = None,
    ) -> None:
        self.geometry = geometry
        #: Number of slots.
        self.capacity = slots
        self._granted = granted
        self._lock = threads.lock()
        self._pool = SlotPool(slots)
        size_bytes = max(slots, 1) * geometry.full_block_bytes
        self._memory = memory or allocate_registered(size_bytes)
        self._view = self._memory.view(0, self._memory.size_bytes)

    @property
    def free(self) -> int:
        """Number of free slots, including those with evictable blocks."""
        with self._lock:
            return self._pool.free

    @property
    def memory(self) -> object:
        """The allocation; whoever registers it has to hold this reference."""
        return self._memory

    def region(self, name: str = BUFFER_REGION) -> RegionInfo:
        """Return the region of the buffer, for a transport."""
        return buffer_region(name, self.geometry, self._memory)

    def view(self, slot: int) -> memoryview:
        """Return a slot's Full Block as writable bytes."""
        size = self.geometry.full_block_bytes
        return self._view[slot * size : (slot + 1) * size]

    def slot_at(self, address: int) -> int:
        """Return the slot that contains an address of the buffer."""
        return (address - self._memory.address) // self.geometry.full_block_bytes

    def owner(self, slot: int) -> str | None:
        """Return the request for which KV may arrive in a slot; see ``SlotPool``.

        For inspection while no other thread changes the buffer, as it does not take the lock.
        """
        return self._pool.owner(slot)

    def cached_blocks(self) -> list[tuple[int, BlockKey]]:
        """Return the slots of all cached blocks with their keys; for inspection, as ``owner``."""
        return self._pool.cached.items()

    def is_leased(self, slot: int) -> bool:
        """Whether a slot is leased or quarantined; an atomic read without the lock."""
        return self._pool.is_leased(slot)

    def is_pinned(self, slot: int) -> bool:
        """Whether a slot's memory is being read or written; an atomic read without the lock."""
        return self._pool.is_pinned(slot)

    def is_retained(self, key: BlockKey) -> bool:
        """Whether a key is retained, cached or not; an atomic read without the lock."""
        return self._pool.cached.is_retained(key)

    @property
    def retained(self) -> int:
        """Number of retained keys, cached or not; an atomic read without the lock."""
        return self._pool.cached.retained

    @property
    def evictable(self) -> int:
        """Number of free slots that hold a cached block."""
        with self._lock:
            return self._pool.cached.evictable

    @property
    def evicted(self) -> int:
        """Number of blocks evicted so far."""
        with self._lock:
            return self._pool.cached.evicted

    def slots_of(self, request_id: str) -> tuple[int, ...]:
        """Return the slots a request holds, in block order; empty if none."""
        with self._lock:
            return self._pool.slots_of(request_id)

    def request(self, request_id: str, count: int, keys: Sequence[BlockKey] = ()) -> None:
        """Queue a reservation for blocks that begin with these keys; see ``SlotPool``.

        Raises ``BufferTooSmallError`` if it could never be granted.
        """
        with self._lock:
            grants = self._pool.request(request_id, count, keys)
        self._announce(grants)

    def grant_now(self, request_id: str, count: int, keys: Sequence[BlockKey] = ()) -> Grant | None:
        """Return a reservation that is granted at once, None if it would have to wait.

        ``granted`` is not called for it.
        """
        with self._lock:
            return self._pool.grant_now(request_id, count, keys)

    def lease_spare(
        self, request_id: str, keys: Sequence[BlockKey], cached: int, spare: int
    ) -> Grant | str:
        """Lease slots to another engine's request at once, or return why not; see ``SlotPool``."""
        with self._lock:
            return self._pool.lease_spare(request_id, keys, cached, spare)

    def cache_blocks(
        self, request_id: str, slots: Sequence[int], keys: Sequence[BlockKey], parent: BlockKey
    ) -> None:
        """Cache the complete blocks in a request's slots; see ``SlotPool``."""
        with self._lock:
            self._pool.cache_blocks(request_id, slots, keys, parent)

    def cache_copy(self, key: BlockKey, parent: BlockKey, block: memoryview) -> bool:
        """Cache a copy of a complete block; False if there is no room or it is cached already."""
        if (slot := self.allocate_for(key)) is None:
            return False
        self.view(slot)[:] = block
        self.cache_allocated(slot, key, parent)
        return True

    def missing(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return those of these keys that are not cached."""
        with self._lock:
            return [key for key in keys if not self._pool.cached.has(key)]

    def retain(self, keys: Iterable[BlockKey], expected_ns: int) -> None:
        """Evict these blocks last from now on, including blocks that are cached later.

        Of these, the one with the latest expected use is evicted first.
        """
        with self._lock:
            self._pool.cached.retain(keys, expected_ns)

    def unretain(self, keys: Iterable[BlockKey], *, evict_first: bool = False) -> None:
        """End the retention of blocks; ``evict_first``: evict them before all others."""
        normal, first = EvictionPriority.NORMAL, EvictionPriority.EVICT_FIRST
        with self._lock:
            self._pool.cached.unretain(keys, first if evict_first else normal)

    def allocate_for(self, key: BlockKey) -> int | None:
        """Lease a free slot for a block to be cached; None if none is free or it is cached already.

        None also if all blocks to evict for it have a later order of eviction.
        """
        with self._lock:
            cacheable = self._pool.caching and not self._pool.cached.has(key)
            return self._pool.allocate_for(key) if cacheable else None

    def cache_allocated(self, slot: int, key: BlockKey, parent: BlockKey) -> None:
        """Cache the complete block in a slot from ``allocate_for``, and end the slot's lease."""
        with self._lock:
            self._pool.cache_blocks(NO_REQUEST, [slot], [key], parent)
        self.free_slot(slot)

    @property
    def caches(self) -> bool:
        """Whether blocks are cached for later requests; an atomic read without the lock."""
        return self._pool.caching

    def set_caching(self, *, enabled: bool) -> None:
        """Cache blocks for later requests from now on, or none."""
        self._change(lambda pool: pool.set_caching(enabled=enabled))

    def report_changes(self, *, begin: bool) -> None:
        """Begin to collect changes of the cached keys, all of them first; or end it."""
        with self._lock:
            self._pool.cached.report_changes(begin=begin)

    def changes(self, limit: int) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return up to ``limit`` keys that were cached or evicted since the last call."""
        with self._lock:
            return self._pool.cached.changes(limit)

    def allocate(self) -> int | None:
        """Lease one free slot to no request; None if none is free or reservations wait."""
        with self._lock:
            return self._pool.allocate()

    def free_slot(self, slot: int) -> None:
        """End the lease of a slot from ``allocate``."""
        self._change(lambda pool: pool.free_slot(slot))

    def replace(self, request_id: str, slots: Iterable[int]) -> bool:
        """Exchange slots of a request for free ones; False if too few are free."""
        with self._lock:
            return self._pool.replace(request_id, slots)

    def release(self, request_id: str) -> None:
        """End a request's lease or its waiting."""
        self._change(lambda pool: pool.release(request_id))

    def quarantine(self, request_id: str) -> None:
        """Quarantine a request's slots."""
        with self._lock:
            self._pool.quarantine(request_id)

    def has_request(self, request_id: str) -> bool:
        """Whether a request has slots, waits for some, or has some in quarantine."""
        with self._lock:
            return self._pool.has_request(request_id)

    def quarantined(self) -> tuple[str, ...]:
        """Return the requests with slots in quarantine."""
        with self._lock:
            return self._pool.quarantined

    def quarantined_slots(self) -> int:
        """Return the number of slots in quarantine."""
        with self._lock:
            return self._pool.quarantined_slots

    def end_quarantine(self, request_id: str) -> None:
        """Free a request's quarantined slots."""
        self._change(lambda pool: pool.end_quarantine(request_id))

    def pin(self, slots: Iterable[int]) -> None:
        """Protect leased slots from reuse while their memory is read or written."""
        with self._lock:
            self._pool.pin(slots)

    def pin_lease(self, request_id: str, slots: tuple[int, ...]) -> bool:
        """Pin a request's slots if it still holds exactly these; otherwise return False."""
        with self._lock:
            if not slots or self._pool.slots_of(request_id) != slots:
                return False
            self._pool.pin(slots)
            return True

    def pin_to_write(self, request_id: str, slot: int) -> bool:
        """Pin one slot if the request may write to it; otherwise return False."""
        with self._lock:
            if not self._pool.may_write(request_id, slot):
                return False
            self._pool.pin([slot])
            return True

    def pin_some(self, request_id: str, slots: Iterable[int]) -> bool:
        """Pin some of a request's slots if it still holds them all; otherwise return False."""
        wanted = set(slots)
        with self._lock:
            if not wanted.issubset(self._pool.slots_of(request_id)):
                return False
            self._pool.pin(wanted)
            return True

    def unpin(self, slots: Iterable[int]) -> None:
        """End a pin of each slot."""
        held = list(slots)
        self._change(lambda pool: pool.unpin(held))

    def _change(self, change: Callable[[SlotPool], object]) -> None:
        with self._lock:
            change(self._pool)
            grants = self._pool.grant()
        self._announce(grants)

    def _announce(self, grants: list[Grant]) -> None:
        for grant in grants:
            self._granted(grant)
