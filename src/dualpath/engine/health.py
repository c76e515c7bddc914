"""Health of an engine's data plane, by the progress of its threads instead of a heartbeat.

Every thread of the data plane is started here.  A thread that ends, by any error, breaks the engine
permanently (``broken``), as its work is not done any more.  A thread that hangs is detected by its
``Watchdog``: there is work, and no progress for longer than its limit.  This may be temporary, as
when a storage recovers, so the engine is unhealthy only while it lasts.
"""

import logging
from collections.abc import Callable

from dualpath.engine.threads import OS_THREADS, Thread, Threads

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000


class Watchdog:
    """Detects that one kind of work makes no progress; its owner reports work and progress."""

    def __init__(self, what: str, limit_s: float, threads: Threads) -> None:
        self._what = what
        self._limit_s = limit_s
        self._threads = threads
        self._since_ns: int | None = None

    def progressed(self) -> None:
        """There is work, and it has just made progress."""
        self._since_ns = self._threads.now_ns()

    def started(self) -> None:
        """There is work, which has to make progress from now on."""
        if self._since_ns is None:
            self.progressed()

    def idle(self) -> None:
        """There is no work."""
        self._since_ns = None

    def problem(self) -> str | None:
        """Return the problem, None without one."""
        since_ns = self._since_ns
        if since_ns is None:
            return None
        still_s = (self._threads.now_ns() - since_ns) / _NS_PER_S
        return f"{self._what} for {still_s:.0f} s" if still_s > self._limit_s else None


class Health:
    """Starts the threads of a data plane and reports its health; thread-safe."""

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self.threads = threads
        self._watchdogs: list[Watchdog] = []
        self._broken: str | None = None
        self._closing = False

    @property
    def broken(self) -> str | None:
        """Why this engine cannot go on in this process, None if it can."""
        return self._broken

    def start(self, name: str, work: Callable[[], None]) -> Thread:
        """Run ``work`` on a thread that must not end before ``close``."""

        def watched() -> None:
            try:
                work()
            except Exception as error:  # any error: the work of this thread is not done any more
                log.exception("thread %s ended", name)
                self.fail(f"thread {name} ended by {type(error).__name__}: {error}")
            else:
                self.fail(f"thread {name} ended")

        return self.threads.start(name, watched)

    def watchdog(self, what: str, limit_s: float) -> Watchdog:
        """Return a new watchdog; ``what`` describes the state without progress."""
        watchdog = Watchdog(what, limit_s, self.threads)
        self._watchdogs.append(watchdog)
        return watchdog

    def fail(self, reason: str) -> None:
        """Mark the data plane as permanently broken; only the first reason is stored."""
        if self._broken is None and not self._closing:
            self._broken = reason

    def close(self) -> None:
        """Threads may end from now on."""
        self._closing = True

    def problem(self) -> str | None:
        """Return why this engine should get no requests now, None if it is healthy."""
        return self._broken or next(filter(None, (w.problem() for w in self._watchdogs)), None)
