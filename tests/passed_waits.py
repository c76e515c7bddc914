"""Threads that record each wait that timed out, so that tests do not measure time."""

import threading
from collections.abc import Callable

from dualpath.engine.threads import Event, OsThreads, Thread


class PassedWaits(OsThreads):
    """``passed_s`` are the time-outs of waits that timed out; ``late_s`` advances the clock."""

    def __init__(self) -> None:
        self.passed_s: list[float] = []
        self.late_s = 0.0

    def event(self) -> Event:
        """Return an event that records its waits."""
        return _Event(self.passed_s)

    def start(self, name: str, work: Callable[[], None]) -> Thread:
        """Start a thread; to wait for its end is noted."""
        thread = _Thread(self.passed_s, name, work)
        thread.start()
        return thread

    def now_ns(self) -> int:
        """Return the time, ``late_s`` later."""
        return super().now_ns() + int(self.late_s * 1e9)


class _Event(threading.Event):
    def __init__(self, passed_s: list[float]) -> None:
        super().__init__()
        self._passed_s = passed_s

    def wait(self, timeout: float | None = None) -> bool:
        came = super().wait(timeout)
        if not came and timeout is not None:
            self._passed_s.append(timeout)
        return came


class _Thread(threading.Thread):
    def __init__(self, passed_s: list[float], name: str, work: Callable[[], None]) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self._passed_s = passed_s

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self.is_alive() and timeout is not None:
            self._passed_s.append(timeout)
