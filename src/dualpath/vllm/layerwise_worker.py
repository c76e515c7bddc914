"""A vLLM worker whose layers share a few physical KV regions (layerwise prefill, §2.1).

vLLM places every layer's KV by a ``KVCacheTensor`` (offset, strides) in one allocation and allows
placements that overlap.  So nothing but data changes: layer i is placed in region i mod
``layer_buffers``.  The scheduler sees ``layers / layer_buffers`` times as many blocks in the same
memory; ``engine.layer_stream`` moves KV in and out in time.
"""

import os
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheTensor

from dualpath.core.errors import ConfigError
from dualpath.vllm.cache_checks import state_problems
from dualpath.vllm.connector import DualPathConnector
from dualpath.vllm.engine_settings import engine_settings

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def place_in_regions(
    tensors: list[KVCacheTensor], num_blocks: int, buffers: int
) -> list[KVCacheTensor]:
    """Return placements in which layer i of each tensor lies in region i mod ``buffers``."""

    def region_bytes(tensor: KVCacheTensor) -> int:
        return int(tensor.block_stride) * num_blocks

    total_bytes = sum(region_bytes(t) * min(buffers, len(t.layers)) for t in tensors)
    placed: list[KVCacheTensor] = []
    base = 0
    for tensor in tensors:
        stride = region_bytes(tensor)
        for index, layer in enumerate(tensor.layers):
            placed.append(
                KVCacheTensor(
                    size=total_bytes,
                    layers=[layer],
                    layer_stride=stride,
                    block_stride=tensor.block_stride,
                    offset=base + (index % buffers) * stride,
                )
            )
        base += stride * min(buffers, len(tensor.layers))
    return placed


class LayerwiseWorker(PlatformWorker):
    """Worker of a prefill engine, with any number of layer buffers."""

    @property
    def layer_buffers(self) -> int:
        """Layers of KV that HBM holds; 0 for all."""
        transfer = self.vllm_config.kv_transfer_config
        if transfer is None:
            return 0
        return engine_settings(transfer.kv_connector_extra_config, os.environ).layer_buffers

    def get_kv_cache_spec(self) -> "dict[str, KVCacheSpec]":
        """Refuse in our words what vLLM would refuse in its own, or could not compute so."""
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        if problems := state_problems(specs.values()):
            raise ConfigError("; ".join(problems))
        return specs

    def determine_available_memory(self) -> int:
        """Report memory as if every layer had a region of its own."""
        available_bytes = int(super().determine_available_memory())
        if not self.layer_buffers:
            return available_bytes
        layers = len(self.get_kv_cache_spec())
        return available_bytes * layers // min(self.layer_buffers, layers)

    def compile_or_warm_up_model(self) -> Any:  # noqa: ANN401 - vLLM's
        """Warm up, then let the connector measure what passes cost here."""
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
                    "needs one: set layer_buffers to 0"
                )
            kv_cache_config.kv_cache_tensors = place_in_regions(
                kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks, self.layer_buffers
            )
        return super().initialize_from_config(kv_cache_config)
