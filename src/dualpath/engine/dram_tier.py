"""The blocks an engine's DRAM keeps for requests to come: what the router hears of them.

The buffer keeps them by itself (``engine.slots``); which blocks are whole is said by whoever knows:
the read queue of a PE, which has verified them, a DE's served prompts, whose KV is complete once
they are to be persisted, and its generated blocks.  Of what the engines of a node share
(``storage.node_dram``) the router hears nothing.
"""

from collections.abc import Callable

from dualpath.core.control import KEPT_KEY_BYTES, MOST_KEPT_KEYS, Kept
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.slots import Grant
from dualpath.storage.node_dram import NodeDram


class DramTier:
    """Tells ``send`` which blocks come and go, as long as there is a session in which to say it.

    ``shared``: what the engines of the node have together, None if each is for itself.
    """

    def __init__(
        self,
        buffer: BlockBuffer,
        counters: Counters,
        send: Callable[[Kept], None],
        shared: NodeDram | None = None,
    ) -> None:
        self._shared = shared
        self._buffer = buffer
        self._counters = counters
        self._send = send

    def begin_session(self, *, keeps: bool) -> None:
        """A router listens that knows of no block; ``keeps``: whether it wants any kept."""
        self._buffer.keep(keeps=keeps)
        if self._shared is not None:
            self._shared.keeps = keeps
        self._buffer.tell(begin=keeps)

    def end_session(self) -> None:
        """Nobody listens; what is kept stays."""
        self._buffer.tell(begin=False)

    def granted(self, grant: Grant) -> None:
        """Count what a request gets without a read."""
        self._counters.add(Counter.DRAM_HIT_BLOCKS, grant.kept)
        self._counters.add(
            Counter.DRAM_HIT_BYTES, grant.kept * self._buffer.geometry.full_block_bytes
        )

    def totals(self) -> dict[str, float]:
        """Return what is counted where it is kept."""
        return {
            Counter.DRAM_EVICTED_BLOCKS.value: self._buffer.evicted,
            Counter.NODE_DRAM_EVICTED_BLOCKS.value: self._shared.evicted if self._shared else 0,
        }

    def tell(self) -> None:
        """Say what has changed."""
        added, dropped = self._buffer.news(MOST_KEPT_KEYS)
        if added or dropped:
            self._send(Kept(tuple(map(_short, added)), tuple(map(_short, dropped))))


def _short(key: bytes) -> bytes:
    return key[:KEPT_KEY_BYTES]
