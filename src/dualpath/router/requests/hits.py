"""What the storage reads of one request brought, and which of it counts as hit."""

from collections.abc import Sequence

import msgspec

from dualpath.core.control import HitRun
from dualpath.policy.events import ReadPart


class PartRead(msgspec.Struct, frozen=True):
    """Outcome of one read part: ``slots`` of its good blocks, all slots of the reservation."""

    part: ReadPart
    good_blocks: int
    slots: tuple[int, ...]
    reserved: tuple[int, ...]
    reason: str


class Loaded(msgspec.Struct, frozen=True):
    """KV that waits in DRAM: hit runs in token order, and the DE's slots of the whole prompt."""

    hit_blocks: int
    hits: tuple[HitRun, ...]
    de_slots: tuple[int, ...]


def good_runs(
    outcomes: Sequence[PartRead], block_tokens: int
) -> tuple[tuple[HitRun, ...], int, str | None]:
    """Return the runs of good blocks from the start of the prompt, their length, and why no more.

    ``outcomes`` are in token order.  The first part that is shorter than asked ends the hit: what
    was read behind it has no KV before it.  The reason is None if everything arrived.
    """
    runs: list[HitRun] = []
    hit_blocks = 0
    for outcome in outcomes:
        if outcome.good_blocks:
            runs.append(HitRun(side=outcome.part.side, first_block=hit_blocks, slots=outcome.slots))
        hit_blocks += outcome.good_blocks
        if outcome.good_blocks * block_tokens < outcome.part.tokens:
            return tuple(runs), hit_blocks, outcome.reason
    return tuple(runs), hit_blocks, None
