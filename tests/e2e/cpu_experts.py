"""Patches of vLLM's CPU build for data-parallel attention with expert parallelism, for tests.

``--worker-extension-cls tests.e2e.cpu_experts.MendedCpuExperts`` makes a worker import this.  Two
things are missing in vLLM 0.32: gathering and scattering of unequal sizes, which raise
``NotImplementedError``, and the map from global to local experts, without which the kernel reads
beyond its weights.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


class MendedCpuExperts:
    """Adds nothing to a worker; naming it makes the worker import this module."""


def _all_gatherv(
    self: CpuCommunicator, given: Any, dim: int = 0, sizes: list[int] | None = None
) -> Any:
    assert dim == 0
    if isinstance(given, list):
        return [_all_gatherv(self, each, dim, sizes) for each in given]
    counts = sizes or [given.shape[0]] * self.world_size
    padded = given.new_zeros((max(counts), *given.shape[1:]))
    padded[: given.shape[0]] = given
    gathered = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


def _reduce_scatterv(
    self: CpuCommunicator, given: Tensor, dim: int = 0, sizes: list[int] | None = None
) -> Tensor:
    assert dim == 0
    total = given.contiguous().clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    counts = sizes or [total.shape[0] // self.world_size] * self.world_size
    first = sum(counts[: self.rank_in_group])
    return total[first : first + counts[self.rank_in_group]].clone()


_apply = CPUUnquantizedExperts.apply
#: Of the arguments of ``apply``, without ``self``.
_WEIGHTS, _IDS, _MAP = 4, 5, 8


def _apply_local(self: CPUUnquantizedExperts, *given: Any, **named: Any) -> None:
    """Compute local experts only: those of other ranks count nothing here."""
    names = ("topk_weights", "topk_ids", "expert_map")
    values = list(given)
    for place, name in zip((_WEIGHTS, _IDS, _MAP), names, strict=True):
        if len(values) > place:
            named[name] = values[place]
    local_of = named.get("expert_map")
    if local_of is not None:
        local = local_of[named["topk_ids"].long()]
        weights = named["topk_weights"]
        named["topk_weights"] = torch.where(local >= 0, weights, torch.zeros_like(weights))
        named["topk_ids"] = local.clamp(min=0).to(named["topk_ids"].dtype)
        named["expert_map"] = None
    for place, name in zip((_WEIGHTS, _IDS, _MAP), names, strict=True):
        if len(values) > place:
            values[place] = named.pop(name)
    _apply(self, *values, **named)


if CPUUnquantizedExperts.apply is not _apply_local:
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv
    CPUUnquantizedExperts.apply = _apply_local
