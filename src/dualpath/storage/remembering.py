"""A cache of successful look-ups in front of a backend, for one engine.

A conversation looks up its whole prefix at every turn, and blocks are immutable: a block that was
stored a short while ago still is, unless it was evicted or removed.  A cached entry is a hint only,
as every read verifies the block.  A read that finds a block missing or corrupt removes the entry;
a removal by another process is noticed after at most two ``trust_s``.
"""

import threading
from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockKey
from dualpath.core.recent import Recent
from dualpath.storage.contract import BlockStorage, ReadOutcome
from dualpath.storage.wrapping import WrappingStorage

#: An entry is valid for this long to twice as long.
LOOKUP_TRUST_S = 60.0
#: Cached keys are limited to this many to twice as many, about 130 bytes each: 8 million tokens
#: with blocks of 64 tokens.
MAX_CACHED_KEYS = 1 << 17

_NS_PER_S = 1_000_000_000


class LookupCachingStorage(WrappingStorage):
    """See ``dualpath.storage.contract.BlockStorage``.

    Blocks that were found, read or written are cached.  ``now_ns`` is the clock of expiry.
    """

    def __init__(
        self,
        inner: BlockStorage,
        now_ns: Callable[[], int],
        *,
        trust_s: float = LOOKUP_TRUST_S,
        max_keys: int = MAX_CACHED_KEYS,
    ) -> None:
        super().__init__(inner)
        self._now_ns = now_ns
        self._trust_ns = int(trust_s * _NS_PER_S)
        self._lock = threading.Lock()
        self._known: Recent[BlockKey, None] = Recent(max_keys)
        self._aged_ns = now_ns()

    def cached_head(self, keys: Sequence[BlockKey], start: int = 0) -> int:
        """Return how many leading ``keys`` are cached; the first ``start`` are known to be."""
        with self._lock:
            self._age()
            return self._known.head(keys, start)

    def remember(self, keys: Sequence[BlockKey]) -> None:
        """Cache keys whose blocks must be stored, because a later block of their chain is."""
        with self._lock:
            self._age()
            self._known.note(keys, None)

    def is_stored(self, key: BlockKey) -> bool:
        """Look up in the inner backend and cache the result."""
        stored = self.inner.is_stored(key)
        self._learn(key, stored)
        return stored

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read, and update the cache with the outcome."""
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
            self._known.remove(key)

    def _age(self) -> None:
        """Remove expired entries."""
        now_ns = self._now_ns()
        for _ in range(min((now_ns - self._aged_ns) // self._trust_ns, 2)):
            self._known.age()
            self._aged_ns = now_ns
