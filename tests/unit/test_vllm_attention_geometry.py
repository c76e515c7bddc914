"""The compute quota's attention model of each kind of layers, beside the catalog's own sums."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from transformers import CONFIG_MAPPING

import dualpath_sim.catalog
from dualpath.policy.batching import AttentionGeometry
from dualpath.vllm.profiling import attention_geometry
from dualpath_sim.catalog.load import load_model

MODELS = Path(dualpath_sim.catalog.__file__).parent / "models"


def config_of(text: dict[str, Any], ranks: int = 1) -> Any:
    """Return what the quota reads of vLLM's configuration of a model."""
    heads, size = text["num_attention_heads"], text.get("head_dim")
    return SimpleNamespace(
        parallel_config=None,
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**text),
            use_mla="kv_lora_rank" in text,
            get_num_attention_heads=lambda parallel: heads // ranks,
            get_layers_start_end_indices=lambda parallel: (0, text["num_hidden_layers"]),
            get_sliding_window=lambda: text.get("sliding_window"),
            get_head_size=lambda: size or text["hidden_size"] // heads,
        ),
    )


def published(name: str) -> dict[str, Any]:
    """Return a model's own config.json, with the defaults of its class in transformers."""
    found: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    kind = found["model_type"]
    defaults = CONFIG_MAPPING[kind](**found).to_dict() if kind in CONFIG_MAPPING else {}
    return {**defaults, **found}


@pytest.mark.parametrize(
    "name",
    ["deepseek-v3.2", "kimi-k2", "gpt-oss-120b-published", "olmo-3-32b", "llama-3.3-70b"],
)
def test_a_chunk_costs_what_the_layers_of_the_catalog_compute(name: str) -> None:
    geometry = attention_geometry(config_of(published(name)))
    attention = load_model(name).attention
    for cached, bsz in ((0, 512), (100, 64), (60_000, 448), (4_096, 1)):
        expected = sum(
            part.layers * scan.flop * scan.seen_tokens(cached + position + 1)
            for part in attention
            for scan in part.scans
            for position in range(bsz)
        )
        assert geometry.flops(cached, bsz) == pytest.approx(expected)


def test_layers_with_a_state_cost_the_same_at_every_length() -> None:
    kinds = ["linear_attention", "full_attention", "mamba", "conv"]
    hybrid = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}
    geometry = attention_geometry(config_of({**hybrid, "layer_types": kinds}))
    assert geometry == AttentionGeometry.from_heads(1, 8, 8, 8)


def test_a_rank_computes_its_own_heads() -> None:
    whole, half = (attention_geometry(config_of(published("llama-3.3-70b"), n)) for n in (1, 2))
    assert half.flops(1000, 100) == whole.flops(1000, 100) / 2


def test_chunked_attention_sees_at_most_its_chunk() -> None:
    text = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}
    kinds = ["chunked_attention", "full_attention"]
    geometry = attention_geometry(
        config_of({**text, "layer_types": kinds, "attention_chunk_size": 128})
    )
    assert (geometry.window_tokens, geometry.index_pair_flops) == (128, geometry.pair_flops)
