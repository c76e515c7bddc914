"""How the hits of one attempt get into DRAM: slots, what they keep already, reads of the rest.

What an engine keeps is known when it has granted its slots; the assignment was made with what was
heard of it.  So the DE says first what of the prompt's head it keeps.  If that is less than was
believed, the runs are chosen anew (``policy.assigning``), else those of the assignment hold behind
it.  Then the PE says it, of the blocks that fall to it; what it does not keep it reads.

Slots that keep blocks are shared and must not be written to.  At a DE they are the prompt's first
ones and only these: no run before them can turn out short, upon which the PE would compute what
follows anew and write it there.
"""

from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.blocks import BlockKey, chain_root
from dualpath.core.cluster import Role
from dualpath.core.control import Reserved
from dualpath.core.runs import BlockRun, HitRun
from dualpath.router.attempts.attempt_steps import AttemptSteps
from dualpath.router.attempts.hits import (
    Loaded,
    RunRead,
    behind,
    kept_head,
    lying,
    side_of,
    split_at,
    to_read_whole,
)
from dualpath.router.control.context import SchedulerContext
from dualpath.router.control.kept_blocks import serves
from dualpath.router.engines import EngineInfo
from dualpath.router.stages import Stage, Stages
from dualpath.router.waits import gather_or_cancel


class Brought(msgspec.Struct, frozen=True):
    """What became of every run of hits, in block order, and the DE's slots of the prompt."""

    de_slots: tuple[int, ...]
    outcomes: tuple[RunRead, ...]


class Loading:
    """Of one attempt on ``prefill`` and ``decode``; ``keys`` are the prompt's.

    ``kept`` False: nothing is taken from what buffers keep.  ``granted`` is told how many blocks
    the DE keeps, where any were believed to be kept and before the PE is sent anything, and returns
    the runs anew.
    """

    def __init__(
        self,
        context: SchedulerContext,
        steps: AttemptSteps,
        stages: Stages,
        keys: tuple[BlockKey, ...],
        prefill: EngineInfo,
        decode: EngineInfo,
        *,
        kept: bool,
        granted: Callable[[int], Sequence[HitRun]],
    ) -> None:
        self._context = context
        self._steps = steps
        self._stages = stages
        self._keys = keys
        self._prefill = prefill
        self._decode = decode
        self._kept = kept
        self._granted = granted
        self._whole_from = 0

    async def load(self, runs: Sequence[HitRun], prompt_blocks: int) -> Brought:
        """Reserve, and read what is not there; ``runs`` are the assignment's.

        DE first, always: what holds PE slots waits for nobody, so nothing can deadlock.
        """
        if any(run.cached or run.side is Role.PREFILL for run in runs):
            return await self._reserve_and_read(runs, prompt_blocks, idle=False)
        # A PE that gets no slots in any case need not wait for what the DE grants and reads.
        _, brought = await gather_or_cancel(
            self._steps.assign(self._prefill),
            self._reserve_and_read(runs, prompt_blocks, idle=True),
        )
        assert brought is not None
        return brought

    async def _reserve_and_read(
        self, runs: Sequence[HitRun], prompt_blocks: int, *, idle: bool
    ) -> Brought:
        """Reserve at the DE, then read at both; the PE reads nothing if it is ``idle``."""
        hit_run = BlockRun(0, _hit_blocks(runs))
        granted = await self._reserve(self._decode, prompt_blocks, [hit_run])
        if any(run.cached for run in runs):
            runs = self._granted(granted.cached_blocks)
        hit_blocks = _hit_blocks(runs)
        self._whole_from = self._context.geometry.whole_from(hit_blocks)
        slots, kept = granted.slots, min(granted.cached_blocks, hit_blocks)
        head = HitRun(Role.DECODE, BlockRun(0, kept), slots[:kept], cached=True)
        rest = behind(runs, kept)
        at_decode = [
            run.with_slots(slots[run.blocks.first : run.blocks.end])
            for run in side_of(rest, Role.DECODE)
        ]
        decode_reads = self._read_all(self._decode, [head, *at_decode] if kept else at_decode)
        if idle:
            there, here = await decode_reads, []
        else:
            prefill_reads = self._at_prefill(side_of(rest, Role.PREFILL))
            there, here = await gather_or_cancel(decode_reads, prefill_reads)
        for outcome in there:
            slots = outcome.slots or slots  # A deadline may have replaced slots.
        outcomes = sorted(there + here, key=lambda one: one.assigned.blocks.first)
        return Brought(slots, tuple(outcomes))

    async def _at_prefill(self, runs: list[HitRun]) -> list[RunRead]:
        """Load runs into the PE's buffer, as many blocks of them as it can hold."""
        engine = self._prefill
        most = engine.buffer_tokens // self._context.block_tokens
        fitting, cut = split_at(runs, most)
        short = [RunRead(run, run.head(0), (), "buffer-too-small") for run in cut]
        if not fitting:
            await self._steps.assign(engine)
            return short
        count = sum(run.blocks.count for run in fitting)
        granted = await self._reserve(engine, count, [run.blocks for run in fitting])
        placed = lying(fitting, granted.slots, granted.cached_blocks)
        return await self._read_all(engine, placed) + short

    async def _reserve(
        self, engine: EngineInfo, count: int, blocks: Sequence[BlockRun]
    ) -> Reserved:
        mode = self._context.registry.mode
        wanted = self._kept and mode is not None and serves(engine.role, mode)
        keys = [key for run in blocks for key in self._keys[run.first : run.end]]
        with self._stages.stage(Stage.BUFFER_WAIT, engine.engine_id):
            return await self._steps.reserve(engine, count, tuple(keys) if wanted else ())

    async def _read_all(self, engine: EngineInfo, runs: Sequence[HitRun]) -> list[RunRead]:
        """Return what became of runs that lie in an engine's slots, one after the other."""
        return [RunRead(run, run) if run.cached else await self._read(engine, run) for run in runs]

    async def with_windows(self, loaded: Loaded) -> Loaded:
        """Have a hit that ended early whole where it ends now, or end it with what was kept."""
        self._whole_from = self._context.geometry.whole_from(loaded.hit_blocks)
        slots, complete = loaded.de_slots, True
        for run in to_read_whole(loaded.hits, self._whole_from):
            decode = run.side is Role.DECODE
            again = await self._read(self._decode if decode else self._prefill, run)
            if decode:
                slots = again.slots
            complete = complete and again.good.blocks == run.blocks
        if complete:
            hits = tuple(run.whole_behind(self._whole_from) for run in loaded.hits)
            return Loaded(loaded.hit_blocks, hits, slots)
        hits = kept_head(loaded.hits)
        return Loaded(hits[-1].blocks.end if hits else 0, hits, slots)

    async def _read(self, engine: EngineInfo, run: HitRun) -> RunRead:
        run, first = run.whole_behind(self._whole_from), run.blocks.first
        parent = self._keys[first - 1] if first else chain_root()
        start_s = self._context.clock()
        with self._stages.stage(Stage.READ, engine.engine_id):
            done = await self._steps.read(engine, run, self._keys[first : run.blocks.end], parent)
        read_s = start_s + done.queue_s
        self._stages.add(Stage.READ_QUEUE, start_s, engine.engine_id, read_s)
        self._stages.add(Stage.STORAGE_READ, read_s, engine.engine_id, read_s + done.read_s)
        good = run.head(done.good_blocks)
        return RunRead(run, good, done.slots, done.reason or "buffer-too-small")


def _hit_blocks(runs: Sequence[HitRun]) -> int:
    return runs[-1].blocks.end if runs else 0
