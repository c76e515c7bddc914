"""The journal: engines report to the janitor which blocks they wrote, used, or found missing.

Each process writes *segments*, small numbered objects ``janitor/journal/<writer>/<number>``.  The
janitor applies them to its index and removes them once the index is saved.  Events that are lost (a
process dies before it has written them) are recovered by the janitor's survey of the storage.
Events are idempotent.
"""

import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import xxhash

from dualpath.core.blocks import BlockKey, BlockOrigin, TenantTag
from dualpath.core.errors import StorageError
from dualpath.storage.objects import ObjectTree
from dualpath.storage.posix import is_folder_name
from dualpath.storage.quotas import StoredBytes

log = logging.getLogger(__name__)

JOURNAL = "janitor/journal/"
#: Limit of events not yet written; beyond it the oldest are dropped (the storage is unavailable).
MAX_EVENTS = 1 << 16
_CHECKSUM_BYTES = 8
#: A block of more bytes is damage, and would not fit into the index's columns.
_LARGEST_BLOCK_BYTES = 1 << 40


#: What names of objects may not have (``storage.objects``).
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


class Written(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A block was stored; ``parent`` and ``tenant`` as in ``BlockOrigin``."""

    time_s: float
    key: BlockKey
    parent: BlockKey
    tenant: TenantTag
    bytes: Annotated[int, msgspec.Meta(ge=0, le=_LARGEST_BLOCK_BYTES)]


class Used(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A chain that ends with this block was used."""

    time_s: float
    key: BlockKey


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A block was removed or found missing, unless it was written or used after that time."""

    time_s: float
    key: BlockKey


JournalEvent = Written | Used | Removed


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Events of one namespace, oldest first; times are Unix times."""

    namespace: str
    events: tuple[JournalEvent, ...]


_decoder = msgspec.msgpack.Decoder(Segment)


def encode_segment(segment: Segment) -> bytes:
    """Return a segment's bytes, with a checksum at the end."""
    content = msgspec.msgpack.encode(segment)
    return content + xxhash.xxh3_64_digest(content)


def decode_segment(content: bytes) -> Segment | None:
    """Return the segment, None if the bytes are damaged or name what no engine writes.

    The namespace becomes part of a path: ``../other`` would lead to the blocks of another storage.
    """
    body, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(body) != checksum:
        return None
    try:
        segment = _decoder.decode(body)
    except msgspec.MsgspecError:
        return None
    parents = (event.parent for event in segment.events if isinstance(event, Written))
    is_whole = all(len(event.key) == 32 for event in segment.events) and all(
        len(parent) in (0, 32) for parent in parents
    )
    return segment if is_whole and is_folder_name(segment.namespace) else None


def segment_name(writer: str, number: int) -> str:
    """Return the object name of a segment; names sort in numerical order."""
    return f"{JOURNAL}{writer}/{number:012}"


def segments(tree: ObjectTree) -> Iterator[tuple[str, int, str]]:
    """Yield (writer, number, name) of all segments, each writer's in order."""
    for name in sorted(info.name for info in tree.objects(JOURNAL)):
        writer, _, number = name.removeprefix(JOURNAL).rpartition("/")
        if writer and number.isdecimal():
            yield writer, int(number), name


class Journal:
    """One process's events of one namespace.  ``writer`` is a unique name, never used again.

    It names a folder, in which characters that names of objects may not have are ``_``.

    All methods except ``flush`` are quick and thread-safe; ``flush`` is called by one thread.
    """

    def __init__(self, tree: ObjectTree, namespace: str, writer: str) -> None:
        self.writer = _NOT_IN_NAMES.sub("_", writer)
        self.namespace = namespace
        self._tree = tree
        self._lock = threading.Lock()
        self._events: list[JournalEvent] = []
        self._used: dict[BlockKey, float] = {}
        self._number = 0
        #: Blocks written in segments that the janitor may not have applied, by number.
        self._unapplied: dict[int, dict[BlockKey, Written]] = {}

    def written(
        self,
        keys: Sequence[BlockKey],
        origins: Sequence[BlockOrigin],
        sizes_bytes: Sequence[int],
        time_s: float,
    ) -> None:
        """Record that blocks of these sizes, with their headers, were stored."""
        events = [
            Written(time_s, key, origin.parent, origin.tenant, size)
            for key, origin, size in zip(keys, origins, sizes_bytes, strict=True)
        ]
        with self._lock:
            self._events += events
            del self._events[:-MAX_EVENTS]

    def used(self, key: BlockKey, time_s: float) -> None:
        """Record a use of the chain that ends with this block; once per segment."""
        with self._lock:
            if key in self._used or len(self._used) < MAX_EVENTS:
                self._used[key] = time_s

    def removed(self, key: BlockKey, time_s: float) -> None:
        """Record that a block was removed or found missing."""
        with self._lock:
            self._events.append(Removed(time_s, key))
            del self._events[:-MAX_EVENTS]

    def unapplied(self, applied: int) -> StoredBytes:
        """Return the bytes of the blocks written after segment ``applied``, each counted once.

        A block is written again if storage was too slow to answer that it is stored.
        """
        blocks: dict[BlockKey, Written] = {}
        with self._lock:
            self._unapplied = {n: written for n, written in self._unapplied.items() if n > applied}
            for written in self._unapplied.values():
                blocks |= written
            blocks |= _written(self._events)
        tenants: Counter[str] = Counter()
        for block in blocks.values():
            tenants[block.tenant] += block.bytes
        return StoredBytes(tenants.total(), {self.namespace: tenants.total()}, dict(tenants))

    def discard_pending(self) -> None:
        """Drop the events not yet written: the storage has no janitor to apply them."""
        with self._lock:
            self._events, self._used = [], {}

    def flush(self) -> bool:
        """Write new events as a segment; return False if the storage refused it.

        Refused events are written by the next call, in a segment with another number: the refused
        one may be stored all the same, as when only the answer is lost, and may be applied already.
        """
        with self._lock:
            events, used = self._events, self._used
            if not events and not used:
                return True
            self._events, self._used = [], {}
            self._number += 1
            number = self._number
            # Counted before the write: otherwise the quota could be exceeded in between.
            self._unapplied[number] = _written(events)
        every = (*events, *(Used(time_s, key) for key, time_s in used.items()))
        content = encode_segment(Segment(self.namespace, every))
        try:
            self._tree.replace(segment_name(self.writer, number), content)
        except StorageError as error:
            log.warning("cannot write the storage's journal, trying again later: %s", error)
            with self._lock:
                self._unapplied.pop(number, None)
                self._events[:0] = events
                self._used = used | self._used
            return False
        return True


def _written(events: Sequence[JournalEvent]) -> dict[BlockKey, Written]:
    return {item.key: item for item in events if isinstance(item, Written)}
