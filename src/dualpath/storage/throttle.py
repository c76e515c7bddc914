"""Emulates a slow storage NIC: a token bucket in front of any backend.

It throttles the reads through this object, where there is no real SNIC to saturate.  Buckets are
not shared between processes: give each engine of a node its share of the SNIC's rate.
"""

import threading
import time
from collections.abc import Callable

from dualpath.core.blocks import BlockKey
from dualpath.core.errors import ConfigError
from dualpath.storage.contract import BlockStorage, ReadOutcome
from dualpath.storage.wrapping import WrappingStorage

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
