"""Decides which new blocks are written: filters, quota, and the rate that the device bears."""

from collections.abc import Sequence
from enum import StrEnum

from dualpath.core.blocks import BlockKey
from dualpath.core.recent import Recent

#: Burst after a pause, in seconds of the rate.
BURST_S = 10.0
#: Limit (to twice this many) of the remembered keys: of refused blocks, and of blocks seen once.
MAX_KEYS = 1 << 18


class Refusal(StrEnum):
    """Why a block is not written."""

    QUOTA = "quota"
    RATE = "rate"
    ONCE = "once"


class WriteGate:
    """The write gate of one engine.

    ``bytes_per_s``: rate limit, 0 for none.  ``twice``: admit blocks only when they are computed a
    second time.  After a refused block its descendants are refused too: no hit could reach them.
    """

    def __init__(self, bytes_per_s: float = 0.0, *, twice: bool = False) -> None:
        self._bytes_per_s = bytes_per_s
        self._twice = twice
        self._seen: Recent[BlockKey, None] = Recent(MAX_KEYS)
        self._refused: Recent[BlockKey, Refusal] = Recent(MAX_KEYS)
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
        """Return how many leading blocks of a run may be written, and why not all.

        ``parent`` is the key before the run, empty if unknown.  ``room_bytes``: the bytes that the
        quota leaves, None if unknown.  ``now_s`` is of a monotonic clock.
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
            self._refused.remove(key)
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
