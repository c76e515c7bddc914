"""Tiny random models: the same bytes each time, and a text for every token they can sample."""

import json
from typing import Any, cast

import pytest

from dualpath.core.errors import ConfigError
from dualpath_lab.models.random_models import VOCABULARY_TOKENS, make_tiny_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def weights(directory):
    return (directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("kind", "model_type", "layers"),
    [
        ("qwen2", "qwen2", 8),
        ("qwen3_moe", "qwen3_moe", 4),
        ("deepseek_v2", "deepseek_v2", 4),
        ("gemma3", "gemma3_text", 6),
        ("gpt_oss", "gpt_oss", 4),
    ],
)
def test_a_tiny_model_runs_in_float32(tmp_path, kind, model_type, layers):
    directory = make_tiny_model(kind, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.model_type == model_type
    assert model.config.num_hidden_layers == layers
    assert model.dtype == torch.float32
    logits = model(torch.arange(3, 40)[None]).logits
    assert logits.shape == (1, 37, VOCABULARY_TOKENS)
    assert bool(torch.isfinite(logits).all())


def test_greedy_output_depends_on_the_start_of_a_long_context(tmp_path):
    directory = make_tiny_model("qwen2", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    prompt = [3 + (7 * index) % 500 for index in range(256)]
    changed = [4 + token for token in prompt[:64]] + prompt[64:]
    prompts = torch.tensor([prompt, changed])
    outputs = model.generate(prompts, max_new_tokens=16, do_sample=False)[:, 256:].tolist()
    assert outputs[0] != outputs[1]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    first = make_tiny_model("qwen2", tmp_path / "first", seed=1, layers=1)
    again = make_tiny_model("qwen2", tmp_path / "again", seed=1, layers=1)
    other = make_tiny_model("qwen2", tmp_path / "other", seed=2, layers=1)
    assert weights(first) == weights(again) != weights(other)
    assert (first / "tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()


def test_creating_a_model_does_not_change_the_callers_random_state(tmp_path):
    before = torch.random.get_rng_state()
    make_tiny_model("qwen2", tmp_path / "model", layers=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_tokenizer_covers_the_vocabulary_and_renders_chats(tmp_path):
    directory = make_tiny_model("qwen2", tmp_path / "model", layers=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"] == VOCABULARY_TOKENS
    text = "def f(x): return x  # été"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_the_default_directory_is_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DUALPATH_CACHE", str(tmp_path))
    directory = make_tiny_model("qwen2", seed=3, layers=1)
    assert directory == tmp_path / "tiny-qwen2-1-layers-seed-3"


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'gpt'.*qwen2, qwen3_moe, deepseek_v2"):
        make_tiny_model(cast("Any", "gpt"), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"0 layers.*at least 1"):
        make_tiny_model("qwen2", tmp_path / "model", layers=0)
