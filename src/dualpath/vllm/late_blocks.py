"""HBM blocks that a late transfer may still write, held back from vLLM's block pool.

A worker knows of them, the scheduler gives blocks out.  vLLM carries a connector's metadata from
one to the other at the end of each step, before the next one is scheduled: blocks that vLLM has
just freed with their request are taken out of the free ones again, in time.
"""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


@dataclass
class LateBlocksMetadata(KVConnectorWorkerMetadata):
    """Block ids; one may be in both, or several times."""

    held: list[int]
    let_go: list[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LateBlocksMetadata":
        """Add what another worker says."""
        assert isinstance(other, LateBlocksMetadata)
        return LateBlocksMetadata(self.held + other.held, self.let_go + other.let_go)


class LateBlocks:
    """The worker's side: ``engine.chunk_transfers.BlockHolder``, asked at the end of each step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[int] = []
        self._let_go: list[int] = []

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Have these held with the end of this step."""
        with self._lock:
            self._held += hbm_blocks

    def let_go(self, hbm_blocks: tuple[int, ...]) -> None:
        """Have these let go with the end of a step."""
        with self._lock:
            self._let_go += hbm_blocks

    def take(self) -> LateBlocksMetadata | None:
        """Return what changed since the last call, None if nothing has."""
        with self._lock:
            if not self._held and not self._let_go:
                return None
            taken = LateBlocksMetadata(self._held, self._let_go)
            self._held, self._let_go = [], []
            return taken


def apply(late: LateBlocksMetadata, pool: "BlockPool") -> None:
    """The scheduler's side: use held blocks as a request would, be they free by now or not."""
    pool.touch([pool.blocks[block] for block in late.held])
    pool.free_blocks([pool.blocks[block] for block in late.let_go])
