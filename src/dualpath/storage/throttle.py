"""Storage behind a slow storage NIC: a token bucket in front of any backend.

Emulates the SNIC of one node where there is no real one to saturate.  It shapes the reads that go
through this object; several engines that share a node's SNIC are several processes, and a bucket
across processes is not built: give each of them its share of the rate.
"""

import threading
import time
from collections.abc import Callable

from dualpath.core.blocks import BlockKey
from dualpath.core.errors import ConfigError
from dualpath.storage.contract import BlockStorage, ReadOutcome
from dualpath.storage.wrapping import WrappingStorage

#: Lateness a bucket makes up for; long enough for a late wake-up of a busy machine, short enough
#: to stay below 1 % of a two-second measurement.
DEFAULT_BURST_S = 0.02


class TokenBucket:
    """When bytes that want to pass at a time have passed, first come first served.

    Pure arithmetic on the times it is given.  ``bytes_per_s`` > 0; after ``burst_s`` seconds or
    more of silence, ``burst_s`` worth of bytes pass at once.
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
        """Return when ``size_bytes`` that started to move at ``since_s`` are through."""
        # The first bytes find an empty bucket, so that a short measurement is not flattered.
        busy_until_s = since_s if self._busy_until_s is None else self._busy_until_s
        start_s = max(since_s - self.burst_s, busy_until_s)
        self._busy_until_s = start_s + size_bytes / self.bytes_per_s
        return self._busy_until_s


class ThrottledStorage(WrappingStorage):
    """Another backend whose reads pass a token bucket.

    Look-ups are free, and so are writes: reads are the bottleneck under study (§2.3).

    ``read_bytes_per_s``: payload bytes per second over all threads.  Blocks of concurrent reads
    share it in order of arrival.  ``now_s`` and ``sleep_s`` are the clock.
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
        """Read as late as the bucket lets the bytes through."""
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
