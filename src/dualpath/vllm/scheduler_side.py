"""The connector inside vLLM's scheduler: which tokens come from outside, which blocks go out.

A PE's request arrives when its hit KV already lies in a DRAM buffer, so the hit is granted
synchronously and loaded layer by layer within the forward pass.  A DE's request arrives when the
prompt's KV is complete in this engine's buffer, so it is granted asynchronously: vLLM allocates
HBM, the worker copies, the request runs.
"""

import logging
from typing import TYPE_CHECKING

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.control import DecodeTransfer, PrefillTransfer, from_transfer_params
from dualpath.plan.steps import BlockRun
from dualpath.vllm.metadata import DecodeWork, PrefillWork, StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


log = logging.getLogger(__name__)


class _Tracked:
    """A request that carries a hand-over or take-over."""

    def __init__(self, request: "Request", ours: PrefillTransfer | DecodeTransfer) -> None:
        self.request = request
        self.ours = ours
        self.blocks: list[int] = []
        self.persisted_blocks = 0
        self.taken_over = False


class SchedulerSide:
    """State of one engine's scheduler process."""

    def __init__(self, role: Role, block_tokens: int) -> None:
        self._role = role
        self._block_tokens = block_tokens
        self._tracked: dict[str, _Tracked] = {}
        self._new_take_overs: list[str] = []
        self._pool: BlockPool | None = None

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """Learn where free HBM is counted."""
        self._pool = pool

    def matched_tokens(self, request: "Request", computed_tokens: int) -> tuple[int, bool]:
        """Return (tokens that come from outside beyond ``computed_tokens``, asynchronously?)."""
        tracked = self._track(request)
        if tracked is None:
            return 0, False
        if isinstance(tracked.ours, PrefillTransfer):
            hit_tokens = tracked.ours.hit_blocks * self._block_tokens
            return max(hit_tokens - computed_tokens, 0), False
        if tracked.taken_over:  # preempted since: the buffer is gone, recompute
            return 0, False
        waiting_tokens = max(tracked.ours.prompt_tokens - computed_tokens, 0)
        return waiting_tokens, waiting_tokens > 0

    def blocks_allocated(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        """HBM was allocated for a request."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.blocks = list(blocks.get_block_ids()[0])
        if (
            isinstance(tracked.ours, DecodeTransfer)
            and external_tokens > 0
            and not tracked.taken_over
        ):
            tracked.taken_over = True
            tracked.persisted_blocks = tracked.ours.prompt_tokens // self._block_tokens
            self._new_take_overs.append(request.request_id)

    def build(self, output: "SchedulerOutput") -> StepMetadata:
        """Describe this step's work to the worker."""
        step = StepMetadata()
        if self._pool is not None:
            step.free_hbm_tokens = self._pool.get_num_free_blocks() * self._block_tokens
        for request_id, start_tokens, new_blocks in _scheduled(output):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.blocks.extend(new_blocks)
            end_tokens = start_tokens + output.num_scheduled_tokens[request_id]
            if self._role is Role.PREFILL and isinstance(tracked.ours, PrefillTransfer):
                step.prefills.append(self._prefill(tracked, start_tokens, end_tokens))
            elif self._role is Role.DECODE:
                step.generated.extend(self._newly_full(tracked, end_tokens))
        for request_id in self._new_take_overs:
            tracked = self._tracked[request_id]
            if isinstance(tracked.ours, DecodeTransfer):
                blocks = tuple(tracked.blocks[: len(tracked.ours.slots)])
                step.take_overs.append(DecodeWork(request_id, tracked.ours, blocks))
        self._new_take_overs.clear()
        return step

    def finished(self, request: "Request") -> None:
        """A request has finished or was aborted."""
        self._tracked.pop(request.request_id, None)

    def _track(self, request: "Request") -> _Tracked | None:
        if (known := self._tracked.get(request.request_id)) is not None:
            return known
        ours = from_transfer_params(request.kv_transfer_params)
        if ours is None:
            return None
        if isinstance(ours, PrefillTransfer):
            ours = self._checked(request, ours)
        tracked = self._tracked[request.request_id] = _Tracked(request, ours)
        return tracked

    def _checked(self, request: "Request", ours: PrefillTransfer) -> PrefillTransfer:
        """Drop the hits if their key chain is not this request's own."""
        hit_blocks = ours.hit_blocks
        own = request.block_hashes
        matches = hit_blocks == 0 or (
            hit_blocks <= len(own) and bytes(own[hit_blocks - 1]) == ours.hit_key_tail
        )
        if matches:
            return ours
        log.warning(
            "request %s: the key of hit block %d is not the one of this prompt; its %d hit blocks "
            "are recomputed (router and engine disagree on block size or hash algorithm)",
            ours.request_id,
            hit_blocks - 1,
            hit_blocks,
        )
        return msgspec.structs.replace(ours, hit_blocks=0, hit_key_tail=b"", hits=())

    def _prefill(self, tracked: _Tracked, start_tokens: int, end_tokens: int) -> PrefillWork:
        assert isinstance(tracked.ours, PrefillTransfer)
        assert start_tokens % self._block_tokens == 0, "chunks end at block boundaries"
        first = start_tokens // self._block_tokens
        end = -(-end_tokens // self._block_tokens)
        return PrefillWork(
            prefill_transfer=tracked.ours,
            chunk=BlockRun(first, end - first),
            hbm_blocks=tuple(tracked.blocks[:end]),
        )

    def _newly_full(self, tracked: _Tracked, end_tokens: int) -> list[tuple[int, bytes]]:
        """Return (HBM block, key) of blocks that this step fills.

        With asynchronous scheduling the key of a block can be one step late: it is then picked up
        in the next one.
        """
        keys = tracked.request.block_hashes
        full_blocks = min(end_tokens // self._block_tokens, len(keys), len(tracked.blocks))
        new = range(tracked.persisted_blocks, full_blocks)
        tracked.persisted_blocks = max(tracked.persisted_blocks, full_blocks)
        return [(tracked.blocks[block], bytes(keys[block])) for block in new]


def _scheduled(output: "SchedulerOutput") -> list[tuple[str, int, list[int]]]:
    """Return (request, tokens computed before this step, HBM blocks added in it).

    New requests got their blocks through ``blocks_allocated``; resumed ones as well.
    """
    rows: list[tuple[str, int, list[int]]] = [
        (new.req_id, new.num_computed_tokens, []) for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        added = cached.new_block_ids[index]
        fresh = added is None or request_id in cached.resumed_req_ids
        rows.append(
            (request_id, cached.num_computed_tokens[index], [] if fresh else list(added[0]))
        )
    return rows
