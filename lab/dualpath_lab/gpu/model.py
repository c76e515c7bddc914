"""The model of the check: Llama-3.1-8B's layers with seeded random weights, and its prompts.

Norms are near one and matrices keep the size of their input, so that the greedy token depends on
the whole context and KV from a wrong place changes the answer.
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualpath_lab.gpu.settings import GpuCheckSettings
from dualpath_lab.models.prepared import prepare_random
from dualpath_lab.models.random_models import VOCABULARY_TOKENS, train_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

SEED = 7
#: Increase it when the files written here change.
_VERSION = 1
_SHAPES: dict[str, dict[str, int]] = {
    # 4 KiB of KV per token and layer in float16, 262,144 bytes per Layer Block of 64 tokens.
    "llama-8b-16-layers": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "llama-tiny": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    },
}  # fmt: skip
#: Standard deviation of attention's queries and keys, above one so that attention is not uniform.
_QUERY_GAIN = 1.6


def model_of(settings: GpuCheckSettings) -> str:
    """Return the model of the settings, or the folder of the random one, created if needed."""
    if settings.model:
        return settings.model
    shape = "llama-tiny" if settings.rehearse else "llama-8b-16-layers"
    dtype = settings.dtype if settings.dtype != "auto" else "bfloat16"
    name = f"gpu-check-{shape}-{dtype}"
    folder = prepare_random(name, _VERSION, None, lambda empty: _write(empty, shape, dtype))
    return str(folder)


def prompts(settings: GpuCheckSettings) -> dict[str, list[int]]:
    """Return prompts by name; the one of "N+" continues that of "N" by a sixteenth."""
    draw = random.Random(SEED)
    found = {}
    for length in settings.sizes.prompt_tokens:
        first = tokens(draw, length)
        found[str(length)] = first
        found[f"{length}+"] = first + tokens(draw, max(length // 16, 64))
    return found


def next_turn(prompt: list[int], answer: Sequence[int]) -> list[int]:
    """Return a prompt that continues the conversation of a prompt and its answer."""
    return [*prompt, *answer, *tokens(random.Random(SEED + 1), 64)]


def tokens(draw: random.Random, count: int) -> list[int]:
    """Return random token ids of the made model's vocabulary, without its special tokens."""
    return [draw.randrange(3, VOCABULARY_TOKENS) for _ in range(count)]


def _write(folder: Path, shape: str, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    sizes = _SHAPES[shape]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": VOCABULARY_TOKENS, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "torch_dtype": dtype, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, **sizes,
    }  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(SEED)
    kind = getattr(torch, dtype)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> "Tensor":
        values = torch.randn(rows, columns, generator=generator, device=device)
        return (values * gain / math.sqrt(columns)).to(kind).cpu()

    def norm() -> "Tensor":
        values = torch.randn(hidden, generator=generator, device=device)
        return (1 + 0.1 * values).to(kind).cpu()

    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    queries = sizes["num_attention_heads"] * sizes["head_dim"]
    keys = sizes["num_key_value_heads"] * sizes["head_dim"]
    places: dict[str, str] = {}

    def save(file: str, weights: "dict[str, Tensor]") -> None:
        save_file(weights, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(weights, file))

    embedding = matrix(VOCABULARY_TOKENS, hidden, math.sqrt(hidden))
    save("outer.safetensors", {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(VOCABULARY_TOKENS, hidden),
    })  # fmt: skip
    for layer in range(sizes["num_hidden_layers"]):
        weights = {
            "self_attn.q_proj": matrix(queries, hidden, _QUERY_GAIN),
            "self_attn.k_proj": matrix(keys, hidden, _QUERY_GAIN),
            "self_attn.v_proj": matrix(keys, hidden, _QUERY_GAIN),
            "self_attn.o_proj": matrix(hidden, queries),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
            "input_layernorm": norm(),
            "post_attention_layernorm": norm(),
        }
        named = {f"model.layers.{layer}.{name}.weight": one for name, one in weights.items()}
        save(f"layer-{layer:02}.safetensors", named)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    train_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
