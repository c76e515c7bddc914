"""Every byte of every path is right: PE path, DE path, split, any number of layer buffers."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import GEOMETRY, ToyCluster, full_block, is_seen, kv_bytes, prompt_keys
from tests.stored_runs import read_run

from dualpath.core.blocks import BlockGeometry
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun
from dualpath.plan.counts import new_full_blocks


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, int, tuple[int, ...]]:
    """Prompt tokens, hit blocks on the PE, on the DE, and chunk ends in blocks."""
    tokens = draw(st.integers(1, 60))
    most = GEOMETRY.max_hit_blocks(tokens)
    pe_hits = draw(st.integers(0, most))
    de_hits = draw(st.integers(0, most - pe_hits))
    blocks = GEOMETRY.blocks_for(tokens)
    inner = range(pe_hits + de_hits + 1, blocks)
    cuts = draw(st.sets(st.sampled_from(inner), max_size=3)) if inner else set()
    return tokens, pe_hits, de_hits, (*sorted(cuts), blocks)


def run_prompt(cluster: ToyCluster, prompt: tuple[int, int, int, tuple[int, ...]]) -> None:
    tokens, pe_hits, de_hits, chunk_ends = prompt
    geometry = cluster.geometry
    keys = prompt_keys(tokens)
    cluster.store(keys[: pe_hits + de_hits])
    prefill_transfer = cluster.load("r", keys, tokens, pe_hits, de_hits)
    hbm = list(range(40, 40 + len(keys)))[::-1]
    first = pe_hits + de_hits
    for end in chunk_ends:
        failures = cluster.forward([(prefill_transfer, keys, BlockRun(first, end - first), hbm)])
        assert failures == {}
        first = end
    for block, slot in enumerate(prefill_transfer.de_slots):
        found = cluster.de.slot_bytes(slot)
        right = full_block(keys[block], geometry)
        for layer in range(geometry.layers):
            place = geometry.slice_of(layer)
            # New blocks are stored, and so have to be there in all layers.
            if block >= pe_hits + de_hits or is_seen(geometry, layer, block, tokens - 1):
                assert found[place] == right[place], (block, layer)
    assert cluster.hand_to_decode(prefill_transfer, keys, hbm) is None
    for layer in range(geometry.layers):
        size = geometry.bytes_of(layer)
        for block, key in enumerate(keys):
            found = cluster.de.hbm[layer][hbm[block]][:size].tobytes()
            if is_seen(geometry, layer, block, tokens - 1):
                assert found == kv_bytes(key, layer, size)
    cluster.release("r")
    assert cluster.de.manager.persister.drain(20)
    full = new_full_blocks(0, tokens, geometry.block_tokens)
    read_back = [bytearray(geometry.full_block_bytes) for _ in range(full)]
    outcome = read_run(cluster.storage, keys[:full], [memoryview(b) for b in read_back])
    assert outcome.good_blocks == full
    assert [bytes(b) for b in read_back] == [full_block(key, geometry) for key in keys[:full]]
    for engine in (cluster.pe, cluster.de):
        assert engine.report().load.free_buffer_tokens == engine.manager.buffer_tokens


@settings(max_examples=60, deadline=None)
@given(prompts(), st.integers(1, GEOMETRY.layers))
def test_all_bytes_arrive_through_every_path(
    prompt: tuple[int, int, int, tuple[int, ...]], layer_buffers: int
) -> None:
    cluster = ToyCluster(layer_buffers=layer_buffers)
    try:
        run_prompt(cluster, prompt)
    finally:
        cluster.close()


@st.composite
def geometries(draw: st.DrawFn) -> BlockGeometry:
    """Some layers, unequal, of one to three parts, some of them with windows."""
    sizes = st.lists(st.sampled_from([24, 64, 200, 256]), min_size=1, max_size=3)
    parts = draw(st.lists(sizes, min_size=1, max_size=5))
    windows = draw(st.tuples(*[st.sampled_from([0, 1, 4, 5, 9, 30, 1000]) for _ in parts]))
    return BlockGeometry(
        GEOMETRY.block_tokens, tuple(map(tuple, parts)), windows if any(windows) else ()
    )


@settings(max_examples=40, deadline=None)
@given(prompts(), geometries(), st.integers(1, 5))
def test_all_bytes_of_unequal_layers_and_their_parts_arrive(
    prompt: tuple[int, int, int, tuple[int, ...]], geometry: BlockGeometry, layer_buffers: int
) -> None:
    buffers = min(layer_buffers, geometry.layers)
    cluster = ToyCluster(layer_buffers=buffers, geometry=geometry)
    try:
        run_prompt(cluster, prompt)
        _, pe_hits, de_hits, _ = prompt
        engines = (cluster.pe, cluster.de)
        read = sum(engine.report().counters["storage_read_bytes"] for engine in engines)
    finally:
        cluster.close()
    hits = pe_hits + de_hits
    assert read == sum(
        geometry.bytes_of(layer)
        for block in range(hits)
        for layer in range(geometry.layers)
        if not geometry.is_window_layer(layer)
        or any(
            is_seen(geometry, other, block, hits * geometry.block_tokens)
            for other in range(geometry.layers)
            if geometry.is_window_layer(other)
        )
    )


@settings(max_examples=15, deadline=None)
@given(prompts())
def test_all_bytes_arrive_in_mode_basic(prompt: tuple[int, int, int, tuple[int, ...]]) -> None:
    cluster = ToyCluster(mode=Mode.BASIC)
    try:
        run_prompt(cluster, prompt)
    finally:
        cluster.close()
