"""The longest stored prefix of a prompt, among many stored sequences (§A.4).

Sequences are bytes made of symbols of one width, most significant byte first: token ids, or ids
that stand for whole blocks.  Kept sorted, the sequence that shares most with a prompt is one of
its two neighbours.  Unlike chained keys this gives the shared *tokens*, from which hits follow
for any block size and behind any prefix.
"""

from bisect import bisect_right

import numpy as np


class StoredPrefixes:
    """Stored sequences of symbols of ``width_bytes`` bytes; a mutable set with one owner."""

    def __init__(self, width_bytes: int) -> None:
        """Start empty."""
        self._width_bytes = width_bytes
        # No sequence here is a prefix of another one: longer ones replace their prefixes.
        self._sorted: list[bytes] = []

    def longest_common_symbols(self, prompt: bytes) -> int:
        """Return how many leading symbols of ``prompt`` some stored sequence begins with."""
        place = bisect_right(self._sorted, prompt)
        neighbours = self._sorted[max(place - 1, 0) : place + 1]
        common = max((common_bytes(stored, prompt) for stored in neighbours), default=0)
        return common // self._width_bytes

    def add(self, sequence: bytes) -> None:
        """Store a sequence."""
        place = bisect_right(self._sorted, sequence)
        if place < len(self._sorted) and self._sorted[place].startswith(sequence):
            return
        if place > 0 and sequence.startswith(self._sorted[place - 1]):
            self._sorted[place - 1] = sequence
        else:
            self._sorted.insert(place, sequence)


def common_bytes(left: bytes, right: bytes) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(left), len(right))
    if left.startswith(right) or right.startswith(left):
        return shorter
    different = np.frombuffer(left, np.uint8, shorter) != np.frombuffer(right, np.uint8, shorter)
    return int(different.argmax())
