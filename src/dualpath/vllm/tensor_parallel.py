"""An engine's ranks as vLLM has them: how they agree, and which slice of KV each holds.

vLLM cuts KV by heads.  With fewer KV heads than ranks it gives one head to several of them, and
latent KV (MLA) whole to each: these are *replicas* of one slice.
"""

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group

from dualpath.core.errors import ConfigError
from dualpath.core.parts import PartSlice
from dualpath.core.parts import slices_of as cut_into
from dualpath.engine.rank import RankPlace, rank_place
from dualpath.transport.nic_pairing import paired_here
from dualpath.vllm.cache_layers import specs_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

T = TypeVar("T")


class VllmRanks:
    """See ``engine.ranks.RankGroup``; to be called on the thread that computes, as vLLM does."""

    def __init__(self) -> None:
        self._group: Any = get_tp_group()
        self.rank: int = self._group.rank_in_group
        self.size: int = self._group.world_size

    def broadcast(self, value: T | None) -> T:
        """See the contract."""
        told: T = self._group.broadcast_object(value, src=0)
        return told

    def gather(self, value: T) -> list[T]:
        """See the contract."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value, group=self._group.cpu_group)
        return found


def slices_of(config: "VllmConfig", cache: "KVCacheConfig") -> int:
    """Return into how many slices the ranks of an engine cut the KV of each layer.

    Raises ``ConfigError`` for layers that are not all cut alike.
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
    """Return this rank's place among those of its engine, and the slice that it holds."""
    return rank_place(VllmRanks(), slices_of(config, cache))


def nearest_nic(device: torch.device, ranks: int) -> str:
    """Return the RDMA port nearest to a rank's GPU; empty where UCX may choose.

    It may for engines of one rank, as ever: their ports are for whoever starts them to give.
    """
    if ranks == 1 or device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return paired_here().get("{:04x}:{:02x}:{:02x}.0".format(*place), "")
