"""Describes vLLM's KV tensors as regions of HBM with one contiguous piece per engine block."""

from collections.abc import Sequence

import torch

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import ConfigError
from dualpath.core.parts import WHOLE, PartSlice
from dualpath.engine.hbm_layout import HbmLayout, HbmPart
from dualpath.transport.contract import RegionInfo


def hbm_layout(
    layers: Sequence[Sequence[torch.Tensor]],
    num_blocks: int,
    geometry: BlockGeometry,
    kv_slice: PartSlice = WHOLE,
) -> HbmLayout:
    """Return the regions of the layers' KV tensors, one per part; layers may share regions.

    The capacity is the free HBM of an engine without requests: vLLM's scheduler allocates all
    ``num_blocks`` except its null block.  The tensors hold the slice ``kv_slice`` of each block.
    Raises ``ConfigError`` for a tensor in which blocks are not contiguous.
    """
    regions: dict[int, RegionInfo] = {}
    in_order = []
    for layer, (caches, sizes) in enumerate(zip(layers, geometry.layer_parts, strict=True)):
        parts = []
        for cache, size_bytes in zip(caches, sizes, strict=True):
            page_bytes = size_bytes // kv_slice.count
            region = _region(f"hbm.{len(regions)}", layer, cache, num_blocks, page_bytes)
            parts.append(HbmPart(regions.setdefault(region.base_address, region), kv_slice))
        in_order.append(tuple(parts))
    return HbmLayout(
        memories=tuple(regions.values()),
        layers=tuple(in_order),
        capacity_tokens=(num_blocks - 1) * geometry.block_tokens,
    )


def _region(
    name: str, layer: int, cache: torch.Tensor, num_blocks: int, page_bytes: int
) -> RegionInfo:
    """Describe one layer's tensor, whose first dimension counts blocks.

    If the attention kernel has smaller blocks than the engine, an engine block is a whole number
    of kernel blocks.
    """
    kernel_blocks, rest = divmod(cache.shape[0], num_blocks)
    inside = zip(cache.shape[1:], cache.stride()[1:], strict=True)
    kernel_block_bytes = (1 + sum((n - 1) * s for n, s in inside)) * cache.element_size()
    kernel_stride_bytes = cache.stride(0) * cache.element_size()
    used_bytes = max(kernel_blocks - 1, 0) * kernel_stride_bytes + kernel_block_bytes
    stride_bytes = kernel_blocks * kernel_stride_bytes
    if rest or not kernel_blocks or used_bytes > page_bytes or stride_bytes < page_bytes:
        raise ConfigError(
            f"layer {layer}: KV tensor of shape {tuple(cache.shape)}, strides {cache.stride()} and "
            f"{cache.element_size()}-byte elements; expected {num_blocks} contiguous blocks of "
            f"{page_bytes} bytes: use a block-major KV layout"
        )
    return RegionInfo(
        name=name,
        base_address=cache.data_ptr(),
        stride_bytes=stride_bytes,
        piece_bytes=page_bytes,
        pieces=num_blocks,
        memory="VRAM" if cache.is_cuda else "DRAM",
        device=cache.device.index or 0,
    )
