"""A model's `config.json` becomes a geometry; what is not understood is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from dualpath.core.errors import ConfigError
from dualpath_sim.catalog.costs import model_costs
from dualpath_sim.catalog.defaults import defaults_of, installed_defaults, stored_defaults
from dualpath_sim.catalog.families import CONFIG_KEYS, DEFAULTS_OF_FAMILIES, FAMILIES
from dualpath_sim.catalog.geometry import ModelGeometry
from dualpath_sim.catalog.load import GPUS, MODELS, find, load_cluster, load_gpu, names
from dualpath_sim.catalog.load import load_model as load
from dualpath_sim.cli.model_tables import kv_table

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


def windows(model: ModelGeometry) -> list[tuple[int, int]]:
    """Return layers and their window, run by run."""
    return [(kind.layers, kind.window_tokens) for kind in model.kv_by_kind()]


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
    assert load(DEEPSEEK, "fp8").attention[0].stored[0].part_bytes == (656, 132)
    assert load(DEEPSEEK, "fp8").kv_bytes_per_token == 61 * (656 + 132)
    assert load(DEEPSEEK).attention[0].stored[0].part_bytes == (1152, 132)


def test_window_layers_are_found_by_their_list_and_by_gemmas_pattern(tmp_path):
    assert windows(load(GPT_OSS)) == [(18, 0), (18, 128)]
    gemma = {**keys_of("llama-3.3-70b"), "model_type": "gemma3_text", "sliding_window": 1024}
    assert windows(load(written(tmp_path / "gemma", gemma, num_hidden_layers=62))) == [
        (10, 0),
        (52, 1024),
    ]


def test_a_window_that_qwen_does_not_use_is_none(tmp_path):
    qwen = {**keys_of("llama-3.3-70b"), "model_type": "qwen2", "sliding_window": 4096}
    for said in (None, False):
        model = load(written(tmp_path / "qwen", qwen, use_sliding_window=said))
        assert windows(model) == [(80, 0)]
    used = load(written(tmp_path / "used", qwen, use_sliding_window=True, max_window_layers=60))
    assert windows(used) == [(60, 0), (20, 4096)]


def test_windows_or_states_in_all_layers_are_refused_as_engines_refuse_them(tmp_path):
    llama = keys_of("llama-3.3-70b")
    text = refusal(tmp_path / "mistral", llama, model_type="mistral", sliding_window=4096)
    assert "no layer stores every token's KV" in text
    states = ["linear_attention"] * 48
    text = refusal(tmp_path / "states", keys_of("qwen3-next-80b"), layer_types=states)
    assert "no layer stores every token's KV" in text


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


@pytest.mark.parametrize("model_type", ["nemotron_h", "jamba", "minimax", "exaone4"])
@pytest.mark.parametrize("keys", ["{}", '{"sliding_window_pattern": "LLLG", "x": [0, Infinity]}'])
def test_families_that_are_not_read_are_refused_by_name_before_their_keys(
    tmp_path, model_type, keys
):
    (tmp_path / "config.json").write_text(keys[:-1] + (", " if len(keys) > 2 else ""))
    with (tmp_path / "config.json").open("a") as file:
        file.write(f'"hidden_size": "many", "model_type": "{model_type}"}}')
    with pytest.raises(ConfigError, match=model_type) as refused:
        load(tmp_path)
    assert "hidden_size" not in str(refused.value)


def test_state_layers_in_a_list_are_refused_by_name(tmp_path):
    kinds = ["linear_attention", "full_attention"] * 40
    text = refusal(tmp_path, keys_of("llama-3.3-70b"), layer_types=kinds)
    assert "layers of type linear_attention: known for this family are full_attention" in text
    text = refusal(tmp_path, keys_of("minimax-m2"), attn_type_list=[0, 1])
    assert "layers with a state" in text


def test_what_is_not_understood_is_refused_with_its_key(tmp_path):
    llama, experts = keys_of("llama-3.3-70b"), keys_of("kimi-k2")
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (llama, {"model_type": "gpt2"}, "model_type is 'gpt2', known are llama"),
        (llama, {"hidden_size": "many"}, "hidden_size"),
        (llama, {"num_key_value_heads": 7}, "must be a multiple of kv_heads"),
        (llama, {"head_dim": None, "hidden_size": 8}, "hidden_size is 8, below the 64 heads"),
        (llama, {"torch_dtype": "int3"}, "dtype is 'int3'"),
        (llama, {"quantization_config": {"quant_method": "new"}}, "quant_method is 'new', known"),
        (llama, {"quantization_config": {"quant_method": "awq"}}, "states no bits"),
        (llama, {"layer_types": ["full_attention"]}, "layer_types has 1 layers"),
        (llama, {"use_sliding_window": True, "sliding_window": 64}, "no layer_types"),
        (experts, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (experts, {"index_topk": 8, "indexer_types": ["full", "shared"]}, "indexer_types or"),
        (experts, {"index_topk": 8, "index_topk_pattern": "S" * 61}, "the first as full"),
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


def test_a_key_that_is_null_is_not_the_familys_default(tmp_path):
    llama = keys_of("llama-3.3-70b")
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"):
        (tmp_path / "config.json").write_text(json.dumps({**llama, key: None}))
        with pytest.raises(ConfigError, match=f"there is no {key}, which a llama model has"):
            load(tmp_path)
    mistral = {**llama, "model_type": "mistral", "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(mistral))
    assert windows(load(tmp_path)) == [(80, 0)]


# Defaults


@pytest.mark.parametrize("name", sorted(set(DEFAULTS_OF_FAMILIES.values())))
def test_the_table_of_defaults_is_that_of_the_installed_classes(name):
    """Else: python -m dualpath_sim.catalog.defaults, and look at what changed."""
    installed = installed_defaults(name)
    if installed is None:
        pytest.skip("transformers is not installed")
    assert stored_defaults(name) == installed.only(CONFIG_KEYS)


@pytest.mark.parametrize("name", ["gemma3_text", "glm_moe_dsa", "llama4_text", "deepseek_v4"])
def test_defaults_are_those_that_the_class_itself_has(name):
    """The source is read without importing it; here it is imported once."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    config = auto.CONFIG_MAPPING[name]()
    values = defaults_of(name).only(CONFIG_KEYS).values
    assert values
    assert {key: getattr(config, key) for key in values} == values


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_family_is_read_from_its_name_alone_and_without_transformers(
    tmp_path, model_type, monkeypatch
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))

    def outcome() -> object:
        try:
            return load(tmp_path)
        except ConfigError as error:
            return str(error)

    with_package = outcome()
    monkeypatch.setattr("dualpath_sim.catalog.defaults.installed_defaults", lambda name: None)
    defaults_of.cache_clear()
    assert outcome() == with_package
    defaults_of.cache_clear()
    # Mistral's class has a window in all layers, DeepSeek-V2's no number of active experts.
    refused = model_type in ("mistral", "mistral3", "deepseek_v2")
    assert isinstance(with_package, str) == refused, with_package


