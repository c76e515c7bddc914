"""Layerwise prefill on a device that computes asynchronously (``tests/async_device.py``).

For any order in which kernels, copies, transfers and threads may run: a layer's KV has arrived when
attention reads it, nothing overwrites it before attention is through, and what is sent is what was
computed.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.async_device import (
    World,
    WorldCopier,
    WorldDevice,
    WorldEventWaiter,
    WorldHbmCopier,
    WorldLayerStream,
    WorldPump,
    WorldTransport,
)
from tests.engine_harness import GEOMETRY, HeldBlocks, full_block, kv_bytes, prompt_keys

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import PrefillTransfer
from dualpath.engine.buffer.block_buffer import STAGING_REGION, BlockBuffer
from dualpath.engine.counters import Counters
from dualpath.engine.passes.device import Device, HostDevice
from dualpath.engine.passes.hbm_copy import BlockOut, PacedPosts
from dualpath.engine.passes.hbm_layout import NO_BLOCK, PartViews, shared_layers
from dualpath.engine.passes.layer_stream import LayerSettings
from dualpath.engine.passes.pass_transfers import NoHolder
from dualpath.engine.passes.pump import EventWaiter, Movers, StalledAgents
from dualpath.engine.passes.step_transfers import PrefillChunk, StepTransfers
from dualpath.engine.threads import OS_THREADS, Health
from dualpath.engine.trace import TraceRecorder
from dualpath.plan.steps import PromptLayout, decode_steps, generated_steps
from dualpath.transport.contract import RegionInfo
from dualpath.transport.memory import allocate_registered

HBM_BLOCKS, SLOTS = 8, 10
#: Two polls of a wait.
DEADLINE_S = 0.5
SIZE = GEOMETRY.bytes_of(0)
#: As DeepSeek-V3.2 has them; a Layer Block has the same bytes as in GEOMETRY.
TWO_PARTS = BlockGeometry(GEOMETRY.block_tokens, ((SIZE - 64, 64),) * GEOMETRY.layers)
GARBAGE = np.full(SIZE, 0xEE, np.uint8)


#: Chunks of a pass, each with the keys of its prompt's blocks.
Batch = Sequence[tuple[PrefillChunk, list[bytes]]]


def buffer(slots: int) -> BlockBuffer:
    return BlockBuffer(GEOMETRY, slots, lambda grant: None)


class Engine:
    """One engine's data plane over a world; ``regions`` layers of HBM."""

    def __init__(
        self, seed: int, regions: int, own_copier: bool, geometry: BlockGeometry = GEOMETRY
    ) -> None:
        self.geometry = geometry
        self.world = World(Random(seed))
        memory = allocate_registered(regions * HBM_BLOCKS * SIZE)
        self.hbm = memory.array.reshape(regions, HBM_BLOCKS, SIZE)
        hbm = [
            RegionInfo(f"hbm.{i}", memory.address + i * HBM_BLOCKS * SIZE, SIZE, SIZE, HBM_BLOCKS)
            for i in range(regions)
        ]
        self.layer_region = [i % regions for i in range(GEOMETRY.layers)]
        self.layout = shared_layers(hbm, geometry, HBM_BLOCKS * geometry.block_tokens)
        views = PartViews(geometry, self.layout)
        self.buffer, self.staging, self.de_buffer = buffer(SLOTS), buffer(3), buffer(SLOTS)
        self.other_de_buffer = buffer(SLOTS)
        own = [
            *hbm,
            *self.layout.views(),
            *views.of(self.buffer.region()),
            *views.of(self.staging.region(STAGING_REGION)),
        ]
        self.own_copier = WorldCopier(self.world, own) if own_copier else None
        self.gpu = WorldDevice(self.world, self.own_copier)
        self.device: Device = self.gpu
        self.pump = WorldPump(self.world)
        self.after: EventWaiter = WorldEventWaiter(self.world)
        agents = {
            "self": own,
            "de": list(views.of(self.de_buffer.region())),
            "other-de": list(views.of(self.other_de_buffer.region())),
        }
        self.transport = WorldTransport(self.world, "self", agents)
        self.stalled = StalledAgents()
        self.wrong: list[str] = []

    def stream(
        self,
        chunks: Sequence[PrefillChunk],
        layers: LayerSettings,
        before: WorldLayerStream | None = None,
    ) -> WorldLayerStream:
        movers = self.movers(Role.PREFILL)
        stream = WorldLayerStream(chunks, layers, self.geometry, movers, Counters(), before=before)
        stream.world = self.world
        return stream

    def movers(self, side: Role) -> Movers:
        transfers = StepTransfers(
            side, self.transport, self.device, Counters(), "self", self.layout
        )
        return Movers(
            transfers,
            self.pump,
            self.device,
            self.after,
            self.stalled,
            DEADLINE_S,
            TraceRecorder(None, ""),
            Health(),
        )

    def copier(self) -> WorldHbmCopier:
        copier = WorldHbmCopier(self.movers(Role.DECODE), NoHolder())
        copier.world = self.world
        return copier

    def kernel_writes(self, layer: int, block: int, content: bytes | NDArray[np.uint8]) -> None:
        there = self.hbm[self.layer_region[layer], block]
        what = np.frombuffer(bytes(content), np.uint8)
        self.gpu.compute.queue(lambda: np.copyto(there, what))

    def kernel_reads(self, layer: int, block: int, expected: bytes) -> None:
        there = self.hbm[self.layer_region[layer], block]

        def read() -> None:
            if there.tobytes() != expected:
                self.wrong.append(f"layer {layer} block {block}")

        self.gpu.compute.queue(read)

    def forward(
        self,
        work: Batch,
        layers: LayerSettings,
        at_layer: Callable[[int], None] = lambda _: None,
        read_before_hook: bool = False,
    ) -> WorldLayerStream:
        """A forward pass as vLLM queues it: new KV, wait for loaded KV, attention.

        With ``read_before_hook`` a layer reads its KV before that wait, too; then each is waited
        for when the one before is computed.
        """
        for chunk, _ in work:
            computed_before = chunk.chunk.first > chunk.transfer.hit_blocks
            resident = chunk.chunk.first if computed_before and not layers.overlap else 0
            for layer in range(GEOMETRY.layers):  # another pass, still under way
                for block in chunk.hbm_blocks[resident:]:
                    self.kernel_writes(layer, block, GARBAGE)
        stream = self.stream([chunk for chunk, _ in work], layers)
        stream.begin()
        if read_before_hook:
            stream.wait_loaded(0)
        for layer in range(GEOMETRY.layers):
            at_layer(layer)
            self.one_layer(stream, work, layer, read_before_hook)
        stream.finish()
        return stream

    def one_layer(
        self, stream: WorldLayerStream, work: Batch, layer: int, read_before_hook: bool = False
    ) -> None:
        """Queue one layer of a pass."""
        self.world.drift(8)
        for chunk, keys in work:
            for block in range(chunk.chunk.first, chunk.chunk.end):
                self.kernel_writes(layer, chunk.hbm_blocks[block], kv_bytes(keys[block], layer))
        if read_before_hook:
            self.attention(stream, work, layer)
        stream.wait_loaded(layer)
        for _ in range(2):  # a kernel reads for a while
            self.attention(stream, work, layer)
        self.world.drift(8)
        stream.computed(layer)
        if read_before_hook and layer + 1 < GEOMETRY.layers:
            stream.wait_loaded(layer + 1)

    def attention(self, stream: WorldLayerStream, work: Batch, layer: int) -> None:
        """Read the KV of requests that have not failed."""
        for chunk, keys in work:
            if chunk.transfer.request_id not in stream.failures:
                for block in range(chunk.chunk.end):
                    self.kernel_reads(layer, chunk.hbm_blocks[block], kv_bytes(keys[block], layer))

    def drain(self) -> None:
        while self.world.step():
            pass


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Prompt tokens, hit blocks on the PE, on the DE, and where the second chunk begins."""
    tokens = draw(st.integers(1, HBM_BLOCKS * GEOMETRY.block_tokens))
    most = GEOMETRY.max_hit_blocks(tokens)
    pe_hits = draw(st.integers(0, most))
    de_hits = draw(st.integers(0, most - pe_hits))
    cut = draw(st.integers(pe_hits + de_hits + 1, GEOMETRY.blocks_for(tokens)))
    return tokens, pe_hits, de_hits, cut


def fill(there: BlockBuffer, slot: int, key: bytes) -> None:
    there.view(slot)[:] = full_block(key)


@settings(max_examples=150, deadline=None)
@given(prompts(), st.integers(0, 4), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_kv_is_there_when_attention_reads_it_and_is_sent_as_computed(
    prompt: tuple[int, int, int, int],
    layer_buffers: int,
    own_copier: bool,
    two_parts: bool,
    seed: int,
) -> None:
    tokens, pe_hits, de_hits, cut = prompt
    keys = prompt_keys(tokens)
    overlap = layer_buffers > 0  # 0: mode Basic
    layers = LayerSettings(buffers=layer_buffers or GEOMETRY.layers, overlap=overlap)
    geometry = TWO_PARTS if two_parts else GEOMETRY
    engine = Engine(seed, layers.buffers, own_copier, geometry)
    hits = pe_hits + de_hits
    for block in range(pe_hits):
        fill(engine.buffer, block, keys[block])
    for block in range(pe_hits, hits):
        fill(engine.de_buffer, block, keys[block])
    runs = [
        HitRun(Role.PREFILL, BlockRun(0, pe_hits), tuple(range(pe_hits))),
        HitRun(Role.DECODE, BlockRun(pe_hits, hits - pe_hits), tuple(range(pe_hits, hits))),
    ]
    prefill_transfer = PrefillTransfer(
        request_id="r",
        prompt_tokens=tokens,
        hit_blocks=hits,
        hit_key_tail=b"",
        hits=tuple(run for run in runs if run.slots),
        decode_engine="de-0",
        decode_epoch="e",
        de_slots=tuple(range(len(keys))),
    )
    for first, end in ((hits, cut), (cut, len(keys))):
        if first == end:
            continue
        chunk = PrefillChunk(
            transfer=prefill_transfer,
            chunk=BlockRun(first, end - first),
            hbm_blocks=tuple(range(len(keys)))[::-1][:end],
            decode_agents=("de",),
        )
        assert engine.forward([(chunk, keys)], layers, read_before_hook=two_parts).failures == {}
    assert engine.wrong == []
    for block, key in enumerate(keys):
        assert engine.de_buffer.view(block).tobytes() == full_block(key), block


def chunk_of(
    engine: Engine,
    name: str,
    chunk: BlockRun,
    hits: tuple[int, int],
    hbm_blocks: Sequence[int],
    first_slot: int,
    blocks: int,
) -> tuple[PrefillChunk, list[bytes]]:
    """A chunk of a prompt of ``blocks``, with so many hits here and there in their places.

    Its slots begin with ``first_slot``, here and at the DE.
    """
    keys = prompt_keys(blocks * GEOMETRY.block_tokens, name)
    here, there = BlockRun(0, hits[0]), BlockRun(hits[0], hits[1])
    slots = tuple(range(first_slot, first_slot + blocks))
    for run, buffer in ((here, engine.buffer), (there, engine.de_buffer)):
        for block in range(run.first, run.end):
            fill(buffer, slots[block], keys[block])
    runs = (
        HitRun(Role.PREFILL, here, slots[: here.end]),
        HitRun(Role.DECODE, there, slots[there.first : there.end]),
    )
    transfer = PrefillTransfer(
        request_id=name,
        prompt_tokens=blocks * GEOMETRY.block_tokens,
        hit_blocks=sum(hits),
        hit_key_tail=b"",
        hits=tuple(run for run in runs if run.slots),
        decode_engine="de",
        decode_epoch="e",
        de_slots=slots,
    )
    return PrefillChunk(transfer, chunk, tuple(hbm_blocks), ("de",)), keys


#: Layers of a pass before which the next one begins; the last: when all of it is queued.
AHEAD = st.integers(0, GEOMETRY.layers)
#: Layers of a pass before which the one before it is ended; the last: when all of it is queued.
ENDS = st.integers(0, GEOMETRY.layers)


def run_overlapping(
    engine: Engine, passes: Sequence[Batch], layers: LayerSettings, ahead: int, ends: int
) -> list[WorldLayerStream]:
    """Run passes, each begun before layer ``ahead`` of the one before, ended at ``ends`` of it."""
    streams = [engine.stream([chunk for chunk, _ in passes[0]], layers)]
    streams[0].begin()

    def begin_next(number: int) -> None:
        if number < len(passes):
            chunks = [chunk for chunk, _ in passes[number]]
            streams.append(engine.stream(chunks, layers, streams[-1]))
            streams[-1].begin()

    for number, work in enumerate(passes):
        stream = streams[number]
        engine.world.drift(8)
        stream.enter()
        for layer in range(GEOMETRY.layers):
            if layer == ahead:
                begin_next(number + 1)
            if layer == ends and number:
                streams[number - 1].finish()
            engine.one_layer(stream, work, layer)
        if ahead == GEOMETRY.layers:
            begin_next(number + 1)
        if ends == GEOMETRY.layers and number:
            streams[number - 1].finish()
    streams[-1].finish()
    return streams


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, GEOMETRY.layers - 1),
    st.booleans(),
    AHEAD,
    ENDS,
    st.tuples(st.integers(0, 1), st.integers(0, 1)),
    st.integers(0, 2**32),
)
def test_a_pass_begins_in_the_one_before_and_no_region_has_two_users(
    layer_buffers: int, own_copier: bool, ahead: int, ends: int, hits: tuple[int, int], seed: int
) -> None:
    """A prompt's chunks in all three passes, and others in HBM blocks that the next pass reuses."""
    layers = LayerSettings(buffers=layer_buffers, overlap=True)
    engine = Engine(seed, layer_buffers, own_copier)
    engine.hbm[:] = GARBAGE
    first = sum(hits)
    long = [
        chunk_of(engine, "long", BlockRun(first + n, 1), hits, range(first + n + 1), 0, first + 3)
        for n in range(3)
    ]
    others = [
        chunk_of(engine, name, BlockRun(1, 1), (1, 0), hbm_blocks, 5 + 2 * n, 2)
        for n, (name, hbm_blocks) in enumerate((("one", (5, 6)), ("other", (6, 5))))
    ]
    passes = [[long[0], others[0]], [others[1], long[1]], [long[2]]]
    streams = run_overlapping(engine, passes, layers, ahead, ends)
    engine.drain()
    assert engine.wrong == []
    assert [stream.failures for stream in streams] == [{}] * 3
    for chunk, keys in (long[2], *others):
        for slot, key in zip(chunk.transfer.de_slots, keys, strict=True):
            assert engine.de_buffer.view(slot).tobytes() == full_block(key), slot


