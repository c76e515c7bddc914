"""Maps the KV caches that vLLM names to the numbered layers of the data plane.

Usually a layer of the model has one KV cache, and vLLM calls the connector with that cache's name
before and after its attention.  A layer of DeepSeek-V3.2 has two caches: latent KV and the keys of
its indexer.  They are two *parts* of one layer.  If the connector is called around the latent
attention only, the indexer runs earlier and reads all earlier keys, so the layer must be in HBM
before it begins (``read_before_hook``).  ``sparse_attention`` adds an earlier call for the classes
in which one function reads both parts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from dualpath.core.blocks import WHOLE, BlockGeometry, PartSlice, first_seen_block
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.engine.passes.hbm_layout import HbmLayout, HbmPart
from dualpath.transport.contract import RegionInfo
from dualpath.vllm.engine_arguments import ONE_CACHE_GROUP
from dualpath.vllm.kernel_patches import calls_connector, calls_connector_first

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


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


# ------------------------------------------------------------------------------------ cache checks
# Checks whether vLLM's KV cache can be moved block by block: its specs, groups and layout.
#
# vLLM describes each layer's cache by a *spec*, puts layers with equal needs into *groups* with
# their own block ids, and chooses one *layout* for all.  The connector checks them when it is
# created.

#: The tokens of a head are contiguous, and heads follow each other: a slice of heads is contiguous.
KV_LAYOUT = "LBHNC"
#: For layers with one head, such as latent KV, this layout has the same bytes as ``KV_LAYOUT``.
_SAME_FOR_ONE_HEAD = "LBNHC"
#: Specs of caches in which a token's entry does not depend on later tokens.
_PER_TOKEN = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
#: Specs that an engine of each role serves.  A DE also serves sliding windows, where vLLM frees old
#: blocks while the request runs.
_SERVED = {
    Role.PREFILL: _PER_TOKEN,
    Role.DECODE: _PER_TOKEN | {"SlidingWindowSpec"},
}
#: Attribute of a vLLM layer that names another layer if it reads that layer's KV.
_SHARES = "kv_sharing_target_layer_name"


def cache_problems(role: Role, config: "VllmConfig", cache: "KVCacheConfig") -> list[str]:
    """Describe what in the KV cache cannot be moved, each with its remedy; empty if all can be."""
    specs = specs_of(cache)
    if problems := state_problems(specs) or _group_problems(role, cache.kv_cache_groups):
        return problems
    return [
        *_kind_problems(role, specs),
        *_layout_problems(cache.kv_cache_layout, specs),
        *_sharing_problems(config),
        *_window_problems(role, config, cache),
    ]


def state_problems(specs: Iterable[KVCacheSpec]) -> list[str]:
    """Describe layers that cache a state (Mamba) instead of KV per token."""
    states = _kinds(spec for spec in specs if isinstance(spec, MambaSpec))
    if not states:
        return []
    return [
        f"layers with a state ({states}): the state belongs to a whole prefix, not to a block of "
        "tokens, and vLLM does not call the connector around these layers; serve a model with "
        "attention in all layers"
    ]


def _kind_problems(role: Role, specs: list[KVCacheSpec]) -> list[str]:
    problems = []
    if other := _kinds(spec for spec in specs if type(spec).__name__ not in _SERVED[role]):
        problems.append(
            f"layers with a cache of the kind {other}: its blocks are not known to be "
            f"interchangeable between engines; a {role} engine serves "
            + ", ".join(sorted(_SERVED[role]))
        )
    if any(getattr(spec, "non_causal", False) for spec in specs):
        problems.append("layers with non-causal attention: KV depends on later tokens")
    return problems


def _group_problems(role: Role, groups: "list[KVCacheGroupSpec]") -> list[str]:
    sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if len(groups) == 1 or (role is Role.DECODE and len(sizes) == 1):
        return []
    block_sizes = "" if role is Role.PREFILL else f" with blocks of {sizes} tokens"
    return [
        f"{len(groups)} KV cache groups ({_kinds(g.kv_cache_spec for g in groups)}){block_sizes}; "
        f"a {role} engine needs {'one group' if role is Role.PREFILL else 'blocks of one size'}: "
        f"add {ONE_CACHE_GROUP}"
    ]


def _layout_problems(layout: str | None, specs: list[KVCacheSpec]) -> list[str]:
    one_head = all(spec.num_heads == 1 for spec in specs)
    if layout == KV_LAYOUT or (one_head and layout == _SAME_FOR_ONE_HEAD):
        return []
    return [
        f"KV cache layout {layout}, in which the tokens of a head are not contiguous; dualpath "
        f"needs {KV_LAYOUT}: unset VLLM_KV_CACHE_LAYOUT, and choose a backend that supports it "
        "with --attention-backend"
    ]


def _sharing_problems(config: "VllmConfig") -> list[str]:
    """Describe layers that read another layer's KV, which may already have left HBM."""
    layers = config.compilation_config.static_forward_context
    shared = [name for name, layer in layers.items() if getattr(layer, _SHARES, None)]
    if not shared:
        return []
    return [
        f"{len(shared)} layers that read another layer's KV ({shared[0]}), which a prefill engine "
        "may already have moved out of HBM; serve a model in which each layer has its own KV"
    ]


def _window_problems(role: Role, config: "VllmConfig", cache: "KVCacheConfig") -> list[str]:
    """Describe a prefix cache that would hit blocks without their window layers.

    A DE loads only the last blocks of a prompt's window layers.  vLLM tracks this only if the
    window layers have groups of their own.
    """
    in_one_group = role is Role.DECODE and len(cache.kv_cache_groups) == 1
    if not (in_one_group and any(hooked_layers(config).values())):
        return []
    if not config.cache_config.enable_prefix_caching:
        return []
    return [
        "prefix caching with window layers in the same group as the others: a shorter prompt "
        "would hit old blocks that have no KV of the window layers; leave "
        f"{ONE_CACHE_GROUP} out, or add --no-enable-prefix-caching"
    ]


def _kinds(specs: Iterable[KVCacheSpec]) -> str:
    return ", ".join(sorted({type(spec).__name__ for spec in specs}))


# ----------------------------------------------------------------------------------- draft context
# Limit on prompt length if the KV of a draft model is part of every block.
#
# If a request and its proposed tokens do not fit the draft model's context, vLLM skips the draft
# model for the whole pass.  The blocks of that pass would then lack KV of the draft's layers
# without any error, so such prompts are refused before they are computed.


def max_drafted_prompt_tokens(config: "VllmConfig") -> int | None:
    """Return the longest prompt in tokens that the draft model can process; None without a limit.

    The rule is vLLM 0.32's for each pass (``_input_fits_in_drafter``).
    """
    drafts = config.speculative_config
    if drafts is None or not (drafts.use_eagle() or drafts.uses_draft_model()):
        return None
    own = drafts.draft_model_config
    context_tokens = (own.max_model_len if own else None) or config.model_config.max_model_len
    proposed = drafts.num_speculative_tokens
    return int(context_tokens - proposed - bool(drafts.use_dflash()))


# -------------------------------------------------------------------------------------- kv regions
# Describes vLLM's KV tensors as regions of HBM with one contiguous piece per engine block.


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
    """Describe one layer's tensor; its first dimension counts blocks.

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
