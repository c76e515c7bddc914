"""Which engine's buffer keeps which blocks, as far as the router has heard.

Only a belief: what a request gets at an engine is decided there, by key, when its slots are granted
(``engine.slots``).  So a stale or colliding entry costs a read, never a wrong byte.
"""

from bisect import bisect_left
from collections.abc import Sequence

from dualpath.core.blocks import BlockKey
from dualpath.core.cluster import Role
from dualpath.core.control import KEPT_KEY_BYTES, MOST_KEPT_KEYS, Kept
from dualpath.core.modes import Mode
from dualpath.core.request import KeptPrefix
from dualpath.router.engines import EngineInfo


class _Engine:
    def __init__(self, role: Role, most_keys: int) -> None:
        self.role = role
        self.most_keys = most_keys
        self.keys: set[bytes] = set()

    def head(self, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys`` it keeps from the first on, which it does keep."""
        return bisect_left(keys, True, lo=1, key=lambda key: key not in self.keys)


class KeptBlocks:
    """By engine, for as long as its session lasts; bounded by what its buffer can hold."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}

    def engine_joined(self, info: EngineInfo, block_tokens: int) -> None:
        """A session begins: the engine will say what it keeps."""
        # News of what has come may be here before those of what has gone for it.
        most = 2 * (info.buffer_tokens // block_tokens) + MOST_KEPT_KEYS
        self._engines[info.engine_id] = _Engine(info.role, most)

    def engine_lost(self, info: EngineInfo) -> None:
        """A session is over."""
        self._engines.pop(info.engine_id, None)

    def heard(self, engine_id: str, news: Kept) -> None:
        """An engine says what has come and gone."""
        if (engine := self._engines.get(engine_id)) is None:
            return
        engine.keys.difference_update(news.dropped)
        if len(engine.keys) + len(news.added) <= engine.most_keys:
            engine.keys.update(key[:KEPT_KEY_BYTES] for key in news.added)

    def prefixes(self, keys: Sequence[BlockKey], mode: Mode) -> tuple[KeptPrefix, ...]:
        """Return who keeps how many blocks at the head of ``keys``, where a mode can use them.

        The last block that an engine keeps of a chain is found by bisection: tails give way first.
        """
        if not keys:
            return ()
        first = keys[0][:KEPT_KEY_BYTES]
        found = [(name, e) for name, e in self._engines.items() if first in e.keys]
        short = [key[:KEPT_KEY_BYTES] for key in keys] if found else []
        return tuple(
            KeptPrefix(engine_id, engine.head(short))
            for engine_id, engine in found
            if serves(engine.role, mode)
        )


def serves(role: Role, mode: Mode | None) -> bool:
    """Whether hits can come from the buffers of engines of a role; None: no mode is known yet."""
    if mode is None or not mode.moves_bytes:
        return False
    return role is Role.PREFILL or mode.dual_path
