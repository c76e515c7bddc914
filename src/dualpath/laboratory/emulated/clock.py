"""Emulated computation: the engine's thread sleeps for the computation's time."""

import time
from collections.abc import Callable

#: A wait shorter than this did not block.
_NO_WAIT_S = 0.0002


class ComputeClock:
    """Runs work of known duration back to back on one emulated GPU, in real time.

    The GPU is busy until ``_free_s``.  A late wake-up does not delay the next work, which ends when
    it would have ended, unless the GPU had to wait for an input.  ``now`` is a monotonic clock in
    seconds; ``sleep`` may return late.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.now = now
        self._sleep = sleep
        self._free_s = 0.0

    def begin(self) -> None:
        """Record that the GPU was idle until now."""
        self._free_s = self.now()

    def waited(self, since_s: float) -> None:
        """Record that the GPU waited from ``since_s`` until now, if that wait blocked."""
        now_s = self.now()
        if now_s - since_s > _NO_WAIT_S:
            self._free_s = max(self._free_s, now_s)

    def work(self, seconds: float) -> None:
        """Compute for ``seconds``; returns when the work ends."""
        self._free_s += seconds
        left_s = self._free_s - self.now()
        if left_s > 0:
            self._sleep(left_s)
