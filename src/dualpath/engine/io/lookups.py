"""Answers the router's look-ups: how many blocks at the head of a list are stored.

A look-up is a search in a chain of keys (``engine.prefix_search``) that advances with each event:
an answer of the storage, or the end of a write that it waits for.  It holds no thread while it
waits, so that look-ups do not queue behind one another.  Each is answered by its deadline with the
blocks found by then, even if the storage hangs.
"""

import functools
import logging
from collections.abc import Callable, Mapping

from dualpath.core.blocks import BlockKey
from dualpath.core.control import EngineMessage, Lookup, LookupDone
from dualpath.core.errors import DualPathError
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.io.persister import PendingWrites
from dualpath.engine.threads import OS_THREADS, Threads, TimeLimit, Workers
from dualpath.storage.wrapping import LookupCachingStorage

# ----------------------------------------------------------------------------------- prefix search
# A search for the length of the stored prefix of a chain of blocks, with few storage queries.
#
# Keys are chained and blocks are written in order, so that almost always all blocks before a stored
# one are stored, and none after an absent one.  If a block in the middle was removed, the search
# may end after the gap: the read then finds the gap, and the blocks after it are recomputed.


class PrefixSearch:
    """Chooses the positions of ``count`` blocks to query next, ``width`` ≥ 1 at a time.

    The first query is for the block after those known to be stored: for most chains it is absent
    and ends the search.  Then the remaining range is repeatedly divided into ``width`` + 1 parts:
    with 1,000 blocks and a width of 1 that takes at most 11 queries, one after the other.
    """

    def __init__(self, count: int, width: int) -> None:
        self.stored = 0
        self._count = count
        self._width = width
        self._absent = count
        self._asked = False

    @property
    def is_over(self) -> bool:
        """Whether block ``stored`` is known to be absent, or all blocks are stored."""
        return self.stored == self._absent

    def next_positions(self) -> list[int]:
        """Return the positions to query, in order; none once the search is over."""
        left = self._absent - self.stored
        if not self._asked:
            return [self.stored] if left else []
        parts = min(self._width, left) + 1
        return [self.stored + part * left // parts for part in range(1, parts)]

    def note(self, found: Mapping[int, bool]) -> None:
        """Process the answers for the queried positions: whether each block is stored."""
        self._asked = True
        for position in sorted(found):
            if not found[position]:
                self._absent = position
                return
            self.stored = position + 1

    def advance(self, stored: int) -> None:
        """Note that the first ``stored`` blocks are stored, as known from another source.

        If the block found absent is among them, the search restarts after them.
        """
        self.stored = max(self.stored, stored)
        if self.stored > self._absent:
            self._absent = self._count
            self._asked = False


log = logging.getLogger(__name__)

#: Concurrent storage queries; each one that hangs occupies a thread.
LOOKUP_THREADS = 16
#: Storage queries that wait for a thread.  With more the storage hangs: look-ups end at once.
MAX_WAITING = 1024
_NS_PER_S = 1_000_000_000


class _Lookup:
    """A look-up under way.

    ``search`` is used by one thread at a time, the one that advances the look-up; ``found``,
    ``asked`` and ``over`` are changed only under the lock of ``Lookups``.
    """

    def __init__(self, message: Lookup, now_ns: int, width: int) -> None:
        self.call_id = message.call_id
        self.keys = message.keys
        self.deadline_ns = now_ns + int(message.deadline_s * _NS_PER_S)
        self.search = PrefixSearch(len(message.keys), width)
        self.known_before = 0
        self.asked = 0
        self.found: dict[int, bool] = {}
        self.over = False


class Lookups:
    """All look-ups of an engine; an error of the storage ends a look-up with the blocks found.

    ``begin`` and ``expire`` never wait for the storage.
    """

    def __init__(
        self,
        storage: LookupCachingStorage,
        pending: PendingWrites,
        counters: Counters,
        send: Callable[[EngineMessage], None],
        threads: Threads = OS_THREADS,
    ) -> None:
        self._storage = storage
        self._pending = pending
        self._counters = counters
        self._send = send
        self._threads = threads
        self._lock = threads.lock()
        #: In the order of arrival, in which late look-ups are answered.
        self._open: dict[_Lookup, None] = {}
        self._waiting = 0
        self._workers = Workers(threads, "lookup", LOOKUP_THREADS)

    def begin(self, message: Lookup) -> None:
        """Look up and send ``LookupDone``; returns at once."""
        lookup = _Lookup(message, self._threads.now_ns(), self._storage.parallel_lookups)
        lookup.known_before = self._storage.cached_head(lookup.keys)
        with self._lock:
            self._open[lookup] = None
        self._counters.add(Counter.LOOKUPS, 1)
        self._advance(lookup)

    def expire(self, now_ns: int) -> None:
        """Answer every look-up that is past its deadline with the blocks found so far."""
        with self._lock:
            late = [lookup for lookup in self._open if now_ns >= lookup.deadline_ns]
        for lookup in late:
            self._answer(lookup, partial=True)

    def drop(self) -> None:
        """Drop all look-ups under way: the session with the router is over."""
        with self._lock:
            for lookup in self._open:
                lookup.over, lookup.keys = True, ()
            self._open.clear()

    def close(self, limit: TimeLimit) -> None:
        """Finish the queries under way, within the limit, and drop the others; idempotent."""
        self._workers.close(limit)

    def _advance(self, lookup: _Lookup) -> None:
        search, keys = lookup.search, lookup.keys
        while not lookup.over:
            search.advance(self._storage.cached_head(keys, search.stored))
            if search.stored == len(keys):
                self._answer(lookup, partial=False)
                return
            key = keys[search.stored]
            if self._pending.when_over(key, functools.partial(self._advance, lookup)):
                return
            if not search.is_over:
                self._ask(lookup)
                return
            # Its write may have ended since the query; then the key is known.
            if not self._storage.cached_head([key]):
                self._answer(lookup, partial=False)

    def _ask(self, lookup: _Lookup) -> None:
        positions = lookup.search.next_positions()
        with self._lock:
            lookup.found, lookup.asked = {}, len(positions)
            overflows = self._waiting + len(positions) > MAX_WAITING
            self._waiting += 0 if overflows else len(positions)
        if overflows:
            self._answer(lookup, partial=True)
            return
        for position in positions:
            self._workers.submit(functools.partial(self._ask_one, lookup, position))

    def _ask_one(self, lookup: _Lookup, position: int) -> None:
        with self._lock:
            self._waiting -= 1
            if lookup.over:
                return
            key = lookup.keys[position]
        try:
            stored = bool(self._storage.cached_head([key])) or self._probe(key)
        except DualPathError as error:
            log.warning("a look-up ends early: %s", error)
            self._answer(lookup, partial=True)
            return
        with self._lock:
            lookup.found[position] = stored
            if lookup.over or len(lookup.found) < lookup.asked:
                return
            lookup.search.note(lookup.found)
        self._advance(lookup)

    def _probe(self, key: BlockKey) -> bool:
        self._counters.add(Counter.LOOKUP_PROBES, 1)
        return self._storage.is_stored(key)

    def _answer(self, lookup: _Lookup, *, partial: bool) -> None:
        with self._lock:
            if lookup.over:
                return
            lookup.over = True
            self._open.pop(lookup, None)
            stored = lookup.search.stored
            # Callbacks may hold the look-up for a long time; they must not hold its keys.
            keys, lookup.keys = lookup.keys, ()
        self._storage.remember(keys[lookup.known_before : stored])
        if stored:
            self._storage.used(keys[stored - 1])
        self._send(LookupDone(call_id=lookup.call_id, hit_blocks=stored, partial=partial))
