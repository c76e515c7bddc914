"""Who holds which slot of a DRAM buffer (§4.1), as plain bookkeeping without memory or threads.

Four rules keep KV correct and the system alive:

* Reservations are granted FIFO and whole.  A request never waits for a second reservation in the
  same buffer, so no two requests can wait for each other.
* A slot is reusable only when all its leases are over *and* nobody has it pinned.  Whoever reads or
  writes a slot's memory pins it for that long: a late write can never land in another request's
  block.
* A slot whose writer cannot be proven dead stays in quarantine instead of becoming free.
* A slot whose block is ``whole`` is written by nobody any more, not even by its holder.  It keeps
  its block when the lease ends, and counts as free all the same.  A request that hits the block is
  granted that very slot; several may hold it at a time, and read it.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.errors import BufferTooSmallError
from dualpath.engine.kept_blocks import KeptBlocks, with_parents

#: Holds slots that belong to no request.
NOBODY = ""


class Grant(msgspec.Struct, frozen=True):
    """A reservation that has just been granted; its first ``kept`` slots hold their blocks."""

    request_id: str
    slots: tuple[int, ...]
    kept: int = 0


class _Waiting(msgspec.Struct, frozen=True):
    request_id: str
    count: int
    keys: Sequence[BlockKey]


class SlotPool:
    """Slots ``0 … capacity - 1`` with FIFO leases and pins; owned by one traffic manager.

    ``keeps`` False: a block is gone with its lease.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keeps = True
        self.kept = KeptBlocks(capacity)
        self._free: deque[int] = deque(range(capacity))
        self._pins = [0] * capacity
        self._leased = [0] * capacity
        #: Who may write to a slot; None: nobody.
        self._holder: list[str | None] = [None] * capacity
        self._leases: dict[str, list[int]] = {}
        self._waiting: deque[_Waiting] = deque()
        self._quarantine: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        """Slots that could be granted now, those that keep a block included."""
        return len(self._free) + self.kept.resting

    @property
    def waiting(self) -> int:
        """Reservations not granted yet."""
        return len(self._waiting)

    def slots_of(self, request_id: str) -> tuple[int, ...]:
        """Return the slots a request holds, in block order; empty if none."""
        return tuple(self._leases.get(request_id, ()))

    def may_write(self, request_id: str, slot: int) -> bool:
        """Whether a request holds a slot alone, and its block is not whole yet."""
        return self._holder[slot] == request_id

    def request(self, request_id: str, count: int, keys: Sequence[BlockKey] = ()) -> list[Grant]:
        """Queue a reservation of ``count`` ≥ 1 slots; return what can be granted now.

        ``keys`` name its first blocks: those at their head that are kept when it is granted get the
        slots they lie in.  Raises ``BufferTooSmallError`` if the buffer could never hold it.
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
            kept = self.kept.head(keys)
            if count - len(kept) > self.free - sum(map(self.kept.rests, kept)):
                break
            self._waiting.popleft()
            for slot in kept:
                self.kept.wake(slot)
                self._leased[slot] += 1
            slots = kept + [self._fresh(request_id) for _ in range(count - len(kept))]
            self._leases[request_id] = slots
            granted.append(Grant(request_id, tuple(slots), len(kept)))
        return granted

    def take(self) -> int | None:
        """Return a free slot leased to nobody in particular, None if none is free.

        Does not overtake waiting reservations: with any of them queued it returns None.
        """
        return None if self._waiting or not self.free else self._fresh(NOBODY)

    def take_for(self, key: BlockKey) -> int | None:
        """As ``take``; None too where all that could give way stays longer than ``key``'s block."""
        return self.take() if self._free or self.kept.gives_way_to(key) else None

    def give_back(self, slot: int) -> None:
        """End the lease of a slot got from ``take``."""
        self._end_lease(slot)

    def whole(
        self, holder: str, slots: Iterable[int], keys: Iterable[BlockKey], parent: BlockKey
    ) -> None:
        """These slots of a request, or of ``NOBODY``, have whole blocks: nothing writes to them.

        ``keys`` are theirs, consecutive, with ``parent`` before them.  Slots that others hold, or
        whose block lies in another slot already, are left out.
        """
        if not self.keeps:
            return
        for slot, (key, before) in zip(slots, with_parents(keys, parent), strict=True):
            if self._holder[slot] == holder and self.kept.add(slot, key, before):
                self._holder[slot] = None

    def keep(self, *, keeps: bool) -> None:
        """Keep whole blocks from now on, or none: then those that nobody holds go at once."""
        self.keeps = keeps
        if not keeps:
            self._free.extend(self.kept.clear())

    def replace(self, request_id: str, slots: Iterable[int]) -> bool:
        """Swap some of the request's slots for fresh ones; False if too few are free.

        The old slots, which it may write, become free when their pins are gone.
        """
        given_up = list(slots)
        if len(given_up) > self.free:
            return False
        held = self._leases[request_id]
        for old in given_up:
            held[held.index(old)] = self._fresh(request_id)
            self._end_lease(old)
        return True

    def release(self, request_id: str) -> bool:
        """End a request's lease or its waiting; True if it had either."""
        before = len(self._waiting)
        self._waiting = deque(w for w in self._waiting if w.request_id != request_id)
        slots = self._leases.pop(request_id, None)
        for slot in slots or ():
            self._end_lease(slot)
        return slots is not None or len(self._waiting) < before

    def quarantine(self, request_id: str) -> None:
        """Keep a request's slots away from everybody until ``end_quarantine``.

        Not those with whole blocks, which nobody writes.
        """
        for slot in self._leases.pop(request_id, ()):
            if self._holder[slot] is None:
                self._end_lease(slot)
            else:
                self._holder[slot] = None
                self._quarantine.setdefault(request_id, []).append(slot)

    def holds(self, request_id: str) -> bool:
        """Whether a request has slots, waits for some, or left some in quarantine."""
        waits = any(waiting.request_id == request_id for waiting in self._waiting)
        return waits or request_id in self._leases or request_id in self._quarantine

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Requests whose slots are kept away from everybody."""
        return tuple(self._quarantine)

    def end_quarantine(self, request_id: str) -> None:
        """The possible writer is proven gone: the slots become free."""
        for slot in self._quarantine.pop(request_id, ()):
            self._end_lease(slot)

    def pin(self, slots: Iterable[int]) -> None:
        """Somebody reads or writes these slots' memory."""
        for slot in slots:
            self._pins[slot] += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """The reader or writer is done; raises ``ValueError`` for a slot that was not pinned."""
        for slot in slots:
            if self._pins[slot] < 1:
                raise ValueError(f"slot {slot} is not pinned")
            self._pins[slot] -= 1
            self._free_if_unused(slot)

    def _fresh(self, holder: str) -> int:
        slot = self._free.popleft() if self._free else self.kept.evict()
        self._leased[slot], self._holder[slot] = 1, holder
        return slot

    def _end_lease(self, slot: int) -> None:
        self._leased[slot] -= 1
        self._holder[slot] = None
        self._free_if_unused(slot)

    def _free_if_unused(self, slot: int) -> None:
        if self._leased[slot] or self._pins[slot]:
            return
        if slot not in self.kept:
            self._free.append(slot)
            return
        self.kept.rest(slot)
        if not self.keeps:
            self._free.extend(self.kept.clear())
