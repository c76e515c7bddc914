"""Where the hits of one request lie or are read, what the reads brought, and what of it counts.

Layers with a sliding window are read of the last blocks of a hit only.  A hit that ends earlier
than was thought has other last blocks, and those were read without such layers: they are read once
more, whole.  If one of them cannot be had, the hit ends with what buffers have kept, which is
whole.  Any longer one would again end in blocks that were never whole, and each further round may
wait for a whole deadline; what is computed is always right.
"""

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun


class RunRead(msgspec.Struct, frozen=True):
    """Outcome of one run: of ``assigned`` the head ``good`` lies in its side's buffer.

    ``slots`` are all that the request has there after a read; ``reason`` says why no more was read.
    """

    assigned: HitRun
    good: HitRun
    slots: tuple[int, ...] = ()
    reason: str = ""


class Loaded(msgspec.Struct, frozen=True):
    """KV that waits in DRAM: hit runs in block order, and the DE's slots of the whole prompt."""

    hit_blocks: int
    hits: tuple[HitRun, ...]
    de_slots: tuple[int, ...]

    @property
    def shared_blocks(self) -> int:
        """Blocks, the prompt's first, whose slots at the DE other requests may have too."""
        kept = [run.blocks.end for run in side_of(self.hits, Role.DECODE) if run.cached]
        return max(kept, default=0)


def behind(runs: Iterable[HitRun], block: int) -> list[HitRun]:
    """Return what runs have from ``block`` on, to be read: those that follow each other as one."""
    left: list[HitRun] = []
    for run in runs:
        first = max(run.blocks.first, block)
        if first < run.blocks.end:
            _append(left, HitRun(run.side, BlockRun(first, run.blocks.end - first)))
    return left


def lying(runs: Iterable[HitRun], slots: Sequence[int], kept_blocks: int) -> list[HitRun]:
    """Return runs of one side in its ``slots``, of which the first ``kept_blocks`` are kept.

    A run of which a part is kept becomes two, and what is to be read without a gap becomes one.
    """
    placed: list[HitRun] = []
    for run in runs:
        own, slots = slots[: run.blocks.count], slots[run.blocks.count :]
        kept = min(kept_blocks, len(own))
        kept_blocks -= kept
        first = run.blocks.first
        for start, end, is_kept in ((0, kept, True), (kept, len(own), False)):
            if start < end:
                part = BlockRun(first + start, end - start)
                _append(placed, HitRun(run.side, part, tuple(own[start:end]), cached=is_kept))
    return placed


def split_at(runs: Iterable[HitRun], blocks: int) -> tuple[list[HitRun], list[HitRun]]:
    """Return the runs of the first ``blocks`` blocks of all ``runs``, and of the others."""
    head: list[HitRun] = []
    tail: list[HitRun] = []
    for run in runs:
        own = run.head(blocks)
        if own.blocks:
            head.append(own)
        tail += behind([run], own.blocks.end)
        blocks -= own.blocks.count
    return head, tail


def side_of(runs: Iterable[HitRun], side: Role) -> list[HitRun]:
    """Return the runs of one side."""
    return [run for run in runs if run.side is side]


def _append(runs: list[HitRun], run: HitRun) -> None:
    last = runs[-1] if runs else None
    follows = last is not None and last.blocks.end == run.blocks.first
    if last is None or not follows or (last.side, last.cached) != (run.side, run.cached):
        runs.append(run)
        return
    blocks = BlockRun(last.blocks.first, last.blocks.count + run.blocks.count)
    runs[-1] = HitRun(run.side, blocks, last.slots + run.slots, cached=run.cached)


def to_read_whole(hits: Sequence[HitRun], whole_from: int) -> tuple[HitRun, ...]:
    """Return the parts of runs from block ``whole_from`` on that lie there without windows."""
    parts = (
        run.part(BlockRun(first, run.whole_from - first))
        for run in hits
        if (first := max(run.blocks.first, whole_from)) < run.whole_from
    )
    return tuple(part.whole_behind(whole_from) for part in parts)


def kept_head(hits: Sequence[HitRun]) -> tuple[HitRun, ...]:
    """Return the first runs, as long as buffers have kept them."""
    return tuple(itertools.takewhile(lambda run: run.cached, hits))


def good_runs(outcomes: Sequence[RunRead]) -> tuple[tuple[HitRun, ...], int, str | None]:
    """Return the runs of good blocks from the start of the prompt, their length, and why no more.

    ``outcomes`` are in block order.  The first run that is shorter than assigned ends the hit: what
    was read behind it has no KV before it.  The reason is None if everything arrived.
    """
    runs: list[HitRun] = []
    hit_blocks = 0
    for outcome in outcomes:
        if outcome.good.blocks:
            runs.append(outcome.good)
        hit_blocks += outcome.good.blocks.count
        if outcome.good.blocks.count < outcome.assigned.blocks.count:
            return tuple(runs), hit_blocks, outcome.reason
    return tuple(runs), hit_blocks, None
