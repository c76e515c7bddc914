"""A tokenizer of words, with which an emulated cluster serves text without a model.

A text is cut into pieces: up to six letters or digits, or up to two other characters.  White space
separates pieces and is no token, so a text has about as many tokens as with the tokenizer of a real
model.  Token ``n`` is written as the word ``t<n>``, which is one piece; any other piece becomes the
token that its CRC-32 gives.  Therefore

- the token ids of an answer are the same after its text was sent back in the next turn, so the KV
  of the answer is found again, and
- two texts with the same beginning have the same tokens up to the piece in which they differ.

Different pieces may become the same token.  The text of a prompt cannot be restored from its
tokens; nothing needs it.
"""

import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

#: The vocabulary of emulated engines by default, and of the folder that ``write_tokenizer`` writes.
VOCAB_SIZE = 32000

_PIECES = re.compile(r"(?<!\S)t(?:0|[1-9][0-9]{0,9})(?!\S)|\w{1,6}|[^\w\s]{1,2}")
_TOKEN_WORD = re.compile(r"t(?:0|[1-9][0-9]{0,9})")
#: Bound of the table of known pieces, which is cleared when it is full.
_KNOWN_PIECES = 1 << 17


class _PieceIds(dict[str, int]):
    """The token of every piece that was seen."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __missing__(self, piece: str) -> int:
        if len(self) >= _KNOWN_PIECES:
            self.clear()
        token = int(piece[1:]) if _TOKEN_WORD.fullmatch(piece) else self._vocab_size
        if token >= self._vocab_size:
            # JSON may contain halves of surrogate pairs, which UTF-8 cannot express otherwise.
            token = zlib.crc32(piece.encode("utf-8", "surrogatepass")) % self._vocab_size
        self[piece] = token
        return token


class Words:
    """The tokenizer for token ids from 0 to ``vocab_size`` - 1."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self._ids = _PieceIds(vocab_size)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(map(self._ids.__getitem__, _PIECES.findall(text)))

    @staticmethod
    def decode(token_ids: Sequence[int], *, first: bool = True) -> str:
        """Return the text of token ids; if they are not the ``first`` of an answer, after a space.

        ``encode`` of it returns the same token ids.
        """
        text = " ".join(map("t{}".format, token_ids))
        return text if first or not text else f" {text}"


def write_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write the tokenizer as a folder for Hugging Face's ``AutoTokenizer``.

    It is for benchmarks that make prompts of random tokens: a prompt of N of its tokens is N tokens
    at the cluster.  It has no token for other text, and raises an error for it: with one such token
    for all text, prompts of different text would be equal.
    """
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {f"t{token}": token for token in range(vocab_size)},
            "unk_token": "",
        },
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 30}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
