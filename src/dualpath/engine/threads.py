"""Threads, locks and the clock of an engine, all from one object.

No part of an engine asks the operating system for them.  So a simulation can bring threads of its
own, which run one at a time, in an order that a seed decides, and a clock that jumps.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

log = logging.getLogger(__name__)


#: As ``threading.Lock``, used in ``with`` alone.
Lock = AbstractContextManager[bool]


class Event(Protocol):
    """As ``threading.Event``; ``timeout`` in seconds."""

    def is_set(self) -> bool:
        """Whether it has been set."""
        ...

    def set(self) -> None:
        """Let all who wait go on."""
        ...

    def clear(self) -> None:
        """Let those wait who come."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Return once it is set; False after the timeout."""
        ...


class Condition(AbstractContextManager[bool], Protocol):
    """As ``threading.Condition``; ``timeout`` in seconds."""

    def wait(self, timeout: float | None = None) -> bool:
        """Give up the lock until notified; False after the timeout."""
        ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until it is true; False after the timeout."""
        ...

    def notify(self, n: int = 1) -> None:
        """Wake ``n`` who wait."""
        ...

    def notify_all(self) -> None:
        """Wake all who wait."""
        ...


class Thread(Protocol):
    """A thread that has been started; ``timeout`` in seconds."""

    def is_alive(self) -> bool:
        """Whether its work is not over."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait until its work is over, or the time is."""
        ...


class Threads(Protocol):
    """Where the parts of an engine get their threads, what these wait with, and their clock."""

    def start(self, name: str, work: Callable[[], None]) -> Thread:
        """Run ``work`` on a thread of its own, which does not keep the process alive."""
        ...

    def is_current(self, thread: Thread) -> bool:
        """Whether it is ``thread`` that asks."""
        ...

    def lock(self) -> Lock:
        """Return a new lock, open."""
        ...

    def condition(self) -> Condition:
        """Return a new condition with a lock of its own."""
        ...

    def event(self) -> Event:
        """Return a new event, not set."""
        ...

    def now_ns(self) -> int:
        """Return a time that never goes back; on one machine the same for all processes."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait; perhaps longer than asked."""
        ...


class OsThreads:
    """The operating system's: what live engines run on."""

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


class TimeLimit:
    """One limit of ``seconds`` from now for several waits, one after the other."""

    def __init__(self, threads: Threads, seconds: float) -> None:
        self._threads = threads
        self._end_ns = threads.now_ns() + int(seconds * 1e9)

    def left_s(self) -> float:
        """Return what is left for the next wait, 0 if nothing is."""
        return max(self._end_ns - self._threads.now_ns(), 0) / 1e9

    def join(self, threads: Sequence[Thread]) -> bool:
        """Wait until they are over; False if one is not in time."""
        for thread in threads:
            if not self._threads.is_current(thread):
                thread.join(self.left_s())
        return not any(thread.is_alive() for thread in threads)


class Workers:
    """Some threads that take work from one queue, first come, first served."""

    def __init__(self, threads: Threads, name: str, count: int) -> None:
        self._name = name
        self._wake = threads.condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._closing = False
        self._threads = [threads.start(f"{name}-{i}", self._run) for i in range(count)]

    def submit(self, work: Callable[[], None]) -> bool:
        """Queue work; False, and nothing queued, once these workers are closed."""
        with self._wake:
            if not self._closing:
                self._waiting.append(work)
                self._wake.notify()
            return not self._closing

    def close(self, limit: TimeLimit | None = None) -> None:
        """Finish what is under way, within the limit, and drop what waits; idempotent."""
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
            except Exception:  # a defect must not end a thread that others rely on
                log.exception("work of thread %s failed", self._name)
