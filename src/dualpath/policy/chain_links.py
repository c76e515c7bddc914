"""Which blocks of a ``ChainIndex`` come behind which, and what they have from those before them.

A chain has one tenant: the salt is hashed into its first block.  Blocks that do not say whose they
are, as generated ones did not once, are their parent's tenant's.  News and surveys come in any
order, so a block may be known long before it is known who its parent is, or whose that is.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

NO_ROW = -1
#: Longer chains than 2**this have no block a model could have computed.
MOST_DOUBLINGS = 32


class Children:
    """The rows behind each row, as lists that go through two columns; one owner."""

    def __init__(self, parents: NDArray[np.int32], rows: int) -> None:
        """Take the parents of the first ``rows`` rows; there is room for as many as ``parents``."""
        self._first = np.full(len(parents), NO_ROW, np.int32)
        self._next = np.full(len(parents), NO_ROW, np.int32)
        behind = np.flatnonzero(parents[:rows] != NO_ROW)
        ordered = behind[np.argsort(parents[behind], kind="stable")]
        before = parents[ordered]
        alike = before[1:] == before[:-1]
        self._next[ordered[:-1][alike]] = ordered[1:][alike]
        begins = np.concatenate(([True], ~alike))[: len(ordered)]
        self._first[before[begins]] = ordered[begins]

    def grow(self, rows: int) -> None:
        """Make room for so many rows."""
        more = np.full(rows - len(self._first), NO_ROW, np.int32)
        self._first = np.concatenate((self._first, more))
        self._next = np.concatenate((self._next, more))

    def of(self, parent: int) -> Iterator[int]:
        """Yield the rows right behind a row."""
        row = int(self._first[parent])
        while row != NO_ROW:
            yield row
            row = int(self._next[row])

    def add(self, parent: int, row: int) -> None:
        """A row that is behind none comes behind ``parent``."""
        self._next[row], self._first[parent] = self._first[parent], row

    def remove(self, parent: int, row: int) -> None:
        """A row is not behind ``parent`` after all."""
        rest = [child for child in self.of(parent) if child != row]
        self._first[parent] = NO_ROW
        for child in rest:
            self.add(parent, child)
        self._next[row] = NO_ROW


def inherited(tenants: NDArray[np.int32], parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the tenants of all rows: of those without one (0) that of the next before with one.

    In doublings, each over those rows only that may still find one.
    """
    found = tenants.copy()
    rows = np.flatnonzero((found == 0) & (parents != NO_ROW))
    if not np.any(found[parents[rows]]):
        return found  # what is inherited at all begins at a row and its parent
    ancestors = parents.copy()
    for _ in range(MOST_DOUBLINGS):
        if not rows.size:
            break
        above = ancestors[rows]
        found[rows], further = found[above], ancestors[above]
        ancestors[rows] = further
        rows = rows[(found[rows] == 0) & (further != NO_ROW)]
    return found
