"""KV caches as vLLM describes them to a connector, made of its own specs."""

from collections.abc import Sequence

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
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
    """Return a layer that keeps one state per prefix."""
    return MambaSpec(block_size=block_tokens, shapes=((4, 8),), dtypes=(torch.float32,))


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
