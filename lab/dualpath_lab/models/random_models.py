"""Tiny models with random weights, for tests of token identity.

They are float32, and engines must be started with `dtype="float32"`, because vLLM's `auto` converts
float32 weights to bfloat16. In bfloat16 the results of one engine for different batch shapes differ
by more than the gap between two likely tokens. The variance of the weights is large enough that the
greedy token depends on the whole context, so that KV read from a wrong place changes the output.

    kind          attention            layers  KV of a token and layer
    qwen2         grouped, 4 KV heads  8       1,024 bytes
    qwen3_moe     grouped, 4 KV heads  4       1,024 bytes; 8 experts
    deepseek_v2   MLA                  4       2,304 bytes (compressed KV 512 + rotary key 64)
    gemma3        5 of 6 in windows    6       512 bytes
    gpt_oss       every 2nd in windows 4       1,024 bytes; experts, sinks

A window has `WINDOW_TOKENS` tokens.

vLLM's CPU build runs `deepseek_v2` correctly only with `MLA_COMPILATION_CONFIG`, with blocks of 16
tokens and, on CPUs with AMX, with `--attention-backend CPU_MLA`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from dualpath.core.errors import ConfigError
from dualpath_lab.models.prepared import prepare_random
from dualpath_lab.models.smollm2 import CHAT_TEMPLATE

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

# ----------------------------------------------------------------------------------------- adapter
# Tiny LoRA adapters with random weights for tests; they change every token of a tiny model.

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
        directory: where to write; default: a directory in `private_cache_directory()`.

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


TinyKind = Literal["qwen2", "qwen3_moe", "deepseek_v2", "gemma3", "gpt_oss"]

KINDS: tuple[TinyKind, ...] = get_args(TinyKind)
DEFAULT_LAYERS: dict[TinyKind, int] = {
    "qwen2": 8,
    "qwen3_moe": 4,
    "deepseek_v2": 4,
    "gemma3": 6,
    "gpt_oss": 4,
}
WINDOW_TOKENS = 64

# vLLM's CPU operator for rotary embeddings is wrong for MLA's three-dimensional rotary keys.
MLA_COMPILATION_CONFIG = {"custom_ops": ["-rotary_embedding"]}

# Increase it when the files written here change, so that cached models are created again.
GENERATOR_VERSION = 1

VOCABULARY_TOKENS = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT_ID, START_ID, END_ID = range(3)

TRAINING_TEXT = (
    "An agent works in rounds: it reads a file, runs a command, and waits for the answer.",
    "Every round appends a little to a long context, and nearly all of it was seen before.",
    "The storage holds the key-value cache of those rounds, block by block and layer by layer.",
    "A prefill engine reads through one path, a decode engine reads through the other path.",
    "def load(block, layer):\n    return storage.read(block.key, offset=layer * layer_bytes)\n",
    "Traceback (most recent call last): FileNotFoundError: [Errno 2] No such file or directory",
    "When the network of the storage is the bottleneck, the idle network helps to carry the load.",
    "The scheduler balances tokens and requests, and the quota keeps the engines in step.",
    "system user assistant tool: please fix the failing test, then run the whole suite again.",
)


def make_tiny_model(
    kind: TinyKind, directory: Path | None = None, seed: int = 0, layers: int | None = None
) -> Path:
    """Return the directory of a random model; created by the first call with these arguments.

    Args:
        kind: architecture, one of `KINDS`.
        directory: where to write; default: a directory in `private_cache_directory()`.
        seed: seed of the weights; the same seed gives the same bytes.
        layers: number of layers, at least 1; default `DEFAULT_LAYERS[kind]`.

    Raises:
        ConfigError: unknown kind, `layers` below 1, or `directory` cannot be used.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown tiny model {kind!r}: choose one of {', '.join(KINDS)}")
    count = DEFAULT_LAYERS[kind] if layers is None else layers
    if count < 1:
        raise ConfigError(f"a model of {count} layers cannot run: it must have at least 1")
    name = f"tiny-{kind}-{count}-layers-seed-{seed}"
    return prepare_random(
        name, GENERATOR_VERSION, directory, lambda empty: _write_model(kind, empty, seed, count)
    )


def _write_model(kind: TinyKind, directory: Path, seed: int, layers: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = train_tokenizer()
    config = tiny_config(kind, layers)
    # The caller's random state must not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _qwen2_config(layers: int) -> "PretrainedConfig":
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        initializer_range=0.12,
        **_shared_settings(),
    )


def _qwen3_moe_config(layers: int) -> "PretrainedConfig":
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        initializer_range=0.12,
        **_shared_settings(),
    )


def _deepseek_v2_config(layers: int) -> "PretrainedConfig":
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
        # All layers are dense, because experts are irrelevant for tests of KV loading.
        first_k_dense_replace=layers,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=8192,
        initializer_range=0.08,
        **_shared_settings(),
    )


def _gemma3_config(layers: int) -> "PretrainedConfig":
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW_TOKENS,
        layer_types=[_attention_type(layer, 6) for layer in range(layers)],
        max_position_embeddings=8192,
        initializer_range=0.12,
        **_shared_settings(),
    )


def _gpt_oss_config(layers: int) -> "PretrainedConfig":
    from transformers import GptOssConfig

    return GptOssConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW_TOKENS,
        layer_types=[_attention_type(layer, 2) for layer in range(layers)],
        max_position_embeddings=131072,
        initializer_range=0.12,
        **_shared_settings(),
    )


def _attention_type(layer: int, every: int) -> str:
    return "sliding_attention" if (layer + 1) % every else "full_attention"


