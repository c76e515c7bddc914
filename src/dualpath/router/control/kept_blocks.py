"""Which engine finds which blocks in DRAM, as far as the router has heard.

They lie in its own buffer, or in what it shares with other engines of its node; of that each of
them tells what it has seen, so the router knows it by the node.

Only a belief: what a request gets at an engine is decided there, by key, when its slots are granted
(``engine.slots``), and when the rest is read.  So a stale or colliding entry costs a read, never a
wrong byte.
"""

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
    """Somewhere in DRAM where up to ``blocks`` blocks are kept."""

    def __init__(self, blocks: int) -> None:
        # News of what has come may be here before those of what has gone for it.
        self._most_keys = 2 * blocks + MAX_CACHE_UPDATE_KEYS
        #: The latest last.
        self._keys: dict[bytes, None] = {}

    def heard(self, news: CacheUpdate) -> None:
        for key in (*news.removed, *news.added):
            self._keys.pop(key[:CACHE_UPDATE_KEY_BYTES], None)
        self._keys.update((key[:CACHE_UPDATE_KEY_BYTES], None) for key in news.added)
        # An engine may have had nobody to tell that blocks have gone.
        while len(self._keys) > self._most_keys:
            del self._keys[next(iter(self._keys))]

    def head(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of ``keys`` are kept from the first on.

        The last one of a chain is found by bisection: tails give way first.  In what a node shares
        they need not; of a chain that has gone in part this is some block of it where a gap begins.
        """
        if not keys or self._lacks(keys[0]):
            return 0
        return bisect_left(keys, True, lo=1, key=self._lacks)

    def _lacks(self, key: BlockKey) -> bool:
        return key[:CACHE_UPDATE_KEY_BYTES] not in self._keys


class _Engine(msgspec.Struct, frozen=True):
    role: Role
    buffer: _Place
    #: Of ``CachedBlocks._shared``, None where it shares nothing.
    share: tuple[str, str] | None


class CachedBlocks:
    """By engine, for as long as its session lasts; what a node shares while any of those is there.

    Bounded by what buffers and shares can hold.
    """

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        #: By node and mark (``NodeDramShare``).
        self._shared: dict[tuple[str, str], _Place] = {}

    def engine_joined(self, info: EngineInfo, block_tokens: int) -> None:
        """A session begins: the engine will say what it keeps, and what it sees of its node's."""
        share = None
        if (dram := info.node_dram) is not None:
            share = info.node, dram.directory_id
            self._shared.setdefault(share, _Place(dram.tokens // block_tokens))
        buffer = _Place(info.buffer_tokens // block_tokens)
        self._engines[info.engine_id] = _Engine(info.role, buffer, share)
        self._forget_shares()

    def engine_lost(self, info: EngineInfo) -> None:
        """A session is over."""
        self._engines.pop(info.engine_id, None)
        self._forget_shares()

    def heard(self, engine_id: str, news: CacheUpdate) -> None:
        """An engine says what has come and gone."""
        if (engine := self._engines.get(engine_id)) is None:
            return
        if not news.in_node:
            engine.buffer.heard(news)
        elif engine.share is not None:
            self._shared[engine.share].heard(news)

    def prefixes(self, keys: Sequence[BlockKey], mode: Mode) -> tuple[CachedPrefix, ...]:
        """Return who finds how many blocks at the head of ``keys``, where a mode can use them."""
        in_node = {share: place.head(keys) for share, place in self._shared.items()}
        found = []
        for engine_id, engine in self._engines.items():
            shared = in_node[engine.share] if engine.share else 0
            blocks = max(engine.buffer.head(keys), shared)
            if blocks and serves(engine.role, mode):
                found.append(CachedPrefix(engine_id, blocks))
        return tuple(found)

    def of(self, engine_id: str, keys: Sequence[BlockKey]) -> int:
        """Return how many of ``keys``, from the first on, an engine finds in DRAM."""
        engine = self._engines.get(engine_id)
        return max(engine.buffer.head(keys), self.shared(engine_id, keys)) if engine else 0

    def shared(self, engine_id: str, keys: Sequence[BlockKey]) -> int:
        """Return how many of ``keys``, from the first on, lie in what an engine's node shares."""
        engine = self._engines.get(engine_id)
        return self._shared[engine.share].head(keys) if engine and engine.share else 0

    def _forget_shares(self) -> None:
        """Forget what nobody tells of any more."""
        told = {engine.share for engine in self._engines.values()}
        self._shared = {share: place for share, place in self._shared.items() if share in told}


def serves(role: Role, mode: Mode | None) -> bool:
    """Whether hits can come from DRAM of engines of a role; None: no mode is known yet."""
    if mode is None or not mode.moves_bytes:
        return False
    return role is Role.PREFILL or mode.dual_path
