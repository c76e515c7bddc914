"""The contract every storage backend keeps; ``tests/contract`` runs it against all of them."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from dualpath.core.blocks import BlockGeometry, BlockKey


class ReadOutcome(msgspec.Struct, frozen=True):
    """Result of reading a run of Full Blocks.

    ``good_blocks`` blocks at the head of the run arrived whole and verified; the run ends there
    if it is shorter than asked, ``reason`` then says why ("missing", "short", "wrong key",
    "checksum", "read error: …", "cancelled").  Destinations beyond ``good_blocks`` hold undefined
    bytes.
    """

    good_blocks: int
    bytes_read: int
    reason: str | None = None


class BlockStorage(Protocol):
    """Full Blocks by key, for one ``StoreNamespace``.

    Blocks are immutable: equal keys mean equal content, so a second write of a key is a no-op.
    A block is visible either whole or not at all, also after a crash of the writer.  Every read
    verifies key, length and checksum of each block before it counts it as good; a block found bad
    is forgotten, so that it can be written again.  All methods may be called from several threads.
    """

    geometry: BlockGeometry

    def hit_blocks(self, keys: Sequence[BlockKey]) -> int:
        """Return how many keys at the head of ``keys`` are stored; touches no block content."""
        ...

    def read(self, keys: Sequence[BlockKey], destinations: Sequence[memoryview]) -> ReadOutcome:
        """Read block ``keys[i]`` into ``destinations[i]`` (``full_block_bytes`` each, writable).

        Blocks until done.  Never raises for a bad block: the outcome says where the run ends.
        Raises ``ValueError`` if the lengths differ or a destination has the wrong size.
        """
        ...

    def write(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> int:
        """Persist the blocks atomically one by one; return how many were new.

        Raises ``StorageError`` if the device refuses (full, read-only); what was written before
        stays whole and visible.
        """
        ...

    def close(self) -> None:
        """Release descriptors and threads; idempotent."""
        ...
