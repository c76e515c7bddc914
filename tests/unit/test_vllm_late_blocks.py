"""HBM blocks that a late transfer may write, against vLLM's own block pool."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from dualpath.vllm.late_blocks import LateBlocks, LateBlocksMetadata, apply


def test_held_blocks_go_to_nobody_though_their_request_freed_them_and_return_when_let_go() -> None:
    pool = BlockPool(num_gpu_blocks=9, enable_caching=False, hash_block_size=16)
    late = LateBlocks()
    blocks = pool.get_new_blocks(4)
    ids = tuple(block.block_id for block in blocks)
    late.hold(ids[:2])
    pool.free_blocks(blocks)  # the request ends within the step
    held = late.take()
    assert held is not None
    apply(held, pool)
    others = pool.get_new_blocks(6)
    assert not {block.block_id for block in others} & set(ids[:2])
    assert pool.get_num_free_blocks() == 0
    pool.free_blocks(others)
    late.let_go(ids[:2])
    let_go = late.take()
    assert let_go is not None
    apply(let_go, pool)
    assert pool.get_num_free_blocks() == 8
    assert late.take() is None


def test_blocks_held_before_their_request_frees_them_stay_held() -> None:
    pool = BlockPool(num_gpu_blocks=5, enable_caching=False, hash_block_size=16)
    blocks = pool.get_new_blocks(4)
    ids = [block.block_id for block in blocks]
    apply(LateBlocksMetadata(ids, []), pool)  # a chunk of a prompt that goes on
    pool.free_blocks(blocks)  # then it is preempted
    assert pool.get_num_free_blocks() == 0
    apply(LateBlocksMetadata([], ids), pool)
    assert pool.get_num_free_blocks() == 4


def test_what_several_workers_say_is_added() -> None:
    both = LateBlocksMetadata([1], [2]).aggregate(LateBlocksMetadata([3], []))
    assert both == LateBlocksMetadata([1, 3], [2])
