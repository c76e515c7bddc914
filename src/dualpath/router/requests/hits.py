"""What the storage reads of one request brought, and which of it counts as hit."""

from collections.abc import Sequence

import msgspec

from dualpath.core.runs import HitRun


class RunRead(msgspec.Struct, frozen=True):
    """Outcome of one read: of the run ``assigned`` the head ``good`` lies in the reader's buffer.

    ``slots`` are all slots the request has there now; ``reason`` says why no more was read.
    """

    assigned: HitRun
    good: HitRun
    slots: tuple[int, ...]
    reason: str


class Loaded(msgspec.Struct, frozen=True):
    """KV that waits in DRAM: hit runs in block order, and the DE's slots of the whole prompt."""

    hit_blocks: int
    hits: tuple[HitRun, ...]
    de_slots: tuple[int, ...]


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
