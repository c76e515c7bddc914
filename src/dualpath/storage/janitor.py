"""The janitor: keeps a storage within its limits.  One per storage, elected by a lease.

A step applies the journal events of the engines, continues the survey, and removes blocks if a
limit is exceeded.  A janitor that dies at any point leaves intact blocks; the next janitor restores
the index from the saved one, the events since then, and the survey.  Two janitors at the same time
remove too many blocks at worst, and a removed block is computed again.
"""

import logging
from collections import deque
from collections.abc import Callable

import msgspec

from dualpath.core.errors import StorageError
from dualpath.policy.chain_index import ChainIndex
from dualpath.policy.eviction import above_watermark, pinned_ends, victims
from dualpath.policy.quotas import StorageLimits
from dualpath.storage import index_file
from dualpath.storage.half_written import remove_stale_temporaries
from dualpath.storage.index_file import Progress
from dualpath.storage.journal import JournalEvent, Removed, Used, Written, decode_segment, segments
from dualpath.storage.lease import LEASE_S, Lease
from dualpath.storage.objects import ObjectTree
from dualpath.storage.pins import read_pins
from dualpath.storage.removal import BATCH, Removal
from dualpath.storage.status import MAX_NAMED_OWNERS, Status, write_status
from dualpath.storage.survey import Survey

log = logging.getLogger(__name__)

#: Time budget of a step for the survey, and again for removals.
STEP_BUDGET_S = 0.5
#: The index is saved after this time, or after this many events.
SAVE_S = 600.0
SAVE_EVENTS = 200_000
#: After planning found nothing to remove, the next plan waits for this multiple of its run time.
_REPLAN_FACTOR = 50.0
#: The time to live is checked this many times per ``ttl_s``.
_TTL_CHECKS = 20
#: A writer without events for this long is removed from the index's progress.
_WRITER_EXPIRY_S = 3600.0
#: Interval of the search for stale temporary files.
_CLEAN_UP_S = 3600.0


class Totals(msgspec.Struct):
    """Totals of this janitor since it was created."""

    evicted_blocks: int = 0
    evicted_bytes: int = 0


class Janitor:
    """A candidate for janitor, and the janitor while it holds the lease; not thread-safe.

    ``now_s`` is Unix time, ``steady_s`` a monotonic clock, ``holder`` a unique name.
    """

    def __init__(
        self,
        tree: ObjectTree,
        holder: str,
        limits: StorageLimits,
        now_s: Callable[[], float],
        steady_s: Callable[[], float],
        lease_s: float = LEASE_S,
    ) -> None:
        self.totals = Totals()
        self.lease = Lease(tree, holder, lease_s)
        self._tree = tree
        self._limits = limits
        self._now_s = now_s
        self._steady_s = steady_s
        self._term: _JanitorTerm | None = None

    @property
    def index(self) -> ChainIndex | None:
        """The index, None while this is not the janitor."""
        return None if self._term is None else self._term.index

    @property
    def survey(self) -> Survey | None:
        """The survey, None while this is not the janitor."""
        return None if self._term is None else self._term.survey

    @property
    def is_busy(self) -> bool:
        """Whether the next step has blocks to remove or folders to survey."""
        return self._term is not None and self._term.is_busy

    def step(self) -> bool:
        """Acquire or renew the lease and do what is due; return whether this is the janitor.

        Takes about a second at most.  Raises ``StorageError``; the next step continues.
        """
        if not self.lease.acquire(self._steady_s()):
            self._term = None
            return False
        if self._term is None:
            self._term = _JanitorTerm(
                self._tree, self.lease, self._limits, self.totals, self._now_s, self._steady_s
            )
        self._term.step()
        return True

    def close(self) -> None:
        """Save the index and release the lease."""
        term, self._term = self._term, None
        if term is not None and self.lease.is_held():
            term.save()
            self.lease.release()