STALLED = "other-de"
BLOCKS = 3  # of each prompt: one read here, one read there, one computed


def prompt_of(
    engine: Engine, name: str, decode_agent: str, own_slot: int, de_slot: int, hbm_block: int
) -> tuple[PrefillChunk, list[bytes]]:
    """A request with its KV in place, and the keys of its blocks."""
    keys = prompt_keys(BLOCKS * GEOMETRY.block_tokens, name)
    there = engine.de_buffer if decode_agent == "de" else engine.other_de_buffer
    slots = tuple(range(de_slot, de_slot + BLOCKS))
    fill(engine.buffer, own_slot, keys[0])
    fill(there, slots[1], keys[1])
    transfer = PrefillTransfer(
        request_id=name,
        prompt_tokens=BLOCKS * GEOMETRY.block_tokens,
        hit_blocks=2,
        hit_key_tail=b"",
        hits=(
            HitRun(Role.PREFILL, BlockRun(0, 1), (own_slot,)),
            HitRun(Role.DECODE, BlockRun(1, 1), (slots[1],)),
        ),
        decode_engine=decode_agent,
        decode_epoch="e",
        de_slots=slots,
    )
    hbm_blocks = tuple(range(hbm_block, hbm_block + BLOCKS))
    return PrefillChunk(transfer, BlockRun(2, 1), hbm_blocks, (decode_agent,)), keys


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 4),
    st.booleans(),
    st.integers(0, GEOMETRY.layers - 1),
    st.integers(0, GEOMETRY.layers - 1),
    st.integers(0, 2**32),
)
def test_an_agent_that_stalls_fails_its_own_request_and_its_late_bytes_reach_no_other(
    layer_buffers: int, own_copier: bool, stalls_at: int, wakes_at: int, seed: int
) -> None:
    overlap = layer_buffers > 0
    layers = LayerSettings(buffers=layer_buffers or GEOMETRY.layers, overlap=overlap)
    engine = Engine(seed, layers.buffers, own_copier)
    mine = prompt_of(engine, "mine", "de", own_slot=0, de_slot=0, hbm_block=0)
    theirs = prompt_of(engine, "theirs", STALLED, own_slot=1, de_slot=0, hbm_block=BLOCKS)
    stalled = engine.transport.stalled

    def stall(layer: int) -> None:
        if layer == stalls_at:
            stalled.add(STALLED)

    def wake(layer: int) -> None:
        if layer == wakes_at:
            stalled.clear()

    stream = engine.forward([mine, theirs], layers, stall)
    assert set(stream.failures) == {"theirs"}
    late = stream.late
    assert {chunk.request_id for chunk in late} <= {"theirs"}

    # A later pass has the HBM of "mine"; the late bytes of "theirs" come in the middle of it.
    following = prompt_of(engine, "following", "de", own_slot=2, de_slot=BLOCKS, hbm_block=0)
    assert engine.forward([following], layers, wake).failures == {}
    engine.drain()
    assert not any(chunk.moves for chunk in late)
    assert STALLED not in engine.stalled
    assert engine.wrong == []
    for slot, key in enumerate((*mine[1], *following[1])):
        assert engine.de_buffer.view(slot).tobytes() == full_block(key), slot
    again = prompt_of(engine, "again", STALLED, own_slot=3, de_slot=0, hbm_block=BLOCKS)
    assert engine.forward([again], layers).failures == {}
    for slot, key in enumerate(again[1]):
        assert engine.other_de_buffer.view(slot).tobytes() == full_block(key), slot


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.integers(0, 2**32))
def test_a_prompt_is_copied_after_the_last_use_of_its_blocks_and_read_when_complete(
    own_copier: bool, seed: int
) -> None:
    engine = Engine(seed, GEOMETRY.layers, own_copier)
    keys = prompt_keys(3 * GEOMETRY.block_tokens)
    for slot, key in enumerate(keys):
        fill(engine.buffer, slot, key)
    blocks = [6, 1, 4]
    for layer in range(GEOMETRY.layers):
        for block in blocks:
            engine.kernel_writes(layer, block, GARBAGE)
    ended: list[str | None] = []
    tokens = len(keys) * GEOMETRY.block_tokens
    prompt = PromptLayout(GEOMETRY, tokens, de_slots=tuple(range(len(keys))))
    engine.copier().into_hbm("r", decode_steps(prompt), blocks, ended.append)
    copier = engine.own_copier
    assert copier is None or copier.queued == 0  # the pump queues thousands of pieces
    engine.world.until(lambda: bool(ended))
    assert copier is None or copier.queued == GEOMETRY.layers
    for layer in range(GEOMETRY.layers):
        for block, key in zip(blocks, keys, strict=True):
            engine.kernel_reads(layer, block, kv_bytes(key, layer))
    engine.drain()
    assert ended == [None]
    assert engine.wrong == []


