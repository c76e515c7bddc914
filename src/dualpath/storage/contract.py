"""The interface of every storage backend; ``tests/contract`` tests all backends against it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockGeometry, BlockKey, BlockOrigin
from dualpath.core.errors import StorageError

# ------------------------------------------------------------------------------------------ checks
# Argument checks shared by all storage backends.


def check_sources(
    geometry: BlockGeometry, keys: Sequence[BlockKey], buffers: Sequence[memoryview]
) -> list[memoryview]:
    """Return a write's sources as flat byte views.

    Raises ``ValueError`` if there is not one contiguous buffer of ``full_block_bytes`` per key.
    """
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers; one per key is needed")
    return [_flat(geometry, buffer, writable=False) for buffer in buffers]


def run_origins(keys: Sequence[BlockKey], origin: BlockOrigin) -> list[BlockOrigin]:
    """Return the origin of each block of a run; ``origin`` is that of the first."""
    parents = [origin.parent, *keys[:-1]] if origin.parent else [b""] * len(keys)
    return [BlockOrigin(parent, origin.tenant) for _, parent in zip(keys, parents, strict=False)]


def check_destination(geometry: BlockGeometry, destination: memoryview) -> memoryview:
    """Return a read's destination as a flat byte view.

    Raises ``ValueError`` unless it has ``full_block_bytes``, is contiguous and writable.
    """
    return _flat(geometry, destination, writable=True)


def _flat(geometry: BlockGeometry, buffer: memoryview, *, writable: bool) -> memoryview:
    if buffer.nbytes != geometry.full_block_bytes:
        raise ValueError(
            f"buffer has {buffer.nbytes} bytes; must be {geometry.full_block_bytes}, one Full Block"
        )
    if not buffer.contiguous or (writable and buffer.readonly):
        raise ValueError("buffer must be contiguous, and the destination of a read writable")
    return buffer.cast("B")


class ReadOutcome(msgspec.Struct, frozen=True):
    """Result of reading a Full Block; ``bytes_read`` counts the payload bytes read.

    Of a compressed block these are the stored bytes, those on the wire.

    ``reason`` is None if the block was read completely and verified.  Otherwise it is the failure
    ("missing", "short", "wrong key", "checksum", "read error: …"), and the destination holds
    undefined bytes.  ``from_dram``: the block was read from the node's own memory, not over the
    storage NIC.
    """

    bytes_read: int
    reason: str | None = None
    from_dram: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the block was read completely and verified."""
        return self.reason is None

    @property
    def storage_bytes(self) -> int:
        """Bytes that were read over the storage NIC."""
        return 0 if self.from_dram else self.bytes_read


class WriteOutcome(msgspec.Struct, frozen=True):
    """Result of writing Full Blocks: how many were ``new``, and the bytes that each one takes.

    ``payload_bytes`` are those behind the header as the block is stored, fewer than the Full Block
    has if it is compressed.  They include blocks that were stored before.
    """

    new: int = 0
    payload_bytes: tuple[int, ...] = ()

    @property
    def stored(self) -> int:
        """Number of blocks that are stored now."""
        return len(self.payload_bytes)

    def plus(self, other: "WriteOutcome") -> "WriteOutcome":
        """Return the outcome of both writes."""
        return WriteOutcome(self.new + other.new, self.payload_bytes + other.payload_bytes)


def all_written(blocks: Iterable[tuple[bool, int]]) -> WriteOutcome:
    """Return the outcome of a write from whether each block was new, and its payload bytes."""
    found = list(blocks)
    return WriteOutcome(sum(new for new, _ in found), tuple(size for _, size in found))


class DeclinedError(StorageError):
    """A quota or filter declined some blocks of a write.

    ``outcome`` is that of the first blocks, which are stored.  ``reason`` is a
    ``write_gate.Refusal``.
    """

    def __init__(self, reason: str, outcome: WriteOutcome) -> None:
        super().__init__(f"new blocks are declined ({reason}); see the storage's quota and filters")
        self.reason = reason
        self.outcome = outcome


class BlockStorage(Protocol):
    """Full Blocks by key, for one ``StoreNamespace``.

    Blocks are immutable: equal keys mean equal content, so a second write of a key is a no-op.
    Writes are atomic: a block is visible either completely or not at all, also after a crash of
    the writer.  Every read verifies key, length and checksum.  A corrupt block is removed, so that
    it can be written again.  A block of another format version or codec, or sealed with a storage
    key that is not here, is neither read nor removed, but a write replaces it.  All methods are
    thread-safe; a caller that wants several blocks in parallel (an engine's read queue) reads from
    several threads.
    """

    geometry: BlockGeometry
    #: How many look-ups may usefully run in parallel; above 1 where a look-up is a round trip
    #: over the network.
    parallel_lookups: int

    def is_stored(self, key: BlockKey) -> bool:
        """Return whether a block is stored, without reading its content.

        A block that is sealed with a storage key that is not here counts as absent.
        Raises ``StorageError`` if the storage does not answer.
        """
        ...

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read a block into ``destination`` (``full_block_bytes``, writable).

        With ``whole`` False, window layers are neither read nor verified: their bytes in the
        destination are unchanged and do not contain valid KV.

        Blocks until done.  Does not raise for a missing or corrupt block: ``ReadOutcome.reason``
        has the failure.  Raises ``ValueError`` if the destination has the wrong size.
        """
        ...

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> WriteOutcome:
        """Write the blocks, each one atomically.

        ``origin`` is the origin of the run of blocks: if it has a parent, the blocks are
        consecutive in one chain and the parent precedes the first of them.

        Raises ``StorageError`` if the device refuses (full, read-only); blocks written before the
        failure stay stored.
        """
        ...

    def used(self, key: BlockKey) -> None:
        """Record a use of the chain that ends with this block: it was looked up or is being read.

        Eviction is least recently used: storage removes other blocks first.
        """
        ...

    def close(self) -> None:
        """Release file descriptors and threads; idempotent."""
        ...
