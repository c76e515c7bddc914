"""Tiny LoRA adapters with random weights for tests; they change every token of a tiny model."""

import json
from pathlib import Path
from typing import Any

from dualpath.laboratory.models.prepared import prepare_random

RANK = 8
#: The adapted modules of each layer's attention, including keys and values, so that KV differs.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
ADAPTER_VERSION = 1


def make_tiny_adapter(
    model: Path, seed: int, directory: Path | None = None, scale: float = 0.1
) -> Path:
    """Return the folder of a random adapter for a model with grouped attention (`qwen2`).

    Args:
        model: the model's folder.
        seed: seed of the weights; the same seed gives the same bytes.
        scale: standard deviation of the weights; with 0 the adapter has no effect.
        directory: where to write; default: a directory in `cache_directory()`.

    Raises:
        ConfigError: `directory` cannot be used.
    """
    name = f"adapter-{model.name}-seed-{seed}-scale-{scale:g}"
    return prepare_random(
        name, ADAPTER_VERSION, directory, lambda empty: _write_adapter(model, empty, seed, scale)
    )


def _write_adapter(model: Path, directory: Path, seed: int, scale: float) -> None:
    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for module in MODULES:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            rows, columns = _size(shape, module)
            weights[f"{name}.lora_A.weight"] = scale * torch.randn(RANK, columns, generator=random)
            weights[f"{name}.lora_B.weight"] = scale * torch.randn(rows, RANK, generator=random)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(MODULES),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _size(shape: dict[str, Any], module: str) -> tuple[int, int]:
    """Return the rows and columns of a projection."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    head = shape.get("head_dim") or hidden // heads
    queries, keys = heads * head, shape["num_key_value_heads"] * head
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }[module]
