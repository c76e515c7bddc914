"""Which new blocks are worth writing: as many as a device and its quota bear."""

from collections.abc import Sequence
from enum import StrEnum

from dualpath.core.blocks import BlockKey
from dualpath.core.recent import Recent

#: Bytes that pass at once after a pause: so many seconds' worth.
BURST_S = 10.0
#: Keys remembered, to twice as many: of blocks refused, and of prefixes seen once.
MOST_KEYS = 1 << 18


class Refusal(StrEnum):
    """Why a block is not written."""

    QUOTA = "quota"
    RATE = "rate"
    ONCE = "once"


class WriteGate:
    """One engine's; ``bytes_per_s`` 0 is no cap, ``twice`` lets pass what is seen a second time.

    Where a block is refused, so are those behind it: no hit would ever reach them.
    """

    def __init__(self, bytes_per_s: float = 0.0, *, twice: bool = False) -> None:
        self._bytes_per_s = bytes_per_s
        self._twice = twice
        self._seen: Recent[BlockKey, None] = Recent(MOST_KEYS)
        self._refused: Recent[BlockKey, Refusal] = Recent(MOST_KEYS)
        self._left_bytes = bytes_per_s * BURST_S
        self._filled_s: float | None = None

    def admitted(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey,
        block_bytes: int,
        now_s: float,
        room_bytes: int | None,
    ) -> tuple[int, Refusal | None]:
        """Return how many blocks at the head of a run may be written, and why no more.

        ``parent`` is the key before the run, empty where not known.  ``room_bytes``: what the quota
        leaves, None where that is not known.  ``now_s`` is a steady clock's.
        """
        count, refusal = len(keys), self._refused.last([parent]) if parent else None
        if refusal is not None:
            count = 0
        if self._twice:
            once = next((i for i, key in enumerate(keys) if key not in self._seen), len(keys))
            self._seen.note(keys, None)
            count, refusal = _less(count, refusal, once, Refusal.ONCE)
        if room_bytes is not None:
            fitting = max(room_bytes, 0) // block_bytes
            count, refusal = _less(count, refusal, fitting, Refusal.QUOTA)
        if self._bytes_per_s:
            self._fill(now_s)
            fitting = int(self._left_bytes // block_bytes)
            count, refusal = _less(count, refusal, fitting, Refusal.RATE)
            self._left_bytes -= count * block_bytes
        for key in keys[:count]:
            self._refused.forget(key)
        if refusal is not None:
            self._refused.note(keys[count:], refusal)
        return count, refusal

    def _fill(self, now_s: float) -> None:
        passed_s = 0.0 if self._filled_s is None else now_s - self._filled_s
        most = self._bytes_per_s * BURST_S
        self._left_bytes = min(self._left_bytes + passed_s * self._bytes_per_s, most)
        self._filled_s = now_s


def _less(
    count: int, refusal: Refusal | None, limit: int, reason: Refusal
) -> tuple[int, Refusal | None]:
    return (limit, reason) if limit < count else (count, refusal)
