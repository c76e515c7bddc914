"""Exchanges loaded latent KV between the GPUs of a tensor-parallel engine (``shared_loads``).

Each layer and KV tensor takes one all-gather over vLLM's tensor-parallel group, queued on the
compute stream like vLLM's own collectives.  This has not been run on a GPU yet.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dualpath.core.errors import ConfigError
from dualpath.engine.rank import RankPlace


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
