"""Token sequences, represented by the origin of their tokens.

A *content* is a building block of prompts: a text, an answer, the tokens that one round appends, or
all blocks of a session.  A sequence consists of a few *spans* of contents, so a prompt of 100,000
tokens is composed, cut and compared without creating tokens; ``contents.Contents`` returns the
tokens when a prompt is sent.

    question, answer = Spans.of(7, 0, 100), Spans.of(8, 0, 20)
    question.then(answer).common_tokens(question)  # 100
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import compress, count, islice
from operator import is_not, itemgetter, ne
from typing import Generic, Protocol, Self, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

# ---------------------------------------------------------------------------------------- prefixes
# Finds the longest stored prefix of a prompt among many stored sequences (§A.4).
#
# The hit length is "calculated in the client": the longest prefix, in Full Blocks, that the same
# session has sent or received before.  It is found by comparing sequences, not by adding lengths,
# because sessions that compact or edit their context are not pure appends.


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


#: As big-endian bytes, tokens compare in the order of their ids.
TOKEN = np.dtype(">u4")


#: (content, start, stop, end): tokens ``start`` ≤ i < ``stop`` of a content; the span ends at token
#: ``end`` of the sequence.  A plain tuple, because simulated traces create millions of them.
Span = tuple[int, int, int, int]
_END = itemgetter(3)


class Spans(msgspec.Struct, frozen=True, order=True):
    """A sequence of tokens.  Adjacent spans are merged, so equal sequences have equal spans.

    In the order of ``<`` sequences with long common prefixes are neighbours.
    """

    spans: tuple[Span, ...] = ()

    @classmethod
    def of(cls, content: int, start: int, stop: int) -> "Spans":
        """Return tokens ``start`` ≤ i < ``stop`` of one content, possibly none."""
        return cls(((content, start, stop, stop - start),)) if stop > start else cls()

    @classmethod
    def of_runs(cls, content: int, runs: Iterable[tuple[int, int]]) -> "Spans":
        """Return tokens ``start`` ≤ i < ``stop`` of one content for every (start, stop)."""
        spans: list[Span] = []
        end = 0
        for start, stop in runs:
            end += stop - start
            first = spans.pop()[1] if spans and spans[-1][2] == start else start
            spans.append((content, first, stop, end))
        return cls(tuple(spans))

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.spans[-1][3] if self.spans else 0

    def then(self, *others: "Spans") -> "Spans":
        """Return this sequence followed by the others."""
        spans = list(self.spans)
        for other in others:
            if other.spans:
                _append(spans, other.spans)
        return Spans(tuple(spans))

    def first(self, tokens: int) -> "Spans":
        """Return the first ``tokens`` tokens, or all if there are fewer."""
        if tokens >= self.tokens:
            return self
        if tokens < 1:
            return Spans()
        place = bisect_left(self.spans, tokens, key=_END)
        content, start, stop, end = self.spans[place]
        return Spans((*self.spans[:place], (content, start, stop - (end - tokens), tokens)))

    def between(self, start: int, stop: int) -> "Spans":
        """Return tokens ``start`` ≤ i < ``stop``, as far as they exist."""
        start, stop = max(start, 0), min(stop, self.tokens)
        if start >= stop:
            return Spans()
        low = bisect_right(self.spans, start, key=_END)
        high = bisect_left(self.spans, stop, lo=low, key=_END)
        part = self.spans[low : high + 1]
        found = [(content, first, last, end - start) for content, first, last, end in part]
        # The first one begins at ``start`` and the last one ends at ``stop``.
        content, _, last, end = found[0]
        found[0] = (content, last - end, last, end)
        content, first, last, end = found[-1]
        found[-1] = (content, first, last - end + (stop - start), stop - start)
        return Spans(tuple(found))

    def common_tokens(self, other: "Spans") -> int:
        """Return the length of the common prefix."""
        left, right = self.spans, other.spans
        same = common_items(left, right)
        tokens = left[same - 1][3] if same else 0
        if same < min(len(left), len(right)):
            content, start, stop, _ = left[same]
            if right[same][:2] == (content, start):
                tokens += min(stop, right[same][2]) - start
        return tokens


def common_items(left: tuple[object, ...], right: tuple[object, ...]) -> int:
    """Return how many leading items are equal."""
    shorter = min(len(left), len(right))
    # Sequences with a common prefix usually share objects, and ``is`` is a fast comparison.
    low = next(compress(count(), map(is_not, left, right)), shorter)
    if low == shorter or left[low] != right[low]:
        return low
    different = map(ne, islice(left, low, None), islice(right, low, None))
    return low + next(compress(count(), different), shorter - low)


def _append(spans: list[Span], others: tuple[Span, ...]) -> None:
    """Append ``others`` to ``spans``; its first span is merged into the last one if adjacent."""
    content, start, stop, end = others[0]
    shift = 0
    if spans:
        last, last_start, last_stop, shift = spans[-1]
        if last == content and last_stop == start:
            spans[-1] = (content, last_start, stop, shift + end)
            others = others[1:]
    for content, start, stop, end in others:
        spans.append((content, start, stop, end + shift))


class TokenIds(msgspec.Struct, frozen=True, order=True):
    """A sequence of token ids."""

    raw: bytes = b""

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> "TokenIds":
        """Return the sequence of ``token_ids``, each 0 to 2**32 - 1."""
        return cls(np.asarray(list(token_ids), TOKEN).tobytes())

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return len(self.raw) // TOKEN.itemsize

    def changed_from(self, tokens: int, others: "TokenIds") -> "TokenIds":
        """Return the first ``tokens`` tokens followed by the others."""
        first = memoryview(self.raw)[: tokens * TOKEN.itemsize]
        return TokenIds(b"".join((first, others.raw)))

    def listed(self) -> list[int]:
        """Return the token ids."""
        ids: list[int] = np.frombuffer(self.raw, TOKEN).tolist()
        return ids

    def common_tokens(self, other: "TokenIds") -> int:
        """Return the length of the common prefix."""
        left, right = self.raw, other.raw
        shorter = min(len(left), len(right))
        if left.startswith(right) or right.startswith(left):
            return shorter // TOKEN.itemsize
        different = np.frombuffer(left, np.uint8, shorter) != np.frombuffer(
            right, np.uint8, shorter
        )
        return int(different.argmax()) // TOKEN.itemsize
