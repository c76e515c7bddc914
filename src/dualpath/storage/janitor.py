"""Keeps a storage within its limits: one janitor for all who use it, elected by a lease.

A step takes in the news of the engines, goes on with the survey, and removes blocks if a limit asks
for it.  Whatever ends between two steps, or within one, leaves whole blocks and an index that the
next janitor makes true again: from what was saved, from the news since then, and from the survey.
Two janitors at once remove too much at worst; a block that is gone is computed again.
"""

import logging
from collections import deque
from collections.abc import Callable

import msgspec

from dualpath.core.errors import StorageError
from dualpath.policy.chain_index import ChainIndex
from dualpath.policy.eviction import is_over, pinned_ends, victims
from dualpath.policy.quotas import StorageLimits
from dualpath.storage import index_file
from dualpath.storage.half_written import remove_half_written
from dualpath.storage.index_file import Progress
from dualpath.storage.journal import Gone, News, Used, Written, decode_segment, segments
from dualpath.storage.lease import LEASE_S, Lease
from dualpath.storage.objects import ObjectTree
from dualpath.storage.pins import read_pins
from dualpath.storage.removal import BATCH, Removal
from dualpath.storage.status import MOST_NAMED, Status, write_status
from dualpath.storage.survey import Survey

log = logging.getLogger(__name__)

#: A step surveys and removes for about that long each.
STEP_BUDGET_S = 0.5
#: The index is saved that often, and after so many news.
SAVE_S = 600.0
SAVE_NEWS = 200_000
#: A plan that finds nothing to remove is not made again before so many times what it took.
_PATIENCE = 50.0
#: Limits in time are looked at that often.
_TTL_CHECKS = 20
_WRITER_S = 3600.0
#: What was left half-written is looked for that often.
_TIDY_S = 3600.0


class Totals(msgspec.Struct):
    """What this janitor has done."""

    evicted_blocks: int = 0
    evicted_bytes: int = 0


