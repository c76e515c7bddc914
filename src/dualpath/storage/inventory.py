"""Operator commands on a storage: usage, verification, removal.  They need no janitor lease."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.blocks import BlockKey
from dualpath.core.errors import ConfigError
from dualpath.storage import block_file, janitor
from dualpath.storage.block_file import BlockCodec, PlainBlocks
from dualpath.storage.chain_index import ChainIndex, Rows, chain_uses
from dualpath.storage.compression import CompressedBlocks
from dualpath.storage.janitor import BATCH, Removal, Survey, apply_events
from dualpath.storage.objects import ObjectTree, namespace_of
from dualpath.storage.posix import object_name
from dualpath.storage.sealed_blocks import block_codec
from dualpath.storage.wrapping import TokenBucket

if TYPE_CHECKING:
    from dualpath.storage.sealed_blocks import KeyRing

Grouping = Literal["namespace", "tenant", "age"]
Report = Callable[[float], None]

#: Ends of the age groups, in seconds since the last use, with their names.
AGES = (
    (3600.0, "an hour"),
    (86400.0, "a day"),
    (7 * 86400.0, "a week"),
    (30 * 86400.0, "30 days"),
    (float("inf"), "longer"),
)
_DIGEST = re.compile(r"_([0-9a-f]{16})")


class GroupUsage(msgspec.Struct, frozen=True):
    """Stored blocks of one group; ``used_s`` is the last use of any of them (Unix time)."""

    name: str
    model: str
    protection: str
    blocks: int
    bytes: int
    tenants: int
    used_s: float


class BlockFilter(msgspec.Struct, frozen=True):
    """Selects blocks that match all given criteria; without criteria all blocks."""

    namespace: str | None = None
    tenant: str | None = None
    unused_since_s: float | None = None


class CheckResult(msgspec.Struct, frozen=True):
    """Outcome of verifying one block; ``reason`` is its defect, None if it is valid."""

    namespace: str
    key: BlockKey
    bytes: int
    reason: str | None


def load_or_survey(
    tree: ObjectTree, now_s: Callable[[], float], report: Report, *, survey: bool = False
) -> ChainIndex:
    """Return the janitor's saved index with all journal events since; or survey the storage.

    Surveys if ``survey`` is True or if no index is saved; ``report`` is called with the completed
    share.
    """
    saved = None if survey else janitor.load(tree)
    index, progress = saved or (ChainIndex(), janitor.Progress())
    index.limit_times(now_s())
    apply_events(tree, index, dict(progress.applied), now_s())
    if progress.surveyed_s is None:
        Survey(tree, index, now_s).run_to_end(report)
    return index


def usage_by_group(
    tree: ObjectTree, index: ChainIndex, by: Grouping, now_s: float
) -> list[GroupUsage]:
    """Return the groups, the largest first; age groups from young to old."""
    tables = index.tables()
    uses, _ = chain_uses(tables.times, tables.parents)
    numbers: NDArray[np.integer]
    if by == "age":
        names, ends = [name for _, name in AGES], [end for end, _ in AGES]
        numbers = np.searchsorted(ends, now_s - uses, side="left").astype(np.int64)
    elif by == "tenant":
        names, numbers = [tag or "(none)" for tag in index.tenants], tables.tenants
    else:
        names, numbers = index.namespaces, tables.namespaces
    found = []
    for number, name in enumerate(names):
        rows = np.flatnonzero(tables.stored & (numbers == number))
        if rows.size:
            namespace = namespace_of(tree, name) if by == "namespace" else None
            found.append(
                GroupUsage(
                    name=name,
                    model=namespace.model if namespace else "?" if by == "namespace" else "",
                    protection=(namespace and namespace.protection) or "",
                    blocks=len(rows),
                    bytes=int(tables.sizes[rows].sum()),
                    tenants=len(np.unique(tables.tenants[rows])),
                    used_s=float(uses[rows].max()),
                )
            )
    return found if by == "age" else sorted(found, key=lambda share: -share.bytes)


def select_rows(index: ChainIndex, choice: BlockFilter) -> Rows:
    """Return the rows that match, tails before heads; raises ``ConfigError`` for unknown names.

    A block matches by age if all blocks behind it do, so that no chain loses its middle.
    """
    tables = index.tables()
    uses, depths = chain_uses(tables.times, tables.parents)
    meant = tables.stored.copy()
    for names, numbers, name in (
        (index.namespaces, tables.namespaces, choice.namespace),
        (index.tenants, tables.tenants, choice.tenant),
    ):
        if name is None:
            continue
        if name not in names:
            shown = ", ".join(sorted(filter(None, names))[:8]) or "none"
            raise ConfigError(f"{name!r} has no blocks in this storage; give one of {shown}")
        meant &= numbers == names.index(name)
    if choice.unused_since_s is not None:
        meant &= uses < choice.unused_since_s
    rows = np.flatnonzero(meant)
    ordered: Rows = rows[np.lexsort((-depths[rows], uses[rows]))]
    return ordered


def remove(tree: ObjectTree, index: ChainIndex, rows: Rows, process: str, report: Report) -> int:
    """Remove blocks in order and journal the removals; return their bytes."""
    removal, removed_bytes = Removal(tree, index, process), 0
    for start in range(0, len(rows), BATCH):
        removed_bytes += removal.remove(rows[start : start + BATCH].tolist())
        removal.flush_journal()
        report(min((start + BATCH) / len(rows), 1.0))
    return removed_bytes


def verify(
    tree: ObjectTree,
    index: ChainIndex,
    rows: Rows,
    bytes_per_s: float,
    keys: "KeyRing | None",
    steady_s: Callable[[], float],
    sleep_s: Callable[[float], None],
) -> Iterator[CheckResult]:
    """Read and verify blocks at up to ``bytes_per_s`` (0: no limit).

    Sealed blocks cannot be verified without their ``keys``: the reason is then "storage key".
    """
    forms = {name: _form(tree, name, keys) for name in index.namespaces}
    bucket = TokenBucket(bytes_per_s) if bytes_per_s else None
    for row in rows.tolist():
        place, key = index.block(row)
        began_s = steady_s()
        content = tree.get(object_name(place, key))
        if content is None:
            yield CheckResult(place, key, 0, block_file.MISSING)
            continue
        form, reason = forms[place], block_file.OTHER_STORAGE_KEY
        found = reason if form is None else block_file.defect_of_file(form, key, content)
        if bucket is not None:
            sleep_s(max(bucket.pass_at(len(content), began_s) - steady_s(), 0.0))
        yield CheckResult(place, key, len(content), found)


def discard(tree: ObjectTree, verdicts: Sequence[CheckResult]) -> None:
    """Remove corrupt blocks; their KV is recomputed when it is needed."""
    tree.remove([object_name(bad.namespace, bad.key) for bad in verdicts])


def _form(tree: ObjectTree, name: str, keys: "KeyRing | None") -> BlockCodec | None:
    """Return the codec of a namespace's blocks, None if it needs storage keys that are missing."""
    namespace = namespace_of(tree, name)
    if namespace is None:
        return CompressedBlocks(PlainBlocks((_DIGEST.findall(name) or [""])[-1]))
    sealed = namespace.protection is not msgspec.UNSET
    return None if sealed and keys is None else block_codec(namespace, keys)
