"""The quotas of a storage: of all that lies there, of each namespace, of each tenant.

One rule for the three.  Above a share of it, the high watermark, the janitor removes blocks
(``policy.eviction``); what would exceed it is not written (``storage.keeper``).
"""

import heapq
import operator
from typing import Annotated

import msgspec

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

#: Whose the quota of all that lies there is.
ALL = ""


class StoredBytes(msgspec.Struct, frozen=True):
    """Bytes that lie in a storage: all, by namespace, and by tenant tag.

    The empty tag stands for requests without a salt.  Who is not named has none.
    """

    total: int
    by_namespace: dict[str, int]
    by_tenant: dict[str, int]

    def plus(self, other: "StoredBytes") -> "StoredBytes":
        """Return both together."""
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
        """Return the bytes of those who have more than this share of it."""
        if not self.limit_bytes:
            return {}
        most = int(share * self.limit_bytes)
        return {owner: used for owner, used in self.used_bytes.items() if used > most}

    def fullest(self, count: int) -> dict[str, int]:
        """Return the bytes of those who have the most, none where there is no limit."""
        if not self.limit_bytes:
            return {}
        return dict(heapq.nlargest(count, self.used_bytes.items(), key=operator.itemgetter(1)))

    def left_bytes(self, owner: str) -> int | None:
        """Return what is left to one of them, less than 0 where it has too much; None: no limit."""
        return self.limit_bytes - self.used_bytes.get(owner, 0) if self.limit_bytes else None


class StorageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much may lie in a storage and for how long; 0 is no limit.

    ``quota_bytes`` is for all, ``namespace_quota_bytes`` and ``tenant_quota_bytes`` for each
    namespace and each tenant.  Above ``high`` of a quota blocks are removed down to ``low`` of it.
    A chain unused for ``ttl_s`` goes; one used in the last ``protect_s`` never does.
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
        """Whether there is a limit of bytes."""
        return any((self.quota_bytes, self.namespace_quota_bytes, self.tenant_quota_bytes))

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return self.any_quota or self.ttl_s > 0

    def quotas(self, stored: StoredBytes) -> tuple[Quota, Quota, Quota]:
        """Return the quotas of tenants, of namespaces and of all, with what counts against them."""
        return (
            Quota(self.tenant_quota_bytes, stored.by_tenant),
            Quota(self.namespace_quota_bytes, stored.by_namespace),
            Quota(self.quota_bytes, {ALL: stored.total}),
        )

    def left_bytes(self, stored: StoredBytes, namespace: str, tenant: str) -> int | None:
        """Return what may still be stored of a tenant in a namespace; None: as much as comes."""
        owners = (tenant, namespace, ALL)
        left = [q.left_bytes(owner) for q, owner in zip(self.quotas(stored), owners, strict=True)]
        return min((each for each in left if each is not None), default=None)


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return one | {name: one.get(name, 0) + used for name, used in other.items()}