class _JanitorTerm:
    """State of the janitor while it holds the lease."""

    def __init__(
        self,
        tree: ObjectTree,
        lease: Lease,
        limits: StorageLimits,
        totals: Totals,
        now_s: Callable[[], float],
        steady_s: Callable[[], float],
    ) -> None:
        self._tree, self._lease, self._limits, self._totals = tree, lease, limits, totals
        self._now_s, self._steady_s = now_s, steady_s
        self.index, progress = index_file.load(tree) or (ChainIndex(), Progress())
        self.survey = Survey(tree, self.index, now_s, progress.surveyed_s)
        self._applied = dict(progress.applied)
        self._last_event_s: dict[str, float] = dict.fromkeys(self._applied, steady_s())
        self._removal = Removal(tree, self.index, f"{lease.holder}-{lease.term}")
        self._plan: deque[int] = deque()
        self._planned: set[int] = set()
        self._plan_again_s = self._check_ttl_s = 0.0
        self._cleaned_s = float("-inf")
        self._saves = 0
        self._saved_s = steady_s()
        self._saved_whole = progress.surveyed_s is not None
        self._events = 0
        log.info(
            "this process is now the storage's janitor; its index has %d blocks, %d bytes%s",
            *(self.index.blocks, self.index.used_bytes),
            "" if self._saved_whole else " and the first survey is under way",
        )

    @property
    def is_busy(self) -> bool:
        return bool(self._plan) or self.survey.surveyed_s is None

    def step(self) -> None:
        self._apply_events()
        self.survey.advance(STEP_BUDGET_S)
        self._remove(self._steady_s() + STEP_BUDGET_S)
        self._removal.flush_journal()
        self._clean_up_if_due()
        self._save_if_due()
        self._publish()

    def save(self) -> None:
        """Save the index, then remove the journal segments that it includes."""
        self._drop_plan()
        ends = pinned_ends(self.index, read_pins(self._tree))
        self.index.compact(self._now_s() - _WRITER_EXPIRY_S, ends)
        now_s = self._steady_s()
        for writer in [
            w for w, last_s in self._last_event_s.items() if now_s - last_s > _WRITER_EXPIRY_S
        ]:
            del self._applied[writer], self._last_event_s[writer]
        self._saves += 1
        progress = Progress(dict(self._applied), self.survey.surveyed_s)
        index_file.save(self._tree, self._lease.term, self._saves, self.index, progress)
        self._saved_s, self._events = now_s, 0
        self._saved_whole = self.survey.surveyed_s is not None
        if self._lease.is_held():
            self._tree.remove(
                [n for w, number, n in segments(self._tree) if number <= self._applied.get(w, 0)]
            )

    # ------------------------------------------------------------------ events

    def _apply_events(self) -> None:
        before = dict(self._applied)
        touched, count = apply_events(self._tree, self.index, self._applied)
        now_s = self._steady_s()
        self._last_event_s |= {w: now_s for w, n in self._applied.items() if before.get(w) != n}
        self._events += count
        if not self._planned.isdisjoint(touched):
            # A used block stays, and so do all blocks before it.
            self._drop_plan()

    # ------------------------------------------------------------------ removal

    def _remove(self, end_s: float) -> None:
        if not self._plan:
            self._make_plan()
        while self._plan and self._steady_s() < end_s:
            if not self._lease.is_held():
                self._drop_plan()
                return
            self._remove_batch()

    def _make_plan(self) -> None:
        now_s = self._steady_s()
        if not self._limits.any or now_s < self._plan_again_s:
            return
        # Before the first survey is complete, the oldest indexed block may be the newest stored.
        whole = self.survey.surveyed_s is not None
        full = 0 < self._limits.quota_bytes < self.index.used_bytes
        late = bool(self._limits.ttl_s) and now_s >= self._check_ttl_s
        if not (full or (whole and (late or above_watermark(self.index, self._limits)))):
            return
        self._check_ttl_s = now_s + max(self._limits.ttl_s / _TTL_CHECKS, 1.0)
        pins = read_pins(self._tree)
        # Measure only the planning itself: with the time to read pins included, a slow storage
        # would stay above its quota for many times that long.
        begun_s = self._steady_s()
        rows = victims(self.index, self._limits, pins, self._now_s()).tolist()
        self._plan, self._planned = deque(rows), set(rows)
        if not rows:
            ended_s = self._steady_s()
            self._plan_again_s = ended_s + _REPLAN_FACTOR * (ended_s - begun_s)

    def _remove_batch(self) -> None:
        rows = [self._plan.popleft() for _ in range(min(BATCH, len(self._plan)))]
        try:
            self._totals.evicted_bytes += self._removal.remove(rows)
        except StorageError:
            self._drop_plan()
            raise
        self._planned.difference_update(rows)
        self._totals.evicted_blocks += len(rows)

    def _drop_plan(self) -> None:
        self._plan, self._planned = deque(), set()

    # ------------------------------------------------------------------ upkeep

    def _clean_up_if_due(self) -> None:
        if self._steady_s() - self._cleaned_s >= _CLEAN_UP_S:
            self._cleaned_s = self._steady_s()
            if count := remove_stale_temporaries(self._tree, self._now_s()):
                log.info("removed %d temporary files of dead writers", count)

    def _save_if_due(self) -> None:
        late = self._events and self._steady_s() - self._saved_s >= SAVE_S
        first = not self._saved_whole and self.survey.surveyed_s is not None
        if late or first or self._events >= SAVE_EVENTS:
            self.save()

    def _publish(self) -> None:
        tenants, namespaces, _ = self._limits.quotas(self.index.stored_bytes())
        write_status(
            self._tree,
            Status(
                holder=self._lease.holder,
                time_s=self._now_s(),
                blocks=self.index.blocks,
                used_bytes=self.index.used_bytes,
                limits=self._limits,
                surveyed_s=self.survey.surveyed_s,
                applied_segments=dict(self._applied),
                fullest_namespaces=namespaces.fullest(MAX_NAMED_OWNERS),
                fullest_tenants=tenants.fullest(MAX_NAMED_OWNERS),
            ),
        )


def apply_events(
    tree: ObjectTree, index: ChainIndex, applied: dict[str, int]
) -> tuple[set[int], int]:
    """Apply all journal segments after ``applied`` (last segment by writer), which is updated.

    Returns the rows of blocks written or used, including the parents of written ones, and the
    number of events.  Raises ``StorageError`` if a segment cannot be read; then none is applied.
    """
    events: list[tuple[str, JournalEvent]] = []
    applied_now = dict(applied)
    for writer, number, name in segments(tree):
        if number <= applied_now.get(writer, 0):
            continue
        content = tree.get(name)
        segment = None if content is None else decode_segment(content)
        if segment is None:
            log.warning("journal segment %s is damaged; the survey finds its blocks", name)
        else:
            events += [(segment.namespace, item) for item in segment.events]
        applied_now[writer] = number
    applied.update(applied_now)
    events.sort(key=lambda item: item[1].time_s)
    touched: set[int] = set()
    for namespace, item in events:
        match item:
            case Written():
                row = index.add(
                    namespace, item.key, item.parent, item.tenant, item.bytes, item.time_s
                )
                touched |= {row, int(index.tables().parents[row])}
            case Used():
                touched.add(index.use(namespace, item.key, item.time_s))
            case Removed():
                index.remove(namespace, item.key, item.time_s)
    return touched, len(events)
