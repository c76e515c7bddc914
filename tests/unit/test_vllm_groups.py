"""A decode engine of a model with windows: block ids by group, null blocks before windows."""

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.unit.test_vllm_hooks import BLOCK_TOKENS, GEOMETRY, SETTINGS, none_hash, vllm_request
from tests.vllm_caches import cache_of, full_attention, sliding_window
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from dualpath.core.blocks import holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.transfers import DecodeTransfer, to_transfer_params
from dualpath.engine.passes.hbm_layout import NO_BLOCK, block_ids
from dualpath.vllm.cache_layers import CacheGroups, cache_groups
from dualpath.vllm.connector import DualPathConnector
from dualpath.vllm.metadata import HeldBlocksMetadata
from dualpath.vllm.scheduler_side import SchedulerSide

__all__ = ["none_hash"]

WINDOW = 2 * BLOCK_TOKENS
NAMES = ["model.layers.0.attn", "model.layers.1.attn"]
CACHE = cache_of(
    NAMES[:1], full_attention(BLOCK_TOKENS), NAMES[1:], sliding_window(BLOCK_TOKENS, WINDOW)
)
GROUPS = cache_groups(CACHE, longest_tokens=64 * BLOCK_TOKENS)
ONE_GROUP = CacheGroups(BLOCK_TOKENS, (None,), 1024)
PROMPT = 5 * BLOCK_TOKENS + 3


def test_groups_have_the_windows_of_their_layers():
    assert CacheGroups(BLOCK_TOKENS, (None, WINDOW), 64 * BLOCK_TOKENS) == GROUPS


@pytest.mark.parametrize("window", [1, 2, BLOCK_TOKENS, BLOCK_TOKENS + 1, WINDOW, 1000])
def test_blocks_outside_a_window_are_those_that_vllm_frees(window):
    groups = CacheGroups(BLOCK_TOKENS, (window,), 1024)
    manager = object.__new__(SlidingWindowManager)
    manager.sliding_window, manager.extra_retained_tokens = window, 0
    for tokens in range(6 * BLOCK_TOKENS):
        freed = manager.get_num_skipped_tokens(tokens) // BLOCK_TOKENS
        assert groups.first_block(0, tokens) == freed


@pytest.mark.parametrize("windows", [(None,), (None, WINDOW), (None, 1), (None, *[WINDOW] * 5)])
def test_a_pool_holds_as_many_of_the_longest_requests_as_reported(windows):
    groups = CacheGroups(BLOCK_TOKENS, windows, 64 * BLOCK_TOKENS)
    held = sum(64 if w is None else (1 if w == 1 else 3) for w in windows)
    assert groups.tokens_in(10 * held) == 10 * groups.longest_tokens
    assert CacheGroups(BLOCK_TOKENS, (None,), 1000).tokens_in(7) == 7 * BLOCK_TOKENS


class Allocated:
    """The blocks vLLM allocated to a request; null blocks before the window."""

    def __init__(self, *groups):
        self.groups = groups

    def get_block_ids(self):
        return self.groups


def taken_over(
    tokens=PROMPT,
    groups=GROUPS,
    blocks=None,
    prompt=PROMPT,
    found=0,
    moves=True,
    tenant="",
    spare_slots=0,
):
    """A decode request in the step that copies its KV: the scheduler side, and that step.

    With ``spare_slots`` its transfer is invalid.
    """
    mode = Mode.DUALPATH if moves else Mode.ORACLE
    settings = msgspec.structs.replace(SETTINGS, role=Role.DECODE, mode=mode)
    side = SchedulerSide(settings, GEOMETRY, groups)
    slots = tuple(range(holding_blocks(prompt, BLOCK_TOKENS) + spare_slots)) if moves else ()
    transfer = DecodeTransfer("q", prompt, slots, tenant)
    request = vllm_request(range(tokens), transfer=to_transfer_params(transfer))
    promised, asynchronously = side.matched_tokens(request, found)
    assert asynchronously is (promised > 0)
    side.blocks_allocated(
        request, blocks or Allocated([1, 2, 3, 4, 5, 6], [0, 0, 0, 7, 8, 9]), promised
    )
    return side, request, promised, side.build(SchedulerOutput.make_empty())


