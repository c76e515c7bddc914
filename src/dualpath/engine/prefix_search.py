"""Where the stored head of a chain of blocks ends, found with few questions.

Keys are chained and blocks are written in order, so that before a stored block all are stored, and
behind an absent one none is, almost always.  Where a block has been removed from the middle, the
search may end behind the hole: the read then finds it, and what follows is computed.
"""

from collections.abc import Mapping


class PrefixSearch:
    """Says which positions of ``count`` blocks to ask for next, ``width`` ≥ 1 at a time.

    First is the block behind those known to be stored: most chains have grown by nothing that is
    stored, and end there.  Then the range left is cut in ``width`` + 1 parts, again and again: with
    1,000 blocks and a width of 1 that is 11 questions at most, one after the other.
    """

    def __init__(self, count: int, width: int) -> None:
        self.stored = 0
        self._count = count
        self._width = width
        self._absent = count
        self._asked = False

    @property
    def is_over(self) -> bool:
        """Whether block ``stored`` is known to be absent, or all blocks to be stored."""
        return self.stored == self._absent

    def next_positions(self) -> list[int]:
        """Return positions to ask for, in order; none once the search is over."""
        left = self._absent - self.stored
        if not self._asked:
            return [self.stored] if left else []
        parts = min(self._width, left) + 1
        return [self.stored + part * left // parts for part in range(1, parts)]

    def note(self, found: Mapping[int, bool]) -> None:
        """Take in whether the blocks at the positions asked for are stored."""
        self._asked = True
        for position in sorted(found):
            if not found[position]:
                self._absent = position
                return
            self.stored = position + 1

    def advance(self, stored: int) -> None:
        """Note that ``stored`` blocks at the head are stored, as became known elsewhere.

        Where a block had been absent, the search begins anew behind them.
        """
        self.stored = max(self.stored, stored)
        if self.stored > self._absent:
            self._absent = self._count
            self._asked = False
