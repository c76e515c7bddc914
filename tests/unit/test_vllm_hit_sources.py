"""From where vLLM counts an engine's hits: HBM, host, disk or the other engine."""

import pytest

pytest.importorskip("vllm")

import msgspec
from tests.unit.test_vllm_groups import ONE_GROUP, Allocated
from tests.unit.test_vllm_hooks import BLOCK_TOKENS, GEOMETRY, SETTINGS, none_hash, vllm_request
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefixCacheStats

from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import (
    DecodeTransfer,
    PrefillTransfer,
    ThirdEngine,
    to_transfer_params,
)
from dualpath.vllm.scheduler_side import SchedulerSide

__all__ = ["none_hash"]

TOKENS = 6 * BLOCK_TOKENS + 3
P2P = CacheHitSource.P2P


def run(side: Role, first: int, count: int, *, cached: bool = False) -> HitRun:
    return HitRun(side, BlockRun(first, count), cached=cached)


#: Five hit blocks: in the DE's DRAM one, read by it two, in the PE's DRAM one, read by it one.
HITS = (
    run(Role.DECODE, 0, 1, cached=True),
    run(Role.DECODE, 1, 2),
    run(Role.PREFILL, 3, 1, cached=True),
    run(Role.PREFILL, 4, 1),
)


def in_blocks(**sources: int) -> dict[CacheHitSource, int]:
    return {CacheHitSource(name): blocks * BLOCK_TOKENS for name, blocks in sources.items()}


def side_of(role: Role) -> SchedulerSide:
    return SchedulerSide(msgspec.structs.replace(SETTINGS, role=role), GEOMETRY, ONE_GROUP)


def admitted(side: SchedulerSide, transfer, found_tokens: int = 0) -> dict[CacheHitSource, int]:
    """Return the sources as vLLM's scheduler asks for them at admission."""
    request = vllm_request(range(TOKENS), transfer=to_transfer_params(transfer))
    promised, _ = side.matched_tokens(request, found_tokens)
    side.blocks_allocated(request, Allocated([1, 2, 3, 4, 5, 6, 7]), promised)
    sources = side.hit_sources(request, promised)
    recorded = PrefixCacheStats()
    recorded.record(TOKENS, promised, False, sources)
    assert recorded.hits_by_source == sources, "vLLM takes them as they are"
    return sources


def test_a_prefill_engine_has_hits_of_its_dram_of_storage_and_of_the_decode_engine():
    keys = vllm_request(range(TOKENS)).block_hashes
    slots = tuple(range(7))
    hits = tuple(each.with_slots(tuple(range(each.blocks.count))) for each in HITS)
    transfer = PrefillTransfer("q", TOKENS, 5, bytes(keys[4]), hits, "de-0", "e", slots)
    assert admitted(side_of(Role.PREFILL), transfer) == in_blocks(host=1, disk=1, p2p=3)


@pytest.mark.parametrize("named", [True, False])
def test_what_a_third_decode_engine_serves_is_from_another_engine(named: bool):
    """It is of the prefill engine's side; a transfer that names no process of it is refused."""
    keys = vllm_request(range(TOKENS)).block_hashes
    slots = tuple(range(7))
    hits = (
        HitRun(Role.PREFILL, BlockRun(0, 2), (8, 9), cached=True, third="de-1"),
        HitRun(Role.PREFILL, BlockRun(2, 3), (0, 1, 2)),
    )
    thirds = (ThirdEngine("de-1", "e"),) if named else ()
    transfer = PrefillTransfer(
        "q", TOKENS, 5, bytes(keys[4]), hits, "de-0", "e", slots, thirds=thirds
    )
    if named:
        assert admitted(side_of(Role.PREFILL), transfer) == in_blocks(disk=3, p2p=2)
        return
    request = vllm_request(range(TOKENS), transfer=to_transfer_params(transfer))
    assert side_of(Role.PREFILL).matched_tokens(request, 0) == (1, True)


def test_a_decode_engine_has_what_it_does_not_load_itself_from_the_prefill_engine():
    own = tuple(each for each in HITS if each.side is Role.DECODE)
    transfer = DecodeTransfer("q", TOKENS, tuple(range(7)), hits=own)
    sources = admitted(side_of(Role.DECODE), transfer)
    assert sources == {**in_blocks(host=1, disk=2), P2P: TOKENS - 3 * BLOCK_TOKENS}


def test_tokens_that_are_in_hbm_already_are_vllms_own_hits():
    own = tuple(each for each in HITS if each.side is Role.DECODE)
    transfer = DecodeTransfer("q", TOKENS, tuple(range(7)), hits=own)
    sources = admitted(side_of(Role.DECODE), transfer, found_tokens=2 * BLOCK_TOKENS)
    assert sources == {**in_blocks(disk=1), P2P: TOKENS - 3 * BLOCK_TOKENS}


def test_a_request_that_is_refused_has_no_source():
    side = side_of(Role.PREFILL)
    request = vllm_request(range(TOKENS))
    assert side.matched_tokens(request, 0) == (1, True)
    assert side.hit_sources(request, 1) == {CacheHitSource.EXTERNAL_UNSPECIFIED: 1}
