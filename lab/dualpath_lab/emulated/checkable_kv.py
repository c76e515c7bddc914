"""KV in which every byte can be verified: a function of weights, token prefix, layer and part.

The KV of a token in one head, part and layer is a number of 64-bit words.  Word ``w`` is the
token's seed (a hash of the whole prefix) XOR a constant of (layer, part, head, ``w``).  So every
word identifies prefix, layer, part and head, at the cost of one pass over the memory.  Parts are
head-major, as in real engines, so that a rank's heads are one slice of each part.
"""

import enum
import hashlib
import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import cbor2
import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dualpath.core.blocks import WHOLE, BlockGeometry, BlockKey, PartSlice, block_keys, chain_root
from dualpath.core.errors import ConfigError
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath_lab.emulated.settings import WORD_BYTES, Verify

# ------------------------------------------------------------------------------------------ prefix
# Functions of a token prefix: its block keys, the seeds of its KV, and the next token.
#
# Every token of a prompt has a 64-bit *seed*, a hash of all tokens up to it, computed from the key
# of the previous block and the tokens of its own block.  ``kv_bytes`` derives KV from the seeds.
# The next token is a hash of the tokens alone, so that answers can be compared between runs with
# different cache salts.

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

    def __init__(self, token_ids: Sequence[int] | NDArray[np.uint32], vocab_size: int) -> None:
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
    Other ``weights`` give other seeds, and the same keys and next tokens.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        block_tokens: int,
        *,
        cache_salt: str | None,
        vocab_size: int,
        capacity_tokens: int,
        weights: str = "",
    ) -> None:
        digest = hashlib.blake2b(weights.encode(), digest_size=8).digest()
        self._weights = int.from_bytes(digest, "little") if weights else 0
        # Converted once: each conversion of a long list of numbers takes as long as all the rest.
        numbers = array("I", token_ids)
        ids = np.frombuffer(numbers, np.uint32)
        self.keys: list[BlockKey] = block_keys(numbers, block_tokens, cache_salt=cache_salt)
        self.tokens = len(token_ids)
        self._block_tokens = block_tokens
        self._cache_salt = cache_salt
        self._chain = TokenChain(ids, vocab_size)
        whole = self.tokens // block_tokens * block_tokens
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
        self.seeds[: len(ids)] = mixed(starts[:, None] + sums) ^ np.uint64(self._weights)

    def _seed(self, token: int) -> None:
        block, place = len(self.keys), len(self._open)
        before = self.keys[-1] if self.keys else chain_root()
        self._sum = (self._sum + _mixed_one(token + (place << 32))) & _MASK
        start = int.from_bytes(before[:8], "little")
        self.seeds[block, place] = _mixed_one((start + self._sum) & _MASK) ^ self._weights
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


#: Bytes processed at a time: large enough for numpy to be efficient, small enough for a core's
#: cache and for the allocator to reuse memory instead of mapping new pages.
PORTION_BYTES = 1 << 16

Words = NDArray[np.uint64]


class PartStack(NamedTuple):
    """Part ``part`` of consecutive ``layers`` with equal parts, processed together.

    ``constants`` [layer, head, word].  In a Full Block the part of the first layer begins at word
    ``first_word``, and each following one ``layer_words`` later.
    """

    layers: range
    part: int
    constants: Words
    first_word: int
    layer_words: int


