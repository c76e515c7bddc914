"""Finds the longest stored prefix of a prompt among many stored sequences (§A.4).

The hit length is "calculated in the client": the longest prefix, in Full Blocks, that the same
session has sent or received before.  It is found by comparing sequences, not by adding lengths,
because sessions that compact or edit their context are not pure appends.
"""

from bisect import bisect_right
from typing import Generic, Protocol, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray


class Comparable(Protocol):
    """A token sequence: ``spans.Spans`` or ``spans.TokenIds``.

    Of three sequences in ascending order, the first and last share at most the prefix that
    neighbours share.
    """

    def __lt__(self, other: Self, /) -> bool:
        """Return whether this sequence sorts before ``other``."""

    @property
    def tokens(self) -> int:
        """Return the length in tokens."""

    def common_tokens(self, other: Self) -> int:
        """Return the length of the common prefix."""


_Tokens = TypeVar("_Tokens", bound=Comparable)


class StoredPrefixes(Generic[_Tokens]):
    """Sorted sequences: the longest shared prefix is that of a neighbour in sort order."""

    def __init__(self) -> None:
        """Start empty."""
        # No sequence is a prefix of another one, because longer ones replace their prefixes.
        self._sorted: list[_Tokens] = []

    def common_tokens(self, prompt: _Tokens) -> int:
        """Return the length of the longest prefix that ``prompt`` shares with a stored sequence."""
        place = bisect_right(self._sorted, prompt)
        neighbours = self._sorted[max(place - 1, 0) : place + 1]
        return max((stored.common_tokens(prompt) for stored in neighbours), default=0)

    def add(self, sequence: _Tokens) -> None:
        """Add a prompt followed by its generated tokens.

        The last generated token must be left out: it was never fed back, so it has no KV.
        """
        place = bisect_right(self._sorted, sequence)
        before, after = self._sorted[max(place - 1, 0) : place], self._sorted[place : place + 1]
        if before and before[0].common_tokens(sequence) == before[0].tokens:
            self._sorted[place - 1] = sequence
        elif not after or after[0].common_tokens(sequence) < sequence.tokens:
            self._sorted.insert(place, sequence)


_Counts = NDArray[np.int64]


@overload
def hit_tokens(stored: int, prompt: int, block_tokens: int) -> int: ...


@overload
def hit_tokens(stored: _Counts, prompt: _Counts, block_tokens: int) -> _Counts: ...


def hit_tokens(stored: int | _Counts, prompt: int | _Counts, block_tokens: int) -> int | _Counts:
    """Return the hit of prompts with ``stored`` leading tokens of KV in an unlimited store.

    It is a multiple of ``block_tokens`` and shorter than the prompt, because the last token is
    always computed, as in ``BlockGeometry.max_hit_blocks``.
    """
    most = np.minimum(stored, np.maximum(np.subtract(prompt, 1), 0))
    hit = most // block_tokens * block_tokens
    return int(hit) if isinstance(stored, int) else hit
