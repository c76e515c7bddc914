"""Blocks that one engine has seen lie in the DRAM of its node, for the router to hear of.

No engine knows all: others add blocks, and remove them.  Each tells what it has seen itself, the
one that removes a block that it is gone; together they tell everything, but what a process that
ended did not get to say.
"""

import threading
from collections.abc import Iterable

from dualpath.core.blocks import BlockKey
from dualpath.core.key_news import KeyNews


class LyingBlocks:
    """The last ``capacity`` keys that were seen; more cannot lie there, so the others are gone.

    Methods may be called by any thread.
    """

    def __init__(self, capacity: int, seen: Iterable[BlockKey] = ()) -> None:
        self._lock = threading.Lock()
        self._capacity = capacity
        self._seen: dict[BlockKey, None] = {}
        self._news = KeyNews()
        for key in seen:
            self.seen(key)

    def seen(self, key: BlockKey) -> None:
        """A block lies there."""
        with self._lock:
            if key in self._seen:
                del self._seen[key]  # To be the latest again.
            else:
                self._news.note(key)
            self._seen[key] = None
            if len(self._seen) > self._capacity:
                del self._seen[next(iter(self._seen))]

    def gone(self, key: BlockKey) -> None:
        """A block does not lie there, whoever has removed it."""
        with self._lock:
            self._seen.pop(key, None)
            self._news.note(key)

    def tell(self, *, begin: bool) -> None:
        """Begin to note news, all that was seen first; or end it."""
        with self._lock:
            self._news.tell(self._seen, begin=begin)

    def news(self, limit: int) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return up to ``limit`` keys of blocks that were seen, or are gone, since last told."""
        with self._lock:
            return self._news.take(limit, self._seen)
