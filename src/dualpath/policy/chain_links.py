"""Children and inherited tenants of the blocks of a ``ChainIndex``.

A chain has one tenant, as the salt is hashed into its first block.  A block whose tenant is not
recorded (older versions did not record it for generated blocks) inherits its parent's.  Events and
surveys add blocks in any order, so the parent or its tenant may become known later than the block.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

NO_ROW = -1
#: No model computes chains longer than 2**this.
MAX_DOUBLINGS = 32


class Children:
    """The children of each row, as linked lists in two columns; not thread-safe."""

    def __init__(self, parents: NDArray[np.int32], rows: int) -> None:
        """Build from the parents of the first ``rows`` rows; capacity is ``len(parents)``."""
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
        """Raise the capacity to ``rows``."""
        more = np.full(rows - len(self._first), NO_ROW, np.int32)
        self._first = np.concatenate((self._first, more))
        self._next = np.concatenate((self._next, more))

    def of(self, parent: int) -> Iterator[int]:
        """Yield the children of a row."""
        row = int(self._first[parent])
        while row != NO_ROW:
            yield row
            row = int(self._next[row])

    def add(self, parent: int, row: int) -> None:
        """Add a child to ``parent``; the row must not have a parent."""
        self._next[row], self._first[parent] = self._first[parent], row

    def remove(self, parent: int, row: int) -> None:
        """Remove a child from ``parent``."""
        rest = [child for child in self.of(parent) if child != row]
        self._first[parent] = NO_ROW
        for child in rest:
            self.add(parent, child)
        self._next[row] = NO_ROW


def inherited(tenants: NDArray[np.int32], parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the tenants of all rows; a row without one (0) gets its nearest ancestor's.

    Pointer doubling over the rows that may still find a tenant.
    """
    found = tenants.copy()
    rows = np.flatnonzero((found == 0) & (parents != NO_ROW))
    if not np.any(found[parents[rows]]):
        return found  # no parent of a row without tenant has one: nothing to inherit
    ancestors = parents.copy()
    for _ in range(MAX_DOUBLINGS):
        if not rows.size:
            break
        above = ancestors[rows]
        found[rows], further = found[above], ancestors[above]
        ancestors[rows] = further
        rows = rows[(found[rows] == 0) & (further != NO_ROW)]
    return found
