"""Base class of backends that wrap another backend."""

import threading
import time
from collections.abc import Callable, Sequence

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin
from dualpath.core.errors import ConfigError
from dualpath.core.recent import Recent
from dualpath.storage.contract import BlockStorage, DeclinedError, ReadOutcome, WriteOutcome


class WrappingStorage:
    """See ``dualpath.storage.contract.BlockStorage``: forwards everything to ``inner``.

    Subclasses override what they change.
    """

    def __init__(self, inner: BlockStorage) -> None:
        self.inner = inner
        self.geometry = inner.geometry
        self.parallel_lookups = inner.parallel_lookups

    def is_stored(self, key: BlockKey) -> bool:
        """Look up in the inner backend."""
        return self.inner.is_stored(key)

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read from the inner backend."""
        return self.inner.read(key, destination, whole=whole)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> WriteOutcome:
        """Write to the inner backend and report the stored blocks to ``_stored``."""
        try:
            outcome = self.inner.write(keys, sources, origin)
        except DeclinedError as declined:
            self._stored(keys[: declined.outcome.stored], sources)
            raise
        self._stored(keys, sources)
        return outcome

    def used(self, key: BlockKey) -> None:
        """Record the use in the inner backend."""
        self.inner.used(key)

    def close(self) -> None:
        """Close the inner backend."""
        self.inner.close()

    def _stored(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        """Handle blocks that a write has stored: ``keys``, from the first of ``sources``."""


# ------------------------------------------------------------------------------------- remembering
# A cache of successful look-ups in front of a backend, for one engine.
#
# A conversation looks up its whole prefix at every turn, and blocks are immutable: a block that was
# stored a short while ago still is, unless it was evicted or removed.  A cached entry is a hint
# only, as every read verifies the block.  A read that finds a block missing or corrupt removes the
# entry; a removal by another process is noticed after at most two ``trust_s``.

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
        """Cache keys of blocks that must be stored, because a later block of their chain is."""
        with self._lock:
            self._age()
            self._known.note(keys, None)

    def is_stored(self, key: BlockKey) -> bool:
        """Look up in the inner backend and cache the result."""
        stored = self.inner.is_stored(key)
        self._learn(key, stored)
        return stored

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read, and update the cache unless DRAM had the block, which may not be stored."""
        outcome = self.inner.read(key, destination, whole=whole)
        if not outcome.from_dram:
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


# ---------------------------------------------------------------------------------------- throttle
# Emulates a slow storage NIC: a token bucket in front of any backend.
#
# It throttles the reads through this object, where there is no real SNIC to saturate.  Buckets are
# not shared between processes: give each engine of a node its share of the SNIC's rate.

#: Lateness that a bucket compensates: long enough for a late wake-up on a busy machine, short
#: enough to stay below 1 % of a two-second measurement.
DEFAULT_BURST_S = 0.02


class TokenBucket:
    """Computes when bytes have passed a link of ``bytes_per_s``, first come first served.

    Reads no clock.  ``bytes_per_s`` > 0; after idling for ``burst_s`` or longer, ``burst_s`` worth
    of bytes pass at once.
    """

    def __init__(self, bytes_per_s: float, burst_s: float = DEFAULT_BURST_S) -> None:
        if not bytes_per_s > 0 or burst_s < 0:
            raise ConfigError(
                f"throttle of {bytes_per_s} bytes/s with {burst_s} s of burst; the rate must be "
                "above 0 and the burst not negative"
            )
        self.bytes_per_s = float(bytes_per_s)
        self.burst_s = burst_s
        self._busy_until_s: float | None = None

    def pass_at(self, size_bytes: int, since_s: float) -> float:
        """Return when ``size_bytes`` that started at ``since_s`` have passed."""
        # The bucket starts without a burst, which would distort short measurements.
        busy_until_s = since_s if self._busy_until_s is None else self._busy_until_s
        start_s = max(since_s - self.burst_s, busy_until_s)
        self._busy_until_s = start_s + size_bytes / self.bytes_per_s
        return self._busy_until_s


class ThrottledStorage(WrappingStorage):
    """Throttles the reads of another backend with a token bucket.

    Look-ups and writes are not throttled: reads are the bottleneck under study (§2.3).

    ``read_bytes_per_s``: payload bytes per second over all threads.  Blocks of concurrent reads
    pass in order of arrival.  ``now_s`` and ``sleep_s`` are the clock.
    """

    def __init__(
        self,
        inner: BlockStorage,
        read_bytes_per_s: float,
        *,
        burst_s: float = DEFAULT_BURST_S,
        now_s: Callable[[], float] = time.monotonic,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._bucket = TokenBucket(read_bytes_per_s, burst_s)
        self._lock = threading.Lock()
        self._now_s = now_s
        self._sleep_s = sleep_s

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read, and return when the bucket has let the bytes pass."""
        start_s = self._now_s()
        outcome = self.inner.read(key, destination, whole=whole)
        self._wait(outcome.bytes_read, start_s)
        return outcome

    def _wait(self, size_bytes: int, since_s: float) -> None:
        with self._lock:
            pass_s = self._bucket.pass_at(size_bytes, since_s)
        remaining_s = pass_s - self._now_s()
        if remaining_s > 0:
            self._sleep_s(remaining_s)
