"""Generated KV is copied from a decode engine's HBM into staging slots and then written to storage.

The HBM block is free as soon as its copy is in a staging slot; the write takes longer.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dualpath.core.blocks import BlockKey, BlockOrigin
from dualpath.core.runs import BlockRun
from dualpath.engine.buffer.block_buffer import BlockBuffer
from dualpath.engine.counters import Counter
from dualpath.engine.io.persister import Persister, WriteTask
from dualpath.engine.passes.hbm_copy import BlockOut
from dualpath.engine.passes.hbm_layout import HbmBlock
from dualpath.engine.ranks.rank import Rank
from dualpath.plan.movements import PERSIST_GENERATED
from dualpath.plan.steps import generated_steps, step_of

log = logging.getLogger(__name__)


class GeneratedBlock(NamedTuple):
    """An HBM block that is full of generated tokens; parent and tenant as in ``BlockOrigin``."""

    hbm_block: HbmBlock
    key: BlockKey
    parent: BlockKey = b""
    tenant: str = ""


#: For each block its staging slot and the number of its work item, None if it is dropped.
StagingOrder = tuple[tuple[int, int] | None, ...]


class GeneratedBlocks:
    """Persists full blocks of generated tokens; called on the engine's thread.

    ``cache`` gets the key, the parent key and the content of each block, to add it to the DRAM
    cache.
    """

    def __init__(
        self,
        rank: Rank,
        staging: BlockBuffer,
        persister: Persister,
        cache: Callable[[BlockKey, BlockKey, memoryview], object],
    ) -> None:
        self._geometry = rank.geometry
        self._rank = rank
        self._staging = staging
        self._persister = persister
        self._cache = cache
        self._counters = rank.counters

    def persist_keys(self, keys: Sequence[BlockKey]) -> None:
        """Queue blocks of which only the lengths are stored."""
        step = step_of(PERSIST_GENERATED, self._geometry, BlockRun(0, len(keys)))
        self._persister.add(WriteTask("", step, keys, [], lambda: None))

    def persist(self, blocks: Sequence[GeneratedBlock]) -> None:
        """Copy blocks out of HBM and queue them for storage.

        Returns when the HBM is no longer needed.  If all staging slots are in use, or a copy
        stalls, a block is dropped and counted: the next turn recomputes it.
        """
        order: StagingOrder = tuple(self._allocate() for _ in blocks)
        self._rank.group.broadcast(order)
        staged = []
        for taken, block in zip(order, blocks, strict=True):
            if taken is None:
                self._drop("all staging slots are being written; raise staging_blocks")
            else:
                # Pending from here on: a look-up during the copy has to wait for the write.
                self._persister.pending.begin([block.key])
                staged.append((block.key, self._block_out(*taken, block)))
        left = self._rank.copier.out_of_hbm([out for _, out in staged])
        self._persister.pending.end(
            key for (key, _), in_time in zip(staged, left, strict=True) if not in_time
        )

    def _allocate(self) -> tuple[int, int] | None:
        slot = self._staging.allocate()
        return None if slot is None else (slot, self._rank.work.begin())

    def _block_out(self, slot: int, number: int, block: GeneratedBlock) -> BlockOut:
        key, work = block.key, self._rank.work
        *copies, persist = generated_steps(self._geometry, slot)

        def copied(error: str | None) -> None:
            work.when_idle(number, functools.partial(all_copied, error))

        def all_copied(error: str | None) -> None:
            if error is None and not work.board.others_staged(slot, number):
                error = "another rank of this engine could not copy it"
            if error is None:
                sources = [self._staging.view(slot)]
                origin = BlockOrigin(block.parent, block.tenant)
                self._persister.add(WriteTask("", persist, [key], sources, written, origin))
            else:
                self._drop(error)
                over()

        def written() -> None:
            # Before a look-up that waits for the write can report the block as stored.
            self._cache(key, block.parent, self._staging.view(slot))
            over()

        def over() -> None:
            self._staging.free_slot(slot)
            self._persister.pending.end([key])

        return BlockOut(copies, block.hbm_block, copied)

    def _drop(self, reason: str) -> None:
        log.warning("a generated block is not persisted: %s", reason)
        self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, 1)
