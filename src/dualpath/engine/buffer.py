"""The PE or DE buffer: registered DRAM divided into Full Block slots (§4.1)."""

from collections.abc import Callable, Iterable, Sequence

from dualpath.core.blocks import BlockGeometry, BlockKey
from dualpath.engine.kept_blocks import EvictionPriority
from dualpath.engine.slots import NO_REQUEST, Grant, SlotPool
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.transport.contract import RegionInfo
from dualpath.transport.memory import RegisteredMemory, allocate_registered

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
        self._granted = granted
        self._lock = threads.lock()
        self._pool = SlotPool(slots)
        size_bytes = max(slots, 1) * geometry.full_block_bytes
        self._memory = memory or allocate_registered(size_bytes)
        self._view = self._memory.view(0, self._memory.size_bytes)

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self._pool.capacity

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
        """Return the slot whose memory contains an address of the buffer."""
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
        """Queue a reservation whose first blocks have these keys; see ``SlotPool``.

        Raises ``BufferTooSmallError`` if it could never be granted.
        """
        with self._lock:
            grants = self._pool.request(request_id, count, keys)
        self._announce(grants)

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
