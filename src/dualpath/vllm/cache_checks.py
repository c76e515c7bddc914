"""Whether a KV cache as vLLM made it can be moved block by block: its kinds, groups and layout.

vLLM says per layer what its cache is (a *spec*), puts layers of equal needs into *groups* with
block ids of their own, and chooses one *layout* for all.  Looked at when the connector is made.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from dualpath.core.cluster import Role
from dualpath.vllm.cache_layers import hooked_layers, specs_of
from dualpath.vllm.engine_arguments import ONE_CACHE_GROUP

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

#: Tokens of a head lie in one piece, heads one after the other: a slice of heads is one piece too.
KV_LAYOUT = "LBHNC"
#: Where all layers have one head, as latent KV has, these bytes are the same.
_SAME_FOR_ONE_HEAD = "LBNHC"
#: Kinds of cache that hold what a layer made of a token, and nothing of what follows it.
_PER_TOKEN = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
#: At a DE also those of which old blocks are given to others while a request goes on.
_SERVED = {
    Role.PREFILL: _PER_TOKEN,
    Role.DECODE: _PER_TOKEN | {"SlidingWindowSpec"},
}
#: Says of which other layer a layer of vLLM reads the KV.
_SHARES = "kv_sharing_target_layer_name"


def cache_problems(role: Role, config: "VllmConfig", cache: "KVCacheConfig") -> list[str]:
    """Name what of the KV cache cannot be moved, each with the remedy; empty if all can."""
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
    """Name layers whose cache is no KV of tokens at all."""
    states = _kinds(spec for spec in specs if isinstance(spec, MambaSpec))
    if not states:
        return []
    return [
        f"layers that keep a state ({states}): it belongs to a whole prefix, not to a block of "
        "tokens, and vLLM calls no connector around these layers; serve a model with attention "
        "in all layers"
    ]


def _kind_problems(role: Role, specs: list[KVCacheSpec]) -> list[str]:
    problems = []
    if other := _kinds(spec for spec in specs if type(spec).__name__ not in _SERVED[role]):
        problems.append(
            f"layers with a cache of the kind {other}, of which it is not known that a block may "
            f"be taken for another engine's; a {role} engine serves "
            + ", ".join(sorted(_SERVED[role]))
        )
    if any(getattr(spec, "non_causal", False) for spec in specs):
        problems.append("layers that attend to what follows, so that KV depends on it")
    return problems


def _group_problems(role: Role, groups: "list[KVCacheGroupSpec]") -> list[str]:
    sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if len(groups) == 1 or (role is Role.DECODE and len(sizes) == 1):
        return []
    one = "" if role is Role.PREFILL else f" with blocks of {sizes} tokens"
    return [
        f"{len(groups)} KV cache groups ({_kinds(g.kv_cache_spec for g in groups)}){one}, a {role} "
        f"engine needs {'one' if role is Role.PREFILL else 'blocks of one size'}: add "
        f"{ONE_CACHE_GROUP}"
    ]


def _layout_problems(layout: str | None, specs: list[KVCacheSpec]) -> list[str]:
    one_head = all(spec.num_heads == 1 for spec in specs)
    if layout == KV_LAYOUT or (one_head and layout == _SAME_FOR_ONE_HEAD):
        return []
    return [
        f"KV cache layout {layout}, in which a head's tokens are not in one piece; dualpath asks "
        f"for {KV_LAYOUT}: leave VLLM_KV_CACHE_LAYOUT out, and name a backend that has it with "
        "--attention-backend"
    ]


def _sharing_problems(config: "VllmConfig") -> list[str]:
    """Name layers that read another layer's KV: it may have left HBM by then."""
    layers = config.compilation_config.static_forward_context
    shared = [name for name, layer in layers.items() if getattr(layer, _SHARES, None)]
    if not shared:
        return []
    return [
        f"{len(shared)} layers that read another layer's KV ({shared[0]}), which a prefill engine "
        "may have moved away by then; serve a model in which each layer has its own"
    ]


def _window_problems(role: Role, config: "VllmConfig", cache: "KVCacheConfig") -> list[str]:
    """Name a prefix cache that would take blocks for whole whose window layers never came.

    A DE gets of a prompt's window layers the last blocks.  In groups of their own vLLM knows it.
    """
    in_one_group = role is Role.DECODE and len(cache.kv_cache_groups) == 1
    if not (in_one_group and any(hooked_layers(config).values())):
        return []
    if not config.cache_config.enable_prefix_caching:
        return []
    return [
        "prefix caching with layers that have a window in one group with the others: a prompt "
        "that ends earlier would find their old blocks empty; leave "
        f"{ONE_CACHE_GROUP} out, or add --no-enable-prefix-caching"
    ]


def _kinds(specs: Iterable[KVCacheSpec]) -> str:
    return ", ".join(sorted({type(spec).__name__ for spec in specs}))
