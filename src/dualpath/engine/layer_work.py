"""Progress of the transfers of one layer in one direction."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dualpath.engine.device import DeviceEvent
from dualpath.engine.threads import OS_THREADS, Threads


class Share(NamedTuple):
    """Transfers of one chunk of the pass with one agent."""

    chunk: int
    agent: str


#: Stands for the posting itself: no stage is complete before all transfers have been posted.
POSTING = Share(-1, "")


class Stage:
    """A milestone of transfers; ``reached`` is set when the last one has come to it.

    A transfer comes to a stage at most once: when it ends, or when it is abandoned.
    """

    def __init__(self, threads: Threads) -> None:
        self.reached = threads.event()
        self._lock = threads.lock()
        self._left: Counter[Share] = Counter()
        self._expected = False

    @property
    def complete(self) -> bool:
        """Whether all expected transfers have come here; an atomic read without the lock.

        ``reached`` is set soon after.
        """
        return self._expected and not self._left

    def expect(self, shares: Iterable[Share]) -> None:
        """Wait for these transfers; called once."""
        with self._lock:
            assert not self._expected, "the transfers of a stage are set twice"
            self._expected = True
            self._left.update(shares)

    def agents(self) -> set[str]:
        """Return the agents with missing transfers; empty before ``expect``."""
        with self._lock:
            return {share.agent for share in self._left}

    def arrived(self, share: Share) -> bool:
        """Count a transfer; return whether it was the last.  Abandoned ones are ignored."""
        with self._lock:
            if share not in self._left:
                return False
            self._left[share] -= 1
            if not self._left[share]:
                del self._left[share]
            return not self._left

    def give_up(self, chunk: int) -> bool:
        """Abandon the missing transfers of a chunk; return whether no others are missing."""
        with self._lock:
            given_up = [share for share in self._left if share.chunk == chunk]
            for share in given_up:
                del self._left[share]
            return bool(given_up) and not self._left


class LayerWork:
    """One layer's loads or sends; the pump's thread counts, the engine's thread waits.

    ``over``: every transfer has ended, and the follow-up has run.  ``queued``: the transport's
    transfers have ended, and the device's copies, which end at ``events``, are queued: the device
    can wait for them.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self.queued = Stage(threads)
        self.over = Stage(threads)
        self.events: list[DeviceEvent] = []
        self._then: Callable[[], None] = lambda: None

    def begin(self, shares: Iterable[Share], then: Callable[[], None]) -> None:
        """Expect these transfers, one share each; ``then`` is called after the last one."""
        expected = [*shares, POSTING]
        self._then = then
        self.queued.expect(expected)
        self.over.expect(expected)

    def copy_queued(self, share: Share, events: Iterable[DeviceEvent]) -> None:
        """One transfer is queued on the device and ends when ``events`` have passed."""
        self.events.extend(events)
        if self.queued.arrived(share):
            self.queued.reached.set()

    def ended(self, share: Share, *, by_device: bool = False) -> None:
        """One transfer is over, or was not posted."""
        if not by_device and self.queued.arrived(share):
            self.queued.reached.set()
        if self.over.arrived(share):
            self._finish()

    def give_up(self, chunk: int) -> None:
        """Abandon the transfers of a chunk: neither stage waits for them any more."""
        if self.queued.give_up(chunk):
            self.queued.reached.set()
        if self.over.give_up(chunk):
            self._finish()

    def _finish(self) -> None:
        try:
            self._then()
        finally:
            self.over.reached.set()
