"""Prompts that a vLLM engine receives in HBM, with vLLM's own block pool and tables of blocks.

The story: the engine takes eight of 24 blocks out of the pool.  A prompt of five blocks arrives in
some of these; when its load is over they change places with those that vLLM has allocated.
"""

import pytest

pytest.importorskip("vllm")

import msgspec
import torch
from tests.unit.test_vllm_groups import ONE_GROUP
from tests.unit.test_vllm_hooks import BLOCK_TOKENS, GEOMETRY, SETTINGS, none_hash, vllm_request
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from dualpath.core.cluster import Role
from dualpath.core.errors import BufferTooSmallError
from dualpath.core.transfers import DecodeTransfer, to_transfer_params
from dualpath.vllm.metadata import BlockExchange, HeldBlocks, HeldBlocksMetadata
from dualpath.vllm.receiving_area import ReceivingArea, receiving_blocks
from dualpath.vllm.scheduler_side import SchedulerSide

__all__ = ["none_hash"]

POOL_BLOCKS, AREA = 24, range(16, 24)
PROMPT_BLOCKS = 5
TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS - 3
DECODE = msgspec.structs.replace(SETTINGS, role=Role.DECODE, receive_hbm_share=1 / 3)


class Engine:
    """The scheduler's half of the connector, and vLLM's manager of blocks."""

    def __init__(self) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = KVCacheConfig(POOL_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.blocks = KVCacheManager(
            config,
            max_model_len=POOL_BLOCKS * BLOCK_TOKENS,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        self.pool = self.blocks.block_pool
        self.side = SchedulerSide(DECODE, GEOMETRY, ONE_GROUP)
        self.side.bind_block_pool(self.pool)

    def request(self, name: str = "r"):
        transfer = DecodeTransfer("t", TOKENS, (), in_hbm=True)
        made = vllm_request(range(TOKENS + 1), transfer=to_transfer_params(transfer))
        made.request_id = name
        return made

    def wait(self, request):
        """Allocate blocks as vLLM does for a request that waits for a load; return its work."""
        promised, waits = self.side.matched_tokens(request, 0)
        assert (promised, waits) == (TOKENS, True)
        taken = self.blocks.allocate_slots(
            request, 0, num_external_computed_tokens=promised, delay_cache_blocks=True
        )
        assert taken is not None
        blocks = self.blocks.get_blocks(request.request_id)
        self.side.blocks_allocated(request, blocks, promised)
        (work,) = self.step().decodes
        return work

    def step(self):
        return self.side.build(SchedulerOutput.make_empty())

    def table(self, request) -> list[int]:
        (ids,) = self.blocks.get_block_ids(request.request_id)
        return list(ids)

    @property
    def free(self) -> int:
        return int(self.pool.get_num_free_blocks())


def test_the_blocks_of_the_area_are_those_that_both_halves_compute() -> None:
    assert receiving_blocks(DECODE, POOL_BLOCKS) == AREA
    assert receiving_blocks(SETTINGS, POOL_BLOCKS) == range(POOL_BLOCKS, POOL_BLOCKS)
    engine = Engine()
    assert engine.free == POOL_BLOCKS - 1 - len(AREA)
    assert engine.side.needs_step, "the worker learns how many blocks are left"
    engine.step()
    others = engine.pool.get_new_blocks(engine.free)
    assert not {block.block_id for block in others} & set(AREA)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_loaded_prompt_and_the_blocks_of_its_request_change_places(aborted: bool) -> None:
    engine = Engine()
    request, free = engine.request(), engine.free
    work = engine.wait(request)
    own = engine.table(request)
    assert list(work.hbm_blocks) == own[:PROMPT_BLOCKS]
    if aborted:  # vLLM frees the blocks of a request only once its load is over.
        engine.side.finished(request)
    reserved = tuple(AREA)[2 : 2 + PROMPT_BLOCKS]
    engine.side.update_held_blocks(HeldBlocksMetadata([], [], [BlockExchange("r", 0, reserved)]))
    assert engine.table(request) == [*reserved, *own[PROMPT_BLOCKS:]]
    assert engine.side.needs_step
    assert engine.step().received == own[:PROMPT_BLOCKS]
    assert engine.step().received == []
    engine.blocks.free(request)
    assert engine.free == free
    area = {*AREA} - {*reserved} | {*own[:PROMPT_BLOCKS]}
    others = engine.pool.get_new_blocks(engine.free)
    assert {block.block_id for block in others} == {*range(1, POOL_BLOCKS)} - area


def test_a_load_that_failed_changes_no_block() -> None:
    engine = Engine()
    request, free = engine.request(), engine.free
    engine.wait(request)
    own = engine.table(request)
    engine.side.update_held_blocks(HeldBlocksMetadata([], [], [BlockExchange("r")]))
    assert engine.table(request) == own
    engine.blocks.free(request)
    assert engine.free == free
    assert not engine.side._tables


def area_of(held: HeldBlocks) -> ReceivingArea:
    return ReceivingArea(AREA, BLOCK_TOKENS, held)


def test_prompts_get_blocks_of_the_area_in_turn_and_others_enter_it() -> None:
    held, got = HeldBlocks(), dict[str, tuple[int, ...]]()
    area = area_of(held)
    for name in ("first", "second", "third"):
        area.reserve(name, TOKENS, 100, lambda blocks, name=name: got.update({name: blocks}))  # type: ignore[misc]
    assert list(got) == ["first"]
    area.hand_over("first")
    # vLLM has found the first block in its prefix cache; it needs four of the five.
    assert area.take("first", 1, PROMPT_BLOCKS) == got["first"][1:]
    assert list(got) == ["first"], "four blocks are free"
    area.give([3, 4, 5, 6])
    assert list(got) == ["first", "second"]
    assert not set(got["second"]) & set(got["first"][1:])
    area.end_reservation("second")
    assert list(got) == ["first", "second", "third"]
    area.end_reservation("third")
    assert area.free == len(AREA)


def test_a_block_that_a_copy_still_reads_is_not_reserved_again() -> None:
    held, got = HeldBlocks(), dict[str, tuple[int, ...]]()
    area = area_of(held)
    area.reserve("first", TOKENS, 0, lambda blocks: got.update(first=blocks))
    area.hold(got["first"][:2])
    area.end_reservation("first")
    assert area.free == len(AREA) - 2
    area.reserve("all", len(AREA) * BLOCK_TOKENS, 0, lambda blocks: got.update(all=blocks))
    assert "all" not in got
    area.unhold(got["first"][:2])
    assert sorted(got["all"]) == list(AREA)
    taken = held.take()
    assert taken is not None
    assert (taken.held, taken.released) == (list(got["first"][:2]),) * 2


def test_a_prompt_larger_than_the_area_is_refused_with_the_remedy() -> None:
    area = area_of(HeldBlocks())
    area.check("r", len(AREA) * BLOCK_TOKENS, 10_000)
    with pytest.raises(BufferTooSmallError, match="raise receive_hbm_share"):
        area.check("r", len(AREA) * BLOCK_TOKENS + 1, 0)
