"""The hits of one request: where they are or are read, the outcome of reads, and what counts.

Layers with a sliding window are read only for the last blocks of a hit.  A hit that ends earlier
than expected has other last blocks, which were read without such layers: these are read once more,
whole.  If one of them cannot be read, the hit ends with the blocks that buffers cached, which are
whole.  Any longer hit would again end in blocks that are not whole, and each further round may take
a whole deadline; recomputing is always correct.
"""

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun


class RunRead(msgspec.Struct, frozen=True):
    """Outcome of one run: of ``assigned`` the head ``good`` is in its side's buffer.

    ``slots`` are all that the request has there after a read; ``reason`` is why no more was read.
    """

    assigned: HitRun
    good: HitRun
    slots: tuple[int, ...] = ()
    reason: str = ""


class Loaded(msgspec.Struct, frozen=True):
    """KV that is in DRAM: hit runs in block order, and where the DE receives the prompt.

    These are its slots of the whole prompt, or its HBM blocks.
    """

    hit_blocks: int
    hits: tuple[HitRun, ...]
    de_slots: tuple[int, ...]
    de_hbm_blocks: tuple[int, ...] = ()

    @property
    def shared_blocks(self) -> int:
        """Blocks at the head of the prompt with slots at the DE that other requests share.

        None if KV is received in HBM, which no other request shares.
        """
        if self.de_hbm_blocks:
            return 0
        cached = [run.blocks.end for run in side_of(self.hits, Role.DECODE) if run.cached]
        return max(cached, default=0)


def behind(runs: Iterable[HitRun], block: int) -> list[HitRun]:
    """Return the parts of runs from ``block`` on, to be read; adjacent ones are joined.

    They are those of a request's own engines.
    """
    left: list[HitRun] = []
    for run in runs:
        first = max(run.blocks.first, block)
        if first < run.blocks.end:
            _append(left, HitRun(run.side, BlockRun(first, run.blocks.end - first)))
    return left


def in_slots(runs: Iterable[HitRun], slots: Sequence[int], cached_blocks: int) -> list[HitRun]:
    """Return runs of one side in its ``slots``, of which the first ``cached_blocks`` are cached.

    A run that is cached in part becomes two, and adjacent runs that are to be read become one.
    """
    placed: list[HitRun] = []
    for run in runs:
        own, slots = slots[: run.blocks.count], slots[run.blocks.count :]
        cached = min(cached_blocks, len(own))
        cached_blocks -= cached
        first = run.blocks.first
        for start, end, is_cached in ((0, cached, True), (cached, len(own), False)):
            if start < end:
                part = BlockRun(first + start, end - start)
                _append(placed, HitRun(run.side, part, tuple(own[start:end]), cached=is_cached))
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
    """Return the runs in the buffer of the request's engine of one side."""
    return [run for run in runs if run.is_at(side)]


def by_third(runs: Iterable[HitRun]) -> dict[str, list[HitRun]]:
    """Return the runs of each third DE, by its id."""
    found: dict[str, list[HitRun]] = {}
    for run in runs:
        if run.third:
            found.setdefault(run.third, []).append(run)
    return found


def _append(runs: list[HitRun], run: HitRun) -> None:
    last = runs[-1] if runs else None
    follows = last is not None and last.blocks.end == run.blocks.first
    if last is None or not follows or (last.side, last.cached) != (run.side, run.cached):
        runs.append(run)
        return
    blocks = BlockRun(last.blocks.first, last.blocks.count + run.blocks.count)
    runs[-1] = HitRun(run.side, blocks, last.slots + run.slots, cached=run.cached)


def to_read_whole(hits: Sequence[HitRun], whole_from: int) -> tuple[HitRun, ...]:
    """Return the parts of runs from block ``whole_from`` on that lack window layers."""
    parts = (
        run.part(BlockRun(first, run.whole_from - first))
        for run in hits
        if (first := max(run.blocks.first, whole_from)) < run.whole_from
    )
    return tuple(part.whole_behind(whole_from) for part in parts)


def cached_head(hits: Sequence[HitRun]) -> tuple[HitRun, ...]:
    """Return the first runs, as long as buffers cached them."""
    return tuple(itertools.takewhile(lambda run: run.cached, hits))


def good_runs(outcomes: Sequence[RunRead]) -> tuple[tuple[HitRun, ...], int, str | None]:
    """Return the runs of good blocks from the start of the prompt, their length, and why no more.

    ``outcomes`` are in block order.  The first run that is shorter than assigned ends the hit:
    blocks that were read behind it have no KV before them.  The reason is None if all arrived.
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