def test_a_prompt_is_copied_where_each_group_has_blocks():
    _, _, promised, step = taken_over(PROMPT + 1)
    (work,) = step.decodes
    assert promised == PROMPT
    assert work.hbm_blocks == (
        *((block, NO_BLOCK) for block in (1, 2, 3)),
        *((4, 7), (5, 8), (6, 9)),
    )
    assert block_ids(work.hbm_blocks) == (1, 2, 3, 4, 7, 5, 8, 6, 9)


def test_a_request_waits_for_its_copy_even_if_nothing_is_moved():
    """In mode Oracle there are no slots, and vLLM still waits for the report."""
    _, _, promised, step = taken_over(PROMPT + 1, moves=False)
    (work,) = step.decodes
    assert (promised, work.hbm_blocks, work.waits) == (PROMPT, (), True)


def test_the_last_token_is_not_reported_if_vllm_recomputes_it():
    """It would free the block that this token attends to and the next one does not."""
    _, _, promised, step = taken_over(PROMPT)
    assert promised == PROMPT - 1
    assert len(step.decodes[0].hbm_blocks) == 6
    _, _, promised, step = taken_over(PROMPT, ONE_GROUP, Allocated([1, 2, 3, 4, 5, 6]))
    assert promised == PROMPT
    assert step.decodes[0].hbm_blocks == (1, 2, 3, 4, 5, 6)


def test_blocks_that_vllm_finds_in_hbm_are_not_written_to():
    """With prefix caching other requests may share and read these blocks."""
    found = 2 * BLOCK_TOKENS
    blocks = Allocated([1, 2, 3, 4, 5, 6])
    _, _, promised, step = taken_over(PROMPT + 1, ONE_GROUP, blocks, found=found)
    assert promised == PROMPT - found
    assert step.decodes[0].hbm_blocks == (NO_BLOCK, NO_BLOCK, 3, 4, 5, 6)
    _, _, _, step = taken_over(PROMPT + 1, found=found)
    assert step.decodes[0].hbm_blocks[:3] == (NO_BLOCK, NO_BLOCK, (3, NO_BLOCK))


def test_a_prompt_that_vllm_hits_completely_frees_its_buffer_and_is_not_stored_again():
    prompt, blocks = 5 * BLOCK_TOKENS, Allocated([1, 2, 3, 4, 5, 6])
    side, request, promised, step = taken_over(
        prompt + 1, ONE_GROUP, blocks, prompt=prompt, found=prompt
    )
    assert promised == 0
    (work,) = step.decodes
    assert (len(work.hbm_blocks), block_ids(work.hbm_blocks)) == (5, ())
    assert not work.waits
    assert side.build(SchedulerOutput.make_empty()).decodes == []
    assert generated(side, request, prompt) == []


def generated(side, request, computed, new=1, added=None):
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=[request.request_id],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[added],
        num_computed_tokens=[computed],
        num_output_tokens=[0],
    )
    step.num_scheduled_tokens = {request.request_id: new}
    return side.build(step).generated


def test_a_full_block_is_persisted_with_the_ids_of_all_groups():
    side, request, _, _ = taken_over(PROMPT + 1)
    request.append_output_token_ids(list(range(2 * BLOCK_TOKENS)))
    assert generated(side, request, PROMPT) == []
    (block,) = generated(side, request, 6 * BLOCK_TOKENS - 1)
    assert block.hbm_block == (6, 9)
    assert block.key == request.block_hashes[5]
    assert generated(side, request, 6 * BLOCK_TOKENS, added=([10], [11])) == []
    (block,) = generated(side, request, 7 * BLOCK_TOKENS - 1)
    assert (block.hbm_block, block.parent) == ((10, 11), request.block_hashes[5])


def test_blocks_of_an_answer_are_the_tenants_that_the_router_names():
    """The salt sent to engines does not determine it: it may contain an adapter's digest."""
    side, request, _, _ = taken_over(PROMPT + 1, tenant="a" * 16)
    request.append_output_token_ids(list(range(2 * BLOCK_TOKENS)))
    (block,) = generated(side, request, 6 * BLOCK_TOKENS - 1)
    assert block.tenant == "a" * 16


