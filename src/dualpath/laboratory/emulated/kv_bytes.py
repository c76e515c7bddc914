"""KV in which every byte can be verified: a function of token prefix, layer and part.

The KV of a token in one head, part and layer is a number of 64-bit words.  Word ``w`` is the
token's seed (a hash of the whole prefix) XOR a constant of (layer, part, head, ``w``).  So every
word identifies prefix, layer, part and head, at the cost of one pass over the memory.  Parts are
head-major, as in real engines, so that a rank's heads are one slice of each part.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import ConfigError
from dualpath.core.parts import WHOLE, PartSlice
from dualpath.laboratory.emulated.prefix import Seeds, mixed
from dualpath.laboratory.emulated.settings import WORD_BYTES

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
