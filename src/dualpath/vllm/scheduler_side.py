"""The connector inside vLLM's scheduler: which tokens come from outside, which blocks go out.

A PE's request arrives when its hit KV already lies in a DRAM buffer, so the hit is granted
synchronously and loaded layer by layer within the forward pass.  A DE's request arrives when the
prompt's KV is complete in this engine's buffer, so it is granted asynchronously: vLLM allocates
HBM, the worker copies, the request runs.

vLLM fails no request from here, but fails one whose KV did not arrive.  So a PE's request that has
no usable transfer is promised a token asynchronously, and the worker says at once that it failed:
it must not be computed, as the PE's layers share regions and nothing would take their KV away.
"""

import logging
from typing import TYPE_CHECKING

from dualpath.core.blocks import BlockGeometry, chain_root
from dualpath.core.cluster import Role
from dualpath.core.errors import DualPathError
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.engine.forward_pass import PromptPart
from dualpath.engine.generated import GeneratedBlock
from dualpath.engine.settings import EngineSettings
from dualpath.engine.transfer_checks import TransferChecks, with_own_hits
from dualpath.plan.counts import new_full_blocks
from dualpath.plan.steps import chunk_of
from dualpath.vllm.late_blocks import LateBlocksMetadata, apply
from dualpath.vllm.metadata import DecodeWork, StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


log = logging.getLogger(__name__)


class _Tracked:
    """A request with the transfer it carries; None: one that cannot be meant."""

    def __init__(
        self, request: "Request", transfer: PrefillTransfer | DecodeTransfer | None
    ) -> None:
        self.request = request
        self.transfer = transfer
        self.blocks: list[int] = []
        self.persisted_blocks = 0
        self.transferred = False


class SchedulerSide:
    """State of one engine's scheduler process."""

    def __init__(self, settings: EngineSettings, geometry: BlockGeometry) -> None:
        self._settings = settings
        self._role = settings.role
        self._checks = TransferChecks(settings, geometry)
        self._block_tokens = geometry.block_tokens
        self._tracked: dict[str, _Tracked] = {}
        self._rejected: dict[str, str] = {}
        self._new_decode_transfers: list[str] = []
        self._refused: list[str] = []
        self._pool: BlockPool | None = None

    def learn_geometry(self, geometry: BlockGeometry) -> None:
        """Hear of the worker what blocks are, before the first request."""
        self._checks = TransferChecks(self._settings, geometry)

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """Learn where free HBM is counted."""
        self._pool = pool

    def note_late_blocks(self, late: LateBlocksMetadata) -> None:
        """Keep HBM blocks from reuse, or let them go; called before the next step is scheduled."""
        assert self._pool is not None, "vLLM binds its block pool at start"
        apply(late, self._pool)

    def matched_tokens(self, request: "Request", computed_tokens: int) -> tuple[int, bool]:
        """Return (tokens that come from outside beyond ``computed_tokens``, asynchronously?)."""
        tracked = self._track(request)
        transfer = tracked.transfer if tracked is not None else None
        if isinstance(transfer, PrefillTransfer):
            hit_tokens = transfer.hit_blocks * self._block_tokens
            return max(hit_tokens - computed_tokens, 0), False
        if self._role is Role.PREFILL:
            # Prompt logprobs make vLLM ignore what is promised.
            request.skip_reading_prefix_cache = False
            return 1, True
        # Preempted since its KV was copied: the buffer is gone, it is computed again.
        if tracked is None or transfer is None or tracked.transferred:
            return 0, False
        waiting_tokens = max(transfer.prompt_tokens - computed_tokens, 0)
        return waiting_tokens, waiting_tokens > 0

    def blocks_allocated(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        """HBM was allocated for a request."""
        tracked = self._tracked.get(request.request_id)
        transfer = tracked.transfer if tracked is not None else None
        if self._role is Role.PREFILL and transfer is None:
            self._refused.append(request.request_id)
        if tracked is None:
            return
        tracked.blocks = list(blocks.get_block_ids()[0])
        if isinstance(transfer, DecodeTransfer) and external_tokens > 0 and not tracked.transferred:
            tracked.transferred = True
            tracked.persisted_blocks = self._full_blocks(transfer.prompt_tokens)
            self._new_decode_transfers.append(request.request_id)

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
            if isinstance(tracked.transfer, PrefillTransfer):
                blocks = self._chunk_blocks(start_tokens, end_tokens)
                hbm_blocks = tuple(tracked.blocks[: blocks.end])
                step.prefills.append(PromptPart(tracked.transfer, blocks, hbm_blocks))
            elif self._role is Role.DECODE:
                step.generated.extend(self._newly_full(tracked, end_tokens))
        for request_id in self._new_decode_transfers:
            tracked = self._tracked[request_id]
            if isinstance(tracked.transfer, DecodeTransfer):
                hbm_blocks = tuple(tracked.blocks[: len(tracked.transfer.slots)])
                step.decodes.append(DecodeWork(request_id, tracked.transfer, hbm_blocks))
        self._new_decode_transfers.clear()
        step.rejected, self._rejected = self._rejected, {}
        step.refused, self._refused = self._refused, []
        return step

    def finished(self, request: "Request") -> None:
        """A request has finished or was aborted."""
        self._tracked.pop(request.request_id, None)

    def _track(self, request: "Request") -> _Tracked | None:
        if (known := self._tracked.get(request.request_id)) is not None:
            return known
        transfer = None
        try:
            transfer = self._checks.carried(request.kv_transfer_params)
            if transfer is None:
                return None
            self._checks.check(transfer, request.num_tokens)
        except DualPathError as error:
            # A DE computes the prompt itself; a PE's request fails, and the router hears why.
            log.error("%s", error)
            if isinstance(transfer, PrefillTransfer):
                self._rejected[transfer.request_id] = str(error)
            transfer = None
        if isinstance(transfer, PrefillTransfer):
            transfer = with_own_hits(transfer, request.block_hashes)
        tracked = self._tracked[request.request_id] = _Tracked(request, transfer)
        return tracked

    def _chunk_blocks(self, start_tokens: int, end_tokens: int) -> BlockRun:
        assert start_tokens % self._block_tokens == 0, "chunks end at block boundaries"
        return chunk_of(start_tokens, end_tokens - start_tokens, self._block_tokens)

    def _full_blocks(self, tokens: int) -> int:
        return new_full_blocks(0, tokens, self._block_tokens)

    def _newly_full(self, tracked: _Tracked, end_tokens: int) -> list[GeneratedBlock]:
        """Return the blocks that this step fills.

        With asynchronous scheduling the key of a block can be one step late: it is then picked up
        in the next one.
        """
        keys = tracked.request.block_hashes
        full_blocks = min(self._full_blocks(end_tokens), len(keys), len(tracked.blocks))
        new = range(tracked.persisted_blocks, full_blocks)
        tracked.persisted_blocks = max(tracked.persisted_blocks, full_blocks)
        return [
            GeneratedBlock(
                tracked.blocks[block],
                bytes(keys[block]),
                bytes(keys[block - 1]) if block else chain_root(),
            )
            for block in new
        ]


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
