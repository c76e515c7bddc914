"""Generated KV on its way from a decode engine's HBM to storage, through slots of its own.

The HBM is free again as soon as a block is in such a staging slot; the storage takes longer.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dualpath.core.blocks import BlockKey, BlockOrigin
from dualpath.core.runs import BlockRun
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.counters import Counter
from dualpath.engine.hbm_copy import BlockOut
from dualpath.engine.hbm_layout import HbmBlock
from dualpath.engine.persister import Persister, WriteTask
from dualpath.engine.rank import Rank
from dualpath.plan.movements import PERSIST_GENERATED
from dualpath.plan.steps import generated_steps, step_of

log = logging.getLogger(__name__)


class GeneratedBlock(NamedTuple):
    """A block of HBM that generated tokens have filled; parent and tenant as in ``BlockOrigin``."""

    hbm_block: HbmBlock
    key: BlockKey
    parent: BlockKey = b""
    tenant: str = ""


#: For each block its staging slot and its number in the engine's work, None if it is dropped.
StagingOrder = tuple[tuple[int, int] | None, ...]


class GeneratedBlocks:
    """Persists full blocks of generated tokens; called on the engine's thread.

    ``keep`` gets each with its key and the one before, to copy it to where requests find it.
    """

    def __init__(
        self,
        rank: Rank,
        staging: BlockBuffer,
        persister: Persister,
        keep: Callable[[BlockKey, BlockKey, memoryview], object],
    ) -> None:
        self._geometry = rank.geometry
        self._rank = rank
        self._staging = staging
        self._persister = persister
        self._keep = keep
        self._counters = rank.counters

    def persist_keys(self, keys: Sequence[BlockKey]) -> None:
        """Queue blocks of which storage takes the lengths only."""
        step = step_of(PERSIST_GENERATED, self._geometry, BlockRun(0, len(keys)))
        self._persister.add(WriteTask("", step, keys, [], lambda: None))

    def persist(self, blocks: Sequence[GeneratedBlock]) -> None:
        """Copy blocks out of HBM and queue them for storage.

        Returns when the HBM is no longer needed.  With all staging slots in use, or a copy that
        stalls, a block is dropped and counted: the next turn recomputes it.
        """
        order: StagingOrder = tuple(self._take() for _ in blocks)
        self._rank.group.broadcast(order)
        staged = []
        for taken, block in zip(order, blocks, strict=True):
            if taken is None:
                self._drop("all staging slots are being written; raise staging_blocks")
            else:
                # On its way from here on: a look-up must not come between the copy and the write.
                self._persister.pending.begin([block.key])
                staged.append((block.key, self._block_out(*taken, block)))
        left = self._rank.copier.out_of_hbm([out for _, out in staged])
        self._persister.pending.end(
            key for (key, _), in_time in zip(staged, left, strict=True) if not in_time
        )

    def _take(self) -> tuple[int, int] | None:
        slot = self._staging.take()
        return None if slot is None else (slot, self._rank.work.begin())

    def _block_out(self, slot: int, number: int, block: GeneratedBlock) -> BlockOut:
        key, work = block.key, self._rank.work
        *copies, persist = generated_steps(self._geometry, slot)

        def copied(error: str | None) -> None:
            work.when_still(number, functools.partial(all_copied, error))

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
            # Before a look-up that waits for the write can say that the block is stored.
            self._keep(key, block.parent, self._staging.view(slot))
            over()

        def over() -> None:
            self._staging.give_back(slot)
            self._persister.pending.end([key])

        return BlockOut(copies, block.hbm_block, copied)

    def _drop(self, reason: str) -> None:
        log.warning("a generated block is not persisted: %s", reason)
        self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, 1)
