"""What a buffer keeps for agents whose tools run, and brings back for their next turns.

The router decides what, and how much of it (``policy.session_warmth``).  An order (``Retain``) ends
by itself: one whose end is never said, as when the router dies, costs nothing for long.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockKey
from dualpath.core.control import Retain
from dualpath.engine.buffer import BlockBuffer

_NS_PER_S = 1_000_000_000


class Retention:
    """Carries out orders; called by one thread.

    ``fetch`` has blocks read when nothing else is, ``leave`` those not that it was told of before.
    Only what is kept by an order is to be fetched, and no longer than that.
    """

    def __init__(
        self,
        buffer: BlockBuffer,
        fetch: Callable[[Sequence[BlockKey]], None],
        leave: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        self._buffer = buffer
        self._fetch = fetch
        self._leave = leave
        self._until_ns: dict[BlockKey, int] = {}
        self._ends: list[tuple[int, tuple[BlockKey, ...]]] = []

    def order(self, message: Retain, now_ns: int) -> None:
        """Keep blocks, or let them go first."""
        # No order is worth more than the buffer holds, whoever gives it.
        keys = message.keys[: self._buffer.capacity]
        if message.retain_s <= 0:
            self._forget(keys)
            self._buffer.let_go(keys, first=True)
            return
        until_ns = now_ns + round(message.retain_s * _NS_PER_S)
        room = self._buffer.capacity - len(self._until_ns)
        kept = [key for key in keys if key in self._until_ns]
        kept += [key for key in keys if key not in self._until_ns][: max(room, 0)]
        self._until_ns.update({key: max(until_ns, self._until_ns.get(key, 0)) for key in kept})
        heapq.heappush(self._ends, (until_ns, tuple(kept)))
        self._buffer.retain(kept, now_ns + round(message.expected_s * _NS_PER_S))
        if message.fetch:
            # A chain is of use from its first block on, and what no order keeps goes first.
            self._fetch([*itertools.takewhile(self._until_ns.__contains__, keys)])

    def expire(self, now_ns: int) -> None:
        """Let blocks be as all others whose time is over."""
        while self._ends and self._ends[0][0] <= now_ns:
            _, keys = heapq.heappop(self._ends)
            over = [key for key in keys if self._until_ns.get(key, now_ns + 1) <= now_ns]
            self._forget(over)
            self._buffer.let_go(over)

    def end_session(self) -> None:
        """Let all be as others: who gave the orders has forgotten them."""
        keys = list(self._until_ns)
        self._forget(keys)
        self._ends.clear()
        self._buffer.let_go(keys)

    def _forget(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._until_ns.pop(key, None)
        self._leave(keys)
