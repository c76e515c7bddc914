"""Whether the data plane of one engine moves; a heart that beats beside it proves nothing.

Every thread of the data plane is started here.  One that ends, by whatever error, takes the engine
out for good (``broken``): what it did nobody does now.  One that hangs is seen by its ``Sign``:
there is work, and nothing of it moves for longer than its limit.  That may pass, as when a storage
comes back, so the engine is unwell only for as long as it lasts.
"""

import logging
from collections.abc import Callable

from dualpath.engine.threads import OS_THREADS, Thread, Threads

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000


class Sign:
    """How one kind of work proves that it moves; its owner says when there is any."""

    def __init__(self, what: str, limit_s: float, threads: Threads) -> None:
        self._what = what
        self._limit_s = limit_s
        self._threads = threads
        self._since_ns: int | None = None

    def moved(self) -> None:
        """There is work, and it has moved just now."""
        self._since_ns = self._threads.now_ns()

    def waits(self) -> None:
        """There is work, which has to move from now on."""
        if self._since_ns is None:
            self.moved()

    def idle(self) -> None:
        """Nothing has to move."""
        self._since_ns = None

    def complaint(self) -> str | None:
        """Return what is wrong, None if nothing is."""
        since_ns = self._since_ns
        if since_ns is None:
            return None
        still_s = (self._threads.now_ns() - since_ns) / _NS_PER_S
        return f"{self._what} for {still_s:.0f} s" if still_s > self._limit_s else None


class Health:
    """Starts the threads of a data plane and says how it is; methods may be called by any."""

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self.threads = threads
        self._signs: list[Sign] = []
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
            except Exception as error:  # whatever it was, its work is done by nobody now
                log.exception("thread %s ended", name)
                self.fail(f"thread {name} ended by {type(error).__name__}: {error}")
            else:
                self.fail(f"thread {name} ended")

        return self.threads.start(name, watched)

    def sign(self, what: str, limit_s: float) -> Sign:
        """Return a new sign; ``what`` says what is so when nothing moves."""
        sign = Sign(what, limit_s, self.threads)
        self._signs.append(sign)
        return sign

    def fail(self, reason: str) -> None:
        """The data plane is broken for good; the first reason stays."""
        if self._broken is None and not self._closing:
            self._broken = reason

    def close(self) -> None:
        """Threads may end from now on."""
        self._closing = True

    def complaint(self) -> str | None:
        """Return why no request should come here now, None if all is well."""
        return self._broken or next(filter(None, (s.complaint() for s in self._signs)), None)