def test_a_copy_that_cannot_be_queued_fails_its_request_and_its_blocks_stay_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A defect on the pump's thread must not leave the request waiting."""
    engine = Engine(seed=0, regions=GEOMETRY.layers, own_copier=True)
    assert engine.own_copier is not None
    queue, calls = engine.own_copier.copy, iter((1, 2, 0))

    def third_fails(*copy: Any) -> Any:
        if next(calls, 1) == 0:
            raise ValueError("no such stream")
        return queue(*copy)

    monkeypatch.setattr(engine.own_copier, "copy", third_fails)
    held = HeldBlocks()
    copier = WorldHbmCopier(engine.movers(Role.DECODE), held)
    copier.world = engine.world
    ended: list[str | None] = []
    prompt = PromptLayout(GEOMETRY, 3 * GEOMETRY.block_tokens, de_slots=(0, 1, 2))
    copier.into_hbm("r", decode_steps(prompt), [6, 1, 4], ended.append)
    engine.world.until(lambda: bool(ended))
    assert ended == ["a copy between DRAM and HBM cannot be posted: no such stream"]
    assert held.now == {6, 1, 4}


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.integers(1, 3), st.integers(0, 2**32))
def test_generated_blocks_are_copied_out_as_computed_before_the_next_step_overwrites_them(
    own_copier: bool, count: int, seed: int
) -> None:
    engine = Engine(seed, GEOMETRY.layers, own_copier)
    keys, blocks = prompt_keys(count * GEOMETRY.block_tokens), (5, 0, 3)[:count]
    for layer in range(GEOMETRY.layers):
        for block, key in zip(blocks, keys, strict=True):
            engine.kernel_writes(layer, block, kv_bytes(key, layer))
    ended: list[str | None] = []
    leaving = [
        BlockOut(generated_steps(GEOMETRY, slot)[:-1], block, ended.append)
        for slot, block in enumerate(blocks)
    ]
    assert engine.copier().out_of_hbm(leaving) == [True] * count
    assert own_copier or ended == [None] * count  # the host has waited for all of them
    # However many blocks became full, each part of a layer is one list of pieces.
    parts = sum(len(layer) for layer in engine.layout.layers)
    assert engine.transport.posts == (0 if own_copier else parts)
    for layer in range(GEOMETRY.layers):
        for block in blocks:
            engine.kernel_writes(layer, block, GARBAGE)
    engine.world.drift(50)
    engine.world.until(lambda: len(ended) == count)
    assert ended == [None] * count
    for slot, key in enumerate(keys):
        assert engine.staging.view(slot).tobytes() == full_block(key)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_step_waits_for_its_own_copies_and_little_of_a_loaded_prompt(seed: int) -> None:
    engine = Engine(seed, GEOMETRY.layers, own_copier=False)
    # As on a CPU or an idle GPU: all computation is over at once.
    engine.after, engine.device = EventWaiter(HostDevice(), "idle"), HostDevice()
    copier = engine.copier()
    layer_bytes = 3 * SIZE
    copier.paced = PacedPosts(engine.pump, OS_THREADS, DEADLINE_S, 2 * layer_bytes)
    loading: list[str | None] = []
    prompt = PromptLayout(GEOMETRY, 3 * GEOMETRY.block_tokens, de_slots=(0, 1, 2))
    for name in ("a", "b"):
        copier.into_hbm(name, decode_steps(prompt), [6, 1, 4], loading.append)
    assert engine.transport.moving_bytes == 0  # the step does not wait
    engine.world.drift(50)
    left: list[str | None] = []
    block_out = BlockOut(generated_steps(GEOMETRY, 0)[:-1], 5, left.append)
    before_it_bytes = engine.transport.moving_bytes
    copier.out_of_hbm([block_out])
    assert before_it_bytes <= 2 * layer_bytes
    engine.world.until(lambda: len(loading) == 2)
    assert loading == [None, None]
    assert left == [None]


