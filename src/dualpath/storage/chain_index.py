"""Index of a storage's blocks as chains: for each block its size, last use, and parent block.

A *chain* is the sequence of blocks of a prefix; chains with a common prefix share its blocks, so
blocks form trees.  A use is recorded at the last block of a chain and counts for all blocks before
it.  ``chain_uses`` resolves that for all blocks at once, so that recording a use costs the same for
a chain of one block or a thousand.

Blocks are rows of tables.  A row without a stored block is a placeholder: of a parent that was
removed or is not known yet, or of a block that was used, by its reports, before it was written.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.blocks import BlockKey, StoreNamespace, chain_root
from dualpath.storage.quotas import ALL, StorageLimits, StoredBytes

# ------------------------------------------------------------------------------------- chain links
# Children and inherited tenants of the blocks of a ``ChainIndex``.
#
# A chain has one tenant, as the salt is hashed into its first block.  A block without a recorded
# tenant (older versions recorded none for generated blocks) inherits its parent's.  Events
# and surveys add blocks in any order, so the parent or its tenant may become known later than the
# block.

NO_ROW = -1
#: No model computes chains longer than 2**this.
MAX_DOUBLINGS = 32
#: Rows without a stored block that compaction leaves: this many, or as many as blocks are stored.
MAX_UNSTORED = 1 << 16


class Children:
    """The children of each row, as linked lists in two columns; not thread-safe."""

    def __init__(self, parents: NDArray[np.int32], rows: int) -> None:
        """Build from the parents of the first ``rows`` rows; capacity is ``len(parents)``."""
        self._first = np.full(len(parents), NO_ROW, np.int32)
        self._next = np.full(len(parents), NO_ROW, np.int32)
        behind = np.flatnonzero(parents[:rows] != NO_ROW)
        ordered = behind[np.argsort(parents[behind], kind="stable")]
        before = parents[ordered]
        alike = before[1:] == before[:-1]
        self._next[ordered[:-1][alike]] = ordered[1:][alike]
        begins = np.concatenate(([True], ~alike))[: len(ordered)]
        self._first[before[begins]] = ordered[begins]

    def grow(self, rows: int) -> None:
        """Raise the capacity to ``rows``."""
        more = np.full(rows - len(self._first), NO_ROW, np.int32)
        self._first = np.concatenate((self._first, more))
        self._next = np.concatenate((self._next, more))

    def of(self, parent: int) -> Iterator[int]:
        """Yield the children of a row."""
        row = int(self._first[parent])
        while row != NO_ROW:
            yield row
            row = int(self._next[row])

    def add(self, parent: int, row: int) -> None:
        """Add a child to ``parent``; the row must not have a parent."""
        self._next[row], self._first[parent] = self._first[parent], row

    def remove(self, parent: int, row: int) -> None:
        """Remove a child from ``parent``."""
        rest = [child for child in self.of(parent) if child != row]
        self._first[parent] = NO_ROW
        for child in rest:
            self.add(parent, child)
        self._next[row] = NO_ROW


def inherited(tenants: NDArray[np.int32], parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the tenants of all rows; a row without one (0) gets its nearest ancestor's.

    Pointer doubling over the rows that may still find a tenant.
    """
    found = tenants.copy()
    rows = np.flatnonzero((found == 0) & (parents != NO_ROW))
    if not np.any(found[parents[rows]]):
        return found  # no parent of a row without tenant has one: nothing to inherit
    ancestors = parents.copy()
    for _ in range(MAX_DOUBLINGS):
        if not rows.size:
            break
        above = ancestors[rows]
        found[rows], further = found[above], ancestors[above]
        ancestors[rows] = further
        rows = rows[(found[rows] == 0) & (further != NO_ROW)]
    return found


KEY_BYTES = 32
_FIRST_ROWS = 1 << 10

Rows = NDArray[np.int64]


