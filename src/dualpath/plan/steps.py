"""Which bytes move where, in what order: the one place that knows DualPath's data path (§4.1).

A plan is data.  The traffic manager executes it, the simulator prices it, ``bounds`` sums it per
link.  Labels are those of the paper's Fig. 4:

    PE read path (4a)                            DE read path (4b)
    1-2  storage → PE buffer     Full Blocks     1-2  storage → DE buffer     Full Blocks
    3-4  PE buffer → PE HBM      Layer Blocks    3-5  DE buffer → PE HBM      Layer Blocks
    5-7  PE HBM → DE buffer      Layer Blocks    (miss) PE HBM → DE buffer    Layer Blocks
    8-9  DE buffer → DE HBM                      6-7  DE buffer → DE HBM

3-7 repeat per layer, one layer ahead of the computation; 5-7 carry hit and miss KV on the PE path
and miss KV alone on the DE path.  A split read (§6.1, future work in the paper) gives every hit
block the path of the side it was read on.

The paper draws 8-9 after the whole prompt has arrived: HBM of the DE is allocated only then.

Deviation: the paper reads prompts in one forward pass.  Where chunked prefill divides a prompt and
HBM holds only some layers, every chunk loads all KV before it once more, layer by layer: hit blocks
from where they were read to, blocks of earlier chunks from the DE buffer, which holds them already.
"""

import enum
from collections.abc import Iterator

import msgspec

from dualpath.core.blocks import BlockGeometry, holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.counts import (
    load_blocks,
    new_full_blocks,
    reload_blocks,
    send_hit_blocks,
)
from dualpath.plan.traffic_class import TrafficClass


class Place(enum.StrEnum):
    """Where KV can lie."""

    STORAGE = "storage"
    PE_BUFFER = "pe-buffer"
    PE_HBM = "pe-hbm"
    DE_BUFFER = "de-buffer"
    DE_HBM = "de-hbm"


class Unit(enum.StrEnum):
    """Granularity of a step (§A.5)."""

    FULL_BLOCK = "full-block"
    LAYER_BLOCK = "layer-block"


