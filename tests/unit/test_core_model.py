"""Geometry gives the parameters models are known by, and Table 1 of the paper."""

from typing import Any

import pytest

from dualpath.core.errors import ConfigError
from dualpath_sim.catalog.geometry import (
    DenseFeedForward,
    ExpertFeedForward,
    GroupedQueryAttention,
    ModelGeometry,
)
from dualpath_sim.catalog.load import MODELS, load_model, names


def small(**changes: Any) -> ModelGeometry:
    """Two full layers and two with a window of 4 tokens; two dense layers and two of experts."""
    attention: dict[str, Any] = {
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "kv_value_bytes": 2.0,
    }
    fields: dict[str, Any] = {
        "name": "small",
        "title": "small",
        "hidden_size": 16,
        "vocabulary": 100,
        "attention": (
            GroupedQueryAttention(**attention),
            GroupedQueryAttention(**attention, window_tokens=4),
        ),
        "feed_forward": (
            DenseFeedForward(layers=2, intermediate_size=32),
            ExpertFeedForward(
                layers=2, experts=8, active_experts=2, shared_experts=1, intermediate_size=8
            ),
        ),
        "weight_value_bytes": 1.0,
    }
    return ModelGeometry(**{**fields, **changes})


def test_only_layers_without_a_window_count_as_kv_of_the_context():
    model = small()
    assert model.kv_bytes_per_token == 2 * (2 * 2 * 8 * 2)
    assert model.kv_bytes_per_token_all_layers == 2 * model.kv_bytes_per_token
    assert model.block_geometry(64).full_block_bytes == 64 * model.kv_bytes_per_token_all_layers


def test_a_query_costs_its_keys_up_to_the_window():
    model = small()
    per_pair = 2 * 4 * 4 * 8
    assert model.attention_flop(3) == 3 * per_pair * 2
    assert model.attention_flop(10) == 10 * per_pair + 4 * per_pair
    assert model.indexer_flop(10) == 0


def test_parameters_add_up():
    model = small()
    expert = 3 * 16 * 8
    assert model.attention_parameters == 4 * (2 * 16 * 8 * (4 + 2))
    assert model.dense_parameters == 2 * 3 * 16 * 32
    assert model.active_expert_parameters == 2 * (16 * 8 + (1 + 2) * expert)
    assert model.total_parameters - model.active_parameters == 2 * (8 - 2) * expert + 16 * 100
    tied = small(tied_embedding=True)
    assert model.total_parameters - tied.total_parameters == 16 * 100
    assert model.active_parameters == tied.active_parameters


def test_only_routed_experts_are_spread_and_every_gpu_has_one():
    model = small()
    expert_bytes = 2 * 3 * 16 * 8
    saved = model.weight_bytes - model.weight_bytes_per_gpu(4)
    assert saved == (8 - 2) * expert_bytes
    assert model.weight_bytes_per_gpu(8) == model.weight_bytes_per_gpu(64)
    embedding = 16 * 100 * 2.0
    assert model.weight_bytes_per_gpu(4) - model.step_weight_bytes(4) == embedding


def test_layers_that_do_not_add_up_are_refused():
    with pytest.raises(ConfigError, match="4 layers and feed_forward 2"):
        small(feed_forward=(DenseFeedForward(layers=2, intermediate_size=32),)).check()
    experts = ExpertFeedForward(layers=4, experts=8, active_experts=9, intermediate_size=8)
    with pytest.raises(ConfigError, match="active_experts is 9, above the 8"):
        small(feed_forward=(experts,)).check()


# Published sizes of the models in billions: all parameters, active ones (with the embedding,
# where the publisher counts it; here always without).
@pytest.mark.parametrize(
    ("name", "total", "active", "kv_bytes_per_token"),
    [
        ("ds-v3", 671.0, 36.6, 656 * 61),
        ("ds-v3.2", 671.9, 36.6, 656 * 61),
        ("ds-27b", 27.2, 4.12, 656 * 30),
        ("qwen2.5-32b", 32.8, 32.0, 262_144),
        ("gpt-oss-120b", 116.8, 5.13, 18_432),
        ("qwen3-235b", 235.1, 21.6, 96_256),
        ("smollm2-135m", 0.1345, 0.1345, 23_040),
    ],
)
def test_models_of_the_catalog_have_their_known_sizes(name, total, active, kv_bytes_per_token):
    model = load_model(name)
    assert model.total_parameters / 1e9 == pytest.approx(total, rel=0.003)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.003)
    assert model.kv_bytes_per_token == kv_bytes_per_token


def test_every_model_file_is_named_after_its_model():
    assert all(load_model(name).name == name for name in names(MODELS))


# GB/PFLOP at 16K and 64K: Table 1 within the rounding of its printed digits.
@pytest.mark.parametrize(
    ("name", "pair_flop", "low", "high"),
    [
        ("qwen2.5-32b", None, 117, 267),
        ("gpt-oss-120b", None, 46.5, 95),
        ("qwen3-235b", None, 39.3, 60),
        ("ds-v3.2", 245_760, 12.7, 36.1),
        ("ds-v3", 245_760, 4.79, 5.79),
        ("ds-v3.2", None, 12.3, 35.2),
        ("ds-v3", None, 4.35, 5.15),
        ("ds-27b", None, 60.6, 163),
    ],
)
def test_cache_compute_ratios(name, pair_flop, low, high):
    model = load_model(name)
    ratios = [model.cache_compute_ratio(c, 429, latent_pair_flop=pair_flop) for c in (16384, 65536)]
    assert ratios == pytest.approx([low, high], rel=0.005)


def test_the_ratio_quoted_in_the_text_of_section_3():
    ratio = load_model("ds-v3.2").cache_compute_ratio(32_721, 429)
    assert round(ratio) == 22
