"""Engines cut in any way move the same whole blocks: slices of parts by PE rank and by DE rank.

Each rank is a mover of its own: an agent, an HBM that holds its heads only, and views of buffers of
whole blocks.  What all ranks of an engine have moved is compared with whole blocks.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dualpath.core.blocks import WHOLE, BlockGeometry, PartSlice, slices_of
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.runs import BlockRun
from dualpath.engine.buffer.block_buffer import BUFFER_REGION, STAGING_REGION, BlockBuffer
from dualpath.engine.counters import Counters
from dualpath.engine.passes.device import HostDevice
from dualpath.engine.passes.hbm_layout import HbmLayout, HbmPart, PartViews
from dualpath.engine.passes.step_transfers import StepTransfers
from dualpath.plan.movements import (
    FILL_DE_HBM,
    LOAD_FROM_DE_BUFFER,
    LOAD_FROM_PE_BUFFER,
    SEND_HITS,
    STAGE_GENERATED,
    Movement,
)
from dualpath.plan.steps import step_of
from dualpath.transport.contract import AgentInfo, RegionInfo, TransferState, Transport
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath.transport.memory import allocate_registered
from dualpath.transport.nixl import NixlTransport

BLOCKS = 3
RANKS = [1, 2, 3, 4, 6, 8]
_names = itertools.count()

Bytes = NDArray[np.uint8]


class Cut:
    """An engine of ``ranks`` that divide KV ``heads``; ranks with the same heads are replicas.

    ``latent``: parts that every rank has whole.
    """

    def __init__(self, ranks: int, heads: int, latent: set[tuple[int, int]]) -> None:
        self.ranks = ranks
        self.slices = min(ranks, heads)
        self._latent = latent

    def of(self, rank: int, layer: int, part: int) -> PartSlice:
        if (layer, part) in self._latent:
            return WHOLE
        return PartSlice(rank // (self.ranks // self.slices), self.slices)


class Rank:
    """One rank: its HBM, and its views of its engine's buffers of Full Blocks."""

    def __init__(
        self,
        transport: Transport,
        geometry: BlockGeometry,
        side: Role,
        cut: Cut,
        rank: int,
        buffers: Sequence[RegionInfo],
    ) -> None:
        self.transport = transport
        agent = transport.info().agent
        moved = [cut.of(rank, p.layer, p.part).of(p) for p in geometry.parts]
        self.memory = allocate_registered(BLOCKS * sum(p.size_bytes for p in moved))
        self.hbm: dict[tuple[int, int], Bytes] = {}
        layers: list[list[HbmPart]] = [[] for _ in range(geometry.layers)]
        first = 0
        for p in moved:
            size, name = p.size_bytes, f"hbm.{p.layer}.{p.part}"
            region = RegionInfo(name, self.memory.address + first, size, size, BLOCKS)
            transport.register(region, self.memory)
            layers[p.layer].append(HbmPart(region, cut.of(rank, p.layer, p.part)))
            here = self.memory.array[first : first + BLOCKS * size]
            self.hbm[p.layer, p.part] = here.reshape(BLOCKS, size)
            first += BLOCKS * size
        self.moved = moved
        layout = HbmLayout(
            tuple(p.region for ps in layers for p in ps), tuple(map(tuple, layers)), 1
        )
        self.views = PartViews(geometry, layout)
        for buffer in buffers:
            transport.register(buffer, None)
            for view in self.views.of(buffer):
                transport.view(view)
        self.transfers = StepTransfers(side, transport, HostDevice(), Counters(), agent, layout)

    def meet(self, peer: AgentInfo) -> None:
        (buffer,) = (region for region in peer.regions if region.name == BUFFER_REGION)
        self.transport.connect(peer, self.views.of(buffer))

    def move(self, movement: Movement, geometry: BlockGeometry, peer: str = "") -> None:
        """Move all blocks in all layers, slot i against HBM block i from the end."""
        for layer in range(geometry.layers):
            slots = tuple(range(BLOCKS))
            step = step_of(movement, geometry, BlockRun(0, BLOCKS), layer, slots)
            transfer, events = self.transfers.post(step, slots[::-1], (peer,))
            while (state := transfer.poll()) is TransferState.MOVING:
                pass
            assert (state, transfer.error(), events) == (TransferState.DONE, None, ())
            assert transfer.bytes == BLOCKS * sum(
                p.size_bytes for p in self.moved if p.layer == layer
            )
            transfer.release()

    def check(self, blocks: Bytes) -> None:
        """Its HBM holds its slice of every part, in the order of ``move``."""
        for part in self.moved:
            end = part.offset_bytes + part.size_bytes
            right = blocks[::-1, part.offset_bytes : end]
            assert np.array_equal(self.hbm[part.layer, part.part], right), part


