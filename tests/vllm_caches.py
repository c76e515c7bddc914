"""KV caches as vLLM describes them to a connector, built from its own specs."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)


def full_attention(block_tokens: int, heads: int = 2, **more: object) -> FullAttentionSpec:
    """Return grouped attention over all tokens, heads of 32 float32."""
    return FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=heads, head_size=32, dtype=torch.float32, **more
    )


def sliding_window(block_tokens: int, window_tokens: int) -> SlidingWindowSpec:
    """Return attention over the last tokens only."""
    return SlidingWindowSpec(
        block_size=block_tokens,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.float32,
        sliding_window=window_tokens,
    )


def state(block_tokens: int) -> MambaSpec:
    """Return a layer with one state per prefix."""
    return MambaSpec(block_size=block_tokens, shapes=((4, 8),), dtypes=(torch.float32,))


def attending(window_tokens: int | None) -> Attention:
    """Return a layer that reports which tokens it attends to, as vLLM's own does."""
    layer = object.__new__(Attention)
    vars(layer).update(sliding_window=window_tokens, use_mm_prefix=False)
    return layer


def loaded_config(
    layers: Mapping[str, object], prefix_caching: bool = False, lookahead_tokens: int = 0
) -> Any:
    """Return the configuration of an engine with a loaded model."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict(layers)),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        num_prefill_lookahead_tokens=lookahead_tokens,
    )


def cache_of(
    *groups: Sequence[str] | KVCacheSpec, layout: str = "LBHNC", blocks: int = 8
) -> KVCacheConfig:
    """Return the cache of groups given as layer names, spec, layer names, spec and so on."""
    pairs = zip(groups[::2], groups[1::2], strict=True)
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(names), spec) for names, spec in pairs],
        kv_cache_layout=layout,
    )


def two_parts(layers: int, without_indexer: Sequence[int] = ()) -> dict[str, KVCacheSpec]:
    """Return the specs of DeepSeek-V3.2: 656 bytes of latent KV, 132 of an indexer's key a token.

    As vLLM's ``deepseek_v2.py`` creates them for ``fp8_ds_mla`` on GPUs.
    """
    latent = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
    )
    index = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(layers):
        specs[f"model.layers.{layer}.self_attn.attn"] = latent
        if layer not in without_indexer:
            specs[f"model.layers.{layer}.self_attn.indexer.k_cache"] = index
    return specs