class Link(enum.StrEnum):
    """A direction of a device that a step loads; reads leave a memory, writes enter one (§4.2)."""

    PE_SNIC_READ = "pe-snic-read"
    DE_SNIC_READ = "de-snic-read"
    DE_SNIC_WRITE = "de-snic-write"
    PE_CNIC_READ = "pe-cnic-read"
    PE_CNIC_WRITE = "pe-cnic-write"
    DE_CNIC_READ = "de-cnic-read"
    DE_CNIC_WRITE = "de-cnic-write"
    PE_DRAM = "pe-dram"
    DE_DRAM = "de-dram"


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One movement of a run of blocks, of one layer or (``layer`` None) of all.

    ``links`` are the device directions that carry each of its ``bytes`` once.
    ``after`` names the labels (same layer where both have one) that must be complete before.
    """

    label: str
    source: Place
    destination: Place
    blocks: BlockRun
    layer: int | None
    unit: Unit
    bytes: int
    traffic_class: TrafficClass
    links: tuple[Link, ...]
    after: tuple[str, ...] = ()


class PromptLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan is made of: the prompt's blocks and the side every hit block is read on.

    ``hits`` are disjoint runs in block order that cover ``[0, hit_blocks)``.
    """

    geometry: BlockGeometry
    prompt_tokens: int
    hits: tuple[HitRun, ...] = ()

    @property
    def hit_blocks(self) -> int:
        """Blocks found in storage."""
        return self.hits[-1].blocks.end if self.hits else 0

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the whole prompt, the last possibly partial."""
        return holding_blocks(self.prompt_tokens, self.geometry.block_tokens)

    def hits_on(self, side: Role) -> tuple[BlockRun, ...]:
        """Hit runs read on one side."""
        return tuple(run.blocks for run in self.hits if run.side is side)


class _Hop(msgspec.Struct, frozen=True):
    """The constant part of a kind of step."""

    label: str
    source: Place
    destination: Place
    unit: Unit
    traffic_class: TrafficClass
    links: tuple[Link, ...]
    after: tuple[str, ...] = ()


# The table that is the data path.  CNIC directions follow §4.2: a host-device copy is an RDMA
# write through the engine's own CNIC, so its bytes are read and written by the same NIC.
READ_TO_PE = _Hop(
    "4a.1-2",
    Place.STORAGE,
    Place.PE_BUFFER,
    Unit.FULL_BLOCK,
    TrafficClass.STORAGE_READ,
    (Link.PE_SNIC_READ, Link.PE_DRAM),
)
READ_TO_DE = _Hop(
    "4b.1-2",
    Place.STORAGE,
    Place.DE_BUFFER,
    Unit.FULL_BLOCK,
    TrafficClass.STORAGE_READ,
    (Link.DE_SNIC_READ, Link.DE_DRAM),
)
LOAD_FROM_PE_BUFFER = _Hop(
    "4a.3-4",
    Place.PE_BUFFER,
    Place.PE_HBM,
    Unit.LAYER_BLOCK,
    TrafficClass.KV,
    (Link.PE_DRAM, Link.PE_CNIC_READ, Link.PE_CNIC_WRITE),
    ("4a.1-2",),
)
LOAD_FROM_DE_BUFFER = _Hop(
    "4b.3-5",
    Place.DE_BUFFER,
    Place.PE_HBM,
    Unit.LAYER_BLOCK,
    TrafficClass.KV,
    (Link.DE_DRAM, Link.DE_CNIC_READ, Link.PE_CNIC_WRITE),
    ("4b.1-2",),
)
RELOAD_CHUNK = _Hop(
    "chunk.reload",
    Place.DE_BUFFER,
    Place.PE_HBM,
    Unit.LAYER_BLOCK,
    TrafficClass.KV,
    (Link.DE_DRAM, Link.DE_CNIC_READ, Link.PE_CNIC_WRITE),
    ("4a.5-7", "miss"),
)
SEND_HITS = _Hop(
    "4a.5-7",
    Place.PE_HBM,
    Place.DE_BUFFER,
    Unit.LAYER_BLOCK,
    TrafficClass.KV,
    (Link.PE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM),
    ("compute",),
)
SEND_MISSES = _Hop(
    "miss",
    Place.PE_HBM,
    Place.DE_BUFFER,
    Unit.LAYER_BLOCK,
    TrafficClass.KV,
    (Link.PE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM),
    ("compute",),
)
FILL_DE_HBM = _Hop(
    "8-9",
    Place.DE_BUFFER,
    Place.DE_HBM,
    Unit.LAYER_BLOCK,
    TrafficClass.KV,
    (Link.DE_DRAM, Link.DE_CNIC_READ, Link.DE_CNIC_WRITE),
    ("4a.5-7", "miss", "4b.1-2"),
)
PERSIST_PROMPT = _Hop(
    "persist",
    Place.DE_BUFFER,
    Place.STORAGE,
    Unit.FULL_BLOCK,
    TrafficClass.STORAGE_WRITE,
    (Link.DE_DRAM, Link.DE_SNIC_WRITE),
    ("miss",),
)


def read_steps(layout: PromptLayout) -> tuple[Step, ...]:
    """Storage reads of the hit blocks, one step per run (labels 1-2)."""
    hops = {Role.PREFILL: READ_TO_PE, Role.DECODE: READ_TO_DE}
    return tuple(_step(hops[run.side], layout.geometry, run.blocks) for run in layout.hits)


def load_steps(
    layout: PromptLayout, layer: int, chunk: BlockRun, *, resident: bool = False
) -> tuple[Step, ...]:
    """What has to be brought into the PE's HBM before ``layer`` of a chunk.

    All KV before the chunk must be there.  ``chunk`` are the blocks the forward pass computes; it
    starts at the first miss block or where the previous chunk ended.  ``resident`` says that HBM
    holds all layers, so that earlier chunks have left everything in place.
    """
    hits = layout.hit_blocks
    hops = {Role.PREFILL: LOAD_FROM_PE_BUFFER, Role.DECODE: LOAD_FROM_DE_BUFFER}
    steps = [
        _step(hops[run.side], layout.geometry, run.blocks, layer)
        for run in layout.hits
        if load_blocks(run.blocks.count, chunk.first, hits, resident)
    ]
    if reloaded := reload_blocks(chunk.first, hits, resident):
        steps.append(_step(RELOAD_CHUNK, layout.geometry, BlockRun(hits, reloaded), layer))
    return tuple(steps)


def send_steps(layout: PromptLayout, layer: int, chunk: BlockRun) -> tuple[Step, ...]:
    """What goes to the DE buffer after ``layer`` of a chunk was computed (labels 5-7).

    The first chunk also carries the hit KV that was read on the PE; KV read on the DE is there.
    """
    steps = [
        _step(SEND_HITS, layout.geometry, run, layer)
        for run in layout.hits_on(Role.PREFILL)
        if send_hit_blocks(run.count, chunk.first, layout.hit_blocks)
    ]
    steps.append(_step(SEND_MISSES, layout.geometry, chunk, layer))
    return tuple(steps)


def decode_steps(layout: PromptLayout) -> tuple[Step, ...]:
    """H2D of the complete prompt KV once prefill is over (labels 8-9 and 6-7)."""
    blocks = BlockRun(0, layout.prompt_blocks)
    return tuple(
        _step(FILL_DE_HBM, layout.geometry, blocks, layer)
        for layer in range(layout.geometry.layers)
    )


def persist_steps(layout: PromptLayout) -> tuple[Step, ...]:
    """Write of the prompt's new full blocks from the DE buffer."""
    block_tokens = layout.geometry.block_tokens
    hit_tokens = layout.hit_blocks * block_tokens
    new = new_full_blocks(hit_tokens, layout.prompt_tokens, block_tokens)
    blocks = BlockRun(layout.hit_blocks, new)
    return (_step(PERSIST_PROMPT, layout.geometry, blocks),) if blocks else ()


def whole_plan(layout: PromptLayout) -> Iterator[Step]:
    """All steps of a request prefilled in one chunk, in the order they can start."""
    chunk = BlockRun(layout.hit_blocks, layout.prompt_blocks - layout.hit_blocks)
    yield from read_steps(layout)
    for layer in range(layout.geometry.layers):
        yield from load_steps(layout, layer, chunk)
        yield from send_steps(layout, layer, chunk)
    yield from decode_steps(layout)
    yield from persist_steps(layout)


def _step(hop: _Hop, geometry: BlockGeometry, blocks: BlockRun, layer: int | None = None) -> Step:
    per_block = geometry.full_block_bytes if layer is None else geometry.layer_block_bytes
    return Step(
        label=hop.label,
        source=hop.source,
        destination=hop.destination,
        blocks=blocks,
        layer=layer,
        unit=hop.unit,
        bytes=blocks.count * per_block,
        traffic_class=hop.traffic_class,
        links=hop.links,
        after=hop.after,
    )
