"""Engines of any number of ranks move every byte of whole blocks, each its own."""

import itertools
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.engine_harness import GEOMETRY, full_block, kv_bytes, prompt_keys
from tests.property.test_engine_paths import prompts
from tests.ranked_harness import Cut, RankedCluster
from tests.stored_runs import read_run

from dualpath.core.control import KvInHbm, PrefillDone
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun
from dualpath.plan.counts import new_full_blocks
from dualpath.transport.nixl import NixlTransport

Prompt = tuple[int, int, int, tuple[int, ...]]

#: Hits at both sides and two chunks, for ranks that are replicas, all or in pairs.
HITS: Prompt = (30, 2, 3, (7, 8))
LATENT, TWO_BY_TWO = Cut(2, heads=1), Cut(4, heads=2)

#: PE and DE of one model, with numbers of ranks that divide its heads or are multiples of them.
MODELS = st.sampled_from([1, 2, 4]).flatmap(
    lambda heads: st.tuples(
        st.builds(Cut, st.sampled_from([1, 2, 4]), st.just(heads)),
        st.builds(Cut, st.sampled_from([1, 2, 4]), st.just(heads)),
    )
)


def run_prompt(cluster: RankedCluster, prompt: Prompt) -> None:
    tokens, pe_hits, de_hits, chunk_ends = prompt
    keys = prompt_keys(tokens)
    cluster.store(keys[: pe_hits + de_hits])
    transfer = cluster.load("r", keys, tokens, pe_hits, de_hits)
    hbm = list(range(40, 40 + len(keys)))[::-1]
    first = pe_hits + de_hits
    for end in chunk_ends:
        failures = cluster.pass_of([(transfer, keys, BlockRun(first, end - first), hbm)])
        assert not any(failures), failures
        first = end
    assert cluster.pe.answer(PrefillDone, "r").failure is None
    for block, slot in enumerate(transfer.de_slots):
        assert cluster.de.slot_bytes(slot) == full_block(keys[block]), block
    assert not any(cluster.hand_over(transfer, keys, hbm))
    for rank in range(cluster.serving.cut.ranks):
        for layer in range(GEOMETRY.layers):
            for block, key in enumerate(keys):
                assert cluster.serving.holds(rank, layer, hbm[block], kv_bytes(key, layer))
    cluster.de.answer(KvInHbm, "r")
    generated = prompt_keys(2 * GEOMETRY.block_tokens, "generated")
    cluster.generate([(1, generated[0]), (2, generated[1])])
    cluster.release("r")
    full = new_full_blocks(0, tokens, GEOMETRY.block_tokens)
    check_stored(cluster, [*keys[:full], *generated])
    for engine in (cluster.pe, cluster.de):
        assert engine.report().load.free_buffer_tokens == engine.manager.buffer_tokens


def check_stored(cluster: RankedCluster, keys: list[bytes]) -> None:
    while cluster.serving.manager.staging.free < 4:
        assert cluster.de.manager.persister.drain(20)
    assert cluster.de.manager.persister.drain(20)
    for key in keys:
        block = bytearray(GEOMETRY.full_block_bytes)
        assert read_run(cluster.storage, [key], [memoryview(block)]).good_blocks == 1
        assert bytes(block) == full_block(key)


@settings(max_examples=40, deadline=None)
@given(MODELS, prompts(), st.integers(1, GEOMETRY.layers), st.booleans())
@example(cuts=(LATENT, LATENT), prompt=HITS, layer_buffers=2, share_loads=True)
@example(cuts=(TWO_BY_TWO, TWO_BY_TWO), prompt=HITS, layer_buffers=1, share_loads=True)
def test_all_bytes_arrive_at_every_rank(
    cuts: tuple[Cut, Cut], prompt: Prompt, layer_buffers: int, share_loads: bool
) -> None:
    cluster = RankedCluster(*cuts, layer_buffers=layer_buffers, share_loads=share_loads)
    try:
        run_prompt(cluster, prompt)
    finally:
        cluster.close()


@settings(max_examples=5, deadline=None)
@given(MODELS, prompts(), st.booleans())
@example(cuts=(LATENT, LATENT), prompt=HITS, share_loads=True)
def test_all_bytes_arrive_at_every_rank_in_mode_basic(
    cuts: tuple[Cut, Cut], prompt: Prompt, share_loads: bool
) -> None:
    cluster = RankedCluster(*cuts, mode=Mode.BASIC, share_loads=share_loads)
    try:
        run_prompt(cluster, prompt)
    finally:
        cluster.close()


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("pe", "de"),
    [(Cut(2), Cut(1)), (Cut(1), Cut(2)), (Cut(4), Cut(2)), (LATENT, LATENT)],
    ids=["PE of 2", "DE of 2", "PE of 4, DE of 2", "latent, 2 each"],
)
def test_all_bytes_arrive_over_nixl(pe: Cut, de: Cut) -> None:
    """Each rank has an agent of its own, and the engine's memory is shared between them."""
    names = itertools.count()

    def open_transport(agent: str) -> NixlTransport:
        return NixlTransport(f"{agent}-{os.getpid()}-{next(names)}", tls="tcp")

    cluster = RankedCluster(pe, de, open_transport=open_transport)
    try:
        run_prompt(cluster, HITS)
    finally:
        cluster.close()


@settings(max_examples=20, deadline=None)
@given(MODELS, prompts(), st.booleans())
@example(cuts=(LATENT, LATENT), prompt=HITS, share_loads=True)
@example(cuts=(TWO_BY_TWO, TWO_BY_TWO), prompt=HITS, share_loads=True)
def test_each_rank_moves_its_share_and_the_engine_counts_each_byte_once(
    cuts: tuple[Cut, Cut], prompt: Prompt, share_loads: bool
) -> None:
    """Per rank, sends are divided by the ranks, loads by the slices or, shared, by the ranks."""
    tokens, pe_hits, de_hits, _ = prompt
    cluster = RankedCluster(*cuts, share_loads=share_loads)
    try:
        keys = prompt_keys(tokens)
        cluster.store(keys[: pe_hits + de_hits])
        transfer = cluster.load("r", keys, tokens, pe_hits, de_hits)
        hits, blocks = pe_hits + de_hits, len(keys)
        work = [(transfer, keys, BlockRun(hits, blocks - hits), range(blocks))]
        assert not any(cluster.pass_of(work))
        pe, size = cluster.prefill, GEOMETRY.full_block_bytes
        counted = pe.report().counters
        copies = 1 if share_loads else pe.cut.replicas
        assert counted["h2d_bytes"] == pe_hits * size * copies
        assert counted["de_to_pe_bytes"] == de_hits * size * copies
        assert counted["pe_to_de_bytes"] == (blocks - de_hits) * size
        assert sum(sum(t.posted.values()) for t in pe.transports) == sum(
            counted[name] for name in ("h2d_bytes", "de_to_pe_bytes", "pe_to_de_bytes")
        )
        loads = hits * size / pe.cut.slices * copies / pe.cut.replicas
        # Runs of blocks divided among replicas begin with any replica: hits at either side, misses.
        uneven = (2 + (2 if share_loads else 0)) * size / pe.cut.slices
        for transport in pe.transports:
            even = loads + (blocks - de_hits) * size / pe.cut.ranks
            assert abs(sum(transport.posted.values()) - even) <= uneven
    finally:
        cluster.close()
