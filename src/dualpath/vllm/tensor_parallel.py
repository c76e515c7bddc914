"""Tensor-parallel ranks of an engine: their communication, and the slice of KV that each holds.

vLLM splits KV by heads.  With fewer KV heads than ranks several ranks hold the same head, and with
latent KV (MLA) all ranks hold the whole KV: these ranks are *replicas* of one slice.
"""

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group

from dualpath.core.errors import ConfigError
from dualpath.core.parts import PartSlice
from dualpath.core.parts import slices_of as cut_into
from dualpath.engine.rank import RankPlace, rank_place
from dualpath.transport.nic_pairing import local_nic_pairing
from dualpath.vllm.cache_layers import specs_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

T = TypeVar("T")


class VllmRanks:
    """See ``engine.ranks.RankGroup``; must be called on the thread that computes, as in vLLM."""

    def __init__(self) -> None:
        self._group: Any = get_tp_group()
        self.rank: int = self._group.rank_in_group
        self.size: int = self._group.world_size

    def broadcast(self, value: T | None) -> T:
        """See ``RankGroup``."""
        received: T = self._group.broadcast_object(value, src=0)
        return received

    def gather(self, value: T) -> list[T]:
        """See ``RankGroup``."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value, group=self._group.cpu_group)
        return found


def slices_of(config: "VllmConfig", cache: "KVCacheConfig") -> int:
    """Return into how many slices the ranks of an engine split the KV of each layer.

    Raises ``ConfigError`` if layers are split differently.
    """
    ranks = config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return 1
    specs = specs_of(cache)
    latent = {getattr(spec, "max_tp_shards", None) for spec in specs}
    heads_here = {getattr(spec, "num_kv_heads", None) for spec in specs}
    if len(latent) > 1 or len(heads_here) > 1:
        raise ConfigError(
            f"{ranks} ranks for layers with different numbers of KV heads ({heads_here} per rank); "
            "such models are served with --tensor-parallel-size 1 only"
        )
    heads = latent.pop() or config.model_config.get_total_num_kv_heads()
    return cut_into(ranks, heads)


def place_of(config: "VllmConfig", cache: "KVCacheConfig") -> tuple[RankPlace, PartSlice]:
    """Return this rank's place among the ranks of its engine, and its slice of the KV."""
    return rank_place(VllmRanks(), slices_of(config, cache))


def nearest_nic(device: torch.device, ranks: int) -> str:
    """Return the RDMA port nearest to a rank's GPU; empty to let UCX choose.

    For engines of one rank it is always empty: whoever starts them configures the port for UCX.
    """
    if ranks == 1 or device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return local_nic_pairing().get("{:04x}:{:02x}:{:02x}.0".format(*place), "")
