"""Converts text to token ids, with the tokenizer of a model folder or approximately."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.conversation.contents import FIRST_UNKNOWN
from dualpath.laboratory.workload.conversation.spans import TOKEN

#: Bytes per token in ``approximate_encode``.  DeepSeek-V3's tokenizer has 3.93 bytes per token on
#: the mini-SWE-agent trajectories.
BYTES_PER_TOKEN = 4


def approximate_encode(text: str) -> Sequence[int]:
    """Return one token per four bytes of UTF-8, for use without the model's tokenizer.

    Equal texts have equal tokens, so appended, edited and shared parts are recognised as with a
    real tokenizer; only lengths are estimates.
    """
    raw = text.encode()
    padded = raw + bytes(-len(raw) % BYTES_PER_TOKEN)
    # Below the ids of unknown tokens; the masked bit is always 0 in ASCII.
    ids: list[int] = (np.frombuffer(padded, TOKEN) & (FIRST_UNKNOWN - 1)).tolist()
    return ids


def load_encoder(tokenizer: str | Path) -> Callable[[str], Sequence[int]]:
    """Return a function from text to token ids that recognises special tokens and adds none.

    ``tokenizer`` is a folder with a Hugging Face tokenizer.  Raises ``ConfigError`` if it cannot be
    loaded.
    """
    folder = Path(tokenizer)
    if not folder.is_dir():
        raise ConfigError(f"tokenizer {folder} is not a folder; give the served model's folder")
    fast = folder / "tokenizer.json"
    return _fast_encoder(fast) if fast.is_file() else _transformers_encoder(folder)


def _fast_encoder(file: Path) -> Callable[[str], Sequence[int]]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "text traces need the tokenizers package; pip install tokenizers"
        ) from None
    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers has no narrower exception class
        raise ConfigError(f"{file}: is not a usable tokenizer ({error})") from None

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = loaded.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _transformers_encoder(folder: Path) -> Callable[[str], Sequence[int]]:
    # Importing takes seconds, so only for folders without a tokenizer.json.
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f"{folder} has no tokenizer.json, so transformers is needed; pip install transformers"
        ) from None
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: has no usable tokenizer ({error})") from None

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = loaded.encode(text, add_special_tokens=False)
        return ids

    return encode
