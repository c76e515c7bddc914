"""The connector inside vLLM's scheduler: which tokens are loaded and which blocks are persisted.

A PE's request arrives when its hit KV is already in a DRAM buffer, so its hit tokens are reported
as a synchronous load, which happens layer by layer within the forward pass.  A DE's request arrives
when the prompt's KV is complete in this engine's buffer, so its tokens are reported as an
asynchronous load: vLLM allocates HBM, the worker copies, then the request runs.  With a hand-over
in HBM the KV is in reserved blocks, which replace the request's once the load is over.  Where a DE
computes the append, its transfer has the hit alone: vLLM computes the tokens behind it, and their
full blocks are persisted like those of generated tokens.

A connector cannot make vLLM's scheduler fail a request, except by a failed load.  So for a PE's
request without a valid transfer, one token is reported as an asynchronous load, and the worker
reports at once that the load failed.  Such a request must not be computed: the PE's layers share
regions, and no transfer would move their KV out.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from dualpath.core.blocks import BlockGeometry, chain_root, holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, DualPathError
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.engine.control.transfer_checks import (
    TransferChecks,
    check_prompt,
    is_own_append,
    with_own_hits,
)
from dualpath.engine.passes.forward_pass import admit_chunk
from dualpath.engine.passes.generated import GeneratedBlock
from dualpath.engine.passes.hbm_layout import NO_BLOCK, HbmBlock
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.settings import EngineSettings
from dualpath.plan.counts import new_full_blocks
from dualpath.plan.steps import chunk_of
from dualpath.policy.batching import ComputeQuota
from dualpath.vllm.cache_layers import CacheGroups
from dualpath.vllm.metadata import (
    BlockExchange,
    DecodeWork,
    HeldBlocksMetadata,
    StepMetadata,
    apply,
)
from dualpath.vllm.receiving_area import receiving_blocks

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


log = logging.getLogger(__name__)

#: vLLM's block id for blocks that have left the sliding window.
_NULL_BLOCK = 0


class _TrackedRequest:
    """A request with its transfer; ``transfer`` is None if it is invalid."""

    def __init__(
        self, request: "Request", transfer: PrefillTransfer | DecodeTransfer | None, tenant: str
    ) -> None:
        self.request = request
        self.transfer = transfer
        #: Owner of its blocks for quotas, also if the transfer is invalid.  It cannot be derived
        #: from ``cache_salt``, which adapters change.
        self.tenant = tenant
        #: vLLM's block ids by KV cache group, in order.
        self.blocks: list[list[int]] = []
        self.persisted_blocks = 0
        #: Prompt tokens that vLLM's prefix cache found in a DE's HBM, in blocks that may be shared.
        self.found_tokens = 0
        #: Whether vLLM waits for the copy of the other tokens to a DE's HBM.
        self.waits = False
        self.transferred = False


class SchedulerSide:
    """State of one engine's scheduler process."""

    def __init__(
        self,
        settings: EngineSettings,
        geometry: BlockGeometry,
        groups: CacheGroups,
        max_drafted_prompt_tokens: int | None = None,
    ) -> None:
        self._settings = settings
        #: Limit at a prefill engine with drafts, see ``draft_context``.
        self._max_drafted_prompt_tokens = max_drafted_prompt_tokens
        self._groups = groups
        self._layers = geometry.layers
        self._role = settings.role
        self._checks = TransferChecks(settings, geometry)
        self._block_tokens = geometry.block_tokens
        self._tracked: dict[str, _TrackedRequest] = {}
        self._rejected: dict[str, str] = {}
        self._new_decode_transfers: list[str] = []
        self._refused: list[str] = []
        self._ended: list[str] = []
        self._pool: BlockPool | None = None
        #: The number that was last sent to the worker.
        self._reported_free_blocks = 0
        #: References held on blocks that a transfer may still write.
        self._held_blocks = 0
        #: vLLM's own tables of the blocks of requests that wait for a load of a prompt in HBM.
        self._tables: dict[str, list[KVCacheBlock]] = {}
        #: Blocks that are in the receiving area from the next step on.
        self._received: list[int] = []
        #: How long passes lately took to load a token of KV, 0 before the first load.
        self.load_token_s = 0.0
        self._is_member = True

    def set_geometry(self, geometry: BlockGeometry) -> None:
        """Set the block geometry that the worker reported; called before the first request."""
        self._checks = TransferChecks(self._settings, geometry)
        self._layers = geometry.layers

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """Set vLLM's block pool; the worker assumes that all blocks are free at start."""
        self._pool = pool
        self._reported_free_blocks = pool.get_num_free_blocks()
        area = receiving_blocks(self._settings, pool.num_gpu_blocks)
        pool.touch([pool.blocks[block] for block in area])

    def update_held_blocks(self, changes: HeldBlocksMetadata) -> None:
        """Hold or release HBM blocks; called before the next step is scheduled."""
        assert self._pool is not None, "vLLM binds its block pool at start"
        apply(changes, self._pool)
        self._held_blocks += len(changes.held) - len(changes.released)
        for exchange in changes.exchanges:
            self._exchange(exchange, self._pool)
        if changes.load_token_s is not None:
            self.load_token_s = changes.load_token_s

    def _exchange(self, exchange: BlockExchange, pool: "BlockPool") -> None:
        """Put blocks with a prompt's KV into the table of its request, and others into the area.

        The request still waits for its load, aborted or not, so that vLLM has freed no block of it.
        """
        table = self._tables.pop(exchange.vllm_request_id, None)
        if table is None:  # a defect: without a table the blocks stay where they are
            self._received += exchange.blocks
            return
        for row, block in enumerate(exchange.blocks, exchange.first):
            self._received.append(table[row].block_id)
            table[row] = pool.blocks[block]
        if tracked := self._tracked.get(exchange.vllm_request_id):
            tracked.blocks = [[block.block_id for block in table]]

    def left(self) -> None:
        """The engine has left the cluster: from now on no transfer is valid."""
        self._is_member = False

    def joined(self) -> None:
        """The engine joins the cluster again; its worker assumes that all blocks are free."""
        self._is_member = True
        if self._pool is not None:
            self._reported_free_blocks = self._pool.num_gpu_blocks

    def forget_hbm_blocks(self) -> None:
        """Remove all blocks from vLLM's prefix cache, those in use as well.

        vLLM's own reset refuses while any block is in use, such as one that a transfer of an ended
        request still writes.
        """
        pool = self._pool
        if pool is None or pool.reset_prefix_cache():
            return
        pool.evict_blocks({block.block_id for block in pool.blocks})

    @property
    def needs_step(self) -> bool:
        """Whether a step is needed to exchange HBM updates with the worker, even without requests.

        vLLM frees the HBM of a request that was aborted during its copy with the output of a step,
        which may be the last one.  Without another step the router would count that HBM as used
        until the next request, and might not send one for that reason.  Likewise the worker
        releases held blocks only with a step.
        """
        if self._pool is None:
            return False
        free_blocks = self._pool.get_num_free_blocks()
        changed = self._reported_free_blocks != free_blocks
        return changed or self._held_blocks > 0 or bool(self._received)

    def matched_tokens(self, request: "Request", computed_tokens: int) -> tuple[int, bool]:
        """Return (tokens to load after ``computed_tokens``, whether asynchronously)."""
        tracked = self._track(request)
        transfer = tracked.transfer if tracked is not None else None
        if isinstance(transfer, PrefillTransfer):
            hit_tokens = transfer.hit_blocks * self._block_tokens
            return max(hit_tokens - computed_tokens, 0), False
        if self._role is Role.PREFILL:
            # With prompt logprobs vLLM would ignore the reported tokens.
            request.skip_reading_prefix_cache = False
            return 1, True
        # The request was preempted after its KV was copied: the buffer is freed, so recompute.
        if tracked is None or transfer is None or tracked.transferred:
            return 0, False
        tracked.found_tokens = computed_tokens
        waiting_tokens = max(self._tokens_to_fill(tracked.request, transfer) - computed_tokens, 0)
        return waiting_tokens, waiting_tokens > 0

    def _tokens_to_fill(self, request: "Request", transfer: DecodeTransfer) -> int:
        """Return how many of a prompt's tokens are loaded.

        If all tokens are loaded, vLLM recomputes the last one, but by then it has freed the blocks
        outside the windows of the token after it.  So with windows one token fewer is loaded.
        """
        if any(window is not None for window in self._groups.windows):
            return min(transfer.prompt_tokens, request.num_tokens - 1)
        return transfer.prompt_tokens

    def admit(
        self, quota: ComputeQuota, request_id: str, cached: int, remaining: int, limit: int
    ) -> int:
        """Return how many of a request's ``remaining`` tokens enter a PE's next pass."""
        tracked = self._tracked.get(request_id)
        if tracked is None or not isinstance(tracked.transfer, PrefillTransfer):
            return quota.admit(cached, remaining, limit, loaded=0, bounded=False)
        return admit_chunk(
            quota,
            tracked.transfer,
            cached,
            remaining,
            limit,
            block_tokens=self._block_tokens,
            resident=self._settings.layers_in_hbm(self._layers) == self._layers,
        )

    def blocks_allocated(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        """Record that vLLM has allocated HBM for a request."""
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
            if transfer.in_hbm:
                (table,) = blocks.blocks
                assert isinstance(table, list), "vLLM's own table of the request"
                self._tables[request.request_id] = table
            tracked.persisted_blocks = self._full_blocks(transfer.prompt_tokens)
            self._new_decode_transfers.append(request.request_id)

    def hit_sources(self, request: "Request", external_tokens: int) -> dict["CacheHitSource", int]:
        """Return by vLLM's names from where the last loaded tokens of a request come.

        These are ``external_tokens`` tokens, behind those of vLLM's prefix cache.  Blocks that this
        engine's buffer had are from the host, blocks that it read are from disk, all others come
        from another engine.
        """
        tracked = self._tracked.get(request.request_id)
        transfer = tracked.transfer if tracked is not None else None
        if isinstance(transfer, PrefillTransfer):
            loaded_tokens = transfer.hit_blocks * self._block_tokens
        elif transfer is not None:
            loaded_tokens = self._tokens_to_fill(request, transfer)
        else:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: external_tokens}
        first_token = loaded_tokens - external_tokens
        tokens: dict[CacheHitSource, int] = {}
        for run in transfer.hits:
            if not run.is_at(self._role):
                continue
            start = max(run.blocks.first * self._block_tokens, first_token)
            count = min(run.blocks.end * self._block_tokens, loaded_tokens) - start
            if count > 0:
                source = CacheHitSource.HOST if run.cached else CacheHitSource.DISK
                tokens[source] = tokens.get(source, 0) + count
        if (others := external_tokens - sum(tokens.values())) > 0:
            tokens[CacheHitSource.P2P] = others
        return tokens

    def build(self, output: "SchedulerOutput") -> StepMetadata:
        """Return this step's work for the worker."""
        step = StepMetadata()
        if self._pool is not None:
            self._reported_free_blocks = self._pool.get_num_free_blocks()
            step.free_hbm_tokens = self._groups.tokens_in(self._reported_free_blocks)
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
                step.prefills.append(PrefillChunk(tracked.transfer, blocks, hbm_blocks))
            elif self._role is Role.DECODE:
                step.generated.extend(self._newly_full(tracked, start_tokens, end_tokens))
        step.decodes = [self._decode_work(request_id) for request_id in self._new_decode_transfers]
        self._new_decode_transfers.clear()
        step.rejected, self._rejected = self._rejected, {}
        step.refused, self._refused = self._refused, []
        step.ended, self._ended = self._ended, []
        step.received, self._received = self._received, []
        return step

    def finished(self, request: "Request") -> None:
        """Record that a request has finished or was aborted."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None and isinstance(tracked.transfer, DecodeTransfer):
            self._ended.append(tracked.transfer.request_id)

    def _track(self, request: "Request") -> _TrackedRequest | None:
        if (known := self._tracked.get(request.request_id)) is not None:
            return known
        transfer, tenant = None, ""
        try:
            transfer = self._checks.carried(request.kv_transfer_params)
            if transfer is None:
                return None
            if not self._is_member:
                raise BadRequestError(
                    f"request {transfer.request_id}: the engine has left the cluster, because a "
                    "trainer has paused it or changes its weights; send it to another engine"
                )
            tenant = transfer.tenant if isinstance(transfer, DecodeTransfer) else ""
            self._checks.check(transfer, request.num_tokens)
            self._check_leg(request, transfer)
            self._check_drafts(transfer)
        except DualPathError as error:
            # A DE computes the prompt itself; a PE's request fails and the router gets the reason.
            log.error("%s", error)
            if isinstance(transfer, PrefillTransfer):
                self._rejected[transfer.request_id] = str(error)
            transfer = None
        if isinstance(transfer, PrefillTransfer):
            transfer = with_own_hits(transfer, request.block_hashes)
        elif transfer is not None and not is_own_append(transfer, request.block_hashes):
            transfer = None
        tracked = self._tracked[request.request_id] = _TrackedRequest(request, transfer, tenant)
        return tracked

    def _check_leg(self, request: "Request", transfer: PrefillTransfer | DecodeTransfer) -> None:
        """Raise ``BadRequestError`` if a leg's KV is of another prompt, or of another model.

        A prompt of less than one block has no key that would show an adapter or an image.
        """
        if not transfer.prompt_digest:
            return
        if request.lora_request is not None or request.mm_features:
            raise BadRequestError(
                f"request {transfer.request_id}: it has an adapter or an image, and its KV is of "
                "text without an adapter; send the same request to both engines"
            )
        check_prompt(
            transfer, request.block_hashes, request.prompt_token_ids or (), self._block_tokens
        )

    def _check_drafts(self, transfer: PrefillTransfer | DecodeTransfer) -> None:
        most = self._max_drafted_prompt_tokens
        prefills = isinstance(transfer, PrefillTransfer)
        if prefills and most is not None and transfer.prompt_tokens > most:
            raise BadRequestError(
                f"request {transfer.request_id}: the prompt has {transfer.prompt_tokens} tokens, "
                f"but the draft model's context allows at most {most}; shorten it, or leave "
                "--speculative-config out at all engines"
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
        loaded = transfer.loaded_blocks(self._block_tokens)
        filled = min(holding_blocks(filled_tokens, self._block_tokens), loaded)
        shared = min(self._full_blocks(tracked.found_tokens), filled)
        # Shared blocks are not written, because other requests may be reading them.
        new = (self._hbm_block(tracked, row) for row in range(shared, filled))
        return DecodeWork(request_id, transfer, (*[NO_BLOCK] * shared, *new), tracked.waits)

    def _hbm_block(self, tracked: _TrackedRequest, row: int, computed_tokens: int = 0) -> HbmBlock:
        """Return the HBM block ids of a request's block ``row`` after ``computed_tokens``."""
        if len(self._groups.windows) == 1:
            return tracked.blocks[0][row]
        return tuple(
            ids[row]
            if ids[row] != _NULL_BLOCK and row >= self._groups.first_block(group, computed_tokens)
            else NO_BLOCK
            for group, ids in enumerate(tracked.blocks)
        )

    def _newly_full(
        self, tracked: _TrackedRequest, start_tokens: int, end_tokens: int
    ) -> list[GeneratedBlock]:
        """Return the blocks that this step fills.

        With asynchronous scheduling the key of a block can be one step late: the block is then
        returned in the next step.  If it has left a window by then, it is incomplete and skipped.
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
            transfer = tracked.transfer
            request_id = "" if transfer is None else transfer.request_id
            found.append(
                GeneratedBlock(block, bytes(keys[row]), parent, tracked.tenant, request_id)
            )
        return found


def _scheduled(output: "SchedulerOutput") -> list[tuple[str, int, Sequence[Sequence[int]]]]:
    """Return (request, tokens computed before this step, HBM blocks added in it, by group).

    The blocks of new and resumed requests were set by ``blocks_allocated``.
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
