"""A model's `config.json` becomes a geometry; what is not understood is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from dualpath.core.errors import ConfigError
from dualpath_sim.catalog.load import MODELS, find
from dualpath_sim.catalog.load import load_model as load

#: As published; `gpt-oss-120b` and `ds-v3.2` are the same models as the paper counts them.
GPT_OSS = "gpt-oss-120b-published"
DEEPSEEK = "deepseek-v3.2"


def keys_of(name: str) -> dict[str, Any]:
    """Return the keys of a config of the catalog."""
    return dict(json.loads(find(MODELS, name).read_bytes()))


def written(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """Write a config.json with some keys changed, None for keys left out; return its folder."""
    values = {key: value for key, value in {**config, **changes}.items() if value is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def refusal(folder: Path, config: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load(written(folder, config, **changes))
    return str(refused.value)


# Published sizes in billions, as the model cards round them; active ones with the embedding, which
# we leave out.
@pytest.mark.parametrize(
    ("name", "total", "active", "kv_bytes_per_token"),
    [
        ("qwen3-coder-480b", 480.2, 35.5 - 0.93, 62 * 2 * 8 * 128 * 2),
        ("glm-4.6", 352.8, 32.85, 92 * 2 * 8 * 128 * 2),
        ("kimi-k2", 1026.4, 31.7, 61 * 576 * 2),
        ("minimax-m2", 228.7, 10.42, 62 * 2 * 8 * 128 * 2),
        ("llama-3.3-70b", 70.55, 69.5, 80 * 2 * 8 * 128 * 2),
    ],
)
def test_published_configs_give_the_sizes_models_are_known_by(
    name, total, active, kv_bytes_per_token
):
    model = load(name)
    assert model.total_parameters / 1e9 == pytest.approx(total, rel=0.003)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.003)
    assert model.kv_bytes_per_token == kv_bytes_per_token
    assert "config.json" in keys_of(name)["_source"]


def test_a_config_gives_the_values_of_the_models_hand_written_file():
    """Two readers of one model: the catalog's TOML counts KV as the paper does."""
    for published, own in ((GPT_OSS, "gpt-oss-120b"), (DEEPSEEK, "ds-v3.2")):
        model, known = load(published, "fp8"), load(own)
        assert model.total_parameters == known.total_parameters
        assert model.active_parameters == known.active_parameters
        assert model.weight_bytes == known.weight_bytes
        assert model.feed_forward == known.feed_forward
        assert model.attention_flop(5000) == known.attention_flop(5000)
        assert model.indexer_flop(5000) == known.indexer_flop(5000)
    assert load(GPT_OSS, "fp8").kv_bytes_per_token == load("gpt-oss-120b").kv_bytes_per_token


def test_the_indexers_keys_are_a_part_of_their_own_and_count():
    assert load(DEEPSEEK, "fp8").attention[0].part_bytes_per_token == (656, 132)
    assert load(DEEPSEEK, "fp8").kv_bytes_per_token == 61 * (656 + 132)
    assert load(DEEPSEEK).attention[0].part_bytes_per_token == (1152, 132)


def test_window_layers_are_found_by_their_list_and_by_gemmas_pattern(tmp_path):
    full, window = load(GPT_OSS).attention
    assert (full.layers, full.stored_tokens) == (18, 0)
    assert (window.layers, window.stored_tokens) == (18, 128)
    gemma = {**keys_of("llama-3.3-70b"), "model_type": "gemma3_text", "sliding_window": 1024}
    full, window = load(written(tmp_path / "gemma", gemma, num_hidden_layers=62)).attention
    assert (full.layers, window.layers, window.stored_tokens) == (10, 52, 1024)


def test_a_window_that_qwen_does_not_use_is_none(tmp_path):
    qwen = {**keys_of("llama-3.3-70b"), "model_type": "qwen2", "sliding_window": 4096}
    for setting in (None, False):
        model = load(written(tmp_path / "qwen", qwen, use_sliding_window=setting))
        assert [run.stored_tokens for run in model.attention] == [0]
    mistral = load(written(tmp_path / "mistral", qwen, model_type="mistral"))
    assert [run.stored_tokens for run in mistral.attention] == [4096]


