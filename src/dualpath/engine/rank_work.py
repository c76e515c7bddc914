"""What the ranks of one engine still move, told through memory that they share.

All ranks do the same work in the same order: passes, copies of prompts into HBM, generated blocks
out of it.  Each counts it, so that it has the same number everywhere.  The leader may let go of
what work used (slots of a buffer, a request's name) only when no rank moves anything for it any
more, and when that is so no step of the engine need be under way.  So every follower writes into a
row of shared memory, which the leader looks at:

* ``still``: its work with lower numbers is over, and writes nowhere any more;
* ``unwell``: it should get no new requests;
* for each staging slot the number of the work that has filled it, which only a copy without error
  writes.

Each is one aligned word, written by one process and read by another: it is old or new, never in
between.  ``still`` is written last.
"""

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dualpath.engine.threads import OS_THREADS, Threads

log = logging.getLogger(__name__)

_WORD_BYTES = 8
_STILL, _UNWELL, _STAGED = 0, 1, 2


class RankBoard:
    """Rows of all ranks in zeroed memory of ``size_bytes``; ``rank`` writes its own alone."""

    def __init__(self, memory: NDArray[np.uint8], rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        words = memory.view(np.uint64)
        self._rows: NDArray[np.uint64] = words.reshape(ranks, len(words) // ranks)

    @staticmethod
    def size_bytes(ranks: int, staging_slots: int) -> int:
        """Return what the rows of ``ranks`` take."""
        return ranks * (_STAGED + staging_slots) * _WORD_BYTES

    @classmethod
    def alone(cls, staging_slots: int) -> "RankBoard":
        """Return the board of an engine of one rank."""
        return cls(np.zeros(cls.size_bytes(1, staging_slots), dtype=np.uint8), 0, 1)

    def write_still(self, below: int) -> None:
        """Say that work with numbers below this is over."""
        self._rows[self.rank, _STILL] = below

    def write_staged(self, slot: int, number: int) -> None:
        """Say that this rank's part of a block is in a staging slot."""
        self._rows[self.rank, _STAGED + slot] = number

    def write_unwell(self, *, unwell: bool) -> None:
        """Say whether this rank should get new work."""
        self._rows[self.rank, _UNWELL] = unwell

    def others_still(self, number: int) -> bool:
        """Whether work of this number is over at all other ranks."""
        return all(int(row[_STILL]) > number for row in self._other_rows())

    def others_staged(self, slot: int, number: int) -> bool:
        """Whether work of this number has filled a staging slot at all other ranks."""
        return all(int(row[_STAGED + slot]) == number for row in self._other_rows())

    def unwell(self) -> list[int]:
        """Return the other ranks that are unwell."""
        return [rank for rank in range(self.ranks) if rank != self.rank and self._rows[rank, 1]]

    def _other_rows(self) -> list[NDArray[np.uint64]]:
        return [self._rows[rank] for rank in range(self.ranks) if rank != self.rank]


class RankWork:
    """Numbers work, and knows what is over; methods may be called from any thread.

    ``begin`` is called by each rank for the same work in the same order.  A follower says ``ended``
    for each, the leader asks ``when_still``.
    """

    def __init__(self, board: RankBoard, threads: Threads = OS_THREADS) -> None:
        self.board = board
        self._lock = threads.lock()
        self._next = 1
        self._open: set[int] = set()
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def begin(self) -> int:
        """Return the number of the work that begins."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            if self.board.rank:
                self._open.add(number)
            return number

    def ended(self, number: int) -> None:
        """Nothing of it moves at this rank any more."""
        with self._lock:
            self._open.discard(number)
            self.board.write_still(min(self._open, default=self._next))

    def staged(self, number: int, slot: int) -> None:
        """This rank's part of a generated block is in its slot; before ``ended``."""
        self.board.write_staged(slot, number)

    def when_still(self, number: int, then: Callable[[], None]) -> None:
        """Call ``then`` once nothing of it moves at any other rank: now, or from ``look``."""
        with self._lock:
            still = self.board.others_still(number)
            if not still:
                self._waiting.append((number, then))
        if still:
            then()

    def look(self) -> None:
        """Go on with what has waited for others."""
        if not self._waiting:
            return
        with self._lock:
            over = [each for each in self._waiting if self.board.others_still(each[0])]
            self._waiting = [each for each in self._waiting if each not in over]
        for number, then in over:
            try:
                then()
            except Exception:  # a defect in one must not keep the others
                log.exception("what follows work %d of all ranks failed", number)