class Janitor:
    """A candidate, and the janitor once it holds the lease; one thread.

    ``now_s`` is Unix time, ``steady_s`` a clock that never jumps, ``holder`` a name of its own.
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
        self._office: _Office | None = None

    @property
    def index(self) -> ChainIndex | None:
        """What it knows, None while another is the janitor."""
        return None if self._office is None else self._office.index

    @property
    def survey(self) -> Survey | None:
        """How far it has come, None while another is the janitor."""
        return None if self._office is None else self._office.survey

    @property
    def is_busy(self) -> bool:
        """Whether the next step has something to remove or to survey already."""
        return self._office is not None and self._office.is_busy

    def step(self) -> bool:
        """Do what is due, for a second or so; return whether this is the janitor.

        Raises ``StorageError``; the next step goes on.
        """
        if not self.lease.hold(self._steady_s()):
            self._office = None
            return False
        if self._office is None:
            self._office = _Office(
                self._tree, self.lease, self._limits, self.totals, self._now_s, self._steady_s
            )
        self._office.step()
        return True

    def close(self) -> None:
        """Save, and let another be the janitor."""
        office, self._office = self._office, None
        if office is not None and self.lease.is_held():
            office.save()
            self.lease.give_up()


class _Office:
    """What a janitor has for one term."""

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
        self._taken = dict(progress.taken)
        self._heard_s: dict[str, float] = dict.fromkeys(self._taken, steady_s())
        self._removal = Removal(tree, self.index, f"{lease.holder}-{lease.term}")
        self._plan: deque[int] = deque()
        self._planned: set[int] = set()
        self._plan_again_s = self._check_ttl_s = 0.0
        self._tidied_s = float("-inf")
        self._saves = 0
        self._saved_s = steady_s()
        self._saved_whole = progress.surveyed_s is not None
        self._news = 0
        log.info(
            "janitor of the storage: %d blocks, %d bytes known%s",
            *(self.index.blocks, self.index.used_bytes),
            "" if self._saved_whole else "; the rest is being surveyed",
        )

    @property
    def is_busy(self) -> bool:
        return bool(self._plan) or self.survey.surveyed_s is None

    def step(self) -> None:
        self._take_news()
        self.survey.go_on(STEP_BUDGET_S)
        self._remove(self._steady_s() + STEP_BUDGET_S)
        self._removal.tell()
        self._tidy_if_due()
        self._save_if_due()
        self._publish()

    def save(self) -> None:
        """Save the index; news that are in it are needed no more."""
        self._drop_plan()
        ends = pinned_ends(self.index, read_pins(self._tree))
        self.index.compact(self._now_s() - _WRITER_S, ends)
        now_s = self._steady_s()
        for writer in [w for w, heard_s in self._heard_s.items() if now_s - heard_s > _WRITER_S]:
            del self._taken[writer], self._heard_s[writer]
        self._saves += 1
        progress = Progress(dict(self._taken), self.survey.surveyed_s)
        index_file.save(self._tree, self._lease.term, self._saves, self.index, progress)
        self._saved_s, self._news = now_s, 0
        self._saved_whole = self.survey.surveyed_s is not None
        if self._lease.is_held():
            taken = [n for w, number, n in segments(self._tree) if number <= self._taken.get(w, 0)]
            self._tree.remove(taken)

    # ------------------------------------------------------------------ news

    def _take_news(self) -> None:
        before = dict(self._taken)
        touched, count = take_news(self._tree, self.index, self._taken)
        now_s = self._steady_s()
        self._heard_s |= {w: now_s for w, n in self._taken.items() if before.get(w) != n}
        self._news += count
        if not self._planned.isdisjoint(touched):
            # What is in use stays, and so does all before it.
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
        # Before a survey has seen everything, the oldest that is known may be the newest there is.
        whole = self.survey.surveyed_s is not None
        full = 0 < self._limits.quota_bytes < self.index.used_bytes
        late = bool(self._limits.ttl_s) and now_s >= self._check_ttl_s
        if not (full or (whole and (late or is_over(self.index, self._limits)))):
            return
        self._check_ttl_s = now_s + max(self._limits.ttl_s / _TTL_CHECKS, 1.0)
        pins = read_pins(self._tree)
        # Only what the plan itself takes counts: a storage that is slow to name its pins would
        # otherwise stay above its quota for many times as long as it was slow.
        begun_s = self._steady_s()
        rows = victims(self.index, self._limits, pins, self._now_s()).tolist()
        self._plan, self._planned = deque(rows), set(rows)
        if not rows:
            ended_s = self._steady_s()
            self._plan_again_s = ended_s + _PATIENCE * (ended_s - begun_s)

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

    # ------------------------------------------------------------------ what is kept

    def _tidy_if_due(self) -> None:
        if self._steady_s() - self._tidied_s >= _TIDY_S:
            self._tidied_s = self._steady_s()
            if count := remove_half_written(self._tree, self._now_s()):
                log.info("removed %d files that dead writers have left half-written", count)

    def _save_if_due(self) -> None:
        late = self._news and self._steady_s() - self._saved_s >= SAVE_S
        first = not self._saved_whole and self.survey.surveyed_s is not None
        if late or first or self._news >= SAVE_NEWS:
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
                seen=dict(self._taken),
                fullest_namespaces=namespaces.fullest(MOST_NAMED),
                fullest_tenants=tenants.fullest(MOST_NAMED),
            ),
        )


def take_news(tree: ObjectTree, index: ChainIndex, taken: dict[str, int]) -> tuple[set[int], int]:
    """Take in all news behind ``taken``, which is brought forward.

    Returns the rows of blocks written or used, those before new ones included, and how many news
    there were.  Raises ``StorageError`` where not all can be read; then none is taken in.
    """
    news: list[tuple[str, News]] = []
    heard = dict(taken)
    for writer, number, name in segments(tree):
        if number <= heard.get(writer, 0):
            continue
        content = tree.get(name)
        segment = None if content is None else decode_segment(content)
        if segment is None:
            log.warning("news %s cannot be read; the survey finds what they said", name)
        else:
            news += [(segment.namespace, item) for item in segment.news]
        heard[writer] = number
    taken.update(heard)
    news.sort(key=lambda item: item[1].time_s)
    touched: set[int] = set()
    for namespace, item in news:
        match item:
            case Written():
                row = index.add(
                    namespace, item.key, item.parent, item.tenant, item.bytes, item.time_s
                )
                touched |= {row, int(index.tables().parents[row])}
            case Used():
                touched.add(index.use(namespace, item.key, item.time_s))
            case Gone():
                index.remove(namespace, item.key, item.time_s)
    return touched, len(news)
