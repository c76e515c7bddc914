"""The steps of DualPath's data path for a prompt, in order (§4.1).

A plan is data.  Engines execute all of its steps, count and trace them; the simulator computes
their costs, ``bounds`` sums them per link, ``order`` derives their dependencies.  Their labels are
those of the paper's Fig. 4:

    PE read path (4a)                            DE read path (4b)
    1-2  storage → PE buffer     Full Blocks     1-2  storage → DE buffer     Full Blocks
    3-4  PE buffer → PE HBM      Layer Blocks    3-5  DE buffer → PE HBM      Layer Blocks
    5-7  PE HBM → DE buffer      Layer Blocks    (miss) PE HBM → DE buffer    Layer Blocks
    8-9  DE buffer → DE HBM                      6-7  DE buffer → DE HBM

3-7 repeat per layer, one layer ahead of the computation; 5-7 carry hit and miss KV on the PE path
and only miss KV on the DE path.  In a split read (§6.1, future work in the paper) every hit block
takes the path of the side on which it was read.  A block that is cached in a side's buffer takes
that side's path from its second step on.

The paper draws 8-9 after the whole prompt has arrived: HBM of the DE is allocated only then.

The paper divides a prompt into chunks (§6.2) and does not state what a later chunk loads.  If HBM
has only some layers, every chunk loads all KV before it again, layer by layer: hit blocks from
the buffer into which they were read, blocks of earlier chunks from the DE buffer.

Of a layer with a sliding window only the last blocks of a hit are moved, those in the window of the
next computed token.  Other blocks of the hit are read without such layers (``whole`` False), and
these layers are neither loaded nor sent: their memory does not contain valid KV.  Blocks that a PE
computes are sent to the DE in all layers, as the DE stores them.

New KV is written to storage in Full Blocks: the prompt's from the DE buffer, a generated block,
once it is full, from a staging slot in the DE's DRAM.

Beyond the paper the DE may receive a prompt's KV in its HBM (``Handover.HBM``).  Then 5-7 and new
KV go from PE HBM to DE HBM, and later chunks load the blocks of earlier ones from there.  The DE
buffer holds only the hits that the DE reads or caches, which 6-7 copy.  New Full Blocks leave HBM
through staging slots, as generated ones do; if the DE caches blocks in DRAM, so do sent hits.

Beyond the paper a third DE may cache or read blocks of a hit in its own buffer (``HitRun.third``).
They take 1-5 of the DE path from there, and 5-7 of the PE path: the PE sends them to the DE.

Beyond the paper another DE than the one that has received a prompt may decode it.  It moves the
prompt's Full Blocks from that DE's buffer into its own, except those at the prompt's head that it
caches, before 8-9.

Beyond the paper a DE may compute the tokens behind a hit itself.  Then only 1-2 and 6-7 of the DE
path are left, for the hit, and full blocks of the append leave HBM as generated ones do.
"""

