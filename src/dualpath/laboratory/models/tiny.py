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

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from dualpath.core.errors import ConfigError
from dualpath.laboratory.models.prepared import prepare_random
from dualpath.laboratory.models.smollm2 import CHAT_TEMPLATE

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

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
        directory: where to write; default: a directory in `cache_directory()`.
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
