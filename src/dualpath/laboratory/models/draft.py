"""A tiny EAGLE draft of one layer with random weights, which proposes tokens for a tiny model."""

import json
from pathlib import Path

from dualpath.laboratory.models.prepared import prepare_random

GENERATOR_VERSION = 1
#: Of the model's configuration, what its draft shares, so that their KV has one shape.
_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip


def make_tiny_draft(model: Path, seed: int = 0, directory: Path | None = None) -> Path:
    """Return the folder of a random draft for a model with grouped attention (`qwen2`).

    Args:
        model: the model's folder.
        seed: of the weights; the same seed gives the same bytes.
        directory: where to write; default: a directory in `cache_directory()`.

    Raises:
        ConfigError: `directory` cannot be used.
    """
    name = f"draft-{model.name}-seed-{seed}"
    return prepare_random(
        name, GENERATOR_VERSION, directory, lambda empty: _write(model, empty, seed)
    )


def _write(model: Path, directory: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaModel

    shape = json.loads((model / "config.json").read_text())
    config = LlamaConfig(
        num_hidden_layers=1, initializer_range=0.12, **{name: shape[name] for name in _SHARED}
    )
    config.architectures = ["LlamaForCausalLM"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = LlamaModel(config).state_dict()
        # The layer takes what `fc` makes of the model's state and the next token, as it is.
        del weights["layers.0.input_layernorm.weight"], weights["norm.weight"]
        weights["fc.weight"] = 0.12 * torch.randn(config.hidden_size, 2 * config.hidden_size)
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    config.dtype = torch.float32
    config.save_pretrained(directory)
