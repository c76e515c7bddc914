"""Ranks exchange blocks of latent KV: real tensors, and a group of threads."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.thread_ranks import on_every_rank

from dualpath.core.errors import ConfigError
from dualpath.engine.passes.step_transfers import Replica
from dualpath.engine.ranks.rank import RankPlace
from dualpath.vllm.parallel_ranks import TensorExchange, with_load_exchange
from dualpath_lab.emulated.ranks import ThreadRanks

BLOCKS = 6
#: Kernel blocks per engine block, as with an attention kernel that has smaller blocks.
KERNEL_BLOCKS = 2


class ThreadGroup:
    """The methods of vLLM's group that are used, between threads."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self.rank_in_group = rank
        self._end = ranks.ends[rank]

    def all_gather(self, given: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._end.gather(given), dim=dim)


def kv_of(layer: int, part: int) -> torch.Tensor:
    """A layer's KV cache tensor as vLLM allocates it, in one of the cache dtypes."""
    dtype = (torch.bfloat16, torch.uint8)[part]
    shape = (BLOCKS * KERNEL_BLOCKS, 1, 4, (8, 3)[part])
    return torch.arange(torch.Size(shape).numel()).add(7 * layer).reshape(shape).to(dtype)


@pytest.mark.parametrize("blocks", [([3, 0], [5]), ([], [1, 2, 4]), ([2], [0])])
def test_each_rank_has_the_blocks_of_all_and_no_other_has_changed(
    blocks: tuple[list[int], list[int]],
) -> None:
    layers = 2
    caches = [
        [[torch.zeros_like(kv_of(layer, part)) for part in range(2)] for layer in range(layers)]
        for _ in blocks
    ]
    ranks = ThreadRanks(len(blocks))

    def load_and_exchange(rank: int) -> None:
        for layer, parts in enumerate(caches[rank]):
            for part, cache in enumerate(parts):
                there = cache.unflatten(0, (BLOCKS, KERNEL_BLOCKS))
                there[blocks[rank]] = kv_of(layer, part).unflatten(0, (BLOCKS, -1))[blocks[rank]]
        exchange = TensorExchange(ThreadGroup(ranks, rank), caches[rank], BLOCKS)
        for layer in range(layers):
            exchange.exchange(layer, blocks)

    on_every_rank([partial(load_and_exchange, rank) for rank in range(len(blocks))])
    loaded = {block for of_rank in blocks for block in of_rank}
    for rank in range(len(blocks)):
        for layer in range(layers):
            for part in range(2):
                expected = kv_of(layer, part).unflatten(0, (BLOCKS, -1))
                found = caches[rank][layer][part].unflatten(0, (BLOCKS, -1))
                for block in range(BLOCKS):
                    wanted = expected[block] if block in loaded else torch.zeros_like(found[block])
                    assert torch.equal(found[block], wanted), (rank, layer, part, block)


def test_without_replicas_nothing_is_shared() -> None:
    ranks = ThreadRanks(2)
    place = RankPlace(ranks.ends[0])
    assert with_load_exchange(place, ThreadGroup(ranks, 0), [[kv_of(0, 0)]], BLOCKS) is place


def test_kv_outside_gpus_and_of_some_heads_is_refused() -> None:
    ranks = ThreadRanks(4)
    group = ThreadGroup(ranks, 0)
    latent, two_heads = (RankPlace(ranks.ends[0], Replica(0, count)) for count in (4, 2))
    with pytest.raises(ConfigError, match=r"cpu memory.*leave share_loads out"):
        with_load_exchange(latent, group, [[kv_of(0, 0)]], BLOCKS)
    on_gpu: Any = OnGpu()
    with pytest.raises(ConfigError, match=r"4 ranks of which 2 hold the same KV"):
        with_load_exchange(two_heads, group, [[on_gpu]], BLOCKS)


class OnGpu:
    """The attributes of a tensor that the code reads."""

    device = torch.device("cuda")