_CONFIGS: dict[TinyKind, Callable[[int], "PretrainedConfig"]] = {
    "qwen2": _qwen2_config,
    "qwen3_moe": _qwen3_moe_config,
    "deepseek_v2": _deepseek_v2_config,
    "gemma3": _gemma3_config,
    "gpt_oss": _gpt_oss_config,
}


def tiny_config(kind: TinyKind, layers: int) -> "PretrainedConfig":
    """Return the configuration of a tiny model of this architecture."""
    return _CONFIGS[kind](layers)


def _shared_settings() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": START_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def train_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a byte-level tokenizer of exactly `VOCABULARY_TOKENS` tokens.

    It has all ids of the model's vocabulary, so that every sampled id has a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_TOKENS:
        raise ConfigError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens instead of "
            f"{VOCABULARY_TOKENS}: "
            "install the pinned version of tokenizers (constraints/runtime.txt)"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[START_ID],
        eos_token=SPECIAL_TOKENS[END_ID],
        pad_token=SPECIAL_TOKENS[END_OF_TEXT_ID],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


# ------------------------------------------------------------------------------------------- draft
# Tiny draft models of one layer with random weights, which propose tokens for a tiny model.
#
# An EAGLE draft is a separate model.  A layer for multi-token prediction (MTP) is part of the
# model, here of MiMo's architecture, which is Qwen2's with such a layer.

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
        directory: where to write; default: a directory in `private_cache_directory()`.

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
        directory: where to write; default: a directory in `private_cache_directory()`.

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


# ------------------------------------------------------------------------------------------ images
# A tiny multimodal model with random weights: BLIP-2's vision part and Qwen2.
#
# BLIP-2 is used because vLLM's modules for LLaVA and Qwen2.5-VL import torchvision, which is not a
# dependency of this project. The weights are float32, as in the other tiny models (`tiny.py`). A
# prompt has at most one image, before its text; the image takes `IMAGE_TOKENS` tokens.

IMAGE_MODEL_VERSION = 1
IMAGE_MODEL_LAYERS = 4
#: Not a whole number of blocks, so that one block contains image and text.
IMAGE_TOKENS = 40
#: The placeholder token of images, after those of the tokenizer.
IMAGE_TOKEN, IMAGE_TOKEN_ID = "<image>", VOCABULARY_TOKENS
_IMAGE_PIXELS = 56


def make_tiny_image_model(directory: Path | None = None, seed: int = 0) -> Path:
    """Return the folder of a random model with images; created by the first call.

    Args:
        directory: where to write; default: a directory in `private_cache_directory()`.
        seed: seed of the weights; the same seed gives the same bytes.

    Raises:
        ConfigError: `directory` cannot be used.
    """
    name = f"tiny-blip2-{IMAGE_MODEL_LAYERS}-layers-seed-{seed}"
    return prepare_random(
        name, IMAGE_MODEL_VERSION, directory, lambda empty: _write_image_model(empty, seed)
    )


def _write_image_model(directory: Path, seed: int) -> None:
    import torch
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    text = tiny_config("qwen2", IMAGE_MODEL_LAYERS)
    text.vocab_size = VOCABULARY_TOKENS + 16
    text.architectures = ["Qwen2ForCausalLM"]
    vision = Blip2VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_IMAGE_PIXELS,
        patch_size=14,
        initializer_range=0.3,
    )
    queries = Blip2QFormerConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        encoder_hidden_size=64,
        vocab_size=VOCABULARY_TOKENS,
        initializer_range=0.3,
    )
    config = Blip2Config(
        text_config=text,
        vision_config=vision,
        qformer_config=queries,
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Blip2ForConditionalGeneration(config).float()
        torch.nn.init.normal_(model.query_tokens)
    model.save_pretrained(directory)
    side = {"height": _IMAGE_PIXELS, "width": _IMAGE_PIXELS}
    processor = Blip2Processor(
        BlipImageProcessorPil(size=side), tokenizer, num_query_tokens=IMAGE_TOKENS
    )
    processor.save_pretrained(directory)


# -------------------------------------------------------------------------------------------- wide
# A random model for I/O-bound runs on few cores: much KV per token, and costly recomputation.
#
# It has 4 layers with 8 KV heads of 128 and a hidden size of 512: 32 KiB of KV per token in float32
# with 34 million parameters, most of them in the MLP.  Recomputing a history instead of loading it
# is costly, as on a GPU, but computing the few tokens of a turn is cheap.  The variance of the
# weights is large, as in ``models.tiny``, so that the greedy token depends on the whole context.

WIDE_LAYERS = 4
KV_HEADS = 8
HEAD_DIMENSION = 128
HIDDEN = 512
INTERMEDIATE = 4096
MAX_TOKENS = 8192
WIDE_MODEL_NAME = f"wide-qwen3-{WIDE_LAYERS}-{HIDDEN}-{INTERMEDIATE}"
#: Bytes of KV per token: keys and values in float32.
KV_BYTES = WIDE_LAYERS * KV_HEADS * HEAD_DIMENSION * 2 * 4

# Increase it when the files written here change, so that cached models are created again.
WIDE_VERSION = 1


def make_wide_model(directory: Path | None = None, seed: int = 0) -> Path:
    """Return the directory of the model; created by the first call with these arguments.

    Args:
        directory: where to write; default: a directory in `private_cache_directory()`.
        seed: seed of the weights; the same seed gives the same bytes.

    Raises:
        ConfigError: `directory` cannot be used.
    """
    name = f"{WIDE_MODEL_NAME}-seed-{seed}"
    return prepare_random(
        name, WIDE_VERSION, directory, lambda empty: _write_wide_model(empty, seed)
    )


def _write_wide_model(directory: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=WIDE_LAYERS,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIMENSION,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    # The caller's random state must not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    train_tokenizer().save_pretrained(directory)
