"""Tiny draft models of one layer with random weights, which propose tokens for a tiny model.

An EAGLE draft is a separate model.  A layer for multi-token prediction (MTP) is part of the model,
here of MiMo's architecture, which is Qwen2's with such a layer.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dualpath.laboratory.models.prepared import prepare_random
from dualpath.laboratory.models.tiny import tiny_config, train_tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

DRAFT_VERSION = 1
#: Configuration fields that the draft copies from the model, so that their KV has the same shape.
_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip


def make_tiny_draft(model: Path, seed: int = 0, directory: Path | None = None) -> Path:
    """Return the folder of a random draft for a model with grouped attention (`qwen2`).

    Args:
        model: the model's folder.
        seed: seed of the weights; the same seed gives the same bytes.
        directory: where to write; default: a directory in `cache_directory()`.

    Raises:
        ConfigError: `directory` cannot be used.
    """
    name = f"draft-{model.name}-seed-{seed}"
    return prepare_random(
        name, DRAFT_VERSION, directory, lambda empty: _write_draft(model, empty, seed)
    )


def _write_draft(model: Path, directory: Path, seed: int) -> None:
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
        # The layer's input is the output of `fc`, without normalisation.
        del weights["layers.0.input_layernorm.weight"], weights["norm.weight"]
        weights["fc.weight"] = 0.12 * torch.randn(config.hidden_size, 2 * config.hidden_size)
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    config.dtype = torch.float32
    config.save_pretrained(directory)


def make_tiny_mtp_model(layers: int, seed: int = 0, directory: Path | None = None) -> Path:
    """Return the folder of a random model with `layers` layers and one more for MTP.

    Args:
        layers: number of layers of the model itself, at least 1.
        seed: seed of the weights; the same seed gives the same bytes.
        directory: where to write; default: a directory in `cache_directory()`.

    Raises:
        ConfigError: `directory` cannot be used.
    """
    name = f"tiny-mimo-{layers}-layers-seed-{seed}"
    return prepare_random(
        name, DRAFT_VERSION, directory, lambda empty: _write_with_mtp(empty, layers, seed)
    )


def _write_with_mtp(directory: Path, layers: int, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2ForCausalLM

    # vLLM selects the model by its architecture; transformers does not have MiMo.
    config = tiny_config("qwen2", layers)
    config.architectures = ["MiMoForCausalLM"]
    config.num_nextn_predict_layers = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = Qwen2ForCausalLM(config).state_dict() | _mtp_weights(config)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config.dtype = torch.float32
    config.save_pretrained(directory)
    train_tokenizer().save_pretrained(directory)


def _mtp_weights(config: "PretrainedConfig") -> "dict[str, Tensor]":
    """Return the weights of the MTP layer: one layer of the model and its input projection."""
    import torch
    from transformers import Qwen2Model

    one = type(config)(**{**config.to_dict(), "num_hidden_layers": 1, "layer_types": None})
    mtp = {
        name.removeprefix("layers.0."): weight
        for name, weight in Qwen2Model(one).state_dict().items()
        if name.startswith("layers.0.")
    }
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    mtp |= {f"{norm}.weight": torch.ones(config.hidden_size) for norm in norms}
    mtp["input_proj.weight"] = 0.12 * torch.randn(config.hidden_size, 2 * config.hidden_size)
    return {f"model.mtp_layers.0.{name}": weight for name, weight in mtp.items()}
