"""Reports of an engine's DRAM cache to the router.

The buffer caches blocks (``engine.slots``).  Complete blocks are added by a PE's read queue once it
has verified them, by a DE's served prompts once their KV is complete (at ``Persist``), and by
generated blocks.  Each engine of a node also reports its own observations of the DRAM cache that
they share (``storage.node_dram``).
"""

from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockKey
from dualpath.core.control import CACHE_UPDATE_KEY_BYTES, MAX_CACHE_UPDATE_KEYS, CacheUpdate
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.slots import Grant
from dualpath.storage.node_dram import NodeDram


class DramTier:
    """Sends the changes of the cached blocks to the router during a session.

    ``shared``: the DRAM cache that engines of the node share, None without one.
    """

    def __init__(
        self,
        buffer: BlockBuffer,
        counters: Counters,
        send: Callable[[CacheUpdate], None],
        shared: NodeDram | None = None,
    ) -> None:
        self._shared = shared
        self._buffer = buffer
        self._counters = counters
        self._send = send

    def begin_session(self, *, caching: bool) -> None:
        """Begin to report all cached blocks to a new router; ``caching``: whether to cache any."""
        self._buffer.set_caching(enabled=caching)
        if self._shared is not None:
            self._shared.enabled = caching
        self._report(begin=caching)

    def end_session(self) -> None:
        """Stop collecting changes; the cached blocks stay."""
        self._report(begin=False)

    def granted(self, grant: Grant) -> None:
        """Count the blocks that a request gets from the cache."""
        self._counters.add(Counter.DRAM_HIT_BLOCKS, grant.cached)
        self._counters.add(
            Counter.DRAM_HIT_BYTES, grant.cached * self._buffer.geometry.full_block_bytes
        )

    def totals(self) -> dict[str, float]:
        """Return the counters of evicted blocks."""
        return {
            Counter.DRAM_EVICTED_BLOCKS.value: self._buffer.evicted,
            Counter.NODE_DRAM_EVICTED_BLOCKS.value: self._shared.evicted if self._shared else 0,
        }

    def send_changes(self) -> None:
        """Send the changes since the last call."""
        self._update(*self._buffer.changes(MAX_CACHE_UPDATE_KEYS), in_node=False)
        if self._shared is not None:
            self._update(*self._shared.index.changes(MAX_CACHE_UPDATE_KEYS), in_node=True)

    def _report(self, *, begin: bool) -> None:
        self._buffer.report_changes(begin=begin)
        if self._shared is not None:
            self._shared.index.report(begin=begin)

    def _update(
        self, added: Sequence[BlockKey], removed: Sequence[BlockKey], *, in_node: bool
    ) -> None:
        if added or removed:
            self._send(CacheUpdate(_short(added), _short(removed), in_node))


def _short(keys: Sequence[BlockKey]) -> tuple[bytes, ...]:
    return tuple(key[:CACHE_UPDATE_KEY_BYTES] for key in keys)
