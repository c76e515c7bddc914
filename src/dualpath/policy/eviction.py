"""Eviction from a storage: the least recently used chains, tails before heads.

A hit ends at the first missing block.  So a block is evicted only after all its descendants: blocks
are ordered by the last use of themselves or any descendant, and with equal uses the deeper block
evicted first.  An eviction that stops at any point of this order leaves no hole in a chain.
"""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.policy.chain_index import ChainIndex, Rows, chain_uses
from dualpath.policy.quotas import ALL, StorageLimits


class Pins(msgspec.Struct, frozen=True):
    """Blocks that are never evicted, by namespace, tenant, or chain (namespace, last key)."""

    namespaces: frozenset[str] = frozenset()
    tenants: frozenset[str] = frozenset()
    chains: frozenset[tuple[str, bytes]] = frozenset()


#: No pins.
NO_PINS = Pins()


def above_watermark(index: ChainIndex, limits: StorageLimits) -> bool:
    """Whether any owner exceeds the high watermark of its quota."""
    quotas = limits.quotas(index.stored_bytes())
    return any(quota.above(limits.high) for quota in quotas)


def victims(index: ChainIndex, limits: StorageLimits, pins: Pins, now_s: float) -> Rows:
    """Return the rows of the blocks to evict, in order; none of a pinned or protected chain."""
    tables = index.tables()
    uses, depths = chain_uses(_with_pins(index, pins), tables.parents)
    rows = np.flatnonzero(tables.stored & (uses < now_s - limits.protect_s))
    rows = rows[np.lexsort((-depths[rows], uses[rows]))]
    sizes = tables.sizes[rows]
    evicted = uses[rows] < now_s - limits.ttl_s if limits.ttl_s else np.zeros(len(rows), np.bool_)
    owners: tuple[tuple[NDArray[np.integer], list[str]], ...] = (
        (tables.tenants, index.tenants),
        (tables.namespaces, index.namespaces),
        (np.zeros_like(tables.namespaces), [ALL]),
    )
    for quota, (numbers, names) in zip(limits.quotas(index.stored_bytes()), owners, strict=True):
        for owner, used_bytes in quota.above(limits.high).items():
            own = np.flatnonzero(numbers[rows] == names.index(owner))
            _mark_evicted(evicted, own, sizes, used_bytes - int(limits.low * quota.limit_bytes))
    chosen: Rows = rows[evicted]
    return chosen


def pinned_ends(index: ChainIndex, pins: Pins) -> list[int]:
    """Return the rows of the last blocks of pinned chains, including blocks not stored now.

    A block removed as corrupt is written again after its next use; until then its ancestors stay.
    """
    rows = (index.find(namespace, key) for namespace, key in pins.chains)
    return [row for row in rows if row is not None]


def _with_pins(index: ChainIndex, pins: Pins) -> NDArray[np.float64]:
    """Return the times of use, infinite for pinned rows."""
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


def _mark_evicted(
    evicted: NDArray[np.bool_], among: Rows, sizes: NDArray[np.int64], needed: int
) -> None:
    """Mark the first rows of ``among`` in ``evicted`` until marked rows have ``needed`` bytes."""
    needed -= int(sizes[among][evicted[among]].sum())
    more = among[~evicted[among]]
    before = np.cumsum(sizes[more]) - sizes[more]
    evicted[more[before < needed]] = True
