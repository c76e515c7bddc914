"""Every prompt token is a hit or missed for one reason."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.router.hit_account import (
    FASTER,
    GONE,
    NEW,
    TAIL,
    HitPlace,
    SeenBlocks,
)

BLOCK_TOKENS = 4


def keys(*names: int) -> list[bytes]:
    return [name.to_bytes(32, "big") for name in names]


def account(
    seen: SeenBlocks, chain: Sequence[bytes], tail_tokens: int, stored: int, hit: int, **why: Any
):
    prompt_tokens = len(chain) * BLOCK_TOKENS + tail_tokens
    return seen.account(chain, prompt_tokens, BLOCK_TOKENS, stored, hit, **why)


def test_a_first_prompt_is_new_but_for_its_tail() -> None:
    first = account(SeenBlocks(), keys(1, 2), 3, stored=0, hit=0)
    assert first.missed == {NEW: 8, TAIL: 3}
    assert first.ideal_hit_tokens == first.hit_tokens == 0


def test_hits_have_the_dram_or_the_reads_of_an_engine_as_their_source() -> None:
    hits = (
        HitRun(Role.DECODE, BlockRun(0, 1), cached=True),
        HitRun(Role.PREFILL, BlockRun(1, 1), cached=True),
        HitRun(Role.DECODE, BlockRun(2, 2)),
        HitRun(Role.PREFILL, BlockRun(4, 1)),
        HitRun(Role.DECODE, BlockRun(5, 1)),
    )
    found = account(SeenBlocks(), keys(*range(7)), 1, stored=6, hit=6, hits=hits)
    assert found.sources == {
        HitPlace.DE_DRAM: 4,
        HitPlace.PE_DRAM: 4,
        HitPlace.DE_STORAGE: 12,
        HitPlace.PE_STORAGE: 4,
    }
    assert sum(found.sources.values()) == found.hit_tokens


def test_the_last_token_is_never_a_hit() -> None:
    assert account(SeenBlocks(), keys(1, 2), 0, stored=1, hit=1).missed == {TAIL: 4}


def test_a_block_that_was_computed_and_is_not_stored_counts_as_gone() -> None:
    seen = SeenBlocks()
    account(seen, keys(1, 2), 1, stored=0, hit=0)
    again = account(seen, keys(1, 2, 3), 1, stored=1, hit=1)
    assert again.missed == {GONE: 4, NEW: 4, TAIL: 1}
    assert (again.hit_tokens, again.ideal_hit_tokens) == (4, 8)


def test_reasons_of_the_look_up_and_of_the_read_are_separate() -> None:
    seen = SeenBlocks()
    account(seen, keys(1, 2, 3, 4), 1, stored=0, hit=0)
    found = account(
        seen, keys(1, 2, 3, 4), 1, stored=2, hit=1, short_reason="checksum", unstored_reason="late"
    )
    assert found.missed == {"checksum": 4, "late": 8, TAIL: 1}


def test_deliberately_recomputed_tokens_are_separate_from_failed_loads() -> None:
    short = {"short_reason": "deadline", "faster_blocks": 2}
    found = account(SeenBlocks(), keys(1, 2, 3, 4), 1, stored=4, hit=1, **short)
    assert found.missed == {"deadline": 4, FASTER: 8, TAIL: 1}


def test_blocks_found_in_storage_count_as_computed_before_whoever_did_it() -> None:
    assert account(SeenBlocks(), keys(1, 2), 1, stored=2, hit=0).ideal_hit_tokens == 8


def test_seen_blocks_are_removed_after_as_many_other_blocks_and_not_before() -> None:
    seen = SeenBlocks(limit=2)
    account(seen, keys(1), 1, stored=0, hit=0)
    account(seen, keys(2), 1, stored=0, hit=0)
    assert GONE in account(seen, keys(1), 1, stored=0, hit=0).missed
    for other in range(3, 7):
        account(seen, keys(other), 1, stored=0, hit=0)
    assert GONE not in account(seen, keys(1), 1, stored=0, hit=0).missed


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 6), st.integers(0, 6)),
        min_size=1,
    )
)
def test_every_token_has_one_explanation(prompts: list[tuple[int, int, int, int]]) -> None:
    seen = SeenBlocks()
    for blocks, tail_tokens, stored, hit in prompts:
        prompt_tokens = blocks * BLOCK_TOKENS + tail_tokens
        if prompt_tokens == 0:
            continue
        usable = (prompt_tokens - 1) // BLOCK_TOKENS
        stored = min(stored, usable)
        chain, hit = keys(*range(blocks)), min(hit, stored)
        account = seen.account(
            chain, prompt_tokens, BLOCK_TOKENS, stored, hit, short_reason="short"
        )
        assert account.hit_tokens + sum(account.missed.values()) == prompt_tokens
        needed = account.missed.get(NEW, 0) + account.missed[TAIL]
        assert account.ideal_hit_tokens == prompt_tokens - needed
        assert all(tokens > 0 for tokens in account.missed.values())
