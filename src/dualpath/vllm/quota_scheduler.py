"""vLLM's scheduler with the compute quota of §6.2 and block-aligned chunk ends.

vLLM calls ``_reserve_prefill_lookahead`` once per request, in FIFO order, with the paper's pair
(cached, bsz) and accepts a smaller bsz, so this one hook implements intra-engine scheduling.  The
hook is private; ``tests/unit/test_vllm_hooks.py`` pins its signature.

Where the DE receives a request's KV in HBM the quota bounds the loads of a step as well: by the
time per token that the worker observes in its passes, and the measured costs of passes.

Chunk ends are aligned to blocks so that loads (blocks before the chunk) and new KV (blocks of the
chunk) never share a block: vLLM writes a layer's new KV before it waits for that layer's load.
"""

import logging
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from dualpath.policy.batching import (
    NO_LOAD_BOUND,
    Chunk,
    ComputeQuota,
    LayerTimeEstimate,
    LoadBound,
)
from dualpath.vllm.connector import DualPathConnector, settings_of
from dualpath.vllm.metadata import StepMetadata
from dualpath.vllm.pass_costs import PassCosts
from dualpath.vllm.profiling import attention_geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

#: Assumed attention throughput if it is not measured, in FLOP/s; it only affects batch sizes.
ASSUMED_FLOPS_PER_S = {"cpu": 4e10, "cuda": 3e14}
_NO_QUOTA_S = 1e9


class QuotaScheduler(Scheduler):
    """Scheduler of a prefill engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        super().__init__(*args, **kwargs)
        self._quota: ComputeQuota | None = None

    @property
    def quota(self) -> ComputeQuota:
        """The quota, created at first use because the worker reports its costs after start."""
        if self._quota is None:
            self._quota = quota_for(self.vllm_config, self.block_size, self._dualpath.costs)
        return self._quota

    @property
    def _dualpath(self) -> DualPathConnector:
        assert isinstance(self.connector, DualPathConnector), "the plugin adds both"
        return self.connector

    @property
    def _load_token_s(self) -> float:
        """How long the load of a token takes; 0 if that, or the costs of passes, are not known."""
        costs = self._dualpath.costs
        known = costs is not None and costs.besides_attention is not None
        return self._dualpath.scheduler_side.load_token_s if known else 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":  # noqa: ANN401
        """Reset the quota for a new batch, then schedule as vLLM does.

        The worker gets the predicted attention time, to compare it with the measured one.
        """
        self.quota.reset(self._load_token_s)
        scheduled = super().schedule(*args, **kwargs)
        if isinstance(step := scheduled.kv_connector_metadata, StepMetadata):
            step.predicted_attention_s = self.quota.seconds(chunks_of(scheduled))
        return scheduled

    def _reserve_prefill_lookahead(
        self, request: "Request", num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        limit = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        remaining = request.num_tokens - num_computed_tokens
        if limit <= 0 or request.num_output_tokens > 0:
            return limit
        side, quota = self._dualpath.scheduler_side, self.quota
        bsz = side.admit(quota, request.request_id, num_computed_tokens, remaining, limit)
        if bsz < remaining and (num_computed_tokens + bsz) % self.block_size:
            return 0  # vLLM's token budget ends within a block, so wait for the next batch.
        return bsz


def chunks_of(scheduled: "SchedulerOutput") -> list[Chunk]:
    """Return what a step computes, as pairs (cached, bsz)."""
    computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    running = scheduled.scheduled_cached_reqs
    computed |= dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
    return [
        (computed[request_id], tokens)
        for request_id, tokens in scheduled.num_scheduled_tokens.items()
        if request_id in computed
    ]


def quota_for(
    config: "VllmConfig", block_tokens: int, costs: PassCosts | None = None
) -> ComputeQuota:
    """Return an engine's quota; throughput is from settings, else measured, else assumed."""
    settings = settings_of(config)
    estimate, origin = LayerTimeEstimate(0.0, settings.quota_flops_per_s), "set"
    if not settings.quota_flops_per_s:
        assumed = ASSUMED_FLOPS_PER_S.get(current_platform.device_type, 1e12)
        estimate, origin = LayerTimeEstimate(0.0, assumed), "assumed"
        if costs is not None:
            estimate, origin = costs.attention, "profiled"
    quota_s = settings.compute_quota_s or _NO_QUOTA_S
    log.info(
        "compute quota %.3g s at %.3g attention FLOP/s (%s)",
        quota_s, estimate.flops_per_s, origin,
    )  # fmt: skip
    rest = None if costs is None else costs.besides_attention
    loads = NO_LOAD_BOUND if rest is None else LoadBound(0.0, rest.batch_s, rest.token_s)
    if rest is None:
        log.info(
            "the loads of a pass are not bounded where decode engines receive KV in HBM: the time "
            "of a pass besides attention is not measured; set profile to auto"
        )
    return ComputeQuota(attention_geometry(config), estimate, quota_s, block_tokens, loads)
