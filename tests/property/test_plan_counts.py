"""The counts of blocks against a prompt written out token by token."""

import hypothesis.strategies as st
import numba
from hypothesis import given

from dualpath.core.blocks import first_seen_block, holding_blocks
from dualpath.plan import counts

KERNELS = [holding_blocks, first_seen_block] + [
    getattr(counts, name)
    for name in dir(counts)
    if getattr(getattr(counts, name), "__module__", "") == counts.__name__
]

block_sizes = st.integers(1, 70)
lengths = st.integers(0, 300)


def blocks_of(tokens: range, block_tokens: int) -> set[int]:
    return {token // block_tokens for token in tokens}


def full_blocks_of(tokens: int, block_tokens: int) -> set[int]:
    touched = [token // block_tokens for token in range(tokens)]
    return {block for block in touched if touched.count(block) == block_tokens}


@given(lengths, block_sizes)
def test_blocks_that_hold_tokens_are_those_with_a_token(tokens, block_tokens):
    held = blocks_of(range(tokens), block_tokens)
    assert holding_blocks(tokens, block_tokens) == len(held)


@given(lengths, lengths, block_sizes)
def test_new_full_blocks_are_those_full_now_and_not_before(before, added, block_tokens):
    full = full_blocks_of(before + added, block_tokens) - full_blocks_of(before, block_tokens)
    assert counts.new_full_blocks(before, before + added, block_tokens) == len(full)


@given(st.integers(0, 5), st.integers(1, 300), block_sizes)
def test_a_chunk_has_the_blocks_of_its_tokens(cached_blocks, computed, block_tokens):
    cached = cached_blocks * block_tokens
    held = blocks_of(range(cached, cached + computed), block_tokens)
    assert counts.chunk_blocks(cached, computed, block_tokens) == len(held)


@given(st.data(), st.booleans())
def test_before_every_chunk_all_kv_before_it_is_loaded_or_resident(data, resident):
    run, first = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    hits = run
    first += hits
    seen_from = data.draw(st.integers(0, first))
    loaded = counts.load_blocks(0, run, seen_from, first, hits, resident)
    reloaded = counts.reload_blocks(seen_from, first, hits, resident)
    brought = {block for block in range(hits if resident else first) if block >= seen_from}
    assert loaded + reloaded == (0 if resident and first > hits else len(brought))


@given(st.integers(0, 90), st.integers(0, 40), st.integers(1, 9))
def test_a_window_has_the_blocks_of_its_last_tokens(tokens, window, block_tokens):
    seen = {t // block_tokens for t in range(tokens + 1) if not window or tokens - t < window}
    assert first_seen_block(tokens, window, block_tokens) == min(seen)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 20))
def test_seen_blocks_of_a_run_begin_with_the_first_seen_one(first, run, seen_from):
    seen = [block for block in range(first, first + run) if block >= seen_from]
    assert counts.seen_blocks(first, run, seen_from) == len(seen)


@given(st.integers(0, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_hits_read_at_the_pe_are_sent_once(hits, chunks):
    first, sent = hits, 0
    for blocks in chunks:
        sent += counts.send_hit_blocks(0, hits, 0, first, hits)
        first += blocks
    assert sent == hits


def test_the_kernels_compile_as_they_stand():
    for kernel in KERNELS:
        numba.extending.register_jitable(kernel)

    @numba.njit
    def all_of_them(a: int, b: int, c: int, flag: bool) -> tuple[int, ...]:
        return (
            holding_blocks(a, b),
            counts.new_full_blocks(a, a + c, b),
            counts.kv_tokens(a, c),
            counts.chunk_blocks(a, c, b),
            first_seen_block(a, c, b),
            counts.seen_blocks(a, b, c),
            counts.load_blocks(a, b, 1, c, 2, flag),
            counts.reload_blocks(1, a, b, flag),
            counts.send_hit_blocks(a, b, 1, c, 2),
        )

    assert len(KERNELS) == 10
    for flag in (False, True):
        assert all_of_them(200, 64, 70, flag) == all_of_them.py_func(200, 64, 70, flag)
