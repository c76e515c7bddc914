"""What the simulator charges of layers with windows is what the steps of a plan sum to."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.movements import LOAD_FROM_DE_BUFFER, LOAD_FROM_PE_BUFFER, RELOAD_CHUNK
from dualpath.plan.steps import (
    PromptLayout,
    decode_steps,
    load_steps,
    run_reads,
    send_steps,
)
from dualpath_sim.simulator import rules

BLOCK_TOKENS = 16


class Prompt(NamedTuple):
    """A layout, and the same in the numbers of ``sim.rules``: what the sides were found to keep."""

    layout: PromptLayout
    found: dict[Role, int]
    pe_first: int
    pe_blocks: int

    @property
    def kinds(self) -> list[list[float]]:
        """Layers of equal windows together."""
        geometry = self.layout.geometry
        by_window = {0: 0.0}
        windows = geometry.layer_windows or (0,) * geometry.layers
        for layer, window in enumerate(windows):
            by_window[window] = by_window.get(window, 0.0) + geometry.bytes_of(layer)
        return [[float(window), size] for window, size in sorted(by_window.items())]


@st.composite
def prompts(draw: Any) -> Prompt:
    """Hits at the DE, then at the PE, then at the DE again; heads of the first two are cached."""
    sizes, windows = st.integers(1, 9), st.sampled_from([0, 1, 16, 17, 40, 100])
    layers = draw(st.lists(st.tuples(sizes, windows), min_size=1, max_size=4))
    layer_windows = tuple(window for _, window in layers)
    geometry = BlockGeometry(
        BLOCK_TOKENS,
        tuple((size,) for size, _ in layers),
        layer_windows if any(layer_windows) else (),
    )
    head, at_prefill, tail = (draw(st.integers(0, 6)) for _ in range(3))
    found = {
        Role.DECODE: draw(st.integers(0, head)),
        Role.PREFILL: draw(st.integers(0, at_prefill)),
    }
    hit_blocks = head + at_prefill + tail
    whole_from, runs, first = geometry.whole_from(hit_blocks), [], 0
    for side, count, cached in (
        (Role.DECODE, found[Role.DECODE], True),
        (Role.DECODE, head - found[Role.DECODE], False),
        (Role.PREFILL, found[Role.PREFILL], True),
        (Role.PREFILL, at_prefill - found[Role.PREFILL], False),
        (Role.DECODE, tail, False),
    ):
        if count:
            run = HitRun(side, BlockRun(first, count), cached=cached)
            runs.append(run.whole_behind(whole_from))
        first += count
    prompt_tokens = hit_blocks * BLOCK_TOKENS + draw(st.integers(1, 100))
    layout = PromptLayout(geometry=geometry, prompt_tokens=prompt_tokens, hits=tuple(runs))
    return Prompt(layout, found, head, at_prefill)


@given(prompts())
def test_each_side_reads_its_runs(prompt):
    layout = prompt.layout
    for side in Role:
        planned = sum(
            step.bytes
            for run in layout.hits
            if run.side is side
            for step in run_reads(layout.geometry, run)
        )
        read = rules.read_bytes(
            prompt.kinds,
            side is Role.DECODE,
            prompt.found[side],
            prompt.pe_first,
            prompt.pe_blocks,
            layout.hit_blocks,
            BLOCK_TOKENS,
        )
        assert read == planned


@given(prompts(), st.booleans(), st.data())
def test_every_chunk_loads_and_sends_the_bytes_of_its_steps(prompt, resident, data):
    layout, first = prompt.layout, prompt.layout.hit_blocks
    place = (prompt.pe_first, prompt.pe_blocks, layout.hit_blocks)
    while first < layout.prompt_blocks:
        blocks = data.draw(st.integers(1, layout.prompt_blocks - first))
        chunk, sent = BlockRun(first, blocks), 0
        loaded: Counter[str] = Counter()
        for layer in range(layout.geometry.layers):
            for step in load_steps(layout, layer, chunk, resident=resident):
                loaded[step.movement.label] += step.bytes
            sent += sum(step.bytes for step in send_steps(layout, layer, chunk))
        assert rules.load_bytes(prompt.kinds, first, *place, BLOCK_TOKENS, resident) == tuple(
            loaded[movement.label]
            for movement in (LOAD_FROM_PE_BUFFER, LOAD_FROM_DE_BUFFER, RELOAD_CHUNK)
        )
        assert sent == rules.send_bytes(
            prompt.kinds, blocks, first, *place, layout.prompt_tokens, BLOCK_TOKENS
        )
        first += blocks


@given(prompts())
def test_a_decode_engine_fills_its_memory_by_its_steps(prompt):
    layout = prompt.layout
    planned = sum(step.bytes for step in decode_steps(layout))
    assert rules.fill_bytes(prompt.kinds, layout.prompt_tokens, BLOCK_TOKENS) == planned


@given(prompts())
def test_no_buffer_caches_a_block_that_lacks_layers(prompt):
    """Blocks that may be cached are a run from the side's first block on; all without windows."""
    layout, found = prompt.layout, prompt.found
    windows = bool(layout.geometry.layer_windows)
    whole = {
        side: {
            block
            for run in layout.hits
            if run.side is side
            for block in range(run.whole_from, run.blocks.end)
        }
        for side in Role
    }
    computed = layout.prompt_tokens // BLOCK_TOKENS
    whole[Role.DECODE] |= set(range(layout.hit_blocks if windows else 0, computed))
    hit_tokens = layout.hit_blocks * BLOCK_TOKENS
    at_prefill = rules.whole_at_prefill(
        prompt.kinds,
        found[Role.PREFILL],
        prompt.pe_first,
        prompt.pe_blocks,
        hit_tokens,
        BLOCK_TOKENS,
    )
    at_decode = rules.whole_at_decode(
        prompt.kinds,
        found[Role.DECODE],
        prompt.pe_first,
        prompt.pe_blocks,
        hit_tokens,
        layout.prompt_tokens,
        BLOCK_TOKENS,
    )
    assert at_prefill == _in_a_row(whole[Role.PREFILL], prompt.pe_first)
    assert at_decode == _in_a_row(whole[Role.DECODE], 0)


def _in_a_row(blocks: set[int], first: int) -> int:
    end = first
    while end in blocks:
        end += 1
    return end - first


@given(prompts())
def test_a_table_of_kinds_may_be_an_array(prompt):
    """The compiled core's, that is."""
    tokens, kinds = prompt.layout.prompt_tokens, prompt.kinds
    as_array = rules.fill_bytes(np.array(kinds), tokens, BLOCK_TOKENS)
    assert as_array == rules.fill_bytes(kinds, tokens, BLOCK_TOKENS)
