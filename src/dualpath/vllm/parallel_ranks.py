"""Tensor-parallel ranks of an engine: their communication, and the slice of KV that each holds.

vLLM splits KV by heads.  With fewer KV heads than ranks several ranks hold the same head, and with
latent KV (MLA) all ranks hold the whole KV: these ranks are *replicas* of one slice.
"""

import logging
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from vllm.distributed.parallel_state import get_dp_group, get_tp_group

from dualpath.core.blocks import PartSlice
from dualpath.core.blocks import slices_of as cut_into
from dualpath.core.cluster import GroupRank, rank_mark
from dualpath.core.errors import ConfigError
from dualpath.engine.ranks.rank import RankPlace, rank_place
from dualpath.engine.settings import NET_DEVICES, EngineSettings
from dualpath.transport.nic_pairing import PairedPort, local_nic_pairing
from dualpath.vllm.cache_layers import specs_of
from dualpath.vllm.profiling import LockStep

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger(__name__)

# ----------------------------------------------------------------------------------- data parallel
# An engine as one rank of a vLLM data-parallel group, with any load balancing (§A.4).
#
# Each rank is an engine of its own, with one device, one scheduler and one data plane.  Ranks
# compute in lock step, so a rank that ends takes the others down with it.  vLLM always starts all
# ranks of a group together; while they start, they agree on the group's name and epoch with vLLM's
# own process group.  If several ranks share one API server, a request header selects the rank.


def engine_id_of_rank(engine_id: str, parallel: "ParallelConfig") -> str:
    """Return the engine id of a rank: the configured id, with the rank appended in a group."""
    if parallel.data_parallel_size == 1 and parallel.data_parallel_index == 0:
        return engine_id
    return engine_id + rank_mark(parallel.data_parallel_index)


def agree_on_group(engine_id: str, parallel: "ParallelConfig") -> GroupRank | None:
    """Return this engine's place in its data-parallel group, None without a group.

    All ranks call this once at start and wait for each other.  The group takes the name that its
    first rank proposes.
    """
    if parallel.data_parallel_size == 1:
        return None
    proposed = (engine_id.removesuffix(rank_mark(0)), uuid.uuid4().hex[:12])
    group, epoch = get_dp_group().broadcast_object(proposed, src=0)
    return GroupRank(
        group,
        epoch,
        parallel.data_parallel_rank,
        parallel.data_parallel_size,
        at_server=_number_at_server(parallel),
    )


def lock_step_of(parallel: "ParallelConfig") -> LockStep | None:
    """Return how this engine times passes together with its data-parallel group, None without one.

    The store is that of torch's default process group, which has the ranks of all engines.
    """
    if parallel.data_parallel_size == 1:
        return None
    return LockStep(_get_default_store(), parallel.data_parallel_rank, parallel.data_parallel_size)


def group_problems(parallel: "ParallelConfig") -> list[str]:
    """Describe why ranks of this group cannot be engines of a cluster."""
    problems = []
    # Ranks of a dense model compute independently, and vLLM hides the others from each of them.
    if parallel.data_parallel_size == 1 and parallel.data_parallel_index > 0:
        problems.append(
            f"rank {parallel.data_parallel_index} of independent replicas of a dense model: the "
            "first replica cannot see that it shares its server; leave --data-parallel-size out "
            "and start one server per replica"
        )
    if parallel.enable_elastic_ep:
        problems.append("a group of variable size; leave --enable-elastic-ep out")
    return problems


def _number_at_server(parallel: "ParallelConfig") -> int | None:
    """Return the value of ``X-data-parallel-rank`` that selects this rank at its API server.

    None if the rank has a server of its own; vLLM counts local ranks from 0.
    """
    if parallel.data_parallel_external_lb:
        return None
    if parallel.data_parallel_hybrid_lb:
        return parallel.data_parallel_rank_local
    return parallel.data_parallel_rank


# ----------------------------------------------------------------------------------- load exchange
# Exchanges loaded latent KV between the GPUs of a tensor-parallel engine (``shared_loads``).
#
# Each layer and KV tensor takes one all-gather over vLLM's tensor-parallel group, queued on the
# compute stream like vLLM's own collectives.  This has not been run on a GPU yet.


class GatherGroup(Protocol):
    """The part of vLLM's ``GroupCoordinator`` that is used."""

    rank_in_group: int

    def all_gather(self, given: Tensor, dim: int = -1) -> Tensor:
        """Return the tensors of all ranks, concatenated along ``dim``."""
        ...


