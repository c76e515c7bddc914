"""The blocks an engine's DRAM keeps for requests to come: what the router hears of them.

The buffer keeps them by itself (``engine.slots``); which blocks are whole is said by whoever knows:
the read queue of a PE, which has verified them, a DE's served prompts, whose KV is complete once
they are to be persisted, and its generated blocks.  What the engines of a node share
(``storage.node_dram``) each of them tells as far as it has seen it.
"""

from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockKey
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
        self._listen(begin=keeps)

    def end_session(self) -> None:
        """Nobody listens; what is kept stays."""
        self._listen(begin=False)

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
        self._tell(*self._buffer.news(MOST_KEPT_KEYS), in_node=False)
        if self._shared is not None:
            self._tell(*self._shared.lying.news(MOST_KEPT_KEYS), in_node=True)

    def _listen(self, *, begin: bool) -> None:
        self._buffer.tell(begin=begin)
        if self._shared is not None:
            self._shared.lying.tell(begin=begin)

    def _tell(
        self, added: Sequence[BlockKey], dropped: Sequence[BlockKey], *, in_node: bool
    ) -> None:
        if added or dropped:
            self._send(Kept(_short(added), _short(dropped), in_node))


def _short(keys: Sequence[BlockKey]) -> tuple[bytes, ...]:
    return tuple(key[:KEPT_KEY_BYTES] for key in keys)
