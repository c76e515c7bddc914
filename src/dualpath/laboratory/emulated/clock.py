"""Emulated computation: it occupies the engine for a time and no core."""

import time
from collections.abc import Callable

#: A wait shorter than this found what it waited for already there.
_NO_WAIT_S = 0.0002


class ComputeClock:
    """Runs work of known length back to back on one emulated GPU; seconds of real time.

    The GPU is free at ``_free_s``.  A late wake-up does not lengthen the computation: the next
    work ends when it would have ended, unless the GPU really had to wait for something.  ``now``
    is monotonic; ``sleep`` may return late.
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
        """The GPU was idle until now."""
        self._free_s = self.now()

    def waited(self, since_s: float) -> None:
        """The GPU could not go on before now if the wait that began at ``since_s`` was one."""
        now_s = self.now()
        if now_s - since_s > _NO_WAIT_S:
            self._free_s = max(self._free_s, now_s)

    def work(self, seconds: float) -> None:
        """Compute for ``seconds``: returns when that is over."""
        self._free_s += seconds
        left_s = self._free_s - self.now()
        if left_s > 0:
            self._sleep(left_s)
