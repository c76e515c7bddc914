"""How far the transfers of one layer in one direction are."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dualpath.engine.device import DeviceEvent
from dualpath.engine.threads import OS_THREADS, Threads


class Share(NamedTuple):
    """Transfers of one chunk of the pass with one agent."""

    chunk: int
    agent: str


#: The posting itself: no layer is through before all of its transfers have been posted.
POSTING = Share(-1, "")


class Stage:
    """A point that every transfer comes to; ``reached`` is set when the last one has.

    Each is reached at most once: by what ends, or by what is given up.
    """

    def __init__(self, threads: Threads) -> None:
        self.reached = threads.event()
        self._lock = threads.lock()
        self._left: Counter[Share] = Counter()

    def expect(self, shares: Iterable[Share]) -> None:
        """Wait for these; called once."""
        with self._lock:
            self._left.update(shares)

    def agents(self) -> set[str]:
        """Return whose transfers have not come here; empty before ``expect``."""
        with self._lock:
            return {share.agent for share in self._left}

    def came(self, share: Share) -> bool:
        """One transfer is here; return whether it was the last.  Given up ones do not count."""
        with self._lock:
            if share not in self._left:
                return False
            self._left[share] -= 1
            if not self._left[share]:
                del self._left[share]
            return not self._left

    def give_up(self, chunk: int) -> bool:
        """Wait for none of a chunk's; return whether only they were missing."""
        with self._lock:
            given_up = [share for share in self._left if share.chunk == chunk]
            for share in given_up:
                del self._left[share]
            return bool(given_up) and not self._left


class LayerWork:
    """One layer's loads or sends; the pump's thread counts, the engine's thread waits.

    ``over``: every transfer has ended, and what follows has begun.  ``queued``: those of the
    transport have ended, and the device's own copies, which end at ``events``, are queued: the
    device can wait for the rest itself.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self.queued = Stage(threads)
        self.over = Stage(threads)
        self.events: list[DeviceEvent] = []
        self._then: Callable[[], None] = lambda: None

    def begin(self, shares: Iterable[Share], then: Callable[[], None]) -> None:
        """Expect these transfers, one share each; ``then`` follows the last of them."""
        expected = [*shares, POSTING]
        self._then = then
        self.queued.expect(expected)
        self.over.expect(expected)

    def copy_queued(self, share: Share, events: Iterable[DeviceEvent]) -> None:
        """The device will have done one transfer when ``events`` have passed."""
        self.events.extend(events)
        if self.queued.came(share):
            self.queued.reached.set()

    def ended(self, share: Share, *, by_device: bool = False) -> None:
        """One transfer is over, or was not posted."""
        if not by_device and self.queued.came(share):
            self.queued.reached.set()
        if self.over.came(share):
            self._finish()

    def give_up(self, chunk: int) -> None:
        """Let nobody wait for a chunk any more, whatever becomes of its transfers."""
        if self.queued.give_up(chunk):
            self.queued.reached.set()
        if self.over.give_up(chunk):
            self._finish()

    def _finish(self) -> None:
        try:
            self._then()
        finally:
            self.over.reached.set()
