"""Selects the chunks of a forward pass (§6.2) and its compute time, as in the simulator."""

from collections.abc import Iterable
from typing import NamedTuple

from dualpath.laboratory.emulated.hbm import EmulatedHbm
from dualpath.laboratory.emulated.requests import PrefillRequest
from dualpath.laboratory.emulated.settings import EmulatedSettings
from dualpath.model.sim.derived import NO_QUOTA_S
from dualpath.model.sim.rules import pass_s
from dualpath.model.sim.settings import PrefillCosts
from dualpath.policy.batching import AttentionGeometry, ComputeQuota, LayerTimeEstimate


class Chunk(NamedTuple):
    """Tokens of a request in one pass: ``bsz`` tokens after ``cached`` cached ones."""

    request: PrefillRequest
    cached: int
    bsz: int


class Batch(NamedTuple):
    """A forward pass; ``compute_s`` excludes waiting for KV."""

    chunks: list[Chunk]
    compute_s: float


class BatchFormer:
    """Batches waiting requests of one engine in FIFO order, without lock step with other ranks."""

    def __init__(self, settings: EmulatedSettings, hbm: EmulatedHbm) -> None:
        engine = settings.engine
        limited = engine.mode.compute_quota and engine.compute_quota_s > 0
        self._costs = settings.costs.prefill
        self._cap_tokens = None if engine.mode.compute_quota else settings.batch_cap_tokens
        self._geometry = settings.geometry
        self._hbm = hbm
        self._quota = ComputeQuota(
            attention_seconds(self._costs),
            LayerTimeEstimate(overhead_s=self._costs.attention_batch_s, flops_per_s=1.0),
            engine.compute_quota_s if limited else NO_QUOTA_S,
            settings.geometry.block_tokens,
        )

    def form(self, waiting: Iterable[PrefillRequest]) -> Batch | None:
        """Return the next pass, None if nothing can be computed now.

        HBM for the whole prompt is allocated when a request first enters a pass.
        """
        self._quota.reset()
        chunks: list[Chunk] = []
        left = self._cap_tokens
        for request in waiting:
            if left == 0 or not self._place(request):
                break
            cached = request.done_tokens
            bsz = self._quota.admit(cached, request.prefix.tokens - cached, left)
            if bsz == 0:
                break
            chunks.append(Chunk(request, cached, bsz))
            left = None if left is None else left - bsz
            if self._quota.closed:
                break
        return Batch(chunks, self._compute_s(chunks)) if chunks else None

    def _place(self, request: PrefillRequest) -> bool:
        if not request.hbm_blocks:
            blocks = self._hbm.allocate(self._geometry.blocks_for(request.prefix.tokens))
            if blocks is None:
                return False
            request.hbm_blocks = blocks
        return True

    def _compute_s(self, chunks: list[Chunk]) -> float:
        costs = self._costs
        return pass_s(
            self._quota.predicted_s,
            sum(chunk.bsz for chunk in chunks),
            costs.batch_s,
            costs.feed_forward_token_s,
            costs.exchange_token_s,
            costs.interleaved,
        )


def attention_seconds(costs: PrefillCosts) -> AttentionGeometry:
    """Return the attention geometry in seconds: one FLOP of the policy stands for one second."""
    return AttentionGeometry(
        pair_flops=costs.pair_s,
        token_flops=costs.attention_token_s,
        window_tokens=costs.window_tokens or None,
        index_pair_flops=costs.index_pair_s,
    )
