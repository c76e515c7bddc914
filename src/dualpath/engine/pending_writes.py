"""Blocks that this engine is writing to storage, and the look-ups that wait for them."""

from collections.abc import Callable, Iterable

from dualpath.core.blocks import BlockKey
from dualpath.engine.threads import OS_THREADS, Threads


class PendingWrites:
    """Counts the writes under way of each key; thread-safe.

    An agent's next turn can follow its last token immediately: without this its look-up would miss
    blocks that are written milliseconds later.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._lock = threads.lock()
        self._writes: dict[BlockKey, int] = {}
        self._waiting: dict[BlockKey, list[Callable[[], None]]] = {}

    def begin(self, keys: Iterable[BlockKey]) -> None:
        """Writes of these blocks begin; ``end`` must follow."""
        with self._lock:
            for key in keys:
                self._writes[key] = self._writes.get(key, 0) + 1

    def end(self, keys: Iterable[BlockKey]) -> None:
        """Writes have ended or failed; call the callbacks of keys without further writes.

        Keys without a write under way are ignored.
        """
        calls: list[Callable[[], None]] = []
        with self._lock:
            for key in keys:
                left = self._writes.pop(key, 0) - 1
                if left > 0:
                    self._writes[key] = left
                else:
                    calls += self._waiting.pop(key, ())
        for call in calls:
            call()

    def when_over(self, key: BlockKey, call: Callable[[], None]) -> bool:
        """Call ``call`` when the last write of a key is over; return False if there is no write.

        ``call`` runs on a writer's thread and must not block.
        """
        with self._lock:
            if key not in self._writes:
                return False
            self._waiting.setdefault(key, []).append(call)
            return True