from collections.abc import Iterator, Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry, holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.modes import Handover
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.counts import (
    chunk_blocks,
    load_blocks,
    new_full_blocks,
    reload_blocks,
    seen_blocks,
    send_hit_blocks,
)
from dualpath.plan.movements import (
    FILL_DE_HBM,
    LOAD_FROM_DE_BUFFER,
    LOAD_FROM_PE_BUFFER,
    LOAD_FROM_THIRD_BUFFER,
    MOVE_PROMPT,
    PERSIST_GENERATED,
    PERSIST_PROMPT,
    READ_TO_DE,
    READ_TO_PE,
    READ_TO_THIRD,
    RELOAD_CHUNK,
    RELOAD_CHUNK_FROM_HBM,
    SEND_HITS,
    SEND_HITS_TO_HBM,
    SEND_MISSES,
    SEND_MISSES_TO_HBM,
    STAGE_GENERATED,
    Link,
    Movement,
    Place,
    Unit,
)
from dualpath.plan.traffic_class import TrafficClass


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One movement of a run of blocks, of one layer or (``layer`` None) of all.

    ``whole`` False: of all layers without those with a sliding window.  ``slots`` are those of the
    DRAM buffer at one end of the step, one per block, or the blocks of the DE's HBM at the other
    end of a PE's step; an engine's plan has them, a simulated one has none.  ``third`` is the third
    DE of which the buffer is, empty for the request's own engines.
    """

    movement: Movement
    blocks: BlockRun
    layer: int | None
    bytes: int
    slots: tuple[int, ...] = ()
    whole: bool = True
    third: str = ""

    def only(self, blocks: BlockRun) -> "Step":
        """Return the part of the step that moves ``blocks``, a subset of its own."""
        before = blocks.first - self.blocks.first
        return msgspec.structs.replace(
            self,
            blocks=blocks,
            bytes=self.bytes // self.blocks.count * blocks.count,
            slots=self.slots[before : before + blocks.count],
        )

    @property
    def label(self) -> str:
        """Its name in Fig. 4."""
        return self.movement.label

    @property
    def source(self) -> Place:
        """The place its blocks are moved from."""
        return self.movement.source

    @property
    def destination(self) -> Place:
        """The place its blocks are moved to."""
        return self.movement.destination

    @property
    def traffic_class(self) -> TrafficClass:
        """Its priority class (§5.1)."""
        return self.movement.traffic_class

    @property
    def links(self) -> tuple[Link, ...]:
        """Device directions that carry each of its bytes once."""
        return self.movement.links

    @property
    def unit(self) -> Unit:
        """Full Blocks or Layer Blocks."""
        return Unit.FULL_BLOCK if self.layer is None else Unit.LAYER_BLOCK

    def block(self, position: int) -> "Step":
        """Return the part of the step that moves its block at index ``position``."""
        return msgspec.structs.replace(
            self,
            blocks=BlockRun(self.blocks.first + position, 1),
            bytes=self.bytes // self.blocks.count,
            slots=self.slots[position : position + 1],
        )


class PromptLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The input of a plan: the prompt's blocks, and the side that reads or caches each hit block.

    ``hits`` are disjoint runs in block order that cover ``[0, hit_blocks)``.  ``de_slots`` are the
    prompt's slots of the DE buffer, empty where none are granted.  ``handover`` is where the DE
    receives the KV, its buffer or its HBM; in HBM, ``de_slots`` are the prompt's blocks there.
    """

    geometry: BlockGeometry
    prompt_tokens: int
    hits: tuple[HitRun, ...] = ()
    de_slots: tuple[int, ...] = ()
    handover: Handover = Handover.BUFFER

    @property
    def hit_blocks(self) -> int:
        """Number of hit blocks."""
        return self.hits[-1].blocks.end if self.hits else 0

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the whole prompt, the last possibly partial."""
        return holding_blocks(self.prompt_tokens, self.geometry.block_tokens)

    @property
    def new_blocks(self) -> BlockRun:
        """The prompt's full blocks behind its hit, which are written to storage."""
        block_tokens = self.geometry.block_tokens
        hit_tokens = self.hit_blocks * block_tokens
        new = new_full_blocks(hit_tokens, self.prompt_tokens, block_tokens)
        return BlockRun(self.hit_blocks, new)

    @property
    def sends(self) -> tuple[Movement, Movement]:
        """The movements of hits and of new KV from the PE to the DE."""
        if self.handover is Handover.HBM:
            return SEND_HITS_TO_HBM, SEND_MISSES_TO_HBM
        return SEND_HITS, SEND_MISSES

    def decode_sees_from(self, layer: int) -> int:
        """Return the first block that the DE needs of a layer: it may recompute the last token."""
        return self.geometry.seen_from(layer, self.prompt_tokens - 1)

    def step(self, movement: Movement, blocks: BlockRun, layer: int | None = None) -> "Step":
        """Return the movement of these blocks from or to where the DE receives KV."""
        slots = self.de_slots[blocks.first : blocks.end]
        return step_of(movement, self.geometry, blocks, layer, slots)


_READS = {Role.PREFILL: READ_TO_PE, Role.DECODE: READ_TO_DE}
_LOADS = {Role.PREFILL: LOAD_FROM_PE_BUFFER, Role.DECODE: LOAD_FROM_DE_BUFFER}


def _source_steps(run: HitRun) -> tuple[Movement, Movement]:
    """Return the read of a run's blocks, and their load into the PE's HBM."""
    if run.third:
        return READ_TO_THIRD, LOAD_FROM_THIRD_BUFFER
    return _READS[run.side], _LOADS[run.side]


