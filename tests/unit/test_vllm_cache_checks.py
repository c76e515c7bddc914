"""Which KV cache layouts of vLLM can be transferred by blocks; errors for all others."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from tests.vllm_caches import (
    attending,
    cache_of,
    full_attention,
    loaded_config,
    sliding_window,
    state,
)

from dualpath.core.cluster import Role
from dualpath.vllm.cache_layers import KV_LAYOUT, cache_problems, state_problems
from dualpath.vllm.connector import DualPathConnector

NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


def problems(cache, role=Role.PREFILL, *, prefix_caching=False, **layers):
    return cache_problems(role, loaded_config(layers, prefix_caching), cache)


def test_attention_over_all_tokens_in_one_group_is_served():
    assert problems(cache_of(NAMES, full_attention(32))) == []
    # Specs of a model with windows when the hybrid KV cache manager is off.
    assert problems(cache_of(NAMES, full_attention(32, sliding_window=64))) == []


def test_several_groups_are_refused_with_the_argument_that_makes_one_of_them():
    cache = cache_of(NAMES[:1], full_attention(32), NAMES[1:], sliding_window(32, 64))
    (problem,) = problems(cache)
    assert "2 KV cache groups (FullAttentionSpec, SlidingWindowSpec)" in problem
    assert "add --disable-hybrid-kv-cache-manager" in problem


def test_a_decode_engine_may_have_a_group_for_windows():
    cache = cache_of(NAMES[:1], full_attention(32), NAMES[1:], sliding_window(32, 64))
    assert problems(cache, Role.DECODE) == []
    unequal = cache_of(NAMES[:1], full_attention(32), NAMES[1:], sliding_window(64, 64))
    (problem,) = problems(unequal, Role.DECODE)
    assert "with blocks of [32, 64] tokens" in problem
    assert "add --disable-hybrid-kv-cache-manager" in problem


def test_a_prefix_cache_must_know_that_old_blocks_lack_their_windows():
    """A decode engine receives only the last blocks of window layers, in any mix of layers."""
    layers = {NAMES[0]: attending(None), NAMES[1]: attending(64)}
    together = cache_of(NAMES, full_attention(32))
    assert problems(together, Role.DECODE, **layers) == []
    (problem,) = problems(together, Role.DECODE, prefix_caching=True, **layers)
    assert "leave --disable-hybrid-kv-cache-manager out" in problem
    without = {name: attending(None) for name in NAMES}
    assert problems(together, Role.DECODE, prefix_caching=True, **without) == []
    apart = cache_of(NAMES[:1], full_attention(32), NAMES[1:], sliding_window(32, 64))
    assert problems(apart, Role.DECODE, prefix_caching=True, **layers) == []


def test_windows_alone_are_refused_at_a_prefill_engine():
    """vLLM frees and reuses their blocks while a request runs."""
    (problem,) = problems(cache_of(NAMES, sliding_window(32, 64)))
    assert "of the kind SlidingWindowSpec" in problem


def test_layers_with_a_state_are_refused():
    reason = r"layers with a state \(MambaSpec\).*does not call the connector around these layers"
    hybrid = cache_of(NAMES[:1], full_attention(32), NAMES[1:], state(32))
    for found in (problems(hybrid), state_problems([full_attention(32), state(32)])):
        with pytest.raises(AssertionError, match=reason):
            assert not found, found[0]
    assert state_problems([full_attention(32)]) == []


def test_kv_that_depends_on_later_tokens_is_refused():
    (problem,) = problems(cache_of(NAMES, full_attention(32, non_causal=True)))
    assert "depends on later tokens" in problem


@pytest.mark.parametrize(
    ("layout", "heads", "served"),
    [("LBHNC", 2, True), ("LBNHC", 2, False), ("LBNHC", 1, True), ("BLHNC", 1, False)],
)
def test_a_layout_without_contiguous_heads_is_refused(layout, heads, served):
    found = problems(cache_of(NAMES, full_attention(32, heads), layout=layout))
    assert (found == []) is served
    assert all(f"layout {layout}" in problem and "needs LBHNC" in problem for problem in found)


def test_the_connector_asks_for_the_layout_that_it_needs():
    assert DualPathConnector.get_required_kvcache_layout(None) == KV_LAYOUT == "LBHNC"


def test_a_layer_that_reads_anothers_kv_is_refused():
    own = SimpleNamespace(kv_sharing_target_layer_name=None)
    shares = SimpleNamespace(kv_sharing_target_layer_name=NAMES[0])
    cache = cache_of(NAMES[:1], full_attention(32))
    assert problems(cache, **{NAMES[0]: own}) == []
    (problem,) = problems(cache, **{NAMES[0]: own, NAMES[1]: shares})
    assert f"1 layers that read another layer's KV ({NAMES[1]})" in problem