class Engine:
    """The ranks of one engine over one buffer and one staging of whole blocks."""

    def __init__(
        self, open_transport: "Opener", geometry: BlockGeometry, side: Role, cut: Cut
    ) -> None:
        self.geometry = geometry
        self._buffers = [BlockBuffer(geometry, BLOCKS, lambda grant: None) for _ in range(2)]
        regions = [
            buffer.region(name)
            for buffer, name in zip(self._buffers, (BUFFER_REGION, STAGING_REGION), strict=True)
        ]
        self.ranks = [
            Rank(open_transport(f"{side.value}-{rank}"), geometry, side, cut, rank, regions)
            for rank in range(cut.ranks)
        ]

    @property
    def buffer(self) -> Bytes:
        return self._whole(0)

    @property
    def staging(self) -> Bytes:
        return self._whole(1)

    def _whole(self, number: int) -> Bytes:
        buffer = self._buffers[number]
        slots = [np.frombuffer(buffer.view(slot), np.uint8) for slot in range(BLOCKS)]
        return np.stack(slots)

    def fill(self, blocks: Bytes) -> None:
        for slot in range(BLOCKS):
            self._buffers[0].view(slot)[:] = blocks[slot].tobytes()

    def move(self, movement: Movement, peer: str = "") -> None:
        for rank in self.ranks:
            rank.move(movement, self.geometry, peer)

    def check(self, blocks: Bytes) -> None:
        for rank in self.ranks:
            rank.check(blocks)


