"""The slots of a DRAM buffer: reservations, leases and pins, without memory or threads (§4.1).

Four rules keep KV correct and exclude deadlocks:

* Reservations are granted FIFO and as a whole.  A request never waits for a second reservation in
  the same buffer, so no two requests can wait for each other.
* A slot is free only when its reference count is 0 *and* it is not pinned.  Code that reads or
  writes a slot's memory pins the slot for that time, so that a late write never reaches another
  request's block.
* A slot is quarantined instead of freed while its writer is not confirmed dead.
* A slot with a cached block is read-only, also for the request that filled it.  The block stays
  cached when the lease ends, while the slot counts as free.  A request that hits the block is
  granted that slot; several requests may share it.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.errors import BufferTooSmallError
from dualpath.engine.kept_blocks import CachedBlocks, with_parents

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
        while self._waiting and self._waiting[0].count - len(self._waiting[0].keys) <= self.free:
            request_id, count, keys = msgspec.structs.astuple(self._waiting[0])
            cached = self.cached.cached_slots(keys)
            if count - len(cached) > self.free - sum(map(self.cached.is_evictable, cached)):
                break
            self._waiting.popleft()
            assert request_id not in self._leases, f"request {request_id} has a lease already"
            for slot in cached:
                self._in_use += self.cached.touch(slot)
                self._ref_count[slot] += 1
            slots = cached + [self._allocate(request_id) for _ in range(count - len(cached))]
            self._leases[request_id] = slots
            granted.append(Grant(request_id, tuple(slots), len(cached)))
        self._check_count()
        return granted

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

    def end_quarantine(self, request_id: str) -> None:
        """Free a request's quarantined slots: its writer is confirmed dead or has finished."""
        for slot in self._quarantine.pop(request_id, ()):
            self._end_lease(slot)
        self._check_count()

    def pin(self, slots: Iterable[int]) -> None:
        """Pin slots whose memory is going to be read or written."""
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