def test_keys_equal_to_the_defaults_may_be_left_out(tmp_path):
    """As published, Gemma 3 4B: 8 heads, 4 KV heads of 256, 5 of 34 layers without a window."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    gemma = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}}
    model = load(written(tmp_path / "gemma", gemma, torch_dtype="bfloat16"))
    assert model.kv_bytes_per_token == 5 * 2 * 4 * 256 * 2
    assert model.tied_embedding
    glm = keys_of("glm-5.2")
    index = dict.fromkeys(("index_n_heads", "index_head_dim", "index_topk"))
    assert load(written(tmp_path / "glm", glm, **index)).attention == load("glm-5.2").attention


def test_other_names_of_a_key_are_those_that_the_class_accepts(tmp_path):
    deepseek = {"model_type": "deepseek_v4", "num_local_experts": 32}
    model = load(written(tmp_path, deepseek))
    assert [part.experts for part in model.expert_layers] == [32]


# Today's models: sizes of their model cards in billions, active ones with the embedding where the
# card counts it, and KV bytes per token by kind of layer.
TODAY: dict[str, tuple[float, float, dict[str, float]]] = {
    "glm-5.2": (744, 40, {"latent + indexer": 21 * (1152 + 132), "latent, shared indexer": 65664}),
    "deepseek-v4-flash": (284, 13, {"compressed 4:1 + indexer": 21 * (584 + 132) / 4}),
    "deepseek-v4-pro": (1573, 49, {"compressed 128:1": 31 * 584 / 128}),
    "kimi-k2.5": (1026, 32, {"latent": 61 * 576 * 2}),
    "kimi-k3": (2780, 104, {"latent": 24 * 576 * 2}),
    "qwen3.5-397b": (397, 17, {"full": 15 * 2 * 2 * 256 * 2}),
    "qwen3-next-80b": (80, 3.9, {"full": 12 * 2 * 2 * 256 * 2}),
    "minimax-m2.5": (229, 11, {"full": 62 * 2 * 8 * 128 * 2}),
    "llama-4-maverick": (400, 17, {"full": 12 * 4096, "window": 36 * 4096}),
    "llama-4-scout": (108, 17, {"full": 12 * 4096, "window": 36 * 4096}),
    "ministral-3-14b": (13.5, 13, {"full": 40 * 4096}),
    "olmo-3-32b": (32.2, 32, {"full": 16 * 4096, "window": 48 * 4096}),
    "seed-oss-36b": (36.2, 36, {"full": 64 * 4096}),
}


@pytest.mark.parametrize("name", sorted(TODAY))
def test_todays_models_have_the_sizes_and_kinds_of_kv_that_they_are_known_by(name):
    total, active, kinds = TODAY[name]
    model = load(name)
    assert model.total_parameters / 1e9 == pytest.approx(total, rel=0.01)
    embedded = (model.active_parameters + model.head_parameters) / 1e9
    assert active * 0.94 <= embedded <= active * 1.06
    found: dict[str, float] = {}
    for kind in model.kv_by_kind():
        found[kind.kind] = found.get(kind.kind, 0) + kind.token_bytes
    assert {kind: found[kind] for kind in kinds} == kinds
    assert "config.json" in keys_of(name)["_source"]


@pytest.mark.parametrize("name", sorted(TODAY))
def test_todays_models_are_priced_on_every_gpu(name):
    model, cluster = load(name), load_cluster("paper-660b")
    for gpu in names(GPUS):
        costs = model_costs(model, load_gpu(gpu), cluster)
        assert costs.prefill_tokens_per_s > 0
        windows = sum(run.kv_bytes_per_token for run in costs.window_layers)
        assert costs.kv_bytes_per_token - windows == pytest.approx(model.kv_bytes_per_token)


def test_a_state_is_one_per_sequence_and_stored_once_per_block():
    """Qwen3-Next: 32 heads of 128 x 128 and 3 inputs of 8192 values; vLLM's block of 544 tokens."""
    _, state = load("qwen3-next-80b").kv_by_kind()
    per_layer = 32 * 128 * 128 * 2 + 3 * 8192 * 2
    assert (state.kind, state.layers, state.window_tokens) == ("state", 36, 544)
    assert state.sequence_bytes == pytest.approx(36 * per_layer)
    assert state.token_bytes == pytest.approx(36 * per_layer / 544)
    # Kimi's are FP32, and vLLM's blocks beside latent attention are multiples of 128 tokens.
    _, kimi = load("kimi-k3").kv_by_kind()
    assert kimi.sequence_bytes == pytest.approx(69 * (96 * 128 * 128 * 4 + 3 * 3 * 12288 * 2))
    assert kimi.window_tokens % 128 == 0


