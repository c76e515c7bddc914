"""A model's layers as the data plane counts them, out of the KV caches that vLLM names.

Mostly a layer of the model has one KV cache, by whose name vLLM calls the connector around the
attention that uses it.  A layer of DeepSeek-V3.2 has two: latent KV and the keys of its indexer.
They are two *parts* of one layer.  Where the connector is called around the latent attention only,
the indexer computes before it and reads all earlier keys: such a layer must be in HBM before it
begins (``begins_unseen``).  Layers that vLLM's own classes for the model compute at one place are
called for in time (``sparse_attention``).
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
from dualpath.vllm.sparse_attention import announces_whole_layer, calls_connector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class CacheGroups(NamedTuple):
    """vLLM's groups of layers: block ids of their own, all out of one pool.

    ``windows``: for each group how many tokens its layers look back, None for all of them.
    ``longest_tokens`` of a request.
    """

    block_tokens: int
    windows: tuple[int | None, ...]
    longest_tokens: int

    def tokens_in(self, blocks: int) -> int:
        """Return how many tokens of the longest requests so many blocks of the pool hold."""
        rows = -(-self.longest_tokens // self.block_tokens)
        return blocks * rows * self.block_tokens // sum(self._held(rows, w) for w in self.windows)

    def first_block(self, group: int, tokens: int) -> int:
        """Return the first block that the group's layers need to compute the token ``tokens``.

        vLLM may have given those before it to another request.
        """
        return first_seen_block(tokens, self.windows[group] or 0, self.block_tokens)

    def _held(self, rows: int, window: int | None) -> int:
        """Blocks of a request of ``rows`` blocks in a group; a window may begin within one."""
        if window is None:
            return rows
        return min(rows, -(-(window - 1) // self.block_tokens) + 1)


def cache_groups(cache: "KVCacheConfig", longest_tokens: int) -> CacheGroups:
    """Return the groups of a cache that ``cache_checks`` let pass."""
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    windows = tuple(s.sliding_window if isinstance(s, SlidingWindowSpec) else None for s in specs)
    return CacheGroups(specs[0].block_size, windows, longest_tokens)


class CacheLayer(NamedTuple):
    """A layer: names and bytes of its parts, the first the one that vLLM calls the connector for.

    ``group`` is vLLM's group of layers whose block ids are its own, ``window_tokens`` how many
    tokens, itself included, a token sees; 0 for all.
    """

    names: tuple[str, ...]
    part_bytes: tuple[int, ...]
    group: int
    window_tokens: int

    @property
    def begins_unseen(self) -> bool:
        """Whether part of it is read before the connector is called around attention."""
        return len(self.names) > 1


def hooked_layers(config: "VllmConfig") -> dict[str, int]:
    """Return the layers around whose computation the connector is called; of a loaded model.

    Each with its window in tokens, 0 where it has none.  The layer says it: where the hybrid
    manager is off, all layers have one spec, which has the window of some or of none.
    """
    layers = config.compilation_config.static_forward_context
    hooked = (Attention, MLAAttention)
    # A drafter of several modules may compute that many tokens again.
    again_tokens = max(config.num_prefill_lookahead_tokens - 1, 0)
    return {
        name: window + again_tokens if (window := _window_of(layer)) else 0
        for name, layer in layers.items()
        if isinstance(layer, hooked) and calls_connector(type(layer))
    }


def begins_unseen(config: "VllmConfig", layers: Sequence[CacheLayer]) -> bool:
    """Whether a layer of a loaded model is read in part before the connector is called for it."""
    kinds = config.compilation_config.static_forward_context
    return any(
        layer.begins_unseen and not announces_whole_layer(type(kinds[layer.names[0]]))
        for layer in layers
    )


def _window_of(layer: object) -> int:
    """Return a layer's window, 0 for none, and where it is not known what a token sees.

    Images that are a prefix for themselves are seen by their own tokens whatever the window.
    """
    if not isinstance(layer, Attention) or layer.use_mm_prefix:
        return 0
    return layer.sliding_window or 0


def cache_layers(cache: "KVCacheConfig", hooked: Mapping[str, int]) -> tuple[CacheLayer, ...]:
    """Return the layers in model order; ``hooked`` as ``hooked_layers`` gives them.

    Raises ``ConfigError`` for a cache of which the connector would not hear in time, or at all.
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
                    f"KV caches {', '.join(names)} of one layer lie in several groups of blocks; "
                    "dualpath moves the parts of a layer together: serve another model"
                )
            sizes = tuple(bytes_of[name] for name in names)
            layers.append(CacheLayer(names, sizes, group_of[names[0]], hooked[names[0]]))
    return tuple(layers)


def _layers_of_index(
    names: Sequence[str], is_hooked: Callable[[str], bool]
) -> list[tuple[str, ...]]:
    """Return which caches with one number make a layer each."""
    hooked = [name for name in names if is_hooked(name)]
    others = [name for name in names if not is_hooked(name)]
    if not others:
        return [(name,) for name in hooked]
    if len(hooked) != 1:
        raise ConfigError(
            f"vLLM calls no connector around {', '.join(others)}, so that nobody would know when "
            "its KV is used; serve a model with vLLM's own attention in all layers"
        )
    return [(*hooked, *others)]


def geometry_of(layers: Sequence[CacheLayer], block_tokens: int, slices: int = 1) -> BlockGeometry:
    """Return the shape of whole blocks, of which these layers have one of ``slices`` slices."""
    parts = (tuple(slices * size for size in layer.part_bytes) for layer in layers)
    windows = tuple(layer.window_tokens for layer in layers)
    return BlockGeometry(block_tokens, tuple(parts), windows if any(windows) else ())


def specs_of(cache: "KVCacheConfig") -> list["KVCacheSpec"]:
    """Return what vLLM keeps for its layers; those of a group that are alike have one spec."""
    return [spec for g in cache.kv_cache_groups for spec in iter_layer_specs(g.kv_cache_spec)]


def _spec_of(spec: "KVCacheSpec", name: str) -> "KVCacheSpec":
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[name]
    return spec
