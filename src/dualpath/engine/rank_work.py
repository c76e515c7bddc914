"""Progress of the ranks of one engine, published through shared memory.

All ranks execute the same work items in the same order: passes, copies of prompts into HBM, copies
of generated blocks out of it.  Each rank numbers them, so that an item has the same number at all
ranks.  The leader may release the resources of an item (buffer slots, a request id) only when no
rank moves bytes for it any more, which may happen between steps of the engine.  So every follower
writes into a row of shared memory, which the leader polls:

* ``done``: its work items with lower numbers are over and write nothing any more;
* ``unhealthy``: it should get no new requests;
* for each staging slot the number of the work item that has filled it, written only after a
  successful copy.

Each is one aligned word, written by one process and read by another, so that reads are atomic.
``done`` is written last.
"""

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dualpath.engine.threads import OS_THREADS, Threads

log = logging.getLogger(__name__)

_WORD_BYTES = 8
_DONE, _UNHEALTHY, _STAGED = 0, 1, 2


class RankBoard:
    """Rows of all ranks in zeroed memory of ``size_bytes``; each rank writes only its own row."""

    def __init__(self, memory: NDArray[np.uint8], rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        words = memory.view(np.uint64)
        self._rows: NDArray[np.uint64] = words.reshape(ranks, len(words) // ranks)

    @staticmethod
    def size_bytes(ranks: int, staging_slots: int) -> int:
        """Return the size of the rows of ``ranks`` ranks."""
        return ranks * (_STAGED + staging_slots) * _WORD_BYTES

    @classmethod
    def alone(cls, staging_slots: int) -> "RankBoard":
        """Return the board of an engine of one rank."""
        return cls(np.zeros(cls.size_bytes(1, staging_slots), dtype=np.uint8), 0, 1)

    def write_done(self, below: int) -> None:
        """Publish that this rank's work items with lower numbers are over."""
        self._rows[self.rank, _DONE] = below

    def write_staged(self, slot: int, number: int) -> None:
        """Publish that this rank's slice of a block is in a staging slot."""
        self._rows[self.rank, _STAGED + slot] = number

    def write_unhealthy(self, *, unhealthy: bool) -> None:
        """Publish whether this rank is unhealthy and should get no new work."""
        self._rows[self.rank, _UNHEALTHY] = unhealthy

    def others_done(self, number: int) -> bool:
        """Whether this work item is over at all other ranks."""
        return all(int(row[_DONE]) > number for row in self._other_rows())

    def others_staged(self, slot: int, number: int) -> bool:
        """Whether all other ranks have filled a staging slot for this work item."""
        return all(int(row[_STAGED + slot]) == number for row in self._other_rows())

    def unhealthy(self) -> list[int]:
        """Return the other ranks that are unhealthy."""
        others = (rank for rank in range(self.ranks) if rank != self.rank)
        return [rank for rank in others if self._rows[rank, _UNHEALTHY]]

    def _other_rows(self) -> list[NDArray[np.uint64]]:
        return [self._rows[rank] for rank in range(self.ranks) if rank != self.rank]


class RankWork:
    """Numbers work items and tracks their end; methods may be called from any thread.

    Each rank calls ``begin`` for the same work items in the same order.  A follower calls ``ended``
    for each, the leader waits with ``when_idle``.
    """

    def __init__(self, board: RankBoard, threads: Threads = OS_THREADS) -> None:
        self.board = board
        self._lock = threads.lock()
        self._next = 1
        self._open: set[int] = set()
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def begin(self) -> int:
        """Return the number of the work item that begins."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            if self.board.rank:
                self._open.add(number)
            return number

    def ended(self, number: int) -> None:
        """All transfers of a work item are over at this rank."""
        with self._lock:
            assert number < self._next, f"work item {number} has not begun"
            self._open.discard(number)
            self.board.write_done(min(self._open, default=self._next))

    def staged(self, number: int, slot: int) -> None:
        """This rank's slice of a generated block is in its slot; called before ``ended``."""
        self.board.write_staged(slot, number)

    def when_idle(self, number: int, then: Callable[[], None]) -> None:
        """Call ``then`` once the work item is over at all other ranks: now, or from ``poll``."""
        with self._lock:
            done = self.board.others_done(number)
            if not done:
                self._waiting.append((number, then))
        if done:
            then()

    def poll(self) -> None:
        """Run the callbacks of work items that are over at all other ranks."""
        if not self._waiting:
            return
        with self._lock:
            over = [each for each in self._waiting if self.board.others_done(each[0])]
            self._waiting = [each for each in self._waiting if each not in over]
        for number, then in over:
            try:
                then()
            except Exception:  # a defect in one callback must not skip the others
                log.exception("the callback of work item %d failed", number)
