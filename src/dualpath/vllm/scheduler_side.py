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
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualpath.core.blocks import BlockGeometry, chain_root, holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, DualPathError
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.engine.forward_pass import PromptPart
from dualpath.engine.generated import GeneratedBlock
from dualpath.engine.hbm_layout import NO_BLOCK, HbmBlock
from dualpath.engine.settings import EngineSettings
from dualpath.engine.transfer_checks import TransferChecks, with_own_hits
from dualpath.plan.counts import new_full_blocks
from dualpath.plan.steps import chunk_of
from dualpath.vllm.cache_layers import CacheGroups
from dualpath.vllm.late_blocks import LateBlocksMetadata, apply
from dualpath.vllm.metadata import DecodeWork, StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


log = logging.getLogger(__name__)

#: In vLLM's lists, in the place of a block that is behind the window.
_NULL_BLOCK = 0


class _Tracked:
    """A request with the transfer it carries; None: one that cannot be meant."""

    def __init__(
        self, request: "Request", transfer: PrefillTransfer | DecodeTransfer | None, tenant: str
    ) -> None:
        self.request = request
        self.transfer = transfer
        #: Whose its blocks are, also of a refused transfer; adapters change ``cache_salt``.
        self.tenant = tenant
        #: vLLM's block ids, by group and in order.
        self.blocks: list[list[int]] = []
        self.persisted_blocks = 0
        #: Of the prompt, whose KV vLLM has found in a DE's HBM, in blocks that others may share.
        self.found_tokens = 0
        #: Whether vLLM waits for a DE's copy of the rest.
        self.waits = False
        self.transferred = False