class KvFunction:
    """The expected content of Layer Blocks and Full Blocks of a geometry with ``heads`` KV heads.

    With a slice ``held``, it is the content of a rank's slice, and ``geometry`` is the slice's.
    ``layer_words`` are the words of a token in one head, by layer and part.  Raises ``ConfigError``
    if these are not whole numbers, or if the heads cannot be split into the slices.
    """

    def __init__(self, geometry: BlockGeometry, heads: int = 1, held: PartSlice = WHOLE) -> None:
        self.geometry = cut(geometry, held)
        if heads % held.count:
            raise ConfigError(f"{heads} KV heads cannot be split into {held.count} equal slices")
        self.heads = heads // held.count
        self.layer_words = [
            tuple(_token_words(geometry, heads, size) for size in sizes)
            for sizes in geometry.layer_parts
        ]
        self.portion_blocks = max(
            PORTION_BYTES // max(p.size_bytes for p in self.geometry.parts), 1
        )
        count = heads * sum(map(sum, self.layer_words))
        numbers = mixed(np.arange(count, dtype=np.uint64))
        mine = slice(held.index * self.heads, (held.index + 1) * self.heads)
        taken = 0

        def constants(words: int) -> Words:
            nonlocal taken
            first, taken = taken, taken + heads * words
            return numbers[first:taken].reshape(heads, words)[mine]

        self.constants: list[tuple[Words, ...]] = [
            tuple(map(constants, words)) for words in self.layer_words
        ]
        self.stacks = tuple(self._stacks())

    def part_blocks(self, seeds: Seeds, layer: int, part: int) -> Words:
        """Return the content [block, head, token, word] of blocks with ``seeds`` [block, token]."""
        content: Words = seeds[:, None, :, None] ^ self.constants[layer][part][:, None]
        return content

    def full_block(self, seeds: Seeds) -> Words:
        """Return the words of the Full Block with these seeds [token]."""
        parts = (part for layer in self.constants for part in layer)
        return np.concatenate([(seeds[:, None] ^ part[:, None]).ravel() for part in parts])

    def in_full_block(self, stack: PartStack, full_block: memoryview) -> Words:
        """Return a stack's words [layer, head, token, word] in a Full Block's bytes."""
        memory = np.frombuffer(full_block, np.uint64)[stack.first_word :]
        layers, heads, words = stack.constants.shape
        tokens = self.geometry.block_tokens
        shape = (layers, heads, tokens, words)
        strides = (stack.layer_words, tokens * words, words, 1)
        return as_strided(memory, shape, [s * WORD_BYTES for s in strides], writeable=False)

    def _stacks(self) -> Iterator[PartStack]:
        """Group consecutive layers with equal parts."""
        tokens, first, first_word = self.geometry.block_tokens, 0, 0
        for words, alike in itertools.groupby(self.layer_words):
            layers = range(first, first + len(list(alike)))
            layer_words = self.heads * sum(words) * tokens
            for part in range(len(words)):
                constants = np.stack([self.constants[layer][part] for layer in layers])
                before = first_word + self.heads * sum(words[:part]) * tokens
                yield PartStack(layers, part, constants, before, layer_words)
            first, first_word = layers.stop, first_word + len(layers) * layer_words


def cut(geometry: BlockGeometry, held: PartSlice) -> BlockGeometry:
    """Return the geometry of a slice of blocks; raises ``ConfigError`` if it does not exist."""
    layers: list[tuple[int, ...]] = [() for _ in range(geometry.layers)]
    for part in geometry.parts:
        layers[part.layer] += (held.of(part).size_bytes,)
    return msgspec.structs.replace(geometry, layer_parts=tuple(layers))


def _token_words(geometry: BlockGeometry, heads: int, part_bytes: int) -> int:
    token_bytes, rest = divmod(part_bytes, geometry.block_tokens * heads)
    if rest or token_bytes % WORD_BYTES or token_bytes < WORD_BYTES:
        raise ConfigError(
            f"a part of {part_bytes} bytes for {geometry.block_tokens} tokens and {heads} heads: "
            f"each token needs a multiple of {WORD_BYTES} bytes per layer, part and head; change "
            "the KV bytes per token or the KV heads"
        )
    return token_bytes // WORD_BYTES


# ------------------------------------------------------------------------------------ verification
# Compares received KV with its expected content and counts the comparisons.

Flags = NDArray[np.bool_]
#: Layer Blocks compared, and those found wrong, by place.
Counts = dict["CheckedAt", tuple[int, int]]


class CheckedAt(enum.StrEnum):
    """The place at which KV is compared."""

    PE_BUFFER = "pe_buffer"
    """In the PE's buffer, after it was read from storage."""
    PE_HBM = "pe_hbm"
    """In the PE's HBM, after a layer was loaded and before it is computed."""
    DE_BUFFER = "de_buffer"
    """In the DE's buffer: the whole prompt, read from storage or sent by the PE."""
    DE_HBM = "de_hbm"
    """In the DE's HBM: the whole prompt, before the first decode step."""