class Tables(msgspec.Struct, frozen=True):
    """The columns of an index; ``parents`` are row numbers, -1 for none."""

    keys: NDArray[np.uint8]
    namespaces: NDArray[np.int16]
    tenants: NDArray[np.int32]
    parents: NDArray[np.int32]
    sizes: NDArray[np.int64]
    times: NDArray[np.float64]
    stored: NDArray[np.bool_]


#: Name, type and width of each column.
COLUMNS: tuple[tuple[str, type, tuple[int, ...]], ...] = (
    ("keys", np.uint8, (KEY_BYTES,)),
    ("namespaces", np.int16, ()),
    ("tenants", np.int32, ()),
    ("parents", np.int32, ()),
    ("sizes", np.int64, ()),
    ("times", np.float64, ()),
    ("stored", np.bool_, ()),
)


class ChainIndex:
    """Blocks by namespace and key; not thread-safe.  Times are seconds of any one clock."""

    def __init__(self) -> None:
        self.namespaces: list[str] = []
        self.tenants: list[str] = [""]
        self.used_bytes = 0
        self.blocks = 0
        self._used_by_namespace: dict[int, int] = {}
        self._used_by_tenant: dict[int, int] = {}
        self._rows: dict[bytes, int] = {}
        self._count = 0
        self._root = chain_root()
        self._numbers: dict[str, int] = {}
        self._tenant_numbers: dict[str, int] = {"": 0}
        self._tables = _empty(_FIRST_ROWS)
        self._children = Children(self._tables.parents, 0)

    # ------------------------------------------------------------------ queries

    def tables(self) -> Tables:
        """Return views of all rows; they change with the index."""
        return _cut(self._tables, self._count)

    def row(self, namespace: str, key: BlockKey) -> int | None:
        """Return the row of a stored block, None if it is not stored."""
        row = self.find(namespace, key)
        return row if row is not None and self._tables.stored[row] else None

    def find(self, namespace: str, key: BlockKey) -> int | None:
        """Return the row of a block, stored or not, None if there is no row."""
        number = self._numbers.get(namespace)
        return None if number is None else self._rows.get(_name(number, key))

    def block(self, row: int) -> tuple[str, BlockKey]:
        """Return namespace and key of a row."""
        tables = self._tables
        return self.namespaces[tables.namespaces[row]], tables.keys[row].tobytes()

    def used_by_namespace(self) -> dict[str, int]:
        """Return stored bytes by namespace."""
        return {self.namespaces[n]: used for n, used in self._used_by_namespace.items() if used}

    def used_by_tenant(self) -> dict[str, int]:
        """Return stored bytes by tenant tag; the empty one stands for requests without a salt."""
        return {self.tenants[n]: used for n, used in self._used_by_tenant.items() if used}

    def stored_bytes(self) -> StoredBytes:
        """Return stored bytes as quotas count them."""
        return StoredBytes(self.used_bytes, self.used_by_namespace(), self.used_by_tenant())

    # ------------------------------------------------------------------ changes

    def add(
        self,
        namespace: str,
        key: BlockKey,
        parent: BlockKey,
        tenant: str,
        size_bytes: int,
        time_s: float,
    ) -> int:
        """Add a block that was stored and used at ``time_s``; return its row.

        An empty ``parent`` or ``tenant`` means unknown.  A block without a tenant inherits its
        parent's, in whichever order the two are added.
        """
        row, tables = self._place(self._namespace(namespace), key), self._tables
        if parent and parent != self._root:
            parent_row = self._place(int(tables.namespaces[row]), parent)
            tables = self._tables  # they may have grown
            self._link(row, parent_row)
        if tables.stored[row]:
            self._count_bytes(row, -1)
        own_parent = tables.parents[row]
        had_none = not tables.tenants[row]
        if tenant:
            tables.tenants[row] = self._tenant(tenant)
        elif had_none and own_parent != NO_ROW:
            tables.tenants[row] = tables.tenants[own_parent]
        if had_none and tables.tenants[row]:
            self._propagate_tenant(row)
        tables.sizes[row] = size_bytes
        tables.stored[row] = True
        tables.times[row] = max(tables.times[row], time_s)
        self._count_bytes(row, 1)
        return row

    def use(self, namespace: str, key: BlockKey, time_s: float) -> int:
        """Record a use of the chain that ends with this block; return the block's row."""
        row = self._place(self._namespace(namespace), key)
        self._tables.times[row] = max(self._tables.times[row], time_s)
        return row

    def remove(self, namespace: str, key: BlockKey, time_s: float = math.inf) -> None:
        """Remove a block that was not stored at ``time_s``, unless it was used later."""
        row = self.row(namespace, key)
        if row is not None and self._tables.times[row] <= time_s:
            self._count_bytes(row, -1)
            self._tables.stored[row] = False

    def limit_times(self, now_s: float) -> None:
        """Set times after ``now_s`` to it: a clock that was ahead may not protect blocks."""
        times = self.tables().times
        np.minimum(times, now_s, out=times)

    def absent(self, namespace: str, fan_out: int, found: set[BlockKey], before_s: float) -> Rows:
        """Return stored rows that are not in ``found`` and have keys that begin with these 12 bits.

        Blocks used at ``before_s`` or later are left out: they may be newer than the listing.
        """
        tables, number = self.tables(), self._numbers.get(namespace, NO_ROW)
        chosen = tables.stored & (_heads(tables) == fan_out) & (tables.times < before_s)
        rows = np.flatnonzero(chosen & (tables.namespaces == number))
        missing = [row for row in rows.tolist() if tables.keys[row].tobytes() not in found]
        return np.array(missing, np.int64)

    def fan_outs(self, namespace: str) -> list[int]:
        """Return the distinct first 12 bits of the namespace's stored keys."""
        tables, number = self.tables(), self._numbers.get(namespace, NO_ROW)
        own = tables.stored & (tables.namespaces == number)
        return [int(head) for head in np.unique(_heads(tables)[own])]

    def compact(self, before_s: float, also: Sequence[int] = ()) -> None:
        """Drop rows without a stored block, child or use since ``before_s``, except ``also``.

        If there are more than ``MAX_UNSTORED`` of the others, and more than blocks are stored,
        those used last are left.  Tenants that are left without a row are dropped as well.
        """
        tables = self.tables()
        unstored = tables.times[~tables.stored]
        most = max(MAX_UNSTORED, len(tables.times) - len(unstored))
        if len(unstored) > most:
            before_s = max(before_s, float(np.partition(unstored, -most)[-most]))
        needed = tables.stored | (tables.times >= before_s)
        needed[list(also)] = True
        behind = np.flatnonzero(needed)
        while behind.size:
            above = tables.parents[behind]
            above = above[above != NO_ROW]
            behind = np.unique(above[~needed[above]])
            needed[behind] = True
        kept = np.flatnonzero(needed)
        moved = np.full(self._count + 1, NO_ROW, np.int32)
        moved[kept] = np.arange(len(kept), dtype=np.int32)
        columns = {name: getattr(tables, name)[kept] for name, _, _ in COLUMNS}
        columns["parents"] = moved[columns["parents"]]
        # Number 0, for no tenant, stays the first one.
        numbers, places = np.unique(np.append(0, columns["tenants"]), return_inverse=True)
        columns["tenants"] = places[1:].astype(np.int32)
        self.tenants = [self.tenants[number] for number in numbers]
        self._tenant_numbers = {name: number for number, name in enumerate(self.tenants)}
        self._take(Tables(**columns))

    @classmethod
    def of(cls, namespaces: Sequence[str], tenants: Sequence[str], tables: Tables) -> "ChainIndex":
        """Return an index with these names and tables; raises ``ValueError`` if inconsistent.

        Tables saved by versions without tenant inheritance get inherited tenants.
        """
        index = cls()
        index.namespaces, index.tenants = list(namespaces), list(tenants)
        index._numbers = {name: number for number, name in enumerate(namespaces)}
        index._tenant_numbers = {name: number for number, name in enumerate(tenants)}
        _check(tables, len(namespaces), len(tenants))
        inherited_tenants = inherited(tables.tenants, tables.parents)
        index._take(msgspec.structs.replace(tables, tenants=inherited_tenants))
        return index

    def _take(self, tables: Tables) -> None:
        self._tables, self._count = tables, len(tables.stored)
        self._children = Children(tables.parents, self._count)
        names = np.empty((self._count, 2 + KEY_BYTES), np.uint8)
        names[:, :2] = tables.namespaces.astype("<i2").view(np.uint8).reshape(-1, 2)
        names[:, 2:] = tables.keys
        packed, width = names.tobytes(), names.shape[1]
        self._rows = {packed[row * width : (row + 1) * width]: row for row in range(self._count)}
        sizes = np.where(tables.stored, tables.sizes, 0)
        self.used_bytes, self.blocks = int(sizes.sum()), int(tables.stored.sum())
        self._used_by_namespace = _sums(tables.namespaces, sizes)
        self._used_by_tenant = _sums(tables.tenants, sizes)

    def _place(self, number: int, key: BlockKey) -> int:
        name = _name(number, key)
        if (row := self._rows.get(name)) is not None:
            return row
        if self._count == len(self._tables.stored):
            self._tables = _grown(self._tables)
            self._children.grow(len(self._tables.stored))
        row = self._rows[name] = self._count
        self._count += 1
        tables = self._tables
        tables.keys[row] = np.frombuffer(key, np.uint8)
        tables.namespaces[row] = number
        tables.parents[row] = NO_ROW
        return row

    def _link(self, row: int, parent_row: int) -> None:
        parents = self._tables.parents
        before = int(parents[row])
        if parent_row in (row, before):
            return
        if before != NO_ROW:
            self._children.remove(before, row)
        parents[row] = parent_row
        self._children.add(parent_row, row)

    def _propagate_tenant(self, row: int) -> None:
        """Set a row's tenant on all its descendants that have none."""
        tables, tenant, pending = self._tables, self._tables.tenants[row], [row]
        while pending:
            for child in self._children.of(pending.pop()):
                if tables.tenants[child]:
                    continue
                self._change_tenant(child, int(tenant))
                pending.append(child)

    def _change_tenant(self, row: int, tenant: int) -> None:
        tables = self._tables
        if tables.stored[row]:
            self._count_bytes(row, -1)
        tables.tenants[row] = tenant
        if tables.stored[row]:
            self._count_bytes(row, 1)

    def _count_bytes(self, row: int, sign: int) -> None:
        tables = self._tables
        change = sign * int(tables.sizes[row])
        self.used_bytes += change
        self.blocks += sign
        for used, number in (
            (self._used_by_namespace, int(tables.namespaces[row])),
            (self._used_by_tenant, int(tables.tenants[row])),
        ):
            used[number] = used.get(number, 0) + change

    def _namespace(self, name: str) -> int:
        if (number := self._numbers.get(name)) is None:
            number = self._numbers[name] = len(self.namespaces)
            self.namespaces.append(name)
        return number

    def _tenant(self, name: str) -> int:
        if (number := self._tenant_numbers.get(name)) is None:
            number = self._tenant_numbers[name] = len(self.tenants)
            self.tenants.append(name)
        return number


