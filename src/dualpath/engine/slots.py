"""Who holds which slot of a DRAM buffer (§4.1), as plain bookkeeping without memory or threads.

Three rules keep KV correct and the system alive:

* Reservations are granted FIFO and whole.  A request never waits for a second reservation in the
  same buffer, so no two requests can wait for each other.
* A slot is reusable only when its lease is over *and* nobody has it pinned.  Whoever reads or
  writes a slot's memory pins it for that long: a late write can never land in another request's
  block.
* A slot whose writer cannot be proven dead stays in quarantine instead of becoming free.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

from dualpath.core.errors import BufferTooSmallError


class Grant(msgspec.Struct, frozen=True):
    """A reservation that has just been granted."""

    request_id: str
    slots: tuple[int, ...]


class SlotPool:
    """Slots ``0 … capacity - 1`` with FIFO leases and pins; owned by one traffic manager."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: deque[int] = deque(range(capacity))
        self._pins = [0] * capacity
        self._leased = [False] * capacity
        self._holder: list[str | None] = [None] * capacity
        self._leases: dict[str, list[int]] = {}
        self._waiting: deque[tuple[str, int]] = deque()
        self._quarantine: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        """Slots that could be granted now."""
        return len(self._free)

    @property
    def waiting(self) -> int:
        """Reservations not granted yet."""
        return len(self._waiting)

    def slots_of(self, request_id: str) -> tuple[int, ...]:
        """Return the slots a request holds, in block order; empty if none."""
        return tuple(self._leases.get(request_id, ()))

    def is_leased_to(self, request_id: str, slot: int) -> bool:
        """Whether a request holds a slot."""
        return self._holder[slot] == request_id

    def request(self, request_id: str, count: int) -> list[Grant]:
        """Queue a reservation of ``count`` ≥ 1 slots; return what can be granted now.

        Raises ``BufferTooSmallError`` if the buffer could never hold it.
        """
        if count > self.capacity:
            raise BufferTooSmallError(
                f"request {request_id} needs {count} Full Blocks of buffer, the whole buffer has "
                f"{self.capacity}; raise buffer_bytes or lower max_model_len"
            )
        self._waiting.append((request_id, count))
        return self.grant()

    def grant(self) -> list[Grant]:
        """Grant reservations from the head of the queue while they fit."""
        granted = []
        while self._waiting and self._waiting[0][1] <= len(self._free):
            request_id, count = self._waiting.popleft()
            slots = [self._free.popleft() for _ in range(count)]
            for slot in slots:
                self._leased[slot] = True
                self._holder[slot] = request_id
            self._leases[request_id] = slots
            granted.append(Grant(request_id=request_id, slots=tuple(slots)))
        return granted

    def take(self) -> int | None:
        """Return a free slot leased to nobody in particular, None if none is free.

        Does not overtake waiting reservations: with any of them queued it returns None.
        """
        if self._waiting or not self._free:
            return None
        slot = self._free.popleft()
        self._leased[slot] = True
        return slot

    def give_back(self, slot: int) -> None:
        """End the lease of a slot got from ``take``."""
        self._end_lease(slot)

    def replace(self, request_id: str, slots: Iterable[int]) -> bool:
        """Swap some of the request's slots for fresh ones; False if too few are free.

        The old slots become free when their pins are gone.
        """
        given_up = list(slots)
        if len(given_up) > len(self._free):
            return False
        held = self._leases[request_id]
        for old in given_up:
            fresh = self._free.popleft()
            held[held.index(old)] = fresh
            self._leased[fresh] = True
            self._holder[fresh] = request_id
            self._end_lease(old)
        return True

    def release(self, request_id: str) -> bool:
        """End a request's lease or its waiting; True if it had either."""
        before = len(self._waiting)
        self._waiting = deque(w for w in self._waiting if w[0] != request_id)
        slots = self._leases.pop(request_id, None)
        for slot in slots or ():
            self._end_lease(slot)
        return slots is not None or len(self._waiting) < before

    def quarantine(self, request_id: str) -> None:
        """Keep a request's slots away from everybody until ``end_quarantine``."""
        if slots := self._leases.pop(request_id, None):
            for slot in slots:
                self._holder[slot] = None
            self._quarantine.setdefault(request_id, []).extend(slots)

    def holds(self, request_id: str) -> bool:
        """Whether a request has slots, waits for some, or left some in quarantine."""
        waits = any(waiting == request_id for waiting, _ in self._waiting)
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

    def _end_lease(self, slot: int) -> None:
        self._leased[slot] = False
        self._holder[slot] = None
        self._free_if_unused(slot)

    def _free_if_unused(self, slot: int) -> None:
        if not self._leased[slot] and self._pins[slot] == 0:
            self._free.append(slot)
