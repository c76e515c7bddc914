"""A search for the length of the stored prefix of a chain of blocks, with few storage queries.

Keys are chained and blocks are written in order, so that almost always all blocks before a stored
one are stored, and none after an absent one.  If a block in the middle was removed, the search may
end after the gap: the read then finds the gap, and the blocks after it are recomputed.
"""

from collections.abc import Mapping


class PrefixSearch:
    """Chooses the positions of ``count`` blocks to query next, ``width`` ≥ 1 at a time.

    The first query is for the block after those known to be stored: for most chains it is absent
    and ends the search.  Then the remaining range is repeatedly divided into ``width`` + 1 parts:
    with 1,000 blocks and a width of 1 that takes at most 11 queries, one after the other.
    """

    def __init__(self, count: int, width: int) -> None:
        self.stored = 0
        self._count = count
        self._width = width
        self._absent = count
        self._asked = False

    @property
    def is_over(self) -> bool:
        """Whether block ``stored`` is known to be absent, or all blocks are stored."""
        return self.stored == self._absent

    def next_positions(self) -> list[int]:
        """Return the positions to query, in order; none once the search is over."""
        left = self._absent - self.stored
        if not self._asked:
            return [self.stored] if left else []
        parts = min(self._width, left) + 1
        return [self.stored + part * left // parts for part in range(1, parts)]

    def note(self, found: Mapping[int, bool]) -> None:
        """Process the answers for the queried positions: whether each block is stored."""
        self._asked = True
        for position in sorted(found):
            if not found[position]:
                self._absent = position
                return
            self.stored = position + 1

    def advance(self, stored: int) -> None:
        """Note that the first ``stored`` blocks are stored, as known from another source.

        If the block found absent is among them, the search restarts after them.
        """
        self.stored = max(self.stored, stored)
        if self.stored > self._absent:
            self._absent = self._count
            self._asked = False
