"""Reports of an engine's DRAM cache to the router.

The buffer caches blocks (``engine.slots``).  Complete blocks are added by a PE's read queue once it
has verified them, by a DE's served prompts once their KV is complete (at ``Persist``), and by
generated blocks.  Each engine of a node also reports its own observations of the DRAM cache that
they share (``storage.node_dram``).
"""

import heapq
import itertools
from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockKey
from dualpath.core.control import CACHE_UPDATE_KEY_BYTES, MAX_CACHE_UPDATE_KEYS, CacheUpdate, Retain
from dualpath.engine.block_events import BlockEvents, Medium
from dualpath.engine.buffer.block_buffer import BlockBuffer, Grant
from dualpath.engine.counters import Counter, Counters
from dualpath.storage.node_dram import NodeDram

# --------------------------------------------------------------------------------------- retention
# Retention and prefetching of blocks for the next turns of agents that wait for a tool.
#
# The router decides which blocks and how many (``policy.session_warmth``).  A retention
# (``Retain``) expires by itself, so that one that the router never ends, as when it dies, is of
# limited cost.

_NS_PER_S = 1_000_000_000
#: Keys of the last prompts, which orders name by their last key, at some 75 bytes each: 8 million
#: tokens with blocks of 64 tokens.
MOST_PROMPT_KEYS = 1 << 17


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
        #: Keys of the last prompts by the last of them, the latest at the end.
        self._prompts: dict[BlockKey, Sequence[BlockKey]] = {}
        self._prompt_keys = 0
        self._until_ns: dict[BlockKey, int] = {}
        #: A heap; a renewed or withdrawn retention leaves its former end until it is rebuilt.
        self._ends: list[tuple[int, BlockKey]] = []

    def assigned(self, keys: Sequence[BlockKey]) -> None:
        """Remember a prompt that this engine serves, in place of the one that it continues."""
        if not keys or len(keys) > MOST_PROMPT_KEYS:
            return
        self._drop_prompt(next((key for key in reversed(keys) if key in self._prompts), b""))
        self._prompts[keys[-1]] = keys
        self._prompt_keys += len(keys)
        while self._prompt_keys > MOST_PROMPT_KEYS:
            self._drop_prompt(next(iter(self._prompts)))

    def _drop_prompt(self, tail: BlockKey) -> None:
        self._prompt_keys -= len(self._prompts.pop(tail, ()))

    def apply(self, message: Retain, now_ns: int) -> None:
        """Retain blocks, or make them the first to be evicted."""
        prompt = self._prompts.get(message.prompt_tail, ())
        if message.prompt_tail and not prompt:
            return
        # A message cannot retain more blocks than the buffer has slots.
        keys = (*prompt, *message.keys)[: self._buffer.capacity]
        if message.retain_s <= 0:
            self._remove(keys)
            self._buffer.unretain(keys, evict_first=True)
            return
        until_ns = now_ns + round(message.retain_s * _NS_PER_S)
        room = self._buffer.capacity - len(self._until_ns)
        retained = [key for key in keys if key in self._until_ns]
        retained += [key for key in keys if key not in self._until_ns][: max(room, 0)]
        for key in retained:
            if self._until_ns.get(key, -1) < until_ns:
                self._until_ns[key] = until_ns
                heapq.heappush(self._ends, (until_ns, key))
        if len(self._ends) > 2 * self._buffer.capacity:
            self._ends = [(end_ns, key) for key, end_ns in self._until_ns.items()]
            heapq.heapify(self._ends)
        self._buffer.retain(retained, now_ns + round(message.expected_s * _NS_PER_S))
        if message.fetch:
            # A chain is useful only from its first block on, up to the first block not retained.
            self._fetch([*itertools.takewhile(self._until_ns.__contains__, keys)])

    def expire(self, now_ns: int) -> None:
        """End the retention of blocks when its time is over."""
        over = []
        while self._ends and self._ends[0][0] <= now_ns:
            _, key = heapq.heappop(self._ends)
            if self._until_ns.get(key, now_ns + 1) <= now_ns:
                over.append(key)
        if over:
            self._remove(over)
            self._buffer.unretain(over)

    def end_session(self) -> None:
        """End all retentions, as the router of the session no longer tracks them."""
        self._prompts.clear()
        self._prompt_keys = 0
        keys = list(self._until_ns)
        self._remove(keys)
        self._ends.clear()
        self._buffer.unretain(keys)

    def _remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._until_ns.pop(key, None)
        self._cancel_fetch(keys)


class DramTier:
    """Sends the changes of the cached blocks to the router during a session.

    ``shared``: the DRAM cache that engines of the node share, None without one.  ``events`` gets
    the changes of the engine's own cache as well.
    """

    def __init__(
        self,
        buffer: BlockBuffer,
        counters: Counters,
        send: Callable[[CacheUpdate], None],
        shared: NodeDram | None = None,
        events: BlockEvents | None = None,
    ) -> None:
        self._shared = shared
        self._events = events or BlockEvents()
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
        added, removed = self._buffer.changes(MAX_CACHE_UPDATE_KEYS)
        self._events.stored(Medium.DRAM, added)
        self._events.removed(Medium.DRAM, removed)
        self._update(added, removed, in_node=False)
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
