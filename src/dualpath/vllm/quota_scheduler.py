"""vLLM's scheduler with the compute quota of §6.2 and block-aligned chunk ends.

vLLM asks ``_reserve_prefill_lookahead`` once per request, in FIFO order, with exactly the paper's
pair (cached, bsz) and accepts a smaller bsz: one hook carries intra-engine scheduling.  The hook
is private; ``tests/unit/test_vllm_hooks.py`` pins its signature.

Chunk ends are aligned to blocks so that loads (blocks before the chunk) and new KV (blocks of the
chunk) never share a block: vLLM writes a layer's new KV before it waits for that layer's load.
"""

import logging
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from dualpath.policy.batching import AttentionGeometry, ComputeQuota, LayerTimeEstimate
from dualpath.vllm.connector import settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

#: Attention throughput assumed until it is measured, FLOP/s; only the batch size depends on it.
ASSUMED_FLOPS_PER_S = {"cpu": 4e10, "cuda": 3e14}
_NO_QUOTA_S = 1e9


class QuotaScheduler(Scheduler):
    """Scheduler of a prefill engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        super().__init__(*args, **kwargs)
        self.quota = quota_for(self.vllm_config, self.block_size)

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":  # noqa: ANN401
        """Begin an empty batch, then schedule as vLLM does."""
        self.quota.reset()
        return super().schedule(*args, **kwargs)

    def _reserve_prefill_lookahead(
        self, request: "Request", num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        limit = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        remaining = request.num_tokens - num_computed_tokens
        if limit <= 0 or request.num_output_tokens > 0:
            return limit
        bsz = self.quota.admit(num_computed_tokens, remaining, limit)
        if bsz < remaining and (num_computed_tokens + bsz) % self.block_size:
            return 0  # vLLM's token budget ends within a block: wait for the next batch
        return bsz


def quota_for(config: "VllmConfig", block_tokens: int) -> ComputeQuota:
    """Return the quota of an engine from its model's geometry and its settings."""
    settings = settings_of(config)
    model, parallel = config.model_config, config.parallel_config
    head_size = model.get_head_size()
    geometry = AttentionGeometry.from_heads(
        layers=model.get_num_layers(parallel),
        query_heads=model.get_num_attention_heads(parallel),
        key_dimension=head_size,
        value_dimension=head_size,
    )
    flops_per_s = settings.quota_flops_per_s
    if not flops_per_s:
        flops_per_s = ASSUMED_FLOPS_PER_S.get(current_platform.device_type, 1e12)
    quota_s = settings.compute_quota_s or _NO_QUOTA_S
    log.info("compute quota %.3g s at %.3g attention FLOP/s", quota_s, flops_per_s)
    return ComputeQuota(
        geometry,
        LayerTimeEstimate(overhead_s=0.0, flops_per_s=flops_per_s),
        quota_s,
        align_tokens=block_tokens,
    )
