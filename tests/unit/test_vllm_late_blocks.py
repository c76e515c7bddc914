"""Holding HBM blocks that a transfer may still write, tested with vLLM's own block pool."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from dualpath.vllm.metadata import HeldBlocks, HeldBlocksMetadata, apply


def test_held_blocks_are_not_allocated_after_their_request_freed_them_until_released() -> None:
    pool = BlockPool(num_gpu_blocks=9, enable_caching=False, hash_block_size=16)
    holder = HeldBlocks()
    blocks = pool.get_new_blocks(4)
    ids = tuple(block.block_id for block in blocks)
    holder.hold(ids[:2])
    pool.free_blocks(blocks)  # the request ends within the step
    held = holder.take()
    assert held is not None
    apply(held, pool)
    others = pool.get_new_blocks(6)
    assert not {block.block_id for block in others} & set(ids[:2])
    assert pool.get_num_free_blocks() == 0
    pool.free_blocks(others)
    holder.unhold(ids[:2])
    released = holder.take()
    assert released is not None
    apply(released, pool)
    assert pool.get_num_free_blocks() == 8
    assert holder.take() is None


def test_blocks_held_before_their_request_frees_them_stay_held() -> None:
    pool = BlockPool(num_gpu_blocks=5, enable_caching=False, hash_block_size=16)
    blocks = pool.get_new_blocks(4)
    ids = [block.block_id for block in blocks]
    apply(HeldBlocksMetadata(ids, []), pool)  # a chunk of a prompt that continues
    pool.free_blocks(blocks)  # then it is preempted
    assert pool.get_num_free_blocks() == 0
    apply(HeldBlocksMetadata([], ids), pool)
    assert pool.get_num_free_blocks() == 4


def test_blocks_reported_by_several_workers_are_added() -> None:
    both = HeldBlocksMetadata([1], [2]).aggregate(HeldBlocksMetadata([3], []))
    assert both == HeldBlocksMetadata([1, 3], [2])
