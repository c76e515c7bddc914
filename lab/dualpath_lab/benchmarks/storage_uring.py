"""One thread that reads Full Blocks through io_uring and verifies each while others arrive.

``pip install liburing`` (2026.3.30; Linux 6.14 or later).  Its wait functions hold the GIL, so the
ring's descriptor is polled instead.
"""

import os
import select
from collections.abc import Callable, Iterator

import liburing

from dualpath.core.blocks import BlockKey

Locate = Callable[[BlockKey], str]
Verify = Callable[[BlockKey, int], bool]


class UringReader:
    """A ring for ``len(slots)`` reads at a time, each of a whole file into one slot."""

    def __init__(self, slots: list[memoryview], locate: Locate, verify: Verify) -> None:
        self._slots = slots
        self._locate = locate
        self._verify = verify
        self._ring = liburing.Ring()
        liburing.io_uring_queue_init(2 * len(slots), self._ring)
        self._poll = select.poll()
        self._poll.register(self._ring.ring_fd, select.POLLIN)
        #: By slot: the key that is read, the file, and the memory as given to the kernel.
        self._moving: dict[int, tuple[BlockKey, int, liburing.Iovec]] = {}

    def read_all(self, keys: list[BlockKey]) -> int:
        """Return the number of good blocks; failed and short reads are not good."""
        waiting, free, good = iter(keys), list(range(len(self._slots))), 0
        self._submit(waiting, free)
        while self._moving:
            slot, key, whole = self._next_read()
            good += whole and self._verify(key, slot)
            free.append(slot)
            self._submit(waiting, free)
        return good

    def _submit(self, waiting: Iterator[BlockKey], free: list[int]) -> None:
        started = 0
        while free and (key := next(waiting, None)) is not None:
            slot = free.pop()
            file = os.open(self._locate(key), os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            place = liburing.Iovec([self._slots[slot]])
            entry = liburing.io_uring_get_sqe(self._ring)
            liburing.io_uring_prep_readv(entry, file, place, offset=0)
            entry.user_data = slot + 1
            self._moving[slot] = (key, file, place)
            started += 1
        if started:
            liburing.io_uring_submit(self._ring)

    def _next_read(self) -> tuple[int, BlockKey, bool]:
        while not liburing.io_uring_cq_ready(self._ring):
            self._poll.poll()
        entry = liburing.Cqe()
        liburing.io_uring_peek_cqe(self._ring, entry)
        slot, arrived_bytes = entry[0].user_data - 1, entry[0].res
        liburing.io_uring_cq_advance(self._ring, 1)
        key, file, _ = self._moving.pop(slot)
        os.close(file)
        return slot, key, arrived_bytes == self._slots[slot].nbytes
