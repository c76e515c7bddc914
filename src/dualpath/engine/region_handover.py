"""How the layer regions of HBM go from one forward pass to the next."""

from collections.abc import Callable

from dualpath.engine.threads import OS_THREADS, Threads


class RegionHandover:
    """The regions that a pass has left for good; used by the engine's thread and the pump.

    The pass says of each region once that it has left it; the pass that follows waits for each of
    them once.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._lock = threads.lock()
        self._left: set[int] = set()
        self._waiting: dict[int, Callable[[], None]] = {}

    def left(self, region: int) -> None:
        """The last layer that uses a region is over and has been sent."""
        with self._lock:
            self._left.add(region)
            then = self._waiting.pop(region, None)
        if then is not None:
            then()

    def when_left(self, region: int, then: Callable[[], None]) -> None:
        """Call ``then`` once a region has been left: now, or on the thread that sees it."""
        with self._lock:
            if region not in self._left:
                self._waiting[region] = then
                return
        then()