def test_compressed_layers_store_an_entry_for_some_tokens_beside_a_window():
    model = load("deepseek-v4-flash")
    geometry = model.block_geometry(128)
    parts = list(zip(geometry.layer_parts, geometry.layer_windows, strict=True))
    assert parts.count(((32 * 584, 32 * 132), 0)) == 21
    assert parts.count(((584,), 0)) == 20
    assert parts.count(((128 * 584,), 128)) == 43
    assert load("deepseek-v4-flash", "fp8") == model


def test_layers_that_share_an_indexer_have_no_keys_and_score_none(tmp_path):
    glm = keys_of("glm-5.2")
    own, sharing = load("glm-5.2").attention
    assert (own.layers, sharing.layers) == (21, 57)
    assert [len(stored.part_bytes) for run in (own, sharing) for stored in run.stored] == [2, 1]
    all_own = load(written(tmp_path / "all", glm, index_topk_freq=1))
    assert load("glm-5.2").indexer_flop(1000) * 78 == all_own.indexer_flop(1000) * 21
    listed = ["full" if n < 3 or (n - 2) % 4 == 0 else "shared" for n in range(78)]
    assert load(written(tmp_path / "l", glm, indexer_types=listed)).attention == (own, sharing)
    letters = "".join("F" if kind == "full" else "S" for kind in listed)
    other = load(written(tmp_path / "p", glm, index_topk_pattern=letters))
    assert other.attention == (own, sharing)


def test_plans_print_the_kv_of_each_kind():
    table = kv_table(load("kimi-k3"))
    assert table.rows == (
        ("latent", "24", "27,648", "all", "-"),
        ("state", "69", "78,016", "5,760", "449.4"),
    )


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path):
    content = json.dumps({**keys_of("llama-3.3-70b"), "scale": float("nan")}).encode()
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + content)
    assert load(tmp_path).attention == load("llama-3.3-70b").attention


# Quantisation


@pytest.mark.parametrize(
    ("quantization", "expert_bytes", "attention_bytes"),
    [
        ({"quant_method": "fp8"}, 1.0, 1.0),
        ({"quant_method": "mxfp4"}, 0.53125, 2.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.515625, 0.515625),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625, 0.5625),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}},
                "ignore": ["re:.*self_attn.*"],
            },
            0.5625,
            2.0,
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["layers.0.self_attn.indexer.wk"]},
            1.0,
            1.0,
        ),
    ],
)
def test_quantised_weights_leave_kv_as_it_is(tmp_path, quantization, expert_bytes, attention_bytes):
    plain = keys_of("kimi-k2")
    model = load(written(tmp_path, plain, quantization_config=quantization))
    assert (model.expert_value_bytes, model.weight_value_bytes) == (expert_bytes, attention_bytes)
    assert model.kv_bytes_per_token == load("kimi-k2").kv_bytes_per_token


def test_quantised_kv_is_read_where_its_type_is_given(tmp_path):
    quantization = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    folder = written(tmp_path, keys_of("kimi-k2"), quantization_config=quantization)
    with pytest.raises(ConfigError, match=r"quantises the KV-cache as well.*set kv_cache_dtype"):
        load(folder)
    assert load(folder, "fp8").kv_bytes_per_token == 61 * 576
