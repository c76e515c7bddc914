"""Handover of the layer regions of HBM from one forward pass to the next."""

from collections.abc import Callable

from dualpath.engine.threads import OS_THREADS, Threads


class RegionHandover:
    """The regions that a pass no longer uses; called by the engine's thread and the pump.

    The pass calls ``left`` once for each region; the following pass waits for each region once.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._lock = threads.lock()
        self._left: set[int] = set()
        self._waiting: dict[int, Callable[[], None]] = {}

    def left(self, region: int) -> None:
        """The last layer of a region has been sent."""
        with self._lock:
            assert region not in self._left, f"region {region} is left twice"
            self._left.add(region)
            then = self._waiting.pop(region, None)
        if then is not None:
            then()

    def has_left(self, region: int) -> bool:
        """Whether a region is left; an atomic read without the lock."""
        return region in self._left

    def when_left(self, region: int, then: Callable[[], None]) -> None:
        """Call ``then`` once the region is left: now, or on the thread that calls ``left``."""
        with self._lock:
            if region not in self._left:
                self._waiting[region] = then
                return
        then()
