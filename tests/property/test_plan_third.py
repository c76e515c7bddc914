"""Plans of prompts of which third DEs cache or read blocks, for any hits, chunks and hand-over."""

import hypothesis.strategies as st
from hypothesis import given

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.modes import Handover
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.bounds import link_bytes
from dualpath.plan.movements import Link, Place
from dualpath.plan.order import Executed, Present, begun_too_early
from dualpath.plan.steps import PromptLayout, whole_plan

GEOMETRY = BlockGeometry.uniform(layers=3, block_tokens=4, layer_block_bytes=8)
#: Cached at the DE, at the PE and at a third DE, read at two third DEs, at the PE and at the DE.
PLACES = (
    (Role.DECODE, True, ""),
    (Role.PREFILL, True, ""),
    (Role.PREFILL, True, "d7"),
    (Role.PREFILL, False, "d7"),
    (Role.PREFILL, False, "d8"),
    (Role.PREFILL, False, ""),
    (Role.DECODE, False, ""),
)
hits = st.tuples(*[st.integers(0, 3)] * len(PLACES))
chunk_sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3)
handovers = st.sampled_from(Handover)


def layout_of(counts: tuple[int, ...], chunks: list[int], handover: Handover) -> PromptLayout:
    runs, first = [], 0
    for count, (side, cached, third) in zip(counts, PLACES, strict=True):
        if count:
            runs.append(HitRun(side, BlockRun(first, count), cached=cached, third=third))
        first += count
    tokens = (first + sum(chunks)) * GEOMETRY.block_tokens - 1
    return PromptLayout(GEOMETRY, tokens, tuple(runs), handover=handover)


@given(hits, chunk_sizes, handovers, st.booleans())
def test_every_layer_reaches_the_decode_engine_once_and_nothing_is_moved_before_it_is_there(
    counts: tuple[int, ...], chunks: list[int], handover: Handover, resident: bool
) -> None:
    layout = layout_of(counts, chunks, handover)
    plan = list(whole_plan(layout, chunks, resident=resident))
    arrived = [
        (block, step.layer)
        for step in plan
        if step.destination is Place.DE_HBM
        for block in range(step.blocks.first, step.blocks.end)
    ]
    assert sorted(arrived) == [(b, n) for b in range(layout.prompt_blocks) for n in range(3)]

    executed = [Executed(step, 2 * time, 2 * time + 1) for time, step in enumerate(plan)]
    present = [Present(Place.STORAGE, BlockRun(0, layout.hit_blocks), None, 0)]
    for run in layout.hits:
        if run.cached:
            own = Place.DE_BUFFER if run.side is Role.DECODE else Place.PE_BUFFER
            present.append(Present(Place.THIRD_BUFFER if run.third else own, run.blocks, None, 0))
    present += [
        Present(Place.PE_HBM, one.step.blocks, one.step.layer, one.start_ns)
        for one in executed
        if one.step.label == "miss"
    ]
    assert begun_too_early(executed, present, GEOMETRY) == []


@given(st.integers(1, 9), chunk_sizes, st.booleans())
def test_a_third_engine_takes_the_links_of_the_de_path_and_a_send_more(
    count: int, chunks: list[int], cached: bool
) -> None:
    """§4.2 with a third DE in place of the DE: its links are those of a DE, of which it is one."""
    tokens = (count + sum(chunks)) * GEOMETRY.block_tokens - 1
    by_third, by_decode = (
        link_bytes(whole_plan(PromptLayout(GEOMETRY, tokens, (run,)), chunks))
        for run in (
            HitRun(Role.PREFILL, BlockRun(0, count), cached=cached, third="d7"),
            HitRun(Role.DECODE, BlockRun(0, count), cached=cached),
        )
    )
    sent = {Link.PE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM}
    for link in Link:
        more = count * GEOMETRY.full_block_bytes if link in sent else 0
        assert by_third[link] == by_decode[link] + more, link
