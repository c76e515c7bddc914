"""Ranks of a tensor-parallel engine give each other latent KV on their GPUs (``shared_loads``).

One all-gather per layer and KV tensor over vLLM's tensor-parallel group, queued on the stream that
computes, as vLLM's own collectives are.  No GPU has run it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dualpath.core.errors import ConfigError
from dualpath.engine.rank import RankPlace


class Gathering(Protocol):
    """As much of vLLM's group of ranks as is needed."""

    rank_in_group: int

    def all_gather(self, given: Tensor, dim: int = -1) -> Tensor:
        """Return what all ranks give, one behind the other along ``dim``."""
        ...


class _Rows:
    """Which blocks this rank gives, and where in what was gathered each block lies."""

    def __init__(self, blocks: Sequence[Sequence[int]], rank: int, device: torch.device) -> None:
        self.blocks = [list(ids) for ids in blocks]
        rows = max(map(len, blocks), default=0)
        # All give as many rows: those of a rank that has fewer end with any.
        own = self.blocks[rank] if blocks else []
        padded = [*own, *[own[-1] if own else 0] * (rows - len(own))]
        there = [row * rows + n for row, ids in enumerate(blocks) for n in range(len(ids))]
        self.given, self.ids, self.there = (
            torch.tensor(numbers, dtype=torch.int64, device=device)
            for numbers in (padded, [block for ids in blocks for block in ids], there)
        )


class TensorExchange:
    """See ``engine.shared_loads.LoadExchange``; ``layers[l]`` are the KV tensors of a layer.

    Each tensor's first dimension counts ``num_blocks`` blocks, or a multiple for smaller ones of
    its kernel.
    """

    def __init__(
        self, group: Gathering, layers: Sequence[Sequence[Tensor]], num_blocks: int
    ) -> None:
        self._group = group
        #: Layers of a pass mostly exchange the same blocks.
        self._last = _Rows((), 0, torch.device("cpu"))
        self._layers = [
            [cache.unflatten(0, (num_blocks, -1)).view(torch.uint8) for cache in caches]
            for caches in layers
        ]

    def exchange(self, layer: int, blocks: Sequence[Sequence[int]]) -> None:
        """See the contract."""
        caches = self._layers[layer]
        if self._last.blocks != blocks:
            self._last = _Rows(blocks, self._group.rank_in_group, caches[0].device)
        last = self._last
        for cache in caches:
            gathered = self._group.all_gather(cache.index_select(0, last.given), dim=0)
            cache.index_copy_(0, last.ids, gathered.index_select(0, last.there))


def exchanging(
    place: RankPlace, group: Gathering, layers: Sequence[Sequence[Tensor]], num_blocks: int
) -> RankPlace:
    """Return the place of a rank that shares its loads, if others hold the same KV.

    Raises ``ConfigError`` where that cannot be.
    """
    replicas = place.replica.count
    if replicas == 1:
        return place
    if layers[0][0].device.type != "cuda":
        raise ConfigError(
            f"share_loads for KV in memory of the {layers[0][0].device.type}: ranks gather it over "
            "links between GPUs, and here it would cross the same memory once more; leave "
            "share_loads out"
        )
    if replicas != place.group.size:
        raise ConfigError(
            f"share_loads for {place.group.size} ranks of which {replicas} hold the same KV: it is "
            "gathered over all ranks of an engine, so that all must hold the same, as of latent "
            "attention; leave share_loads out"
        )
    return place._replace(exchange=TensorExchange(group, layers, num_blocks))
