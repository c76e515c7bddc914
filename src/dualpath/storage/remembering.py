"""A backend and the memory of one engine: which blocks it has seen stored a short while ago.

A conversation looks up its whole prefix at every turn, and blocks are immutable: what was there is
there, unless somebody removes it.  So where a block is, is a hint; what it is, is verified where it
is read.  A read that finds a block missing or bad makes this engine forget it; what another engine
finds, or a person removes, is believed for at most two ``trust_s``.
"""

import threading
from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockKey
from dualpath.core.recent import Recent
from dualpath.storage.contract import BlockStorage, ReadOutcome
from dualpath.storage.wrapping import WrappingStorage

#: A block is believed to be stored for that long, to twice as long, after it was seen.
TRUST_S = 60.0
#: Keys remembered, to twice as many, at some 130 bytes each: with blocks of 64 tokens 8 million
#: tokens.
MOST_KNOWN = 1 << 17

_NS_PER_S = 1_000_000_000


class RememberingStorage(WrappingStorage):
    """See ``dualpath.storage.contract.BlockStorage``; beside it, what is remembered.

    ``now_ns`` is the clock of trust.  What was read whole, written or seen is remembered.
    """

    def __init__(
        self,
        inner: BlockStorage,
        now_ns: Callable[[], int],
        *,
        trust_s: float = TRUST_S,
        most_known: int = MOST_KNOWN,
    ) -> None:
        super().__init__(inner)
        self._now_ns = now_ns
        self._trust_ns = int(trust_s * _NS_PER_S)
        self._lock = threading.Lock()
        self._known: Recent[BlockKey, None] = Recent(most_known)
        self._aged_ns = now_ns()

    def known_head(self, keys: Sequence[BlockKey], start: int = 0) -> int:
        """Return how many keys at the head of ``keys`` are known; the first ``start`` are."""
        with self._lock:
            self._age()
            return self._known.head(keys, start)

    def remember(self, keys: Sequence[BlockKey]) -> None:
        """Note blocks that must be stored, as a later one of their chain is."""
        with self._lock:
            self._age()
            self._known.note(keys, None)

    def is_stored(self, key: BlockKey) -> bool:
        """Ask the inner backend, and learn from its answer."""
        stored = self.inner.is_stored(key)
        self._learn(key, stored)
        return stored

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read, and learn from how it went."""
        outcome = self.inner.read(key, destination, whole=whole)
        self._learn(key, outcome.is_good)
        return outcome

    def _stored(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        self.remember(keys)

    def _learn(self, key: BlockKey, stored: bool) -> None:
        if stored:
            self.remember([key])
            return
        with self._lock:
            self._known.forget(key)

    def _age(self) -> None:
        """Forget what was not seen for too long."""
        now_ns = self._now_ns()
        for _ in range(min((now_ns - self._aged_ns) // self._trust_ns, 2)):
            self._known.age()
            self._aged_ns = now_ns
