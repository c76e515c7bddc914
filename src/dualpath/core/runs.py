"""Runs of consecutive blocks of a prompt, and a run of hits on its way into HBM.

A ``HitRun`` is the same value from the scheduler's assignment (which side has or reads which
blocks) over the storage read (into which buffer slots) to the transfers of a forward pass: what
becomes known is added, nothing is dropped.
"""

from collections.abc import Sequence

import msgspec

from dualpath.core.cluster import Role


class BlockRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks ``[first, first + count)`` of a prompt."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """First block after the run."""
        return self.first + self.count

    def __bool__(self) -> bool:
        """Whether the run holds any block."""
        return self.count > 0


class HitRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Consecutive hit blocks that one side's DRAM buffer holds, or gets by a read from storage.

    ``slots`` are those of that side's DRAM buffer, one per block; empty until they are granted.
    ``kept``: the blocks lie in that buffer already, from an earlier request; nothing is read.
    """

    side: Role
    blocks: BlockRun
    slots: tuple[int, ...] = ()
    kept: bool = False

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a run that cannot be, in a message for instance."""
        if self.blocks.first < 0 or self.blocks.count < 0:
            raise ValueError(f"a run of hits holds the blocks {self.blocks}")
        if self.slots and len(self.slots) != self.blocks.count:
            raise ValueError(f"{self.blocks.count} hit blocks lie in {len(self.slots)} slots")

    def tokens(self, block_tokens: int, hit_tokens: int) -> int:
        """Hit tokens in it of a prompt with ``hit_tokens``: its last block may be partial."""
        return min(self.blocks.end * block_tokens, hit_tokens) - self.blocks.first * block_tokens

    def head(self, blocks: int) -> "HitRun":
        """Return the first ``blocks`` blocks at most, with their slots."""
        count = min(blocks, self.blocks.count)
        run = BlockRun(self.blocks.first, count)
        return msgspec.structs.replace(self, blocks=run, slots=self.slots[:count])

    def lying_in(self, slots: Sequence[int]) -> "HitRun":
        """Return the run with its slots, one per block."""
        return msgspec.structs.replace(self, slots=tuple(slots))