def test_a_prompt_that_is_computed_without_a_transfer_belongs_to_its_tenant():
    side, request, promised, step = taken_over(PROMPT + 1, tenant="a" * 16, spare_slots=1)
    assert (promised, step.decodes) == (0, [])
    blocks = generated(side, request, 0, new=PROMPT + 1)
    assert {block.tenant for block in blocks} == {"a" * 16}


def test_a_block_with_a_key_one_step_late_is_persisted_then():
    """With asynchronous scheduling a step begins before the previous step's token is known."""
    side, request, _, _ = taken_over(PROMPT + 1)
    request.append_output_token_ids(list(range(BLOCK_TOKENS - 5)))
    assert request.num_tokens == 6 * BLOCK_TOKENS - 1
    assert generated(side, request, 6 * BLOCK_TOKENS - 1) == []
    request.append_output_token_ids([7])
    (block,) = generated(side, request, 6 * BLOCK_TOKENS, added=([10], [11]))
    assert (block.hbm_block, block.key) == ((6, 9), request.block_hashes[5])


def test_a_block_that_has_left_a_window_is_not_stored():
    """vLLM has allocated the block to another request, though this list still has its id."""
    side, request, _, _ = taken_over(PROMPT + 1)
    request.append_output_token_ids(list(range(6 * BLOCK_TOKENS)))
    more = ([10, 11, 12, 13, 14], [15, 16, 17, 18, 19])
    blocks = generated(side, request, 9 * BLOCK_TOKENS, new=BLOCK_TOKENS, added=more)
    # Computing the first token of block 9 looks back to the second one of block 7.
    assert [block.hbm_block for block in blocks] == [(11, 16), (12, 17), (13, 18)]


def test_free_hbm_counts_what_the_longest_requests_hold_in_all_groups():
    side, *_ = taken_over(PROMPT + 1)
    pool = BlockPool(num_gpu_blocks=135, enable_caching=False, hash_block_size=BLOCK_TOKENS)
    side.bind_block_pool(pool)
    free = side.build(SchedulerOutput.make_empty()).free_hbm_tokens
    assert free == 134 * 64 * BLOCK_TOKENS // 67


def test_vllm_runs_another_step_until_the_worker_knows_what_the_last_output_freed():
    """A request that is aborted during its copy frees its HBM with the output of the last step."""
    side, *_ = taken_over(PROMPT + 1)
    pool = BlockPool(num_gpu_blocks=135, enable_caching=False, hash_block_size=BLOCK_TOKENS)
    side.bind_block_pool(pool)
    assert not side.needs_step
    blocks = pool.get_new_blocks(67)
    used = side.build(SchedulerOutput.make_empty()).free_hbm_tokens
    assert not side.needs_step
    pool.free_blocks(blocks)
    assert side.needs_step
    assert goes_on(side)
    assert side.build(SchedulerOutput.make_empty()).free_hbm_tokens == 2 * used
    assert not side.needs_step
    assert not goes_on(side)


def test_vllm_runs_another_step_until_the_worker_has_released_held_blocks():
    side, *_ = taken_over(PROMPT + 1)
    pool = BlockPool(num_gpu_blocks=9, enable_caching=False, hash_block_size=BLOCK_TOKENS)
    side.bind_block_pool(pool)
    for changes, is_held in (([1, 2], []), True), (([], [2]), True), (([], [1]), False):
        side.update_held_blocks(HeldBlocksMetadata(*changes))
        side.build(SchedulerOutput.make_empty())
        assert side.needs_step == is_held


def goes_on(side):
    """Return whether vLLM's own scheduler runs a step when it has no request."""
    connector = object.__new__(DualPathConnector)
    connector._scheduler = side
    scheduler = object.__new__(Scheduler)
    scheduler.connector, scheduler.ec_connector = connector, None
    scheduler.finished_req_ids, scheduler.requests = set(), {}
    scheduler.get_request_counts = lambda: (0, 0)
    scheduler._pause_state, scheduler.num_waiting_for_streaming_input = PauseState.UNPAUSED, 0
    return scheduler.has_requests()


def test_the_worker_is_notified_once_of_a_finished_decode_by_transfer_id():
    side, request, _, step = taken_over()
    assert step.ended == []
    side.finished(request)
    side.finished(request)
    assert side.build(SchedulerOutput.make_empty()).ended == ["q"]
    assert side.build(SchedulerOutput.make_empty()).ended == []
