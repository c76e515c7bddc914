"""Which blocks leave a storage: the least recently used chains, tails before heads.

A hit ends at the first block that is missing.  So a block may go only when all behind it are gone:
blocks are ordered by the last use of themselves or any block behind them, and of equal uses the
deeper goes first.  Whatever stops at any point of this order leaves no hole.
"""

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.policy.chain_index import ChainIndex, Rows, chain_uses

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


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
    def any(self) -> bool:
        """Whether there is a limit at all."""
        quotas = self.quota_bytes, self.namespace_quota_bytes, self.tenant_quota_bytes
        return any(quotas) or self.ttl_s > 0


class Pins(msgspec.Struct, frozen=True):
    """What stays: whole namespaces, whole tenants, and chains by (namespace, last key)."""

    namespaces: frozenset[str] = frozenset()
    tenants: frozenset[str] = frozenset()
    chains: frozenset[tuple[str, bytes]] = frozenset()


#: Nothing is pinned.
NO_PINS = Pins()


def is_over(index: ChainIndex, limits: StorageLimits) -> bool:
    """Whether anything exceeds the high watermark of its quota."""
    return (
        _over(index.used_bytes, limits.quota_bytes, limits.high) > 0
        or any(_excess(index.used_by_namespace(), limits.namespace_quota_bytes, limits.high))
        or any(_excess(index.used_by_tenant(), limits.tenant_quota_bytes, limits.high))
    )


def victims(index: ChainIndex, limits: StorageLimits, pins: Pins, now_s: float) -> Rows:
    """Return the rows of the blocks to remove, in order; none of a pinned or protected chain."""
    tables = index.tables()
    uses, depths = chain_uses(_with_pins(index, pins), tables.parents)
    rows = np.flatnonzero(tables.stored & (uses < now_s - limits.protect_s))
    rows = rows[np.lexsort((-depths[rows], uses[rows]))]
    sizes = tables.sizes[rows]
    goes = uses[rows] < now_s - limits.ttl_s if limits.ttl_s else np.zeros(len(rows), np.bool_)
    for numbers, names, used, quota in (
        (tables.tenants, index.tenants, index.used_by_tenant(), limits.tenant_quota_bytes),
        (tables.namespaces, index.namespaces, index.used_by_namespace(),
         limits.namespace_quota_bytes),
    ):  # fmt: skip
        for name in _excess(used, quota, limits.high):
            own = np.flatnonzero(numbers[rows] == names.index(name))
            _choose(goes, own, sizes, used[name] - int(limits.low * quota))
    if _over(index.used_bytes, limits.quota_bytes, limits.high) > 0:
        everything = np.arange(len(rows))
        _choose(goes, everything, sizes, index.used_bytes - int(limits.low * limits.quota_bytes))
    chosen: Rows = rows[goes]
    return chosen


def pinned_ends(index: ChainIndex, pins: Pins) -> list[int]:
    """Return the rows of the last blocks of pinned chains, of those not stored at present too.

    A block that was bad is stored again when it is asked for next; until then all before it stays.
    """
    rows = (index.place(namespace, key) for namespace, key in pins.chains)
    return [row for row in rows if row is not None]


def _with_pins(index: ChainIndex, pins: Pins) -> NDArray[np.float64]:
    """Return the times of use, with pinned rows used at the end of time."""
    tables = index.tables()
    times = tables.times.copy()
    for numbers, names, pinned in (
        (tables.namespaces, index.namespaces, pins.namespaces),
        (tables.tenants, index.tenants, pins.tenants),
    ):
        for number in [n for n, name in enumerate(names) if name in pinned]:
            times[numbers == number] = math.inf
    times[pinned_ends(index, pins)] = math.inf
    return times


def _choose(goes: NDArray[np.bool_], among: Rows, sizes: NDArray[np.int64], needed: int) -> None:
    """Let the first of ``among`` go until ``needed`` bytes go, those that go already included."""
    needed -= int(sizes[among][goes[among]].sum())
    more = among[~goes[among]]
    before = np.cumsum(sizes[more]) - sizes[more]
    goes[more[before < needed]] = True


def _over(used: int, quota: int, high: float) -> int:
    return max(used - int(high * quota), 0) if quota else 0


def _excess(used: dict[str, int], quota: int, high: float) -> Iterable[str]:
    return [name for name, own in used.items() if _over(own, quota, high) > 0]