#: Layers 1, 2 and 4 have a sliding window and separate block ids.
GROUP_OF_LAYER = (0, 1, 1, 0, 1)


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.integers(0, 3), st.integers(0, 4), st.booleans(), st.integers(0, 2**32))
def test_layers_with_windows_get_only_the_blocks_in_their_windows(
    own_copier: bool, behind: int, found: int, last_is_computed: bool, seed: int
) -> None:
    """As at a hybrid decode engine: the last blocks of a group, in ids of that group only.

    What it found in HBM has no ids, in no group.
    """
    engine = Engine(seed, GEOMETRY.layers, own_copier)
    engine.layout = msgspec.structs.replace(engine.layout, group_of_layer=GROUP_OF_LAYER)
    keys = prompt_keys(4 * GEOMETRY.block_tokens)
    for slot, key in enumerate(keys):
        fill(engine.buffer, slot, key)
    full, window = (6, 1, 4, 0), (7, 2, 3, 5)
    seen = (NO_BLOCK,) * behind + window[behind:]
    blocks: list[tuple[int, int] | int] = list(zip(full, seen, strict=True))
    blocks[:found] = [NO_BLOCK] * found
    there = blocks[:3] if last_is_computed else blocks
    for layer in range(GEOMETRY.layers):
        for block in range(HBM_BLOCKS):
            engine.kernel_writes(layer, block, GARBAGE)
    ended: list[str | None] = []
    prompt = PromptLayout(GEOMETRY, 4 * GEOMETRY.block_tokens, de_slots=(0, 1, 2, 3))
    engine.copier().into_hbm("r", decode_steps(prompt), there, ended.append)
    engine.world.until(lambda: bool(ended))
    for layer, group in enumerate(GROUP_OF_LAYER):
        ids = [block if isinstance(block, int) else block[group] for block in there]
        copied = {block: keys[row] for row, block in enumerate(ids) if block != NO_BLOCK}
        for block in range(HBM_BLOCKS):
            there_now = block in copied
            expected = kv_bytes(copied[block], layer) if there_now else GARBAGE.tobytes()
            engine.kernel_reads(layer, block, expected)
    engine.drain()
    assert ended == [None]
    assert engine.wrong == []


@settings(max_examples=20, deadline=None)
@given(st.booleans(), st.integers(0, 2**32))
def test_a_block_of_several_groups_leaves_hbm_as_one_full_block(
    own_copier: bool, seed: int
) -> None:
    engine = Engine(seed, GEOMETRY.layers, own_copier)
    engine.layout = msgspec.structs.replace(engine.layout, group_of_layer=GROUP_OF_LAYER)
    (key,) = prompt_keys(GEOMETRY.block_tokens)
    ids = (5, 2)
    for layer, group in enumerate(GROUP_OF_LAYER):
        engine.kernel_writes(layer, ids[1 - group], GARBAGE)
        engine.kernel_writes(layer, ids[group], kv_bytes(key, layer))
    ended: list[str | None] = []
    *copies, _ = generated_steps(GEOMETRY, slot=0)
    engine.copier().out_of_hbm([BlockOut(copies, ids, ended.append)])
    engine.world.until(lambda: bool(ended))
    assert ended == [None]
    assert engine.staging.view(0).tobytes() == full_block(key)
