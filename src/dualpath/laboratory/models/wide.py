"""A random model for I/O-bound runs on few cores: much KV per token, and dear to compute again.

4 layers of 8 KV heads of 128 on a hidden size of 512: 32 KiB of KV per token in float32, at 34
million parameters, most of them in the MLP.  A stack that computes a history again instead of
loading it must pay for that as on a GPU; the few tokens of a turn are cheap all the same.  Weights
are drawn wide, as in ``models.tiny``, so that the greedy token depends on the whole context.
"""

from pathlib import Path

from dualpath.laboratory.models.prepared import prepare_random
from dualpath.laboratory.models.tiny import VOCABULARY_TOKENS, train_tokenizer

LAYERS = 4
KV_HEADS = 8
HEAD_DIMENSION = 128
HIDDEN = 512
INTERMEDIATE = 4096
MOST_TOKENS = 8192
MODEL_NAME = f"wide-qwen3-{LAYERS}-{HIDDEN}-{INTERMEDIATE}"
#: Of one token: key and value, float32.
KV_BYTES = LAYERS * KV_HEADS * HEAD_DIMENSION * 2 * 4

# Raise it when the files written here change: cached models are then made anew.
GENERATOR_VERSION = 1


def make_wide_model(directory: Path | None = None, seed: int = 0) -> Path:
    """Return the directory of the model; made on the first call with these arguments.

    Args:
        directory: where to write; default: a directory in `cache_directory()`.
        seed: of the weights; the same seed gives the same bytes.

    Raises:
        ConfigError: `directory` cannot be used.
    """
    name = f"{MODEL_NAME}-seed-{seed}"
    return prepare_random(
        name, GENERATOR_VERSION, directory, lambda empty: _write_model(empty, seed)
    )


def _write_model(directory: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIMENSION,
        max_position_embeddings=MOST_TOKENS,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    # The caller's random state is its own.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    train_tokenizer().save_pretrained(directory)
