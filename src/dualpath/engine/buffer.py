"""The PE or DE buffer: registered DRAM divided into Full Block slots (§4.1)."""

from collections.abc import Callable, Iterable, Sequence

from dualpath.core.blocks import BlockGeometry, BlockKey
from dualpath.engine.kept_blocks import Rank
from dualpath.engine.slots import NOBODY, Grant, SlotPool
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.transport.contract import RegionInfo
from dualpath.transport.memory import RegisteredMemory, allocate_registered

#: Names under which every engine registers its buffer, and where generated blocks leave its HBM.
BUFFER_REGION = "buffer"
STAGING_REGION = "staging"


def buffer_region(name: str, geometry: BlockGeometry, memory: RegisteredMemory) -> RegionInfo:
    """Describe memory that is all Full Blocks to a transport."""
    size_bytes = geometry.full_block_bytes
    return RegionInfo(
        name=name,
        base_address=memory.address,
        stride_bytes=size_bytes,
        piece_bytes=size_bytes,
        pieces=memory.size_bytes // size_bytes,
    )


class BlockBuffer:
    """Slots with memory behind them; all methods may be called from any thread.

    One region with a piece per slot, its Full Block (§A.5); who moves Layer Blocks has views of it
    (``engine.hbm_layout``).  ``granted`` is called, outside the lock, for every reservation as
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
        """All slots."""
        return self._pool.capacity

    @property
    def free(self) -> int:
        """Slots free now."""
        with self._lock:
            return self._pool.free

    @property
    def memory(self) -> object:
        """The allocation, to be kept alive by whoever registers it."""
        return self._memory

    def region(self, name: str = BUFFER_REGION) -> RegionInfo:
        """Describe the buffer to a transport."""
        return buffer_region(name, self.geometry, self._memory)

    def view(self, slot: int) -> memoryview:
        """Return a slot's Full Block as writable bytes."""
        size = self.geometry.full_block_bytes
        return self._view[slot * size : (slot + 1) * size]

    @property
    def resting(self) -> int:
        """Slots free now that keep a block."""
        with self._lock:
            return self._pool.kept.resting

    @property
    def evicted(self) -> int:
        """Kept blocks that have given way so far."""
        with self._lock:
            return self._pool.kept.evicted

    def slots_of(self, request_id: str) -> tuple[int, ...]:
        """Return the slots a request holds, in block order; empty if none."""
        with self._lock:
            return self._pool.slots_of(request_id)

    def request(self, request_id: str, count: int, keys: Sequence[BlockKey] = ()) -> None:
        """Queue a reservation whose first blocks have these keys, to get those that are kept.

        Raises ``BufferTooSmallError`` if it could never be granted.
        """
        with self._lock:
            grants = self._pool.request(request_id, count, keys)
        self._announce(grants)

    def whole(
        self, request_id: str, slots: Sequence[int], keys: Sequence[BlockKey], parent: BlockKey
    ) -> None:
        """A request's slots have the whole blocks of these consecutive keys; see ``SlotPool``."""
        with self._lock:
            self._pool.whole(request_id, slots, keys, parent)

    def keep_copy(self, key: BlockKey, parent: BlockKey, block: memoryview) -> bool:
        """Keep a copy of a whole block; False where there is no room, or it is here already."""
        if (slot := self.take_for(key)) is None:
            return False
        self.view(slot)[:] = block
        self.keep_taken(slot, key, parent)
        return True

    def missing(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return those of these keys whose blocks are not kept here."""
        with self._lock:
            return [key for key in keys if not self._pool.kept.has(key)]

    def retain(self, keys: Iterable[BlockKey], expected_ns: int) -> None:
        """Let blocks give way last from now on, those too that are kept later.

        Of these that is first which is expected to be used last.
        """
        with self._lock:
            self._pool.kept.retain(keys, expected_ns)

    def let_go(self, keys: Iterable[BlockKey], *, first: bool = False) -> None:
        """Let blocks give way as all others, or ``first``."""
        with self._lock:
            self._pool.kept.let_go(keys, Rank.FIRST if first else Rank.USUAL)

    def take_for(self, key: BlockKey) -> int | None:
        """Return a free slot for a block to be kept; None where none is, or it is kept already.

        None as well where all kept blocks would be missed sooner.
        """
        with self._lock:
            wanted = self._pool.keeps and not self._pool.kept.has(key)
            return self._pool.take_for(key) if wanted else None

    def keep_taken(self, slot: int, key: BlockKey, parent: BlockKey) -> None:
        """Keep the whole block in a slot got from ``take_for``, which ends its lease."""
        with self._lock:
            self._pool.whole(NOBODY, [slot], [key], parent)
        self.give_back(slot)

    def keep(self, *, keeps: bool) -> None:
        """Keep whole blocks for later requests from now on, or none."""
        self._change(lambda pool: pool.keep(keeps=keeps))

    def tell(self, *, begin: bool) -> None:
        """Begin to note which blocks come and go, with all that are here; or end it."""
        with self._lock:
            self._pool.kept.tell(begin=begin)

    def news(self, limit: int) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return up to ``limit`` keys of kept blocks that have come and gone since last told."""
        with self._lock:
            return self._pool.kept.news(limit)

    def take(self) -> int | None:
        """Return one free slot that belongs to no request, None if there is none to spare."""
        with self._lock:
            return self._pool.take()

    def give_back(self, slot: int) -> None:
        """End the lease of a slot got from ``take``."""
        self._change(lambda pool: pool.give_back(slot))

    def replace(self, request_id: str, slots: Iterable[int]) -> bool:
        """Swap slots of a request for fresh ones; False if too few are free."""
        with self._lock:
            return self._pool.replace(request_id, slots)

    def release(self, request_id: str) -> None:
        """End a request's lease or its waiting."""
        self._change(lambda pool: pool.release(request_id))

    def quarantine(self, request_id: str) -> None:
        """Keep a request's slots away from everybody."""
        with self._lock:
            self._pool.quarantine(request_id)

    def holds(self, request_id: str) -> bool:
        """Whether a request has slots, waits for some, or left some in quarantine."""
        with self._lock:
            return self._pool.holds(request_id)

    def quarantined(self) -> tuple[str, ...]:
        """Return the requests whose slots are kept away from everybody."""
        with self._lock:
            return self._pool.quarantined

    def end_quarantine(self, request_id: str) -> None:
        """Free a request's quarantined slots."""
        self._change(lambda pool: pool.end_quarantine(request_id))

    def pin(self, slots: Iterable[int]) -> None:
        """Protect slots from reuse while somebody reads or writes their memory."""
        with self._lock:
            self._pool.pin(slots)

    def pin_lease(self, request_id: str, slots: tuple[int, ...]) -> bool:
        """Pin a request's slots if it still holds exactly these; False, pinning none, if not."""
        with self._lock:
            if not slots or self._pool.slots_of(request_id) != slots:
                return False
            self._pool.pin(slots)
            return True

    def pin_to_write(self, request_id: str, slot: int) -> bool:
        """Pin one slot if the request may write to it; False if not."""
        with self._lock:
            if not self._pool.may_write(request_id, slot):
                return False
            self._pool.pin([slot])
            return True

    def pin_some(self, request_id: str, slots: Iterable[int]) -> bool:
        """Pin some of a request's slots if it still holds them; False, pinning none, if not."""
        wanted = set(slots)
        with self._lock:
            if not wanted.issubset(self._pool.slots_of(request_id)):
                return False
            self._pool.pin(wanted)
            return True

    def unpin(self, slots: Iterable[int]) -> None:
        """End a protection."""
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
