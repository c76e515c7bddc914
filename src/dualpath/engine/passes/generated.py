"""KV is copied from a decode engine's HBM into staging slots and then written to storage.

The HBM block is free as soon as its copy is in a staging slot; the write takes longer.  Generated
blocks leave HBM within the step that fills them, and are dropped if all slots are in use.  Blocks
of a prompt that a PE has sent into HBM wait for slots: they can be more than there are slots, and
no step waits for them.  Their HBM is held back from reuse until its copy is over, also if the
request ends before.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dualpath.core.blocks import BlockKey, BlockOrigin
from dualpath.core.runs import BlockRun
from dualpath.engine.buffer.block_buffer import BlockBuffer
from dualpath.engine.counters import Counter
from dualpath.engine.io.persister import ChainWrites, Persister, WriteTask, Written
from dualpath.engine.passes.hbm_copy import BlockOut
from dualpath.engine.passes.hbm_layout import HbmBlock, block_ids
from dualpath.engine.passes.pass_transfers import BlockHolder
from dualpath.engine.ranks.rank import Rank
from dualpath.engine.threads import TimeLimit
from dualpath.plan.movements import PERSIST_GENERATED
from dualpath.plan.steps import generated_steps, step_of

log = logging.getLogger(__name__)


class GeneratedBlock(NamedTuple):
    """An HBM block that is full of generated tokens; parent and tenant as in ``BlockOrigin``.

    ``request_id`` is that of its transfer.
    """

    hbm_block: HbmBlock
    key: BlockKey
    parent: BlockKey = b""
    tenant: str = ""
    request_id: str = ""


#: For each block its staging slot and the number of its work item, None if it is dropped.
StagingOrder = tuple[tuple[int, int] | None, ...]


class GeneratedBlocks:
    """Persists full blocks of generated tokens, and of prompts that arrive in HBM.

    ``cache`` gets the key, the parent key and the content of each block, to add it to the DRAM
    cache; ``holder`` holds HBM blocks back from reuse; ``chains`` gets the outcome of each write.
    """

    def __init__(
        self,
        rank: Rank,
        staging: BlockBuffer,
        persister: Persister,
        cache: Callable[[BlockKey, BlockKey, memoryview], object],
        holder: BlockHolder,
        chains: ChainWrites | None = None,
    ) -> None:
        self._holder = holder
        self._chains = chains or ChainWrites(lambda chain: None)
        #: Blocks of prompts that wait for a slot, and what gets the outcome of their writes to
        #: storage, None for those that are only cached.
        self._waiting: deque[tuple[GeneratedBlock, Written | None]] = deque()
        #: Blocks of prompts that are not copied yet.
        self._left = 0
        self._changed = rank.health.threads.condition()
        self._closed = False
        #: A prompt's blocks leave so many slots to generated blocks, which do not wait.
        self._spared_slots = staging.capacity // 2
        self._geometry = rank.geometry
        self._rank = rank
        self._staging = staging
        self._persister = persister
        self._cache = cache
        self._counters = rank.counters

    def persist_prompt(
        self, blocks: Sequence[GeneratedBlock], only_cached: Sequence[GeneratedBlock] = ()
    ) -> None:
        """Write blocks of a prompt in HBM to storage, and copy ``only_cached`` to the DRAM cache.

        May be called from any thread; returns at once.  Only for an engine of one rank, as the
        others would have to copy the same block at the same time.
        """
        assert self._rank.group.size == 1, "several ranks do not receive KV in HBM"
        self._holder.hold(block_ids(block.hbm_block for block in (*blocks, *only_cached)))
        # Pending from here on: a look-up has to wait for the write.
        self._persister.pending.begin([block.key for block in blocks])
        leaving = [
            *((block, self._chains.prompt(block.request_id)) for block in blocks),
            *((block, None) for block in only_cached),
        ]
        with self._changed:
            self._left += len(leaving)

        def queue() -> None:
            self._waiting.extend(leaving)
            self._stage()

        self._rank.movers.pump.call(queue)

    def _stage(self) -> None:
        """Copy the next blocks into free slots; on the pump's thread."""
        while self._waiting and not self._closed and self._staging.free > self._spared_slots:
            if (slot := self._staging.allocate()) is None:
                return
            block, written = self._waiting.popleft()
            out = self._block_out(slot, self._rank.work.begin(), block, written)

            def copied(error: str | None, out: BlockOut = out) -> None:
                self._holder.unhold(block_ids([out.hbm_block]))
                with self._changed:
                    self._left -= 1
                    self._changed.notify_all()
                out.done(error)

            self._rank.copier.out_later(out._replace(done=copied))

    def close(self, limit: TimeLimit) -> None:
        """Copy waiting blocks of prompts, for up to half of the limit, and drop the others."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._left, limit.left_s() / 2):
                self._closed = True
                log.warning(
                    "%d blocks of prompts are not persisted or cached: the engine ended before "
                    "their copy out of HBM",
                    self._left,
                )
                self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, self._left)

    def _freed(self, slot: int) -> None:
        self._staging.free_slot(slot)
        if self._waiting:
            self._rank.movers.pump.call(self._stage)

    def persist_keys(self, blocks: Sequence[GeneratedBlock]) -> None:
        """Queue blocks of which only the lengths are stored."""
        step = step_of(PERSIST_GENERATED, self._geometry, BlockRun(0, 1))
        for block in blocks:
            written = self._chains.generated(block.request_id, block.key, block.parent)
            task = WriteTask("", step, [block.key], [], lambda: None, written=written)
            self._persister.add(task)

    def persist(self, blocks: Sequence[GeneratedBlock]) -> None:
        """Copy blocks out of HBM and queue them for storage.

        Returns when the HBM is no longer needed.  If all staging slots are in use, or a copy
        stalls, a block is dropped and counted: the next turn recomputes it.
        """
        order: StagingOrder = tuple(self._allocate() for _ in blocks)
        self._rank.group.broadcast(order)
        staged = []
        for taken, block in zip(order, blocks, strict=True):
            written = self._chains.generated(block.request_id, block.key, block.parent)
            if taken is None:
                self._drop("all staging slots are being written; raise staging_blocks")
                written(None)
            else:
                # Pending from here on: a look-up during the copy has to wait for the write.
                self._persister.pending.begin([block.key])
                staged.append((block.key, self._block_out(*taken, block, written)))
        left = self._rank.copier.out_of_hbm([out for _, out in staged])
        self._persister.pending.end(
            key for (key, _), in_time in zip(staged, left, strict=True) if not in_time
        )

    def _allocate(self) -> tuple[int, int] | None:
        slot = self._staging.allocate()
        return None if slot is None else (slot, self._rank.work.begin())

    def _block_out(
        self, slot: int, number: int, block: GeneratedBlock, outcome: Written | None
    ) -> BlockOut:
        """Return the copy of a block, which is then written to storage if ``outcome`` is given."""
        key, work = block.key, self._rank.work
        *copies, persist = generated_steps(self._geometry, slot)

        def copied(error: str | None) -> None:
            work.when_idle(number, functools.partial(all_copied, error))

        def all_copied(error: str | None) -> None:
            if error is None and not work.board.others_staged(slot, number):
                error = "another rank of this engine could not copy it"
            if error is not None:
                if outcome is not None:
                    self._drop(error)
                    outcome(None)
                over()
            elif outcome is None:
                written()
            else:
                sources = [self._staging.view(slot)]
                origin = BlockOrigin(block.parent, block.tenant)
                task = WriteTask("", persist, [key], sources, written, origin, outcome)
                self._persister.add(task)

        def written() -> None:
            # Before a look-up that waits for the write can report the block as stored.
            self._cache(key, block.parent, self._staging.view(slot))
            over()

        def over() -> None:
            self._freed(slot)
            if outcome is not None:
                self._persister.pending.end([key])

        return BlockOut(copies, block.hbm_block, copied)

    def _drop(self, reason: str) -> None:
        log.warning("a block in HBM is not persisted: %s", reason)
        self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, 1)
