"""Plans of prompts that are moved to another decode engine, and what that adds to links."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import ClusterShape, Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.engine.counters import BYTES_OF, Counter
from dualpath.plan.bounds import (
    de_pair_bytes_per_s,
    link_bytes,
    pe_pair_bytes_per_s,
)
from dualpath.plan.movements import MOVE_PROMPT, Link, Place
from dualpath.plan.order import Executed, Present, begun_too_early, waits_for
from dualpath.plan.steps import PromptLayout, move_plan, read_steps, whole_plan

GEOMETRY = BlockGeometry.uniform(layers=3, block_tokens=4, layer_block_bytes=8)


@given(st.integers(1, 40), st.data())
def test_every_block_is_at_the_other_engine_before_it_is_copied_into_hbm(
    tokens: int, data: st.DataObject
) -> None:
    layout = PromptLayout(GEOMETRY, tokens)
    cached = data.draw(st.integers(0, tokens // GEOMETRY.block_tokens))
    plan = list(move_plan(layout, cached))
    moved = [step for step in plan if step.movement is MOVE_PROMPT]
    assert [step.blocks for step in moved] == [
        BlockRun(block, 1) for block in range(cached, layout.prompt_blocks)
    ]
    arrived = sorted(
        (block, step.layer)
        for step in plan
        if step.destination is Place.DE_HBM
        for block in range(step.blocks.first, step.blocks.end)
    )
    assert arrived == [(b, n) for b in range(layout.prompt_blocks) for n in range(3)]
    executed = [Executed(step, 2 * time, 2 * time + 1) for time, step in enumerate(plan)]
    present = [
        Present(Place.THIRD_BUFFER, BlockRun(0, layout.prompt_blocks), None, 0),
        Present(Place.DE_BUFFER, BlockRun(0, cached), None, 0),
    ]
    assert begun_too_early(executed, present, GEOMETRY) == []
    early = [executed[-1], *executed[:-1]] if moved else []
    if early:
        swapped = [Executed(done.step, 2 * i, 2 * i + 1) for i, done in enumerate(early)]
        assert begun_too_early(swapped, present, GEOMETRY)
        assert waits_for(plan[-1], plan) == ("move",)


def test_a_move_is_of_both_decode_engines_and_has_a_counter_of_its_own() -> None:
    assert MOVE_PROMPT.engine is Role.DECODE
    assert MOVE_PROMPT.network == "cnic"
    assert BYTES_OF[MOVE_PROMPT.label] == (Counter.DE_TO_DE_BYTES,)
    layout = PromptLayout(GEOMETRY, 8 * GEOMETRY.block_tokens)
    total = link_bytes(step for step in move_plan(layout) if step.movement is MOVE_PROMPT)
    size_bytes = 8 * GEOMETRY.full_block_bytes
    assert total == {
        Link.DE_CNIC_READ: size_bytes,
        Link.DE_CNIC_WRITE: size_bytes,
        Link.DE_DRAM: 2 * size_bytes,
    }


@pytest.mark.parametrize(("prefill", "decode"), [(2, 4), (4, 2), (1, 1)])
def test_moves_of_all_prompts_add_what_the_architecture_says_to_the_bounds(
    prefill: int, decode: int
) -> None:
    """With all storage NICs saturated; hits alone, as in the paper's equations."""
    shape = ClusterShape(prefill, decode, 8, 50e9, 1.0, 500e9)
    added: dict[Link, float] = {}
    for side, rate in (
        (Role.PREFILL, pe_pair_bytes_per_s(shape)),
        (Role.DECODE, de_pair_bytes_per_s(shape)),
    ):
        hits = HitRun(side, BlockRun(0, 100))
        layout = PromptLayout(GEOMETRY, 100 * GEOMETRY.block_tokens, (hits,))
        read_bytes = sum(step.bytes for step in read_steps(layout))
        moves = [step for step in move_plan(layout) if step.movement is MOVE_PROMPT]
        pairs = shape.prefill_nodes * shape.gpus_per_node
        for link, carried in link_bytes(moves).items():
            own = pairs * shape.gpus_per_node if link is Link.DE_DRAM else pairs
            added[link] = added.get(link, 0.0) + rate * carried / read_bytes * own
        assert not any(step.movement is MOVE_PROMPT for step in whole_plan(layout))
    s, g, b = shape.snic_ratio, shape.gpus_per_node, shape.cnic_bytes_per_s
    ratio = shape.prefill_nodes / shape.decode_nodes
    assert added[Link.DE_CNIC_READ] == pytest.approx((ratio + 1) * b * s / g)
    assert added[Link.DE_CNIC_WRITE] == pytest.approx((ratio + 1) * b * s / g)
    assert added[Link.DE_DRAM] == pytest.approx(2 * (ratio + 1) * b * s)