class Verifier:
    """Compares KV and counts: by place here, in total in ``counters``; thread-safe.

    Buffers hold whole blocks with the content of ``function``; HBM holds the content of ``held``, a
    rank's slice of them, which is counted as a Layer Block as well.
    """

    def __init__(
        self,
        function: KvFunction,
        verify: Verify,
        counters: Counters,
        threads: Threads = OS_THREADS,
        held: KvFunction | None = None,
    ) -> None:
        self._function = function
        self._held = held or function
        self._verify = verify
        self._lock = threads.lock()
        self._counts = {place: [0, 0] for place in CheckedAt}
        self._reported: Counts = dict.fromkeys(CheckedAt, (0, 0))
        self._totals = counters
        self._count(CheckedAt.PE_BUFFER, 0, 0)

    @property
    def compares(self) -> bool:
        """Whether KV is compared."""
        return self._verify is not Verify.CHECKSUM

    def counts(self) -> Counts:
        """Return by place (Layer Blocks compared, of which wrong)."""
        with self._lock:
            return {place: (total, wrong) for place, (total, wrong) in self._counts.items()}

    def new_counts(self) -> Counts:
        """Return the counts since the last call."""
        now, before = self.counts(), self._reported
        self._reported = now
        return {p: (now[p][0] - before[p][0], now[p][1] - before[p][1]) for p in CheckedAt}

    def add(self, counts: Counts) -> None:
        """Add the counts of another rank."""
        for place, (total, wrong) in counts.items():
            self._count(place, total, wrong)

    def layer_blocks(
        self,
        place: CheckedAt,
        parts: Sequence[Words],
        block_ids: Sequence[int],
        seeds: Seeds,
        layer: int,
    ) -> list[int]:
        """Compare blocks ``parts[p][block_ids[i]]`` with ``seeds[i]``; return each wrong i."""
        if not self.compares:
            return []
        ids = np.asarray(block_ids, dtype=np.int64)
        rows = seeds[: len(ids)]
        portion = self._held.portion_blocks
        same = np.ones(len(ids), dtype=np.bool_)
        for part, region in enumerate(parts):
            for start in range(0, len(ids), portion):
                some = slice(start, start + portion)
                same[some] &= self._same(region, ids[some], rows[some], layer, part)
        wrong: list[int] = np.flatnonzero(~same).tolist()
        self._count(place, len(ids), len(wrong))
        return wrong

    def full_blocks(
        self,
        place: CheckedAt,
        views: Sequence[memoryview],
        seeds: Seeds,
        first_loaded: Sequence[int] = (),
    ) -> list[int]:
        """Compare Full Blocks ``views[i]`` in DRAM with ``seeds[i]``; return each wrong i.

        ``first_loaded``: for each layer the first i that has its KV; empty: all blocks have it.
        """
        if not self.compares:
            return []
        first = first_loaded or [0] * self._function.geometry.layers
        wrong: list[int] = []
        wrong_layers = 0
        for index, view in enumerate(views):
            bad = [n for n in self._wrong_layers(view, seeds[index]) if index >= first[n]]
            if bad:
                wrong.append(index)
                wrong_layers += len(bad)
        self._count(place, sum(max(len(views) - i, 0) for i in first), wrong_layers)
        return wrong

    def _wrong_layers(self, view: memoryview, seeds: Seeds) -> set[int]:
        wrong: set[int] = set()
        for stack in self._function.stacks:
            found = self._function.in_full_block(stack, view)
            if self._verify is Verify.FULL:
                differs = found != seeds[:, None] ^ stack.constants[:, :, None]
            else:
                differs = found[..., 0] != seeds ^ stack.constants[:, :, :1]
            if differs.any():
                bad = differs.reshape(len(found), -1).any(axis=1)
                wrong.update(stack.layers[number] for number in np.flatnonzero(bad))
        return wrong

    def _same(
        self, region: Words, ids: NDArray[np.int64], rows: Seeds, layer: int, part: int
    ) -> Flags:
        if self._verify is Verify.FULL:
            equal = region[ids] == self._held.part_blocks(rows, layer, part)
        else:
            constants = self._held.constants[layer][part]
            word = layer % constants.shape[1]
            equal = region[ids, :, :, word] == rows[:, None] ^ constants[:, word, None]
        same: Flags = equal.reshape(len(ids), -1).all(axis=1)
        return same

    def _count(self, place: CheckedAt, total: int, wrong: int) -> None:
        with self._lock:
            self._counts[place][0] += total
            self._counts[place][1] += wrong
        self._totals.add(Counter.VERIFIED_LAYER_BLOCKS, total)
        self._totals.add(Counter.WRONG_LAYER_BLOCKS, wrong)
