"""Holds HBM blocks that a transfer may still write out of vLLM's block pool.

The worker knows these blocks, but the scheduler allocates blocks.  vLLM carries connector metadata
from worker to scheduler at the end of each step, before it schedules the next one.  So blocks that
vLLM has just freed with their request are removed from the free blocks before they are reused.
"""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


@dataclass
class HeldBlocksMetadata(KVConnectorWorkerMetadata):
    """Ids of newly held and released blocks; an id may be in both lists, or several times."""

    held: list[int]
    released: list[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "HeldBlocksMetadata":
        """Add the blocks that another worker reports."""
        assert isinstance(other, HeldBlocksMetadata)
        return HeldBlocksMetadata(self.held + other.held, self.released + other.released)


class HeldBlocks:
    """The worker's half: a ``BlockHolder`` of the data plane, read at the end of each step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[int] = []
        self._released: list[int] = []

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Hold these blocks from the end of this step on."""
        with self._lock:
            self._held += hbm_blocks

    def unhold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Release these blocks at the end of this step."""
        with self._lock:
            self._released += hbm_blocks

    def take(self) -> HeldBlocksMetadata | None:
        """Return the changes since the last call, None without changes."""
        with self._lock:
            if not self._held and not self._released:
                return None
            taken = HeldBlocksMetadata(self._held, self._released)
            self._held, self._released = [], []
            return taken


def apply(changes: HeldBlocksMetadata, pool: "BlockPool") -> None:
    """Take or drop a reference to the blocks in vLLM's pool, whether or not they are free now."""
    pool.touch([pool.blocks[block] for block in changes.held])
    pool.free_blocks([pool.blocks[block] for block in changes.released])
