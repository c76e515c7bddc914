"""Index of the blocks in a node's shared DRAM, as one engine has seen them, for the router.

Each engine reports the blocks that it added, read or removed itself; the reports of all engines of
the node together are complete, except for changes that a process did not report before it died.
"""

import threading
from collections.abc import Iterable

from dualpath.core.blocks import BlockKey
from dualpath.core.key_news import KeyUpdates


class SharedDramIndex:
    """The last ``capacity`` keys that were seen; older ones are evicted, as no more blocks fit.

    Thread-safe.
    """

    def __init__(self, capacity: int, seen: Iterable[BlockKey] = ()) -> None:
        self._lock = threading.Lock()
        self._capacity = capacity
        self._seen: dict[BlockKey, None] = {}
        self._news = KeyUpdates()
        for key in seen:
            self.add(key)

    def add(self, key: BlockKey) -> None:
        """Note that a block is in the node's DRAM."""
        with self._lock:
            if key in self._seen:
                del self._seen[key]  # re-insert as the latest
            else:
                self._news.note(key)
            self._seen[key] = None
            if len(self._seen) > self._capacity:
                del self._seen[next(iter(self._seen))]

    def remove(self, key: BlockKey) -> None:
        """Note that a block is not in the node's DRAM."""
        with self._lock:
            self._seen.pop(key, None)
            self._news.note(key)

    def report(self, *, begin: bool) -> None:
        """Start to record changes, beginning with all blocks present; or stop."""
        with self._lock:
            self._news.report(self._seen, begin=begin)

    def changes(self, limit: int) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return up to ``limit`` keys of blocks added, and of removed ones, since the last call."""
        with self._lock:
            return self._news.take(limit, self._seen)
