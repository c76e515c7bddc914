"""What lies in a storage, for a person: counted, checked, removed.  No lease is needed for it."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.blocks import BlockKey, StoreNamespace
from dualpath.core.errors import ConfigError
from dualpath.policy.chain_index import ChainIndex, Rows, chain_uses
from dualpath.storage import block_file, index_file
from dualpath.storage.block_file import BlockForm, PlainBlocks
from dualpath.storage.directory import object_name
from dualpath.storage.janitor import take_news
from dualpath.storage.objects import ObjectTree
from dualpath.storage.protection import block_form
from dualpath.storage.removal import BATCH, Removal
from dualpath.storage.survey import Survey
from dualpath.storage.throttle import TokenBucket

if TYPE_CHECKING:
    from dualpath.storage.key_ring import KeyRing

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


class Share(msgspec.Struct, frozen=True):
    """Blocks of one group; ``used_s`` is the last use of any of them (Unix time)."""

    name: str
    model: str
    protection: str
    blocks: int
    bytes: int
    tenants: int
    used_s: float


class Choice(msgspec.Struct, frozen=True):
    """Which blocks are meant: all that fit everything that is given."""

    namespace: str | None = None
    tenant: str | None = None
    unused_since_s: float | None = None


class Verdict(msgspec.Struct, frozen=True):
    """A block that was read: what is wrong with it, None if nothing is."""

    namespace: str
    key: BlockKey
    bytes: int
    reason: str | None


def known(
    tree: ObjectTree, now_s: Callable[[], float], report: Report, *, survey: bool = False
) -> ChainIndex:
    """Return what lies there: as the janitor knows it and engines have told since, or surveyed.

    Without a saved index everything is surveyed; ``report`` hears the share that is done.
    """
    saved = None if survey else index_file.load(tree)
    index, progress = saved or (ChainIndex(), index_file.Progress())
    take_news(tree, index, dict(progress.taken))
    if progress.surveyed_s is None:
        Survey(tree, index, now_s).whole(report)
    return index


def shares(tree: ObjectTree, index: ChainIndex, by: Grouping, now_s: float) -> list[Share]:
    """Return the groups, the largest first; ages in their order."""
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
            namespace = _namespace(tree, name) if by == "namespace" else None
            found.append(
                Share(
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


def chosen(index: ChainIndex, choice: Choice) -> Rows:
    """Return the rows that are meant, tails before heads; raises ``ConfigError`` for no such name.

    By age whole ends of chains are meant, so that none loses its middle.
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
            raise ConfigError(f"{name!r} has no blocks there; there are {shown}")
        meant &= numbers == names.index(name)
    if choice.unused_since_s is not None:
        meant &= uses < choice.unused_since_s
    rows = np.flatnonzero(meant)
    ordered: Rows = rows[np.lexsort((-depths[rows], uses[rows]))]
    return ordered


def remove(tree: ObjectTree, index: ChainIndex, rows: Rows, process: str, report: Report) -> int:
    """Remove blocks in order, and tell the janitor; return their bytes."""
    removal, removed_bytes = Removal(tree, index, process), 0
    for start in range(0, len(rows), BATCH):
        removed_bytes += removal.remove(rows[start : start + BATCH].tolist())
        removal.tell()
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
) -> Iterator[Verdict]:
    """Read and check blocks at no more than ``bytes_per_s`` (0: as fast as it goes).

    Without their ``keys`` sealed blocks cannot be checked: "storage key".
    """
    forms = {name: _form(tree, name, keys) for name in index.namespaces}
    bucket = TokenBucket(bytes_per_s) if bytes_per_s else None
    for row in rows.tolist():
        place, key = index.block(row)
        began_s = steady_s()
        content = tree.get(object_name(place, key))
        if content is None:
            yield Verdict(place, key, 0, block_file.MISSING)
            continue
        form, reason = forms[place], block_file.OTHER_STORAGE_KEY
        found = reason if form is None else block_file.defect_of_file(form, key, content)
        if bucket is not None:
            sleep_s(max(bucket.pass_at(len(content), began_s) - steady_s(), 0.0))
        yield Verdict(place, key, len(content), found)


def discard(tree: ObjectTree, verdicts: Sequence[Verdict]) -> None:
    """Remove blocks that were found bad; who needs one computes it again."""
    tree.remove([object_name(bad.namespace, bad.key) for bad in verdicts])


def _form(tree: ObjectTree, name: str, keys: "KeyRing | None") -> BlockForm | None:
    """Return how the blocks of a namespace are written, None if only who has keys can say."""
    namespace = _namespace(tree, name)
    if namespace is None:
        return PlainBlocks((_DIGEST.findall(name) or [""])[-1])
    sealed = namespace.protection is not msgspec.UNSET
    return None if sealed and keys is None else block_form(namespace, keys)


def _namespace(tree: ObjectTree, name: str) -> StoreNamespace | None:
    try:
        content = tree.get(f"{name}/namespace.json") or b""
        return msgspec.json.decode(content, type=StoreNamespace)
    except msgspec.MsgspecError:
        return None
