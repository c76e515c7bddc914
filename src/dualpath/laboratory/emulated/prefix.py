"""Functions of a token prefix: its block keys, the seeds of its KV, and the next token.

Every token of a prompt has a 64-bit *seed*, a hash of all tokens up to it, computed from the key of
the previous block and the tokens of its own block.  ``kv_bytes`` derives KV from the seeds.  The
next token is a hash of the tokens alone, so that answers can be compared between runs with
different cache salts.
"""

import hashlib
from collections.abc import Sequence

import cbor2
import numpy as np
from numpy.typing import NDArray

from dualpath.core.blocks import BlockKey, block_keys, chain_root

Seeds = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def mixed(values: Seeds) -> Seeds:
    """Return the SplitMix64 hash of every value."""
    state = values + np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
    hashed: Seeds = state ^ (state >> np.uint64(31))
    return hashed


def _mixed_one(value: int) -> int:
    """Return the hash of one value; numpy is slow for single numbers."""
    state = (value + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * _FIRST) & _MASK
    state = ((state ^ (state >> 27)) * _SECOND) & _MASK
    return state ^ (state >> 31)


class TokenChain:
    """Generates tokens deterministically: the next token is a hash of all tokens before it.

    Tokens are from 0 to ``vocab_size`` - 1; ``vocab_size`` is at most 2**32.
    """

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        ids = np.asarray(token_ids, dtype=np.uint32)
        self._hash = hashlib.blake2b(ids.tobytes(), digest_size=8)
        self._vocab_size = vocab_size

    @property
    def next_token(self) -> int:
        """The next token."""
        return int.from_bytes(self._hash.copy().digest(), "little") % self._vocab_size

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        self._hash.update(token.to_bytes(4, "little"))


class TokenPrefix:
    """The tokens of one request; tokens can be appended.

    ``keys`` are the keys of the full blocks.  ``seeds`` has a row per block and a column per token;
    tokens that do not exist yet have seed 0.  ``capacity_tokens`` is the largest number of tokens.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        block_tokens: int,
        *,
        cache_salt: str | None,
        vocab_size: int,
        capacity_tokens: int,
    ) -> None:
        self.keys: list[BlockKey] = block_keys(token_ids, block_tokens, cache_salt=cache_salt)
        self.tokens = len(token_ids)
        self._block_tokens = block_tokens
        self._cache_salt = cache_salt
        self._chain = TokenChain(token_ids, vocab_size)
        whole = self.tokens // block_tokens * block_tokens
        ids = np.asarray(token_ids, dtype=np.uint32)
        self._open: list[int] = []
        self._sum = 0
        self.seeds: Seeds = np.zeros(
            (-(-max(capacity_tokens, self.tokens) // block_tokens), block_tokens), np.uint64
        )
        self._seed_whole_blocks(ids[:whole].reshape(-1, block_tokens))
        for token in ids[whole:].tolist():
            self._seed(token)

    @property
    def next_token(self) -> int:
        """The next token, below the size of the vocabulary."""
        return self._chain.next_token

    def append(self, token: int) -> None:
        """Append a token; raises ``IndexError`` beyond ``capacity_tokens``."""
        self._chain.append(token)
        self._seed(token)
        self.tokens += 1

    def _seed_whole_blocks(self, ids: NDArray[np.uint32]) -> None:
        if not len(ids):
            return
        before = b"".join(key[:8] for key in (chain_root(), *self.keys[: len(ids) - 1]))
        places = np.arange(self._block_tokens, dtype=np.uint64) << np.uint64(32)
        sums = np.cumsum(mixed(ids.astype(np.uint64) + places), axis=1, dtype=np.uint64)
        starts = np.frombuffer(before, np.uint64)
        self.seeds[: len(ids)] = mixed(starts[:, None] + sums)

    def _seed(self, token: int) -> None:
        block, place = len(self.keys), len(self._open)
        before = self.keys[-1] if self.keys else chain_root()
        self._sum = (self._sum + _mixed_one(token + (place << 32))) & _MASK
        start = int.from_bytes(before[:8], "little")
        self.seeds[block, place] = _mixed_one((start + self._sum) & _MASK)
        self._open.append(token)
        if len(self._open) == self._block_tokens:
            self.keys.append(self._key_of(self._open))
            self._open, self._sum = [], 0

    def _key_of(self, tokens: list[int]) -> BlockKey:
        if not self.keys:
            return block_keys(tokens, self._block_tokens, cache_salt=self._cache_salt)[0]
        # One link of the hash chain, because ``core.blocks`` always starts at the first block.
        link = (self.keys[-1], tuple(tokens), None)
        return hashlib.sha256(cbor2.dumps(link, canonical=True)).digest()