def chunk_of(cached_tokens: int, computed_tokens: int, block_tokens: int) -> BlockRun:
    """Return the blocks of a chunk of ``computed_tokens`` ≥ 1 after ``cached_tokens``."""
    count = chunk_blocks(cached_tokens, computed_tokens, block_tokens)
    return BlockRun(cached_tokens // block_tokens, count)


def step_of(
    movement: Movement,
    geometry: BlockGeometry,
    blocks: BlockRun,
    layer: int | None = None,
    slots: tuple[int, ...] = (),
    *,
    whole: bool = True,
    third: str = "",
) -> Step:
    """Return a movement of some blocks; only this function computes the bytes of a step."""
    size_bytes = blocks.count * geometry.bytes_of(layer, whole=whole)
    return Step(movement, blocks, layer, size_bytes, slots, whole, third)


def run_reads(geometry: BlockGeometry, run: HitRun) -> tuple[Step, ...]:
    """Storage reads of a run of hits into its side's buffer, or a third DE's (labels 1-2).

    One step for its blocks without window layers, one for its whole blocks; none if it is cached.
    """
    if run.cached:
        return ()
    parts = (
        (BlockRun(run.blocks.first, run.windowless), False),
        (BlockRun(run.whole_from, run.blocks.count - run.windowless), True),
    )
    read, _ = _source_steps(run)
    return tuple(
        step_of(
            *(read, geometry, part),
            slots=run.part(part).slots,
            whole=whole,
            third=run.third,
        )
        for part, whole in parts
        if part
    )


def read_steps(layout: PromptLayout) -> tuple[Step, ...]:
    """Storage reads of the hit blocks (labels 1-2)."""
    return tuple(step for run in layout.hits for step in run_reads(layout.geometry, run))


def load_steps(
    layout: PromptLayout, layer: int, chunk: BlockRun, *, resident: bool = False
) -> tuple[Step, ...]:
    """Loads of all KV before a chunk into the PE's HBM, for one layer.

    ``chunk`` are the blocks that the forward pass computes; it starts at the first miss block or at
    the end of the previous chunk.  ``resident``: HBM has all layers, so that the KV of earlier
    chunks is still there.
    """
    hits, geometry = layout.hit_blocks, layout.geometry
    seen = geometry.seen_from(layer, chunk.first * geometry.block_tokens)
    steps = []
    for run in layout.hits:
        first, count = run.blocks.first, run.blocks.count
        loaded = load_blocks(first, count, seen, chunk.first, hits, resident)
        if loaded:
            part = run.part(BlockRun(run.blocks.end - loaded, loaded))
            _, load = _source_steps(run)
            steps.append(step_of(load, geometry, part.blocks, layer, part.slots, third=run.third))
    if reloaded := reload_blocks(seen, chunk.first, hits, resident):
        blocks = BlockRun(chunk.first - reloaded, reloaded)
        in_hbm = layout.handover is Handover.HBM
        movement = RELOAD_CHUNK_FROM_HBM if in_hbm else RELOAD_CHUNK
        steps.append(layout.step(movement, blocks, layer))
    return tuple(steps)


def send_steps(layout: PromptLayout, layer: int, chunk: BlockRun) -> tuple[Step, ...]:
    """Sends to the DE after ``layer`` of a chunk was computed (labels 5-7).

    The first chunk also sends the hit KV that was read on the PE or a third DE; KV read on the DE
    is there.
    """
    seen, steps = layout.decode_sees_from(layer), []
    send_hits, send_misses = layout.sends
    for run in layout.hits:
        if run.side is Role.PREFILL:
            first, count = run.blocks.first, run.blocks.count
            sent = send_hit_blocks(first, count, seen, chunk.first, layout.hit_blocks)
            if sent:
                steps.append(layout.step(send_hits, BlockRun(run.blocks.end - sent, sent), layer))
    steps.append(layout.step(send_misses, chunk, layer))
    return tuple(steps)


def decode_steps(layout: PromptLayout) -> tuple[Step, ...]:
    """H2D of the KV in the DE's buffer (labels 8-9 and 6-7).

    That is the complete prompt, once its prefill is over; or, where the PE sends into HBM, the hits
    that the DE has read or cached.
    """
    if layout.handover is Handover.HBM:
        return tuple(_fill_hits(layout))
    steps = []
    for layer in range(layout.geometry.layers):
        first = layout.decode_sees_from(layer)
        blocks = BlockRun(first, layout.prompt_blocks - first)
        steps.append(layout.step(FILL_DE_HBM, blocks, layer))
    return tuple(steps)


def _fill_hits(layout: PromptLayout) -> Iterator[Step]:
    """Yield the H2D copies of the hits in the DE's buffer."""
    for layer in range(layout.geometry.layers):
        first = layout.decode_sees_from(layer)
        for run in layout.hits:
            if run.side is not Role.DECODE:
                continue
            seen = seen_blocks(run.blocks.first, run.blocks.count, first)
            if seen:
                part = run.part(BlockRun(run.blocks.end - seen, seen))
                yield step_of(FILL_DE_HBM, layout.geometry, part.blocks, layer, part.slots)


def move_steps(geometry: BlockGeometry, blocks: BlockRun, slots: tuple[int, ...]) -> list[Step]:
    """Moves of a prompt's blocks from another DE's buffer into these slots, a step per block.

    A block has all of its layers there, whichever of them the DE will read.
    """
    run = step_of(MOVE_PROMPT, geometry, blocks, slots=slots)
    return [run.block(position) for position in range(blocks.count)]


def persist_steps(layout: PromptLayout) -> tuple[Step, ...]:
    """Write of the prompt's new full blocks from the DE buffer, or from HBM through staging."""
    blocks, geometry = layout.new_blocks, layout.geometry
    if not blocks:
        return ()
    if layout.handover is Handover.BUFFER:
        return (layout.step(PERSIST_PROMPT, blocks),)
    copies = (step_of(STAGE_GENERATED, geometry, blocks, layer) for layer in range(geometry.layers))
    return (*copies, step_of(PERSIST_GENERATED, geometry, blocks))


def cache_steps(layout: PromptLayout) -> tuple[Step, ...]:
    """D2H of hits that a PE has sent into HBM, for the DE's DRAM cache; none without one.

    New blocks are cached from the copies that are written to storage.
    """
    if layout.handover is Handover.BUFFER:
        return ()
    return tuple(
        step_of(STAGE_GENERATED, layout.geometry, run.blocks, layer)
        for layer in range(layout.geometry.layers)
        for run in layout.hits
        if run.side is Role.PREFILL
    )


def generated_steps(geometry: BlockGeometry, slot: int) -> tuple[Step, ...]:
    """D2H of a generated block that became full, into a staging slot; the last step is its write.

    Generated blocks are written one by one: each has a plan of its own, in which it is block 0.
    """
    block = BlockRun(0, 1)
    copies = (
        step_of(STAGE_GENERATED, geometry, block, layer, (slot,))
        for layer in range(geometry.layers)
    )
    return (*copies, step_of(PERSIST_GENERATED, geometry, block, slots=(slot,)))


def whole_plan(
    layout: PromptLayout,
    chunk_blocks: Sequence[int] = (),
    *,
    resident: bool = False,
    caches: bool = False,
) -> Iterator[Step]:
    """All steps of a prompt, in an order in which they can start.

    ``chunk_blocks`` are the sizes of the prefill chunks, by default one chunk; ``resident`` as for
    ``load_steps``; ``caches``: the DE caches blocks in DRAM.
    """
    first = layout.hit_blocks
    yield from read_steps(layout)
    for count in chunk_blocks or (layout.prompt_blocks - first,):
        chunk = BlockRun(first, count)
        for layer in range(layout.geometry.layers):
            yield from load_steps(layout, layer, chunk, resident=resident)
            yield from send_steps(layout, layer, chunk)
        first += count
    yield from decode_steps(layout)
    yield from persist_steps(layout)
    if caches:
        yield from cache_steps(layout)


def move_plan(layout: PromptLayout, cached_blocks: int = 0) -> Iterator[Step]:
    """All steps of a prompt at the DE that decodes it, once another DE has all of its KV.

    The first ``cached_blocks`` are in the DRAM cache of the DE that decodes.  The other DE writes
    the prompt's new blocks to storage.
    """
    moved = BlockRun(cached_blocks, layout.prompt_blocks - cached_blocks)
    slots = layout.de_slots[moved.first : moved.end]
    yield from move_steps(layout.geometry, moved, slots)
    yield from decode_steps(layout)


def append_plan(hit: PromptLayout) -> Iterator[Step]:
    """All steps of a hit until it is in the HBM of the DE that computes the tokens behind it.

    ``hit`` is the layout of the hit alone: its tokens, in full blocks, and its runs at the DE.
    Blocks that become full afterwards have the ``generated_steps``.
    """
    assert all(run.side is Role.DECODE for run in hit.hits), "a PE has no part in it"
    yield from read_steps(hit)
    yield from decode_steps(hit)
