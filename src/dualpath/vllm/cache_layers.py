"""Maps the KV caches that vLLM names to the numbered layers of the data plane.

Usually a layer of the model has one KV cache, and vLLM calls the connector with that cache's name
before and after its attention.  A layer of DeepSeek-V3.2 has two caches: latent KV and the keys of
its indexer.  They are two *parts* of one layer.  If the connector is called around the latent
attention only, the indexer runs earlier and reads all earlier keys, so the layer must be in HBM
before it begins (``read_before_hook``).  ``sparse_attention`` adds an earlier call for the classes
in which one function reads both parts.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from dualpath.core.blocks import BlockGeometry, first_seen_block
from dualpath.core.errors import ConfigError
from dualpath.vllm.sparse_attention import calls_connector, calls_connector_first

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class CacheGroups(NamedTuple):
    """vLLM's KV cache groups: each has its own block ids, all allocated from one block pool.

    ``windows``: each group's sliding window in tokens, None for full attention.
    ``longest_tokens``: the longest request in tokens.
    """

    block_tokens: int
    windows: tuple[int | None, ...]
    longest_tokens: int

    def tokens_in(self, blocks: int) -> int:
        """Return how many tokens of requests of the longest length fit this many pool blocks."""
        rows = -(-self.longest_tokens // self.block_tokens)
        return blocks * rows * self.block_tokens // sum(self._held(rows, w) for w in self.windows)

    def first_block(self, group: int, tokens: int) -> int:
        """Return the first block that the group's layers need to compute token number ``tokens``.

        vLLM may have freed the blocks before it.
        """
        return first_seen_block(tokens, self.windows[group] or 0, self.block_tokens)

    def _held(self, rows: int, window: int | None) -> int:
        """Return how many of a request's ``rows`` blocks a group holds at a time.

        A window may begin within a block.
        """
        if window is None:
            return rows
        return min(rows, -(-(window - 1) // self.block_tokens) + 1)


def cache_groups(cache: "KVCacheConfig", longest_tokens: int) -> CacheGroups:
    """Return the groups of a cache that ``cache_checks`` accepted."""
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    windows = tuple(s.sliding_window if isinstance(s, SlidingWindowSpec) else None for s in specs)
    return CacheGroups(specs[0].block_size, windows, longest_tokens)


class CacheLayer(NamedTuple):
    """A layer: names of its parts and their bytes per block.

    vLLM calls the connector with the first name.  ``group`` is the index of the layer's KV cache
    group.  ``window_tokens`` is its sliding window in tokens, the current one included; 0 for none.
    """

    names: tuple[str, ...]
    part_bytes: tuple[int, ...]
    group: int
    window_tokens: int

    @property
    def read_before_hook(self) -> bool:
        """Whether a part of the layer is read before the connector is called."""
        return len(self.names) > 1


def hooked_layers(config: "VllmConfig") -> dict[str, int]:
    """Return the layers of a loaded model for which vLLM calls the connector, by name.

    The values are their sliding windows in tokens, 0 for none.  They are read from the layers, not
    from the specs: without the hybrid manager all layers have the same spec.
    """
    layers = config.compilation_config.static_forward_context
    hooked = (Attention, MLAAttention)
    # A draft model of several modules may recompute this many tokens.
    again_tokens = max(config.num_prefill_lookahead_tokens - 1, 0)
    return {
        name: window + again_tokens if (window := _window_of(layer)) else 0
        for name, layer in layers.items()
        if isinstance(layer, hooked) and calls_connector(type(layer))
    }


def read_before_hook(config: "VllmConfig", layers: Sequence[CacheLayer]) -> bool:
    """Whether some layer of a loaded model is partly read before the connector is called for it."""
    kinds = config.compilation_config.static_forward_context
    return any(
        layer.read_before_hook and not calls_connector_first(type(kinds[layer.names[0]]))
        for layer in layers
    )


def _window_of(layer: object) -> int:
    """Return a layer's sliding window in tokens; 0 if it has none or if it does not always apply.

    With multimodal prefixes, the tokens of an image attend to the whole image beyond the window.
    """
    if not isinstance(layer, Attention) or layer.use_mm_prefix:
        return 0
    return layer.sliding_window or 0


def cache_layers(cache: "KVCacheConfig", hooked: Mapping[str, int]) -> tuple[CacheLayer, ...]:
    """Return the layers in model order; ``hooked`` is what ``hooked_layers`` returned.

    Raises ``ConfigError`` for a cache for which vLLM calls the connector too late or not at all.
    """
    group_of = {name: i for i, g in enumerate(cache.kv_cache_groups) for name in g.layer_names}
    bytes_of = {
        name: _spec_of(group.kv_cache_spec, name).page_size_bytes
        for group in cache.kv_cache_groups
        for name in group.layer_names
    }
    layers: list[CacheLayer] = []
    in_order = sorted(group_of, key=lambda name: (extract_layer_index(name), name))
    for _, together in groupby(in_order, extract_layer_index):
        for names in _layers_of_index(list(together), hooked.__contains__):
            if len({group_of[name] for name in names}) > 1:
                raise ConfigError(
                    f"KV caches {', '.join(names)} of one layer are in several KV cache groups; "
                    "dualpath moves the parts of a layer together: serve another model"
                )
            sizes = tuple(bytes_of[name] for name in names)
            layers.append(CacheLayer(names, sizes, group_of[names[0]], hooked[names[0]]))
    return tuple(layers)


def _layers_of_index(
    names: Sequence[str], is_hooked: Callable[[str], bool]
) -> list[tuple[str, ...]]:
    """Return which caches with the same layer number form one layer."""
    hooked = [name for name in names if is_hooked(name)]
    others = [name for name in names if not is_hooked(name)]
    if not others:
        return [(name,) for name in hooked]
    if len(hooked) != 1:
        raise ConfigError(
            f"vLLM does not call the connector around {', '.join(others)}, so that it is unknown "
            "when its KV is read; serve a model with vLLM's own attention in all layers"
        )
    return [(*hooked, *others)]


def geometry_of(layers: Sequence[CacheLayer], block_tokens: int, slices: int = 1) -> BlockGeometry:
    """Return the geometry of whole blocks; these layers hold one of ``slices`` slices of them."""
    parts = (tuple(slices * size for size in layer.part_bytes) for layer in layers)
    windows = tuple(layer.window_tokens for layer in layers)
    return BlockGeometry(block_tokens, tuple(parts), windows if any(windows) else ())


def specs_of(cache: "KVCacheConfig") -> list["KVCacheSpec"]:
    """Return the specs of all layers; equal layers of a group share one spec."""
    return [spec for g in cache.kv_cache_groups for spec in iter_layer_specs(g.kv_cache_spec)]


def _spec_of(spec: "KVCacheSpec", name: str) -> "KVCacheSpec":
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[name]
    return spec
