"""The contents of prompts, and their tokens for sending or comparing them."""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dualpath.core.errors import ConfigError, TraceError
from dualpath.workload.conversation.spans import TOKEN, Spans, TokenIds

#: Range of random token ids for an unknown vocabulary: above the special tokens at the low end of
#: most vocabularies, below the size of any common tokenizer.
UNKNOWN_VOCABULARY = (1000, 30000)
#: Token ids from here on, above all real ones, stand for answers that were not generated.
FIRST_UNKNOWN = 1 << 31


class Vocabulary(msgspec.Struct, frozen=True):
    """How contents are converted to tokens.

    ``seed`` determines all random tokens, with ``low`` ≤ id < ``high``.  ``encode`` converts text
    to token ids below 2**31 without adding special tokens; only text sessions need it.
    """

    seed: int = 0
    low: int = UNKNOWN_VOCABULARY[0]
    high: int = UNKNOWN_VOCABULARY[1]
    encode: Callable[[str], Sequence[int]] | None = None

    def check(self) -> None:
        """Raise ``ConfigError`` for an empty or negative range."""
        if not 0 <= self.low < self.high:
            raise ConfigError(
                f"random token range {self.low}..{self.high} is empty or negative; "
                "pass the model's --vocab-size"
            )


def token_range(vocab_size: int | None) -> tuple[int, int]:
    """Return the range (low, high) of random tokens, which excludes low ids of special tokens."""
    if vocab_size is None:
        return UNKNOWN_VOCABULARY
    if vocab_size < 2:
        raise ConfigError(f"vocab_size is {vocab_size}; it must be at least 2")
    return min(UNKNOWN_VOCABULARY[0], vocab_size // 2), vocab_size


class Contents:
    """The numbered contents of one or more sessions; tokens are created at first use.

    Contents with different numbers have different tokens, except that texts may share a prefix.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Start without contents."""
        self._vocabulary = vocabulary
        self._made: list[bytes | Callable[[], bytes]] = []
        self._texts: dict[str, Spans] = {}
        self._blocks: dict[str, int] = {}
        self._salts: dict[int, np.uint64] = {}
        self._unknown_tokens = 0

    def text(self, text: str) -> Spans:
        """Return a text; raises ``ConfigError`` without a tokenizer."""
        known = self._texts.get(text)
        if known is None:
            encode = self._vocabulary.encode
            if encode is None:
                raise ConfigError(
                    "the trace consists of text and no tokenizer was given; pass --tokenizer with "
                    "the folder of the served model"
                )
            raw = np.asarray(encode(text) if text else (), TOKEN).tobytes()
            known = self._texts[text] = self._added(raw, len(raw) // TOKEN.itemsize)
        return known

    def random(self, session_id: str, index: int, tokens: int) -> Spans:
        """Return random tokens that depend only on seed, session and ``index``."""
        return self._added(partial(self._random, session_id, index, tokens), tokens)

    def answer(self, tokens: int, token_ids: Sequence[int] | None = None) -> Spans:
        """Return an answer: ``token_ids``, or that many tokens that differ from all others."""
        if token_ids is None:
            return self._added(partial(self._unknown, tokens), tokens)
        return self._added(TokenIds.of(token_ids).raw, len(token_ids))

    def blocks(self, scope: str) -> int:
        """Return the content with all blocks of ``scope``: block i begins at i · block tokens."""
        number = self._blocks.get(scope)
        if number is None:
            number = self._blocks[scope] = len(self._made)
            self._made.append(b"")
            # Below 2**63 after the shift, so that it fits an unsigned 64-bit integer of numpy.
            seeded = f"{self._vocabulary.seed}/{scope}".encode()
            self._salts[number] = np.uint64(zlib.crc32(seeded) << 30)
        return number

    def tokens(self, sequence: Spans) -> TokenIds:
        """Return the tokens of a sequence."""
        return TokenIds(b"".join([self._tokens_of(*span) for span in sequence.spans]))

    def _added(self, made: bytes | Callable[[], bytes], tokens: int) -> Spans:
        self._made.append(made)
        return Spans.of(len(self._made) - 1, 0, tokens)

    def _tokens_of(self, number: int, start: int, stop: int, _: int) -> bytes:
        if (salt := self._salts.get(number)) is not None:
            return self._block_tokens(salt, start, stop)
        made = self._made[number]
        if not isinstance(made, bytes):
            made = self._made[number] = made()
        return made[start * TOKEN.itemsize : stop * TOKEN.itemsize]

    def _random(self, session_id: str, index: int, tokens: int) -> bytes:
        key = [self._vocabulary.seed, zlib.crc32(session_id.encode()), index]
        generator = np.random.default_rng(key)
        drawn = generator.integers(self._vocabulary.low, self._vocabulary.high, tokens)
        return drawn.astype(TOKEN).tobytes()

    def _unknown(self, tokens: int) -> bytes:
        first = FIRST_UNKNOWN + self._unknown_tokens
        if first + tokens > 1 << 32:
            raise TraceError(
                f"the sessions generate more than {FIRST_UNKNOWN} tokens; "
                "simulate fewer (agents) or shorter (max_turns) sessions"
            )
        self._unknown_tokens += tokens
        return np.arange(first, first + tokens, dtype=TOKEN).tobytes()

    def _block_tokens(self, salt: np.uint64, start: int, stop: int) -> bytes:
        span = np.uint64(self._vocabulary.high - self._vocabulary.low)
        drawn = _mixed(np.arange(start, stop, dtype=np.uint64) + salt) % span
        return (drawn + np.uint64(self._vocabulary.low)).astype(TOKEN).tobytes()


def _mixed(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Apply the finaliser of SplitMix64, a bijection of 64-bit integers."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# ------------------------------------------------------------------------------------ text encoder
# Converts text to token ids, with the tokenizer of a model folder or approximately.

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

    ``tokenizer`` is a folder with a Hugging Face ``tokenizer.json``.  Raises ``ConfigError`` if it
    is missing or cannot be loaded.
    """
    folder = Path(tokenizer)
    if not folder.is_dir():
        raise ConfigError(f"tokenizer {folder} is not a folder; give the served model's folder")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"tokenizer {folder} has no tokenizer.json; write one with "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(FOLDER) "
            "and give that folder"
        )
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