def chain_uses(
    times: NDArray[np.float64], parents: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return for each row its last use, including uses of its descendants, and its depth.

    Pointer doubling: step k passes the latest use of a row to its ancestor 2**k levels above.
    """
    latest, ancestors = times.copy(), parents.astype(np.int64)
    depths = (ancestors != NO_ROW).astype(np.int32)
    for _ in range(MAX_DOUBLINGS):
        rows = np.flatnonzero(ancestors != NO_ROW)
        if not rows.size:
            break
        targets = ancestors[rows]
        np.maximum.at(latest, targets, latest[rows])
        depths[rows] += depths[targets]
        ancestors[rows] = ancestors[targets]
    return latest, depths


def _name(number: int, key: BlockKey) -> bytes:
    return number.to_bytes(2, "little") + key


def _empty(rows: int) -> Tables:
    return Tables(**{name: np.zeros((rows, *width), kind) for name, kind, width in COLUMNS})


def _grown(tables: Tables) -> Tables:
    more = _empty(max(len(tables.stored), _FIRST_ROWS))
    return Tables(
        **{
            name: np.concatenate([getattr(tables, name), getattr(more, name)])
            for name, _, _ in COLUMNS
        }
    )


def _heads(tables: Tables) -> NDArray[np.int16]:
    return (tables.keys[:, 0].astype(np.int16) << 4) | (tables.keys[:, 1] >> 4)


def _cut(tables: Tables, rows: int) -> Tables:
    return Tables(**{name: getattr(tables, name)[:rows] for name, _, _ in COLUMNS})


def _sums(numbers: NDArray[np.integer], sizes: NDArray[np.int64]) -> dict[int, int]:
    # Sums of doubles are exact below 2**53 bytes.
    return {n: int(used) for n, used in enumerate(np.bincount(numbers, sizes)) if used}


def _check(tables: Tables, namespaces: int, tenants: int) -> None:
    rows = len(tables.stored)
    limits = (("namespaces", 0, namespaces), ("tenants", 0, tenants), ("parents", NO_ROW, rows))
    for name, least, end in limits:
        column = getattr(tables, name)
        if len(column) != rows or (rows and (column.min() < least or column.max() >= end)):
            raise ValueError(f"column {name} does not fit {rows} rows, {namespaces} namespaces")


# ---------------------------------------------------------------------------------------- eviction
# Eviction from a storage: the least recently used chains, tails before heads.
#
# A hit ends at the first missing block.  So a block is evicted only after all its descendants:
# blocks are ordered by the last use of themselves or any descendant, and with equal uses the deeper
# block evicted first.  An eviction that stops at any point of this order leaves no hole in a chain.


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


def earlier_weights(index: ChainIndex, namespaces: Mapping[str, StoreNamespace]) -> frozenset[str]:
    """Return the namespaces of weights after which engines have had others, by their last use.

    Each training step has a namespace, which no engine uses after the step.  Namespaces without a
    version are never among them: engines that are started have those weights again.
    """
    tables, last_s = index.tables(), dict[str, float]()
    for number, name in enumerate(index.namespaces):
        times = tables.times[tables.namespaces == number]
        if name in namespaces and len(times):
            last_s[name] = float(times.max())
    latest: dict[StoreNamespace, str] = {}
    for name in sorted(last_s, key=last_s.__getitem__):
        latest[namespaces[name].with_weights()] = name
    return frozenset(
        name
        for name in last_s
        if namespaces[name].weights is not msgspec.UNSET
        and latest[namespaces[name].with_weights()] != name
    )


def victims(
    index: ChainIndex,
    limits: StorageLimits,
    pins: Pins,
    now_s: float,
    earlier: Collection[str] = (),
) -> Rows:
    """Return the rows of the blocks to evict, in order; none of a pinned or protected chain.

    Blocks of ``earlier`` namespaces (see ``earlier_weights``) come first.
    """
    tables = index.tables()
    uses, depths = chain_uses(_with_pins(index, pins), tables.parents)
    rows = np.flatnonzero(tables.stored & (uses < now_s - limits.protect_s))
    first = [number for number, name in enumerate(index.namespaces) if name in earlier]
    later = ~np.isin(tables.namespaces[rows], first)
    rows = rows[np.lexsort((-depths[rows], uses[rows], later))]
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