def test_dense_layers_are_found_by_either_key(tmp_path):
    kimi = keys_of("kimi-k2")
    kinds = ["dense"] * 3 + ["sparse"] * 58
    listed = load(written(tmp_path / "listed", kimi, mlp_layer_types=kinds))
    counted = load(written(tmp_path / "counted", kimi, first_k_dense_replace=3))
    assert listed.feed_forward == counted.feed_forward
    assert [part.layers for part in listed.feed_forward] == [3, 58]


def test_fp8_halves_the_kv_of_a_model_in_bf16():
    assert 2 * load("glm-4.6", "fp8").kv_bytes_per_token == load("glm-4.6").kv_bytes_per_token


def test_layers_of_multi_token_prediction_are_named_and_count_in_nothing():
    model = load("glm-4.6")
    assert (model.layers, model.draft_layers) == (92, 1)
    assert load("kimi-k2").draft_layers == 0


def test_a_model_is_called_like_its_folder_and_a_multi_modal_one_has_a_text_model(tmp_path):
    llama = keys_of("llama-3.3-70b")
    plain = load(written(tmp_path / "Mine", llama))
    assert plain.name == "Mine"
    outer = {"model_type": "llava", "torch_dtype": "bfloat16", "text_config": llama}
    nested = load(written(tmp_path / "Seeing", outer))
    assert nested.kv_bytes_per_token == plain.kv_bytes_per_token
    assert load(tmp_path / "Seeing" / "config.json") == nested


@pytest.mark.parametrize("model_type", ["qwen3_next", "jamba", "minimax"])
def test_families_with_state_layers_are_refused_by_name(tmp_path, model_type):
    text = refusal(tmp_path, keys_of("llama-3.3-70b"), model_type=model_type)
    assert model_type in text
    assert "layers with a state" in text


def test_state_layers_in_a_list_are_refused_by_name(tmp_path):
    kinds = ["linear_attention", "full_attention"] * 40
    text = refusal(tmp_path, keys_of("llama-3.3-70b"), layer_types=kinds)
    assert "layers of type linear_attention" in text
    text = refusal(tmp_path, keys_of("minimax-m2"), attn_type_list=[0, 1])
    assert "layers with a state" in text


def test_what_is_not_understood_is_refused_with_its_key(tmp_path):
    llama, experts = keys_of("llama-3.3-70b"), keys_of("kimi-k2")
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (llama, {"model_type": "gpt2"}, "model_type is 'gpt2', known are llama"),
        (llama, {"hidden_size": None}, "hidden_size"),
        (llama, {"hidden_size": "many"}, "hidden_size"),
        (llama, {"intermediate_size": None}, "there is no intermediate_size"),
        (llama, {"num_key_value_heads": 7}, "must be a multiple of kv_heads"),
        (llama, {"head_dim": None, "hidden_size": 8}, "hidden_size is 8, below the 64 heads"),
        (llama, {"torch_dtype": "int3"}, "dtype is 'int3'"),
        (llama, {"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
        (llama, {"layer_types": ["full_attention"]}, "layer_types has 1 layers"),
        (llama, {"use_sliding_window": True, "sliding_window": 64}, "no layer_types"),
        (experts, {"n_routed_experts": None}, "there is no n_routed_experts"),
        (experts, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (experts, {"index_topk": 8, "index_topk_freq": 4}, "only some layers have an indexer"),
        (experts, {"index_topk": 8, "indexer_types": ["full", "shared"]}, "only some layers"),
        (experts, {"mlp_layer_types": ["sparse", "dense"]}, "not dense layers followed by"),
    ]
    for config, changes, expected in cases:
        text = refusal(tmp_path, config, **changes)
        assert expected in text, changes
        assert str(tmp_path) in text, changes


def test_files_that_are_no_config_are_refused(tmp_path):
    for content in (b"", b"[]", b'{"model_type": 3}', b"\xff", b"[" * 100_000):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"config\.json"):
            load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="there is no file"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="or a folder like"):
        load("no-such-model")


def test_a_toml_file_defines_how_kv_is_stored():
    with pytest.raises(ConfigError, match="states how KV is stored"):
        load("ds-v3.2", "fp8")
