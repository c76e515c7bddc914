"""Which engines have which blocks in DRAM, as far as they have reported.

The blocks are in an engine's own buffer, or in DRAM that it shares with other engines of its node;
of the latter each engine reports what it has seen, so the router stores them by node.

These are beliefs: an engine decides by key what a request gets, when its slots are granted and when
the rest is read.  A stale or colliding entry costs a read, never a wrong byte.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.cluster import Role
from dualpath.core.control import CACHE_UPDATE_KEY_BYTES, MAX_CACHE_UPDATE_KEYS, CacheUpdate
from dualpath.core.modes import Mode
from dualpath.core.request import CachedPrefix
from dualpath.router.engines import EngineInfo


class _Place:
    """A place in DRAM that caches up to ``blocks`` blocks; ``places`` are all places, by key."""

    def __init__(self, blocks: int, places: "dict[bytes, dict[_Place, None]]") -> None:
        # Updates on added blocks may come before those on the blocks evicted for them.
        self._most_keys = 2 * blocks + MAX_CACHE_UPDATE_KEYS
        #: The latest at the end.
        self._keys: dict[bytes, None] = {}
        self._places = places

    def update(self, update: CacheUpdate) -> None:
        for key in (*update.removed, *update.added):
            self._remove(key[:CACHE_UPDATE_KEY_BYTES])
        for key in update.added:
            self._keys[key[:CACHE_UPDATE_KEY_BYTES]] = None
            self._places.setdefault(key[:CACHE_UPDATE_KEY_BYTES], {})[self] = None
        # Updates on evicted blocks may have been lost while there was no session.
        while len(self._keys) > self._most_keys:
            self._remove(next(iter(self._keys)))

    def clear(self) -> None:
        for key in list(self._keys):
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        if key not in self._keys:
            return
        del self._keys[key]
        others = self._places[key]
        del others[self]
        if not others:
            del self._places[key]

    def head(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of ``keys`` are cached from the first on.

        The last one of a chain is found by bisection: tails are evicted first.  In shared DRAM they
        need not be; for a chain that is cached in part this is some block where a gap begins.
        """
        if not keys or self._lacks(keys[0]):
            return 0
        return bisect_left(keys, True, lo=1, key=self._lacks)

    def _lacks(self, key: BlockKey) -> bool:
        return key[:CACHE_UPDATE_KEY_BYTES] not in self._keys


class _Engine(msgspec.Struct, frozen=True):
    """An engine that is live; ``number`` is its place in the order of joining."""

    engine_id: str
    number: int
    role: Role
    buffer: _Place
    #: Key of ``CachedBlockIndex._shared``, None without shared DRAM.
    share: tuple[str, str] | None


class CachedBlockIndex:
    """Cached blocks by engine while its session lasts, and shared ones while any sharer is live.

    Bounded by the capacity of buffers and shared DRAM.  The places of a block are found by its
    key: for a request, only places that cache its first block are searched.
    """

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._numbers = itertools.count()
        #: By node and mark (``NodeDramShare``).
        self._shared: dict[tuple[str, str], _Place] = {}
        #: By truncated key, and the engines that read each place.
        self._places: dict[bytes, dict[_Place, None]] = {}
        self._readers: dict[_Place, dict[str, _Engine]] = {}

    def engine_joined(self, info: EngineInfo, block_tokens: int) -> None:
        """A session begins: the engine will report its cached blocks and those of its node."""
        self.engine_lost(info)
        share = None
        buffer = _Place(info.buffer_tokens // block_tokens, self._places)
        if (dram := info.node_dram) is not None:
            share = info.node, dram.directory_id
            if share not in self._shared:
                self._shared[share] = _Place(dram.tokens // block_tokens, self._places)
        engine = _Engine(info.engine_id, next(self._numbers), info.role, buffer, share)
        self._engines[info.engine_id] = engine
        for place in self._read_by(engine):
            self._readers.setdefault(place, {})[info.engine_id] = engine

    def engine_lost(self, info: EngineInfo) -> None:
        """A session has ended; a place that no live engine reads is removed."""
        if (engine := self._engines.pop(info.engine_id, None)) is None:
            return
        for place in self._read_by(engine):
            readers = self._readers[place]
            del readers[info.engine_id]
            if not readers:
                del self._readers[place]
                place.clear()
                if place is not engine.buffer and engine.share is not None:
                    del self._shared[engine.share]

    def update(self, engine_id: str, update: CacheUpdate) -> None:
        """Take an engine's update on added and evicted blocks."""
        if (engine := self._engines.get(engine_id)) is None:
            return
        if not update.in_node:
            engine.buffer.update(update)
        elif engine.share is not None:
            self._shared[engine.share].update(update)

    def prefixes(
        self, keys: Sequence[BlockKey], mode: Mode, *, in_buffers: bool = False
    ) -> tuple[CachedPrefix, ...]:
        """Return how many blocks at the head of ``keys`` each engine has that a mode can use.

        Engines are in the order of joining.  ``in_buffers``: what nodes share does not count.
        """
        blocks: dict[int, CachedPrefix] = {}
        first = keys[0][:CACHE_UPDATE_KEY_BYTES] if keys else b""
        for place in self._places.get(first, ()):
            head = place.head(keys)
            for engine in self._readers[place].values():
                known = blocks.get(engine.number)
                if in_buffers and place is not engine.buffer:
                    continue
                if serves(engine.role, mode) and (known is None or known.blocks < head):
                    blocks[engine.number] = CachedPrefix(engine.engine_id, head)
        return tuple(blocks[number] for number in sorted(blocks))

    def of(self, engine_id: str, keys: Sequence[BlockKey]) -> int:
        """Return how many of ``keys``, from the first on, an engine has in DRAM."""
        engine = self._engines.get(engine_id)
        return max(engine.buffer.head(keys), self.shared(engine_id, keys)) if engine else 0

    def shared(self, engine_id: str, keys: Sequence[BlockKey]) -> int:
        """Return how many of ``keys``, from the first on, are in the node's shared DRAM."""
        engine = self._engines.get(engine_id)
        return self._shared[engine.share].head(keys) if engine and engine.share else 0

    def _read_by(self, engine: _Engine) -> list[_Place]:
        return (
            [engine.buffer] if engine.share is None else [engine.buffer, self._shared[engine.share]]
        )


def serves(role: Role, mode: Mode | None) -> bool:
    """Whether hits can come from DRAM of engines of a role; None: no mode is known yet."""
    if mode is None or not mode.moves_bytes:
        return False
    return role is Role.PREFILL or mode.dual_path
