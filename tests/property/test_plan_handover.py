"""Plans of prompts that a DE receives in its buffer or in its HBM, for any hits and chunks."""

import math

import hypothesis.strategies as st
from hypothesis import given
from tests.property.test_datapath_bounds import shapes

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import ClusterShape, Role
from dualpath.core.modes import Handover
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.bounds import (
    closed_form_bytes_per_s,
    de_pair_bytes_per_s,
    link_bytes,
    pe_pair_bytes_per_s,
)
from dualpath.plan.movements import Link, Place, Replicas
from dualpath.plan.order import Executed, Present, begun_too_early
from dualpath.plan.steps import PromptLayout, Step, whole_plan

GEOMETRY = BlockGeometry.uniform(layers=3, block_tokens=4, layer_block_bytes=8)

#: Blocks that are cached at the DE, cached at the PE, read at the PE, and read at the DE, in order.
hits = st.tuples(*[st.integers(0, 3)] * 4)
chunk_sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3)


def layout_of(hit_blocks: tuple[int, ...], chunks: list[int], handover: Handover) -> PromptLayout:
    """The prompt fills its last block but for one token."""
    runs, first = [], 0
    places = ((Role.DECODE, True), (Role.PREFILL, True), (Role.PREFILL, False))
    for count, (side, cached) in zip(hit_blocks, (*places, (Role.DECODE, False)), strict=True):
        if count:
            runs.append(HitRun(side, BlockRun(first, count), cached=cached))
        first += count
    tokens = (first + sum(chunks)) * GEOMETRY.block_tokens - 1
    return PromptLayout(GEOMETRY, tokens, tuple(runs), handover=handover)


def one_after_the_other(
    plan: list[Step], layout: PromptLayout
) -> tuple[list[Executed], list[Present]]:
    """Execute a plan step by step; return the steps, and the KV that no step has moved.

    A block is computed at the PE when it is sent, as each layer is.
    """
    executed = [Executed(step, 2 * time, 2 * time + 1) for time, step in enumerate(plan)]
    present = [Present(Place.STORAGE, BlockRun(0, layout.hit_blocks), None, 0)]
    for run in layout.hits:
        if run.cached:
            place = Place.DE_BUFFER if run.side is Role.DECODE else Place.PE_BUFFER
            present.append(Present(place, run.blocks, None, 0))
    present += [
        Present(Place.PE_HBM, one.step.blocks, one.step.layer, one.start_ns)
        for one in executed
        if one.step.label == "miss"
    ]
    return executed, present


def arrivals(plan: list[Step], place: Place) -> list[tuple[int, int]]:
    """The blocks and layers that arrive at a place, as often as they do."""
    return sorted(
        (block, layer)
        for step in plan
        if step.destination is place
        for block in range(step.blocks.first, step.blocks.end)
        for layer in (range(GEOMETRY.layers) if step.layer is None else (step.layer,))
    )


def everywhere(blocks: range) -> list[tuple[int, int]]:
    return [(block, layer) for block in blocks for layer in range(GEOMETRY.layers)]


@given(hits, chunk_sizes, st.booleans(), st.booleans())
def test_every_layer_of_a_prompt_enters_the_hbm_of_its_decode_engine_once(
    hit_blocks: tuple[int, ...], chunks: list[int], resident: bool, caches: bool
) -> None:
    for handover in (Handover.BUFFER, Handover.HBM):
        layout = layout_of(hit_blocks, chunks, handover)
        plan = list(whole_plan(layout, chunks, resident=resident, caches=caches))
        assert arrivals(plan, Place.DE_HBM) == everywhere(range(layout.prompt_blocks))
        executed, present = one_after_the_other(plan, layout)
        assert begun_too_early(executed, present, GEOMETRY) == []


@given(hits, chunk_sizes, st.booleans())
def test_in_hbm_the_buffer_holds_only_what_the_decode_engine_reads(
    hit_blocks: tuple[int, ...], chunks: list[int], caches: bool
) -> None:
    layout = layout_of(hit_blocks, chunks, Handover.HBM)
    plan = list(whole_plan(layout, chunks, caches=caches))
    read = range(layout.hit_blocks - hit_blocks[3], layout.hit_blocks)
    assert arrivals(plan, Place.DE_BUFFER) == everywhere(read)


