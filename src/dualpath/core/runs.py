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
    Its first ``windowless`` blocks come without their window layers: what lies in their slots there
    is no KV.
    """

    side: Role
    blocks: BlockRun
    slots: tuple[int, ...] = ()
    kept: bool = False
    windowless: int = 0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a run that cannot be, in a message for instance."""
        if self.blocks.first < 0 or self.blocks.count < 0:
            raise ValueError(f"a run of hits holds the blocks {self.blocks}")
        if self.slots and len(self.slots) != self.blocks.count:
            raise ValueError(f"{self.blocks.count} hit blocks lie in {len(self.slots)} slots")
        if not 0 <= self.windowless <= self.blocks.count or (self.kept and self.windowless):
            raise ValueError(
                f"{self.windowless} blocks without windows in a run of {self.blocks.count}, "
                f"kept: {self.kept}; kept blocks are whole"
            )

    @property
    def whole_from(self) -> int:
        """The first of its blocks that is there in all layers, or the first after the run."""
        return self.blocks.first + self.windowless

    def tokens(self, block_tokens: int, hit_tokens: int) -> int:
        """Hit tokens in it of a prompt with ``hit_tokens``: its last block may be partial."""
        return min(self.blocks.end * block_tokens, hit_tokens) - self.blocks.first * block_tokens

    def head(self, blocks: int) -> "HitRun":
        """Return the first ``blocks`` blocks at most, with their slots."""
        count = min(blocks, self.blocks.count)
        return self.part(BlockRun(self.blocks.first, count))

    def part(self, blocks: BlockRun) -> "HitRun":
        """Return the part of it with ``blocks``, some of its own, and their slots."""
        before = blocks.first - self.blocks.first
        return msgspec.structs.replace(
            self,
            blocks=blocks,
            slots=self.slots[before : before + blocks.count],
            windowless=min(max(self.whole_from - blocks.first, 0), blocks.count),
        )

    def whole_behind(self, block: int) -> "HitRun":
        """Return the run as it is read where blocks before ``block`` need no window layers."""
        windowless = min(max(block - self.blocks.first, 0), self.blocks.count)
        return msgspec.structs.replace(self, windowless=0 if self.kept else windowless)

    def lying_in(self, slots: Sequence[int]) -> "HitRun":
        """Return the run with its slots, one per block."""
        return msgspec.structs.replace(self, slots=tuple(slots))
