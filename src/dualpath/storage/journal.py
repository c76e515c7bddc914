"""What engines tell the janitor of their storage: blocks written, chains used, blocks found gone.

Each process writes *segments*, small objects in order, ``janitor/journal/<writer>/<number>``; the
janitor takes them in, and removes them once its index is saved with them.  News that is lost (a
process dies before it has written them) is found again by the janitor's survey of the storage; what
is told twice says nothing new.
"""

import functools
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import xxhash

from dualpath.core.blocks import BlockKey, BlockOrigin
from dualpath.core.errors import StorageError
from dualpath.policy.quotas import StoredBytes
from dualpath.storage.objects import ObjectTree

log = logging.getLogger(__name__)

JOURNAL = "janitor/journal/"
#: Beyond that what is oldest is forgotten: the storage takes no segments.
MOST_NEWS = 1 << 16
_CHECKSUM_BYTES = 8


class Written(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A block was stored; ``parent`` and ``tenant`` as in ``BlockOrigin``."""

    time_s: float
    key: BlockKey
    parent: BlockKey
    tenant: str
    bytes: int


class Used(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A chain that ends with this block was used."""

    time_s: float
    key: BlockKey


class Gone(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A block is not stored any more, unless it was written or used after that time."""

    time_s: float
    key: BlockKey


News = Written | Used | Gone


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """News of one namespace, oldest first; times are Unix times."""

    namespace: str
    news: tuple[News, ...]


_decoder = msgspec.msgpack.Decoder(Segment)


def encode_segment(segment: Segment) -> bytes:
    """Return a segment's bytes, with a checksum at the end."""
    content = msgspec.msgpack.encode(segment)
    return content + xxhash.xxh3_64_digest(content)


def decode_segment(content: bytes) -> Segment | None:
    """Return the segment, None if these bytes are none."""
    body, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(body) != checksum:
        return None
    try:
        segment = _decoder.decode(body)
    except msgspec.MsgspecError:
        return None
    return segment if all(len(news.key) == 32 for news in segment.news) else None


def segment_name(writer: str, number: int) -> str:
    """Return where a writer's segment lies; names sort as numbers do."""
    return f"{JOURNAL}{writer}/{number:012}"


def segments(tree: ObjectTree) -> Iterator[tuple[str, int, str]]:
    """Yield (writer, number, name) of all segments, each writer's in order."""
    for name in sorted(info.name for info in tree.objects(JOURNAL)):
        writer, _, number = name.removeprefix(JOURNAL).rpartition("/")
        if writer and number.isdecimal():
            yield writer, int(number), name


class Journal:
    """One process's news of one namespace.  ``writer`` is a name that no process had before.

    All methods but ``flush`` are quick and may be called by any thread; ``flush`` by one.
    """

    def __init__(self, tree: ObjectTree, namespace: str, writer: str) -> None:
        self.writer = writer
        self.namespace = namespace
        self._tree = tree
        self._lock = threading.Lock()
        self._news: list[News] = []
        self._used: dict[BlockKey, float] = {}
        self._number = 0
        self._unseen: dict[int, StoredBytes] = {}

    def written(
        self, keys: Sequence[BlockKey], origins: Sequence[BlockOrigin], size: int, time_s: float
    ) -> None:
        """Blocks of ``size`` bytes each are stored."""
        news = [
            Written(time_s, key, origin.parent, origin.tenant, size)
            for key, origin in zip(keys, origins, strict=True)
        ]
        with self._lock:
            self._news += news
            del self._news[:-MOST_NEWS]

    def used(self, key: BlockKey, time_s: float) -> None:
        """A chain that ends with this block is used; said once per segment."""
        with self._lock:
            if key in self._used or len(self._used) < MOST_NEWS:
                self._used[key] = time_s

    def gone(self, key: BlockKey, time_s: float) -> None:
        """A block was not found where it should have been."""
        with self._lock:
            self._news.append(Gone(time_s, key))
            del self._news[:-MOST_NEWS]

    def unseen(self, seen: int) -> StoredBytes:
        """Return the bytes of blocks written that are not in the segments up to ``seen``."""
        with self._lock:
            self._unseen = {n: written for n, written in self._unseen.items() if n > seen}
            return functools.reduce(
                StoredBytes.plus, self._unseen.values(), self._bytes(self._news)
            )

    def forget(self) -> None:
        """Drop what is new: there is nobody to tell it to."""
        with self._lock:
            self._news, self._used = [], {}

    def flush(self) -> bool:
        """Write what is new as a segment; return whether it is, or there was nothing.

        What cannot be written is kept for the next time.
        """
        with self._lock:
            news, used = self._news, self._used
            if not news and not used:
                return True
            self._news, self._used = [], {}
            # Counted all the while: a quota that forgot them for a moment would be overrun.
            self._unseen[self._number + 1] = self._bytes(news)
        every = (*news, *(Used(time_s, key) for key, time_s in used.items()))
        content = encode_segment(Segment(self.namespace, every))
        try:
            self._tree.replace(segment_name(self.writer, self._number + 1), content)
        except StorageError as error:
            log.warning("news for the storage's janitor is kept for later: %s", error)
            with self._lock:
                self._unseen.pop(self._number + 1, None)
                self._news[:0] = news
                self._used = used | self._used
            return False
        with self._lock:
            self._number += 1
        return True

    def _bytes(self, news: Sequence[News]) -> StoredBytes:
        tenants: Counter[str] = Counter()
        for item in news:
            if isinstance(item, Written):
                tenants[item.tenant] += item.bytes
        return StoredBytes(tenants.total(), {self.namespace: tenants.total()}, dict(tenants))