class SchedulerSide:
    """State of one engine's scheduler process."""

    def __init__(
        self,
        settings: EngineSettings,
        geometry: BlockGeometry,
        groups: CacheGroups,
        most_prompt_tokens: int | None = None,
    ) -> None:
        self._settings = settings
        #: Of a prefill engine, see ``draft_context``.
        self._most_prompt_tokens = most_prompt_tokens
        self._groups = groups
        self._role = settings.role
        self._checks = TransferChecks(settings, geometry)
        self._block_tokens = geometry.block_tokens
        self._tracked: dict[str, _Tracked] = {}
        self._rejected: dict[str, str] = {}
        self._new_decode_transfers: list[str] = []
        self._refused: list[str] = []
        self._ended: list[str] = []
        self._pool: BlockPool | None = None
        #: As the worker last heard it.
        self._told_free_blocks = 0
        #: Of transfers that may come late, as often as they are held.
        self._held_blocks = 0

    def learn_geometry(self, geometry: BlockGeometry) -> None:
        """Hear of the worker what blocks are, before the first request."""
        self._checks = TransferChecks(self._settings, geometry)

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """Learn where free HBM is counted; the worker knows that all of it is free at start."""
        self._pool = pool
        self._told_free_blocks = pool.get_num_free_blocks()

    def note_late_blocks(self, late: LateBlocksMetadata) -> None:
        """Keep HBM blocks from reuse, or let them go; called before the next step is scheduled."""
        assert self._pool is not None, "vLLM binds its block pool at start"
        apply(late, self._pool)
        self._held_blocks += len(late.held) - len(late.let_go)

    @property
    def needs_a_step(self) -> bool:
        """Whether the worker has to hear or to say something of HBM, with or without requests.

        vLLM frees the HBM of a request that was aborted during its copy with the output of a step,
        which may be the last one.  The router would then take it for used until the next request,
        and might not send one for that very reason.  It is the same with what a late transfer may
        write to: the worker says with a step that it may go.
        """
        if self._pool is None:
            return False
        return self._held_blocks > 0 or self._told_free_blocks != self._pool.get_num_free_blocks()

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
        tracked.found_tokens = computed_tokens
        waiting_tokens = max(self._tokens_to_fill(tracked.request, transfer) - computed_tokens, 0)
        return waiting_tokens, waiting_tokens > 0

    def _tokens_to_fill(self, request: "Request", transfer: DecodeTransfer) -> int:
        """Return how many of a prompt's tokens get their KV from outside.

        Of a whole prompt vLLM computes the last token again, but has given up by then what windows
        look back to from the token after it.
        """
        if any(window is not None for window in self._groups.windows):
            return min(transfer.prompt_tokens, request.num_tokens - 1)
        return transfer.prompt_tokens

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
        tracked.blocks = [list(group) for group in blocks.get_block_ids()]
        if tracked.transferred or not isinstance(transfer, DecodeTransfer):
            return
        if tracked.found_tokens + external_tokens >= self._tokens_to_fill(
            tracked.request, transfer
        ):
            tracked.transferred, tracked.waits = True, external_tokens > 0
            tracked.persisted_blocks = self._full_blocks(transfer.prompt_tokens)
            self._new_decode_transfers.append(request.request_id)

    def build(self, output: "SchedulerOutput") -> StepMetadata:
        """Describe this step's work to the worker."""
        step = StepMetadata()
        if self._pool is not None:
            self._told_free_blocks = self._pool.get_num_free_blocks()
            step.free_hbm_tokens = self._groups.tokens_in(self._told_free_blocks)
        for request_id, start_tokens, new_blocks in _scheduled(output):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            for known, added in zip(tracked.blocks, new_blocks, strict=False):
                known.extend(added)
            end_tokens = start_tokens + output.num_scheduled_tokens[request_id]
            if isinstance(tracked.transfer, PrefillTransfer):
                blocks = self._chunk_blocks(start_tokens, end_tokens)
                hbm_blocks = tuple(tracked.blocks[0][: blocks.end])
                step.prefills.append(PromptPart(tracked.transfer, blocks, hbm_blocks))
            elif self._role is Role.DECODE:
                step.generated.extend(self._newly_full(tracked, start_tokens, end_tokens))
        step.decodes = [self._decode_work(request_id) for request_id in self._new_decode_transfers]
        self._new_decode_transfers.clear()
        step.rejected, self._rejected = self._rejected, {}
        step.refused, self._refused = self._refused, []
        step.ended, self._ended = self._ended, []
        return step

    def finished(self, request: "Request") -> None:
        """A request has finished or was aborted."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None and isinstance(tracked.transfer, DecodeTransfer):
            self._ended.append(tracked.transfer.request_id)

    def _track(self, request: "Request") -> _Tracked | None:
        if (known := self._tracked.get(request.request_id)) is not None:
            return known
        transfer, tenant = None, ""
        try:
            transfer = self._checks.carried(request.kv_transfer_params)
            if transfer is None:
                return None
            tenant = transfer.tenant if isinstance(transfer, DecodeTransfer) else ""
            self._checks.check(transfer, request.num_tokens)
            self._check_drafts(transfer)
        except DualPathError as error:
            # A DE computes the prompt itself; a PE's request fails, and the router hears why.
            log.error("%s", error)
            if isinstance(transfer, PrefillTransfer):
                self._rejected[transfer.request_id] = str(error)
            transfer = None
        if isinstance(transfer, PrefillTransfer):
            transfer = with_own_hits(transfer, request.block_hashes)
        tracked = self._tracked[request.request_id] = _Tracked(request, transfer, tenant)
        return tracked

    def _check_drafts(self, transfer: PrefillTransfer | DecodeTransfer) -> None:
        most = self._most_prompt_tokens
        prefills = isinstance(transfer, PrefillTransfer)
        if prefills and most is not None and transfer.prompt_tokens > most:
            raise BadRequestError(
                f"request {transfer.request_id}: a prompt of {transfer.prompt_tokens} tokens and "
                f"its drafts do not fit the draft model's context, {most} would; shorten it, or "
                "leave --speculative-config out at all engines"
            )

    def _chunk_blocks(self, start_tokens: int, end_tokens: int) -> BlockRun:
        assert start_tokens % self._block_tokens == 0, "chunks end at block boundaries"
        return chunk_of(start_tokens, end_tokens - start_tokens, self._block_tokens)

    def _full_blocks(self, tokens: int) -> int:
        return new_full_blocks(0, tokens, self._block_tokens)

    def _decode_work(self, request_id: str) -> DecodeWork:
        tracked = self._tracked[request_id]
        transfer = tracked.transfer
        assert isinstance(transfer, DecodeTransfer), "a DE's request"
        filled_tokens = self._tokens_to_fill(tracked.request, transfer)
        filled = min(holding_blocks(filled_tokens, self._block_tokens), len(transfer.slots))
        shared = min(self._full_blocks(tracked.found_tokens), filled)
        # Other requests may be reading those now.
        new = (self._hbm_block(tracked, row) for row in range(shared, filled))
        return DecodeWork(request_id, transfer, (*[NO_BLOCK] * shared, *new), tracked.waits)

    def _hbm_block(self, tracked: _Tracked, row: int, computed_tokens: int = 0) -> HbmBlock:
        """Return the ids of one of a request's blocks, as they are after ``computed_tokens``."""
        if len(self._groups.windows) == 1:
            return tracked.blocks[0][row]
        return tuple(
            ids[row]
            if ids[row] != _NULL_BLOCK and row >= self._groups.first_block(group, computed_tokens)
            else NO_BLOCK
            for group, ids in enumerate(tracked.blocks)
        )

    def _newly_full(
        self, tracked: _Tracked, start_tokens: int, end_tokens: int
    ) -> list[GeneratedBlock]:
        """Return the blocks that this step fills.

        With asynchronous scheduling the key of a block can be one step late: it is then picked up
        in the next one.  A block that has left a window by then is not whole any more.
        """
        keys = tracked.request.block_hashes
        known = min(map(len, tracked.blocks), default=0)
        full_blocks = min(self._full_blocks(end_tokens), len(keys), known)
        new = range(tracked.persisted_blocks, full_blocks)
        tracked.persisted_blocks = max(tracked.persisted_blocks, full_blocks)
        found = []
        for row in new:
            block = self._hbm_block(tracked, row, start_tokens)
            if isinstance(block, tuple) and NO_BLOCK in block:
                log.warning("block %d of a request left its window and is not persisted", row)
                continue
            parent = bytes(keys[row - 1]) if row else chain_root()
            found.append(GeneratedBlock(block, bytes(keys[row]), parent, tracked.tenant))
        return found


def _scheduled(output: "SchedulerOutput") -> list[tuple[str, int, Sequence[Sequence[int]]]]:
    """Return (request, tokens computed before this step, HBM blocks added in it, by group).

    New requests got their blocks through ``blocks_allocated``; resumed ones as well.
    """
    rows: list[tuple[str, int, Sequence[Sequence[int]]]] = [
        (new.req_id, new.num_computed_tokens, ()) for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        added = cached.new_block_ids[index]
        fresh = added is None or request_id in cached.resumed_req_ids
        rows.append((request_id, cached.num_computed_tokens[index], () if fresh else added))
    return rows
