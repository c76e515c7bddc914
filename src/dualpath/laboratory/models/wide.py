"""A random model for I/O-bound runs on few cores: much KV per token, and costly recomputation.

It has 4 layers with 8 KV heads of 128 and a hidden size of 512: 32 KiB of KV per token in float32
with 34 million parameters, most of them in the MLP.  Recomputing a history instead of loading it is
costly, as on a GPU, but computing the few tokens of a turn is cheap.  The variance of the weights
is large, as in ``models.tiny``, so that the greedy token depends on the whole context.
"""

from pathlib import Path

from dualpath.laboratory.models.prepared import prepare_random
from dualpath.laboratory.models.tiny import VOCABULARY_TOKENS, train_tokenizer

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
        directory: where to write; default: a directory in `cache_directory()`.
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
