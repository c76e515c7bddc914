"""The scheduler's half of an engine whose weights change: no former KV is found or loaded."""

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.unit.test_vllm_append import append_request, decode_side
from tests.unit.test_vllm_hooks import (
    BLOCK_TOKENS,
    GEOMETRY,
    GROUPS,
    SETTINGS,
    _json,
    none_hash,
    prefill_transfer,
    vllm_request,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput

from dualpath.core.blocks import block_keys
from dualpath.core.cluster import Role
from dualpath.core.transfers import to_transfer_params
from dualpath.vllm.scheduler_side import SchedulerSide

__all__ = ["none_hash"]


def test_blocks_in_hbm_are_forgotten_even_while_a_transfer_writes_one() -> None:
    pool = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    request = vllm_request(range(4 * BLOCK_TOKENS))
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(request, blocks, 0, 4, BLOCK_TOKENS, 0)
    hashes = request.block_hashes
    assert all(pool.get_cached_block(one, [0]) for one in hashes)
    pool.free_blocks(blocks[2:])  # The others are still in use, so that vLLM's reset refuses.
    assert pool.reset_prefix_cache() is False
    side = SchedulerSide(SETTINGS, GEOMETRY, GROUPS)
    side.bind_block_pool(pool)
    side.forget_hbm_blocks()
    assert not any(pool.get_cached_block(one, [0]) for one in hashes)
    pool.free_blocks(blocks[:2])
    assert pool.get_num_free_blocks() == 8


def test_a_prefill_engine_that_has_left_refuses_transfers_and_takes_them_once_it_is_back() -> None:
    side = SchedulerSide(SETTINGS, GEOMETRY, GROUPS)
    tokens = list(range(5 * BLOCK_TOKENS))
    keys = block_keys(tokens, BLOCK_TOKENS)
    params = _json(to_transfer_params(prefill_transfer(3, keys[2])))
    side.left()
    assert side.matched_tokens(vllm_request(tokens, transfer=params), 0) == (1, True)
    (reason,) = side.build(SchedulerOutput.make_empty()).rejected.values()
    assert "has left the cluster" in reason
    side.joined()
    request = vllm_request(tokens, transfer=params)
    request.request_id = "later"
    assert side.matched_tokens(request, 0) == (3 * BLOCK_TOKENS, False)


def test_a_decode_engine_that_has_left_computes_a_prompt_itself() -> None:
    side, request = decode_side(), append_request()
    side.left()
    assert side.matched_tokens(request, 0) == (0, False)


def test_free_blocks_are_reported_again_after_the_engine_has_joined() -> None:
    side = SchedulerSide(msgspec.structs.replace(SETTINGS, role=Role.DECODE), GEOMETRY, GROUPS)
    pool = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    side.bind_block_pool(pool)
    kept = pool.get_new_blocks(3)  # of a request that a pause has kept
    side.build(SchedulerOutput.make_empty())
    steps = [side.needs_step]
    side.left()
    side.joined()
    assert [*steps, side.needs_step] == [False, True]
    pool.free_blocks(kept)
