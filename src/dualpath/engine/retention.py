"""Retention and prefetching of blocks for the next turns of agents whose tools are running.

The router decides which blocks and how many (``policy.session_warmth``).  A retention (``Retain``)
expires by itself, so that one that the router never ends, as when it dies, is of limited cost.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockKey
from dualpath.core.control import Retain
from dualpath.engine.buffer import BlockBuffer

_NS_PER_S = 1_000_000_000


class Retention:
    """Executes ``Retain`` messages; called by one thread.

    ``fetch`` queues blocks for prefetching, ``cancel_fetch`` removes them from the queue.  Only
    retained blocks are fetched: a fetch is cancelled before the retention of its block ends.
    """

    def __init__(
        self,
        buffer: BlockBuffer,
        fetch: Callable[[Sequence[BlockKey]], None],
        cancel_fetch: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        self._buffer = buffer
        self._fetch = fetch
        self._cancel_fetch = cancel_fetch
        self._until_ns: dict[BlockKey, int] = {}
        self._ends: list[tuple[int, tuple[BlockKey, ...]]] = []

    def apply(self, message: Retain, now_ns: int) -> None:
        """Retain blocks, or make them the first to be evicted."""
        # A message cannot retain more blocks than the buffer has slots.
        keys = message.keys[: self._buffer.capacity]
        if message.retain_s <= 0:
            self._remove(keys)
            self._buffer.unretain(keys, evict_first=True)
            return
        until_ns = now_ns + round(message.retain_s * _NS_PER_S)
        room = self._buffer.capacity - len(self._until_ns)
        retained = [key for key in keys if key in self._until_ns]
        retained += [key for key in keys if key not in self._until_ns][: max(room, 0)]
        self._until_ns.update({key: max(until_ns, self._until_ns.get(key, 0)) for key in retained})
        heapq.heappush(self._ends, (until_ns, tuple(retained)))
        self._buffer.retain(retained, now_ns + round(message.expected_s * _NS_PER_S))
        if message.fetch:
            # A chain is useful only from its first block on, up to the first block not retained.
            self._fetch([*itertools.takewhile(self._until_ns.__contains__, keys)])

    def expire(self, now_ns: int) -> None:
        """End the retention of blocks whose time has passed."""
        while self._ends and self._ends[0][0] <= now_ns:
            _, keys = heapq.heappop(self._ends)
            over = [key for key in keys if self._until_ns.get(key, now_ns + 1) <= now_ns]
            self._remove(over)
            self._buffer.unretain(over)

    def end_session(self) -> None:
        """End all retentions, as the router of the session no longer tracks them."""
        keys = list(self._until_ns)
        self._remove(keys)
        self._ends.clear()
        self._buffer.unretain(keys)

    def _remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._until_ns.pop(key, None)
        self._cancel_fetch(keys)