class Opener:
    """Opens transports of one kind and closes them all."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._fabric = InProcessFabric()
        self._opened: list[Transport] = []

    def __call__(self, name: str) -> Transport:
        agent = f"{name}-{next(_names)}"
        transport: Transport = (
            NixlTransport(agent)
            if self._kind == "nixl"
            else InProcessTransport(agent, self._fabric)
        )
        self._opened.append(transport)
        return transport

    def close(self) -> None:
        for transport in self._opened:
            transport.close()


def every_path_moves_whole_blocks(
    opener: Opener, geometry: BlockGeometry, prefill: Cut, decode: Cut
) -> None:
    random = np.random.default_rng(1)
    shape = (BLOCKS, geometry.full_block_bytes)
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    pe = Engine(opener, geometry, Role.PREFILL, prefill)
    de = Engine(opener, geometry, Role.DECODE, decode)
    # All ranks of a DE see one buffer: the PE may reach it through any of them.
    peer = de.ranks[0].transport.info()
    for rank in pe.ranks:
        rank.meet(peer)

    de.fill(blocks)
    pe.move(LOAD_FROM_DE_BUFFER, peer.agent)
    pe.check(blocks)
    de.fill(np.zeros_like(blocks))
    pe.move(SEND_HITS, peer.agent)
    assert np.array_equal(de.buffer, blocks)
    de.move(FILL_DE_HBM)
    de.check(blocks)
    de.move(STAGE_GENERATED)
    assert np.array_equal(de.staging, blocks)

    other = random.integers(0, 256, shape, dtype=np.uint8)
    pe.fill(other)
    pe.move(LOAD_FROM_PE_BUFFER)
    pe.check(other)


def divide(heads: int, ranks: int) -> bool:
    """Whether one number divides the other."""
    return max(heads, ranks) % min(heads, ranks) == 0


@st.composite
def models(draw: st.DrawFn) -> tuple[BlockGeometry, int, set[tuple[int, int]]]:
    """Blocks of unequal layers, with KV heads of their parts, or without heads."""
    heads = draw(st.sampled_from([1, 2, 4, 6, 12]))
    layers, latent = [], set()
    for layer in range(draw(st.integers(1, 4))):
        sizes = []
        for part in range(draw(st.integers(1, 3))):
            if draw(st.booleans()):
                sizes.append(heads * draw(st.integers(1, 40)))
            else:
                sizes.append(draw(st.integers(1, 100)))
                latent.add((layer, part))
        layers.append(tuple(sizes))
    return BlockGeometry(4, tuple(layers)), heads, latent


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from(RANKS), st.sampled_from(RANKS))
def test_engines_of_any_tensor_parallelism_move_the_same_full_blocks(
    model: tuple[BlockGeometry, int, set[tuple[int, int]]], prefill: int, decode: int
) -> None:
    geometry, heads, latent = model
    assume(all(divide(heads, ranks) for ranks in (prefill, decode)))
    opener = Opener("in-process")
    try:
        cuts = [Cut(ranks, heads, latent) for ranks in (prefill, decode)]
        every_path_moves_whole_blocks(opener, geometry, *cuts)
    finally:
        opener.close()


@pytest.fixture
def nixl() -> Iterator[Opener]:
    opener = Opener("nixl")
    yield opener
    opener.close()


@pytest.mark.nixl
def test_nixl_moves_slices_of_registered_blocks(nixl: Opener) -> None:
    geometry = BlockGeometry(4, ((256, 24), (512,)))
    latent = {(0, 1)}
    every_path_moves_whole_blocks(nixl, geometry, Cut(2, 2, latent), Cut(1, 2, latent))


def test_ranks_and_heads_are_divided_evenly_or_refused() -> None:
    given_out = {(1, 8): 1, (4, 8): 4, (3, 6): 3, (8, 2): 2, (3, 1): 1}
    assert {(r, h): slices_of(r, h) for r, h in given_out} == given_out
    for ranks, heads in ((3, 2), (4, 6), (6, 4)):
        with pytest.raises(ConfigError, match=f"{ranks} ranks for {heads} KV heads.*divide"):
            slices_of(ranks, heads)


def test_a_part_is_divided_evenly_or_refused() -> None:
    (part,) = BlockGeometry.uniform(1, 4, 30).parts
    assert [PartSlice(i, 3).of(part)[2:] for i in range(3)] == [(0, 10), (10, 10), (20, 10)]
    with pytest.raises(ConfigError, match="30 bytes, which 4 ranks cannot share"):
        PartSlice(0, 4).of(part)
    with pytest.raises(ConfigError, match="slice 3 of 3"):
        PartSlice(3, 3).of(part)


def test_hbm_that_does_not_match_the_blocks_is_refused() -> None:
    geometry = BlockGeometry(4, ((64, 32),))
    whole, half = (HbmPart(RegionInfo("hbm", 4096, size, size, 1)) for size in (64, 32))
    with pytest.raises(ConfigError, match="blocks have 1"):
        PartViews(geometry, HbmLayout((), ((whole,),), 1))
    with pytest.raises(
        ConfigError,
        match="part 1 of layer 0: 32 bytes of each block are moved, a block in HBM has 64",
    ):
        PartViews(geometry, HbmLayout((), ((whole, whole),), 1))
    buffer = RegionInfo("buffer", 4096, 100, 100, 2)
    with pytest.raises(ConfigError, match="blocks of 100 bytes, this engine of 96"):
        PartViews(geometry, HbmLayout((), ((whole, half),), 1)).of(buffer)
