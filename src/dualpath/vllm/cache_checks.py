"""Checks whether vLLM's KV cache can be moved block by block: its specs, groups and layout.

vLLM describes each layer's cache by a *spec*, puts layers with equal needs into *groups* with their
own block ids, and chooses one *layout* for all.  The connector checks them when it is created.
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
            f"layers with a cache of the kind {other}, whose blocks are not known to be "
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
    """Describe a prefix cache that would hit blocks whose window layers were never loaded.

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