@given(hits, chunk_sizes, st.booleans())
def test_new_blocks_leave_hbm_through_staging_and_sent_hits_do_for_the_cache(
    hit_blocks: tuple[int, ...], chunks: list[int], caches: bool
) -> None:
    """The last block is not full: it is not written.  What is in the buffer is cached there."""
    layout = layout_of(hit_blocks, chunks, Handover.HBM)
    plan = list(whole_plan(layout, chunks, caches=caches))
    new = range(layout.hit_blocks, layout.prompt_blocks - 1)
    assert arrivals(plan, Place.STORAGE) == everywhere(new)
    sent = range(hit_blocks[0], hit_blocks[0] + hit_blocks[1] + hit_blocks[2])
    staged = [*(sent if caches else ()), *new]
    assert arrivals(plan, Place.DE_STAGING) == [
        (block, layer) for block in staged for layer in range(GEOMETRY.layers)
    ]


@given(hits, chunk_sizes, st.booleans())
def test_hbm_loads_no_link_more_than_the_buffer_does(
    hit_blocks: tuple[int, ...], chunks: list[int], caches: bool
) -> None:
    """The copy of a block into staging takes the place of its copy into HBM."""
    by_buffer, by_hbm = (
        link_bytes(whole_plan(layout_of(hit_blocks, chunks, handover), chunks, caches=caches))
        for handover in (Handover.BUFFER, Handover.HBM)
    )
    assert all(by_hbm[link] <= by_buffer[link] for link in Link)
    assert by_hbm[Link.DE_DRAM] < by_buffer[Link.DE_DRAM]


@given(shapes)
def test_a_saturated_cluster_in_hbm_needs_less_of_its_decode_engines_than_eq_4_6_and_8(
    shape: ClusterShape,
) -> None:
    """Hit KV only, as in the paper; r and q GPUs of a PE and of a DE hold the same KV.

    The PE path leaves the DE's buffer alone: P/D is gone from reads and from DRAM.  KV that goes to
    HBM is sent to each of q holders.
    """
    count = 50
    replicas = Replicas(shape.prefill_replicas, shape.decode_replicas)
    loads = dict.fromkeys(Link, 0.0)
    for side, rate in (
        (Role.PREFILL, pe_pair_bytes_per_s(shape)),
        (Role.DECODE, de_pair_bytes_per_s(shape)),
    ):
        runs = (HitRun(side, BlockRun(0, count)),)
        tokens = GEOMETRY.block_tokens
        whole = PromptLayout(GEOMETRY, tokens * (count + 1), runs, handover=Handover.HBM)
        alone = PromptLayout(GEOMETRY, tokens, handover=Handover.HBM)
        carried = link_bytes(whole_plan(whole), replicas)
        carried.subtract(link_bytes(whole_plan(alone), replicas))
        for link in Link:
            loads[link] += rate * carried[link] / (count * GEOMETRY.full_block_bytes)
    p, d, g = shape.prefill_nodes, shape.decode_nodes, shape.gpus_per_node
    per_gpu = shape.cnic_bytes_per_s * shape.snic_ratio / g
    r, q = shape.prefill_replicas, shape.decode_replicas
    expected = {
        Link.PE_CNIC_READ: (d * g, (q + r) * per_gpu),
        Link.PE_CNIC_WRITE: (d * g, r * (1 + d / p) * per_gpu),
        Link.DE_CNIC_READ: (p * g, (q + r) * per_gpu),
        Link.DE_CNIC_WRITE: (p * g, q * (p / d + 1) * per_gpu),
        Link.PE_DRAM: (d * g * g, (1 + r) * per_gpu * g),
        Link.DE_DRAM: (p * g * g, (1 + q + r) * per_gpu * g),
    }
    for link, (pairs, load) in expected.items():
        assert math.isclose(loads[link] * pairs, load, rel_tol=1e-9), link
    papers = closed_form_bytes_per_s(shape)
    for link in (Link.DE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM):
        assert expected[link][1] < papers[link]
