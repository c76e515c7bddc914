"""Threads, locks and the clock of an engine, all from one object.

No part of an engine gets them from the operating system directly.  So a simulation can replace them
by threads that run one at a time, in an order determined by a seed, and by a simulated clock.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

log = logging.getLogger(__name__)


#: As ``threading.Lock``, used only in ``with``.
Lock = AbstractContextManager[bool]


class Event(Protocol):
    """As ``threading.Event``; ``timeout`` in seconds."""

    def is_set(self) -> bool:
        """Whether it is set."""
        ...

    def set(self) -> None:
        """Set it and wake all waiting threads."""
        ...

    def clear(self) -> None:
        """Reset it, so that ``wait`` blocks."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Return once it is set; False after the timeout."""
        ...


class Condition(AbstractContextManager[bool], Protocol):
    """As ``threading.Condition``; ``timeout`` in seconds."""

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until notified; False after the timeout."""
        ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``predicate`` is true; False after the timeout."""
        ...

    def notify(self, n: int = 1) -> None:
        """Wake ``n`` waiting threads."""
        ...

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        ...


class Thread(Protocol):
    """A thread that has been started; ``timeout`` in seconds."""

    def is_alive(self) -> bool:
        """Whether its work is not over."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait until its work is over, or until the timeout."""
        ...


class Threads(Protocol):
    """The source of an engine's threads, locks, events and clock."""

    def start(self, name: str, work: Callable[[], None]) -> Thread:
        """Run ``work`` on a new daemon thread."""
        ...

    def is_current(self, thread: Thread) -> bool:
        """Whether ``thread`` is the calling thread."""
        ...

    def lock(self) -> Lock:
        """Return a new, unlocked lock."""
        ...

    def condition(self) -> Condition:
        """Return a new condition with a lock of its own."""
        ...

    def event(self) -> Event:
        """Return a new event, not set."""
        ...

    def now_ns(self) -> int:
        """Return a monotonic time, the same for all processes of a machine."""
        ...

    def sleep(self, seconds: float) -> None:
        """Suspend the calling thread, possibly for longer than ``seconds``."""
        ...


class OsThreads:
    """Threads of the operating system, for live engines."""

    def start(self, name: str, work: Callable[[], None]) -> Thread:
        """Start a daemon thread."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def is_current(self, thread: Thread) -> bool:
        """Compare with the calling thread."""
        return threading.current_thread() is thread

    def lock(self) -> Lock:
        """Return a ``threading.Lock``."""
        return threading.Lock()

    def condition(self) -> Condition:
        """Return a ``threading.Condition``."""
        return threading.Condition()

    def event(self) -> Event:
        """Return a ``threading.Event``."""
        return threading.Event()

    def now_ns(self) -> int:
        """Return ``time.monotonic_ns``."""
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


#: Has no state: every engine of a process may use it.
OS_THREADS = OsThreads()


#: Limit of all that a rank of an engine does when it leaves: less than vLLM's
#: ``--shutdown-timeout``, as vLLM needs seconds afterwards to release its own memory, and less than
#: the 5 s after which vLLM ends the ranks of an engine.
LEAVE_S = 4.0


class TimeLimit:
    """One limit of ``seconds`` from now for several consecutive waits."""

    def __init__(self, threads: Threads, seconds: float) -> None:
        self._threads = threads
        self._end_ns = threads.now_ns() + int(seconds * 1e9)

    def left_s(self) -> float:
        """Return the remaining time, at least 0."""
        return max(self._end_ns - self._threads.now_ns(), 0) / 1e9

    def join(self, threads: Sequence[Thread]) -> bool:
        """Wait until all threads are over; False if one is not over in time."""
        for thread in threads:
            if not self._threads.is_current(thread):
                thread.join(self.left_s())
        return not any(thread.is_alive() for thread in threads)


class Workers:
    """A pool of threads with one FIFO queue."""

    def __init__(self, threads: Threads, name: str, count: int) -> None:
        self._name = name
        self._wake = threads.condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._closing = False
        self._threads = [threads.start(f"{name}-{i}", self._run) for i in range(count)]

    def submit(self, work: Callable[[], None]) -> bool:
        """Queue work; return False without queueing once the pool is closed."""
        with self._wake:
            if not self._closing:
                self._waiting.append(work)
                self._wake.notify()
            return not self._closing

    def close(self, limit: TimeLimit | None = None) -> None:
        """Finish the work under way, within the limit, and drop queued work; idempotent."""
        with self._wake:
            self._closing = True
            self._waiting.clear()
            self._wake.notify_all()
        if limit is not None:
            limit.join(self._threads)
            return
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: bool(self._waiting) or self._closing)
                if not self._waiting:
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception:  # a defect must not end a thread of the pool
                log.exception("work of thread %s failed", self._name)


# ------------------------------------------------------------------------------------------ health
# Health of an engine's data plane, by the progress of its threads instead of a heartbeat.
#
# Every thread of the data plane is started here.  A thread that ends, by any error, breaks the
# engine permanently (``broken``), as its work is not done any more.  A thread that hangs is
# detected by its ``Watchdog``: there is work, and no progress for longer than its limit.  This may
# be temporary, as when a storage recovers, so the engine is unhealthy only while it lasts.

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
        #: Grows while the engine's core works (``core.control.Report.steps``); threads that add to
        #: it at once may count one step instead of two.
        self.steps = 0

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
