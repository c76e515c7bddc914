"""Full Blocks in a dict: the reference backend for tests, with injectable faults.

Blocks are stored in the on-disk format and verified by the same code as files.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, StoreNamespace
from dualpath.core.errors import StorageError
from dualpath.storage import block_file
from dualpath.storage.block_file import FileOrder
from dualpath.storage.compression import Compressor
from dualpath.storage.contract import (
    ReadOutcome,
    WriteOutcome,
    all_written,
    check_destination,
    check_sources,
    run_origins,
)
from dualpath.storage.sealed_blocks import block_codec

if TYPE_CHECKING:
    from dualpath.storage.sealed_blocks import KeyRing

BeforeRead = Callable[[BlockKey], None]


class MemoryStorage:
    """See ``dualpath.storage.contract.BlockStorage``.

    ``before_read`` is called with each key, outside the lock: it may block to model slow storage
    or raise ``OSError`` to model a failing device.  ``capacity_blocks`` models a full device.
    """

    def __init__(
        self,
        namespace: StoreNamespace,
        *,
        before_read: BeforeRead | None = None,
        capacity_blocks: int | None = None,
        keys: "KeyRing | None" = None,
        compressor: Compressor | None = None,
    ) -> None:
        self.parallel_lookups = 1
        self.namespace = namespace
        self.geometry = namespace.geometry
        self.before_read = before_read
        self._capacity_blocks = capacity_blocks
        self._codec = block_codec(namespace, keys, compressor)
        self._order = FileOrder(namespace.geometry)
        self._lock = threading.Lock()
        self._blocks: dict[BlockKey, tuple[bytes, bytes]] = {}

    def is_stored(self, key: BlockKey) -> bool:
        """Return whether the dict has it."""
        with self._lock:
            return self._is_readable(key)

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Copy and verify; a corrupt block is removed."""
        flat = check_destination(self.geometry, destination)
        if self.before_read is not None:
            try:
                self.before_read(key)
            except OSError as error:
                return ReadOutcome(0, f"read error: {error}")
        with self._lock:
            block = self._blocks.get(key)
        if block is None:
            return ReadOutcome(0, block_file.MISSING)
        header, payload = block
        into = self._order.of(flat, whole=whole)
        arrived = min(len(payload), block_file.stored_bytes(header, into))
        block_file.fill(into.buffers, memoryview(payload)[:arrived])
        reason = self._codec.defect(key, header, into)
        if reason is not None and reason not in block_file.UNREADABLE_HERE:
            with self._lock:
                if self._blocks.get(key) is block:
                    del self._blocks[key]
        return ReadOutcome(arrived, reason)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> WriteOutcome:
        """Store a copy of each new block."""
        flat = check_sources(self.geometry, keys, sources)
        blocks = zip(keys, flat, run_origins(keys, origin), strict=True)
        return all_written(self._write_one(*block) for block in blocks)

    def _write_one(
        self, key: BlockKey, source: memoryview, origin: BlockOrigin
    ) -> tuple[bool, int]:
        header, *stored = self._codec.encoded(key, self._order.of(source), origin)
        payload = b"".join(stored)
        with self._lock:
            if self._is_readable(key):
                return False, len(self._blocks[key][1])
            room = self._capacity_blocks is None or len(self._blocks) < self._capacity_blocks
            if key not in self._blocks and not room:
                raise StorageError(
                    f"storage is full at {self._capacity_blocks} blocks; raise capacity_blocks"
                )
            self._blocks[key] = (bytes(header), payload)
        return True, len(payload)

    def _is_readable(self, key: BlockKey) -> bool:
        block = self._blocks.get(key)
        return block is not None and self._codec.unreadable(block[0]) is None

    def used(self, key: BlockKey) -> None:
        """Do nothing: this backend does not evict."""

    def close(self) -> None:
        """Do nothing; the blocks stay."""

    def corrupt(self, key: BlockKey, *, offset_bytes: int = 0) -> None:
        """Flip one bit of a block's stored payload; raises ``KeyError`` if it is not stored."""
        with self._lock:
            header, payload = self._blocks[key]
            damaged = bytearray(payload)
            damaged[offset_bytes] ^= 1
            self._blocks[key] = (header, bytes(damaged))

    def drop(self, key: BlockKey) -> None:
        """Delete a block, to model its loss; raises ``KeyError`` if it is not stored."""
        with self._lock:
            del self._blocks[key]
