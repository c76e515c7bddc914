"""A vLLM worker with layers that share a few physical KV regions (layerwise prefill, §2.1).

vLLM places every layer's KV by a ``KVCacheTensor`` (offset, strides) in one allocation and allows
overlapping placements.  So only data changes: layer i is placed in region i mod ``layer_buffers``
of the regions for blocks of its size.  The scheduler sees ``layers / layer_buffers`` times as many
blocks in the same memory; ``engine.layer_stream`` moves each layer's KV in and out in time.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheTensor

from dualpath.core.errors import ConfigError
from dualpath.vllm.cache_layers import state_problems
from dualpath.vllm.connector import DualPathConnector
from dualpath.vllm.engine_arguments import ONE_CACHE_GROUP, engine_settings

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def place_in_regions(
    tensors: list[KVCacheTensor], num_blocks: int, buffers: int
) -> list[KVCacheTensor]:
    """Return placements in which layers with blocks of the same size share ``buffers`` regions.

    Regions are assigned round-robin in model order, so that layers that share a region are at
    least ``buffers`` layers apart, even if only some layers have a part of that size.  A block has
    the same offset in the region for all of them.
    """
    placed: list[KVCacheTensor] = []
    base = 0
    for stride, layers in _alike({n: int(t.block_stride) for t in tensors for n in t.layers}):
        region_bytes = stride * num_blocks
        for index, layer in enumerate(layers):
            offset = base + (index % buffers) * region_bytes
            placed.append(
                KVCacheTensor(
                    size=0,
                    layers=[layer],
                    layer_stride=region_bytes,
                    block_stride=stride,
                    offset=offset,
                )
            )
        base += region_bytes * min(buffers, len(layers))
    return [dataclasses.replace(tensor, size=base) for tensor in placed]


def unaliased_bytes(available_bytes: int, page_bytes: Mapping[str, int], buffers: int) -> int:
    """Return the memory that would be needed if every layer had a region of its own, in bytes.

    ``page_bytes``: bytes of a block, by layer.
    """
    alike = _alike(page_bytes)
    held = sum(size * min(buffers, len(layers)) for size, layers in alike)
    return available_bytes * sum(page_bytes.values()) // held


def _alike(block_bytes: Mapping[str, int]) -> list[tuple[int, list[str]]]:
    """Return the layers grouped by the size of their blocks, in model order."""
    by_size: dict[int, list[str]] = {}
    for layer in sorted(block_bytes, key=lambda name: (extract_layer_index(name), name)):
        by_size.setdefault(block_bytes[layer], []).append(layer)
    return list(by_size.items())


class LayerwiseWorker(PlatformWorker):
    """Worker of a prefill engine, with any number of layer buffers."""

    @property
    def layer_buffers(self) -> int:
        """Number of layers of KV that HBM holds; 0 for all."""
        transfer = self.vllm_config.kv_transfer_config
        if transfer is None:
            return 0
        return engine_settings(transfer.kv_connector_extra_config, os.environ).layer_buffers

    def get_kv_cache_spec(self) -> "dict[str, KVCacheSpec]":
        """Raise ``ConfigError`` for layers with a state, before vLLM fails with its own error."""
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        if problems := state_problems(specs.values()):
            raise ConfigError("; ".join(problems))
        return specs

    def determine_available_memory(self) -> int:
        """Report memory as if every layer had a region of its own."""
        available_bytes = int(super().determine_available_memory())
        if not self.layer_buffers:
            return available_bytes
        pages = {name: spec.page_size_bytes for name, spec in self.get_kv_cache_spec().items()}
        return unaliased_bytes(available_bytes, pages, self.layer_buffers)

    def compile_or_warm_up_model(self) -> Any:  # noqa: ANN401 - vLLM's
        """Warm up, then let the connector measure the costs of forward passes."""
        times = super().compile_or_warm_up_model()
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if isinstance(connector, DualPathConnector):
            connector.worker_side.profile(self)
        return times

    def initialize_from_config(self, kv_cache_config: "KVCacheConfig") -> Any:  # noqa: ANN401
        """Place the layers in shared regions, then allocate."""
        if self.layer_buffers:
            if len(kv_cache_config.kv_cache_groups) != 1:
                raise ConfigError(
                    f"{len(kv_cache_config.kv_cache_groups)} KV cache groups; layerwise prefill "
                    f"needs one group: add {ONE_CACHE_GROUP}"
                )
            kv_cache_config.kv_cache_tensors = place_in_regions(
                kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks, self.layer_buffers
            )
        return super().initialize_from_config(kv_cache_config)
