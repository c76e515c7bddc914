"""The quotas of a storage: of all blocks, of each namespace, of each tenant.

One rule for the three.  Above a share of the quota, the high watermark, the janitor evicts blocks
(``policy.eviction``); blocks that would exceed the quota are not written (``storage.maintenance``).
"""

import heapq
import operator
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.recent import Recent

# -------------------------------------------------------------------------------------- write gate
# Decides which new blocks are written: filters, quota, and the rate that the device bears.

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


Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

#: The owner of the quota of all blocks.
ALL = ""


class StoredBytes(msgspec.Struct, frozen=True):
    """Stored bytes: in total, by namespace, and by tenant tag; absent owners have none.

    The empty tag stands for requests without a salt.
    """

    total: int
    by_namespace: dict[str, int]
    by_tenant: dict[str, int]

    def plus(self, other: "StoredBytes") -> "StoredBytes":
        """Return the sum of both."""
        return StoredBytes(
            self.total + other.total,
            _sum(self.by_namespace, other.by_namespace),
            _sum(self.by_tenant, other.by_tenant),
        )


class Quota(msgspec.Struct, frozen=True):
    """``limit_bytes`` for each of several owners, 0 for no limit; ``used_bytes`` by owner."""

    limit_bytes: int
    used_bytes: dict[str, int]

    def above(self, share: float) -> dict[str, int]:
        """Return the bytes of owners that use more than this share of the limit."""
        if not self.limit_bytes:
            return {}
        most = int(share * self.limit_bytes)
        return {owner: used for owner, used in self.used_bytes.items() if used > most}

    def fullest(self, count: int) -> dict[str, int]:
        """Return the bytes of the ``count`` largest owners, empty if there is no limit."""
        if not self.limit_bytes:
            return {}
        return dict(heapq.nlargest(count, self.used_bytes.items(), key=operator.itemgetter(1)))

    def left_bytes(self, owner: str) -> int | None:
        """Return the bytes left to an owner, negative above the limit; None: no limit."""
        return self.limit_bytes - self.used_bytes.get(owner, 0) if self.limit_bytes else None


class StorageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a storage's size and of the age of its blocks; 0 is no limit.

    ``quota_bytes`` is for all blocks, ``namespace_quota_bytes`` and ``tenant_quota_bytes`` for each
    namespace and each tenant.  Above ``high`` of a quota blocks are evicted down to ``low`` of it.
    A chain unused for ``ttl_s`` is evicted; one used in the last ``protect_s`` never is.
    """

    quota_bytes: int = 0
    namespace_quota_bytes: int = 0
    tenant_quota_bytes: int = 0
    ttl_s: float = 0.0
    high: Share = 0.95
    low: Share = 0.85
    protect_s: float = 150.0

    @property
    def any_quota(self) -> bool:
        """Whether there is a quota."""
        return any((self.quota_bytes, self.namespace_quota_bytes, self.tenant_quota_bytes))

    @property
    def any(self) -> bool:
        """Whether there is a quota or a time to live."""
        return self.any_quota or self.ttl_s > 0

    def quotas(self, stored: StoredBytes) -> tuple[Quota, Quota, Quota]:
        """Return the quotas of tenants, of namespaces and of all, with their used bytes."""
        return (
            Quota(self.tenant_quota_bytes, stored.by_tenant),
            Quota(self.namespace_quota_bytes, stored.by_namespace),
            Quota(self.quota_bytes, {ALL: stored.total}),
        )

    def left_bytes(self, stored: StoredBytes, namespace: str, tenant: str) -> int | None:
        """Return the bytes that a tenant may still store in a namespace; None: no limit."""
        owners = (tenant, namespace, ALL)
        left = [q.left_bytes(owner) for q, owner in zip(self.quotas(stored), owners, strict=True)]
        return min((each for each in left if each is not None), default=None)


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return one | {name: one.get(name, 0) + used for name, used in other.items()}