class _Rows:
    """The blocks that this rank contributes, and the row of each block in the gathered tensor."""

    def __init__(self, blocks: Sequence[Sequence[int]], rank: int, device: torch.device) -> None:
        self.blocks = [list(ids) for ids in blocks]
        rows = max(map(len, blocks), default=0)
        # All ranks contribute the same number of rows; a rank with fewer blocks repeats one.
        own = self.blocks[rank] if blocks else []
        padded = [*own, *[own[-1] if own else 0] * (rows - len(own))]
        there = [row * rows + n for row, ids in enumerate(blocks) for n in range(len(ids))]
        self.given, self.ids, self.there = (
            torch.tensor(numbers, dtype=torch.int64, device=device)
            for numbers in (padded, [block for ids in blocks for block in ids], there)
        )


class TensorExchange:
    """See ``engine.shared_loads.LoadExchange``; ``layers[l]`` are the KV tensors of a layer.

    Each tensor's first dimension is ``num_blocks``, or a multiple of it if its attention kernel has
    smaller blocks.
    """

    def __init__(
        self, group: GatherGroup, layers: Sequence[Sequence[Tensor]], num_blocks: int
    ) -> None:
        self._group = group
        #: The rows of the last call, because layers of a pass usually exchange the same blocks.
        self._last = _Rows((), 0, torch.device("cpu"))
        self._layers = [
            [cache.unflatten(0, (num_blocks, -1)).view(torch.uint8) for cache in caches]
            for caches in layers
        ]

    def exchange(self, layer: int, blocks: Sequence[Sequence[int]]) -> None:
        """See ``LoadExchange``."""
        caches = self._layers[layer]
        if self._last.blocks != blocks:
            self._last = _Rows(blocks, self._group.rank_in_group, caches[0].device)
        last = self._last
        for cache in caches:
            gathered = self._group.all_gather(cache.index_select(0, last.given), dim=0)
            cache.index_copy_(0, last.ids, gathered.index_select(0, last.there))


def with_load_exchange(
    place: RankPlace, group: GatherGroup, layers: Sequence[Sequence[Tensor]], num_blocks: int
) -> RankPlace:
    """Return ``place`` with a load exchange, or unchanged if no other rank holds the same KV.

    Raises ``ConfigError`` if the ranks cannot share loads.
    """
    replicas = place.replica.count
    if replicas == 1:
        return place
    if layers[0][0].device.type != "cuda":
        raise ConfigError(
            f"share_loads needs links between GPUs, but the KV is in {layers[0][0].device.type} "
            "memory, where gathering would only copy it once more; leave share_loads out"
        )
    if replicas != place.group.size:
        raise ConfigError(
            f"share_loads for {place.group.size} ranks of which {replicas} hold the same KV: all "
            "ranks of an engine must hold the same KV, as with latent attention, because it is "
            "gathered over all of them; leave share_loads out"
        )
    return place._replace(exchange=TensorExchange(group, layers, num_blocks))


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


def with_own_nic(
    settings: EngineSettings, parallel: "ParallelConfig", rank: int, device: torch.device
) -> EngineSettings:
    """Return the settings of one rank with the network device of its GPU; logs which and why.

    It is the one that ``net_devices`` has for the rank, else the RDMA port nearest to the GPU.
    ``net_devices`` is counted over the ranks of all data-parallel engines of one server, which
    share their settings.  Raises ``ConfigError`` if ``net_devices`` has none for the rank.
    """
    engine = _number_at_server(parallel) or 0
    nearest = _nearest_port(device)
    found = settings.of_rank(
        engine * parallel.tensor_parallel_size + rank, nearest.name if nearest else ""
    )
    used = found.nixl_engine_config.get(NET_DEVICES)
    if used is None:
        if device.type == "cuda":
            log.info("rank %d: no RDMA port is up, so UCX chooses the network device", rank)
    elif nearest is None or used != nearest.name:
        log.info("rank %d: UCX uses the network device %s, as set", rank, used)
    elif nearest.problem:
        log.warning(
            "rank %d: UCX uses %s, the nearest RDMA port, which is %s; set net_devices to choose "
            "another",
            *(rank, used, nearest.problem),
        )
    else:
        log.info("rank %d: UCX uses %s, the RDMA port nearest to the GPU", rank, used)
    return found


def _nearest_port(device: torch.device) -> PairedPort | None:
    """Return the RDMA port nearest to a GPU, None without a GPU or a port."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return local_nic_pairing().get("{:04x}:{:02x}:{:02x}.0".format(*place))
