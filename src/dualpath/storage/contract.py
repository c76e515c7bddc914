"""The contract every storage backend keeps; ``tests/contract`` runs it against all of them."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockGeometry, BlockKey, BlockOrigin
from dualpath.core.errors import StorageError


class ReadOutcome(msgspec.Struct, frozen=True):
    """Result of reading a Full Block: ``bytes_read`` of its payload left the device.

    ``reason`` is None if it arrived whole and verified, else it says why not ("missing", "short",
    "wrong key", "checksum", "read error: …"), and the destination holds undefined bytes.
    ``from_dram``: the device is the node's own memory, and no storage NIC had to do with it.
    """

    bytes_read: int
    reason: str | None = None
    from_dram: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the block arrived whole and verified."""
        return self.reason is None

    @property
    def storage_bytes(self) -> int:
        """The bytes read that came from storage."""
        return 0 if self.from_dram else self.bytes_read


class DeclinedError(StorageError):
    """Storage declines new blocks on purpose; the first ``stored`` are stored, ``new`` of them new.

    ``reason`` is a ``policy.write_gate.Refusal``.
    """

    def __init__(self, reason: str, stored: int, new: int) -> None:
        super().__init__(f"new blocks are declined ({reason}); see the storage's quota and filters")
        self.reason = reason
        self.stored = stored
        self.new = new


class BlockStorage(Protocol):
    """Full Blocks by key, for one ``StoreNamespace``.

    Blocks are immutable: equal keys mean equal content, so a second write of a key is a no-op.
    A block is visible either whole or not at all, also after a crash of the writer.  Every read
    verifies key, length and checksum before the block counts as good; a block found bad is
    forgotten, so that it can be written again.  One of another format version is not read and
    stays.  All methods may be called from several threads: who
    wants several blocks at a time, as an engine's read queue does, reads from several.
    """

    geometry: BlockGeometry
    #: Questions for blocks that together take no longer than one; above 1 where each goes a long
    #: way and little is to be done.
    parallel_lookups: int

    def is_stored(self, key: BlockKey) -> bool:
        """Return whether a block is stored; touches no block content.

        Raises ``StorageError`` if the storage cannot say.
        """
        ...

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read a block into ``destination`` (``full_block_bytes``, writable).

        Unless it is the ``whole``, window layers are neither read nor verified: their bytes of the
        destination stay as they are, and must be taken for no KV.

        Blocks until done.  Never raises for a bad block: the outcome says what is wrong with it.
        Raises ``ValueError`` if the destination has the wrong size.
        """
        ...

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> int:
        """Persist the blocks atomically one by one; return how many were new.

        ``origin`` says where they come from, all in one: if it has a parent, the blocks are
        consecutive in one chain and the parent is the first one's.

        Raises ``StorageError`` if the device refuses (full, read-only); what was written before
        stays whole and visible.
        """
        ...

    def used(self, key: BlockKey) -> None:
        """A chain that ends with this block is about to be read, or was asked for.

        Storage that has to remove something removes other blocks first.
        """
        ...

    def close(self) -> None:
        """Release descriptors and threads; idempotent."""
        ...
