"""vLLM's scheduler side of a DE that computes the tokens behind a hit itself."""

import pytest

pytest.importorskip("vllm")

import msgspec
from tests.unit.test_vllm_groups import ONE_GROUP, Allocated, generated
from tests.unit.test_vllm_hooks import BLOCK_TOKENS, GEOMETRY, SETTINGS, none_hash, vllm_request
from vllm.v1.core.sched.output import SchedulerOutput

from dualpath.core.cluster import Role
from dualpath.core.transfers import DecodeTransfer, to_transfer_params
from dualpath.engine.passes.hbm_layout import NO_BLOCK
from dualpath.vllm.scheduler_side import SchedulerSide

__all__ = ["none_hash"]

HIT_BLOCKS = 2
HIT, TOKENS = HIT_BLOCKS * BLOCK_TOKENS, 5 * BLOCK_TOKENS + 3


def append_request(key_of_block: int = HIT_BLOCKS - 1, prompt_tokens: int = HIT):
    """A request of which the DE has two blocks, by the key of the last of them."""
    keys = vllm_request(range(TOKENS)).block_hashes
    slots = tuple(range(-(-prompt_tokens // BLOCK_TOKENS)))
    transfer = DecodeTransfer("q", prompt_tokens, slots, "", bytes(keys[key_of_block]))
    return vllm_request(range(TOKENS), transfer=to_transfer_params(transfer))


def decode_side() -> SchedulerSide:
    settings = msgspec.structs.replace(SETTINGS, role=Role.DECODE)
    return SchedulerSide(settings, GEOMETRY, ONE_GROUP)


def allocated(side, request, found=0):
    promised, _ = side.matched_tokens(request, found)
    side.blocks_allocated(request, Allocated([1, 2, 3, 4, 5, 6]), promised)
    return promised, side.build(SchedulerOutput.make_empty())


def test_the_hit_is_copied_and_vllm_computes_and_persists_the_rest():
    side, request = decode_side(), append_request()
    promised, step = allocated(side, request)
    assert promised == HIT
    assert step.decodes[0].hbm_blocks == (1, 2)
    blocks = generated(side, request, HIT, new=TOKENS - HIT)
    assert [block.hbm_block for block in blocks] == [3, 4, 5]
    assert [block.key for block in blocks] == list(map(bytes, request.block_hashes[2:5]))
    assert blocks[0].parent == request.block_hashes[1]


def test_blocks_are_persisted_chunk_by_chunk():
    side, request = decode_side(), append_request()
    allocated(side, request)
    first = generated(side, request, HIT, new=BLOCK_TOKENS + 5)
    second = generated(side, request, HIT + BLOCK_TOKENS + 5, new=TOKENS - HIT - BLOCK_TOKENS - 5)
    assert [block.hbm_block for block in (*first, *second)] == [3, 4, 5]


@pytest.mark.parametrize("found_blocks", [1, 2, 3])
def test_blocks_that_are_in_hbm_already_are_not_copied(found_blocks):
    """By vLLM's prefix cache, which may have more than the hit."""
    side, request = decode_side(), append_request()
    promised, step = allocated(side, request, found=found_blocks * BLOCK_TOKENS)
    assert promised == max(HIT_BLOCKS - found_blocks, 0) * BLOCK_TOKENS
    copied = [block for block in step.decodes[0].hbm_blocks if block != NO_BLOCK]
    assert len(copied) == max(HIT_BLOCKS - found_blocks, 0)


def test_a_hit_of_another_prompt_is_not_used(caplog):
    side, request = decode_side(), append_request(key_of_block=HIT_BLOCKS)
    assert side.matched_tokens(request, 0) == (0, False)
    assert "is not that of this prompt" in caplog.text


def test_a_hit_ends_with_a_block(caplog):
    side, request = decode_side(), append_request(prompt_tokens=HIT + 1)
    assert side.matched_tokens(request, 0) == (0, False)
    assert "ends within a block" in caplog.text
