"""Runs of consecutive blocks of a prompt, and runs of hit blocks with their place.

A ``HitRun`` is used from the scheduler's assignment (which side caches or reads which blocks) over
the storage read (into which buffer slots) to the transfers of a forward pass: each stage adds its
information, none is dropped.
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
    """Consecutive hit blocks that are cached in one side's DRAM buffer, or read into it.

    ``slots`` are slots of that buffer, one per block; empty until they are granted.  ``cached``:
    the blocks are in that buffer already, from an earlier request; they are not read.  Its first
    ``windowless`` blocks are read without their window layers: those bytes of their slots do not
    contain valid KV.  ``third``: the buffer is that of this third DE, neither the request's PE nor
    its DE; the run is of the PE's side, as the PE loads it from there and sends it to the DE.
    """

    side: Role
    blocks: BlockRun
    slots: tuple[int, ...] = ()
    cached: bool = False
    windowless: int = 0
    third: str = ""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an inconsistent run, in a message for instance."""
        if self.blocks.first < 0 or self.blocks.count < 0:
            raise ValueError(f"a run of hits holds the blocks {self.blocks}")
        if self.slots and len(self.slots) != self.blocks.count:
            raise ValueError(f"{self.blocks.count} hit blocks have {len(self.slots)} slots")
        if not 0 <= self.windowless <= self.blocks.count or (self.cached and self.windowless):
            raise ValueError(
                f"{self.windowless} blocks without windows in a run of {self.blocks.count}, "
                f"cached: {self.cached}; cached blocks have all layers"
            )
        if self.third and self.side is not Role.PREFILL:
            raise ValueError(f"a run at third engine {self.third!r} is of the {self.side}'s side")

    def is_at(self, side: Role) -> bool:
        """Whether its buffer is that of the request's engine of ``side``, not a third DE's."""
        return self.side is side and not self.third

    @property
    def whole_from(self) -> int:
        """Its first block that has all layers, or the first block after the run."""
        return self.blocks.first + self.windowless

    def tokens(self, block_tokens: int, hit_tokens: int) -> int:
        """Number of its tokens that are hits, of a prompt with ``hit_tokens``.

        The last block may be a partial hit.
        """
        return min(self.blocks.end * block_tokens, hit_tokens) - self.blocks.first * block_tokens

    def head(self, blocks: int) -> "HitRun":
        """Return a run of its first ``blocks`` blocks (or fewer), with their slots."""
        count = min(blocks, self.blocks.count)
        return self.part(BlockRun(self.blocks.first, count))

    def part(self, blocks: BlockRun) -> "HitRun":
        """Return the part of the run with these ``blocks``, a subset of its own."""
        before = blocks.first - self.blocks.first
        return msgspec.structs.replace(
            self,
            blocks=blocks,
            slots=self.slots[before : before + blocks.count],
            windowless=min(max(self.whole_from - blocks.first, 0), blocks.count),
        )

    def whole_behind(self, block: int) -> "HitRun":
        """Return the run with the blocks before ``block`` windowless."""
        windowless = min(max(block - self.blocks.first, 0), self.blocks.count)
        return msgspec.structs.replace(self, windowless=0 if self.cached else windowless)

    def with_slots(self, slots: Sequence[int]) -> "HitRun":
        """Return the run with these slots, one per block."""
        return msgspec.structs.replace(self, slots=tuple(slots))
