"""KV whose every byte can be checked: a function of (token prefix, layer, part).

The KV of a token in a part of a layer is some 64-bit words; word ``w`` is the token's seed (a hash
of the whole prefix) XOR a constant of (layer, part, ``w``).  Every single word thus identifies
prefix, layer and part, at the cost of one pass over the memory.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import ConfigError
from dualpath.laboratory.emulated.prefix import Seeds, mixed
from dualpath.laboratory.emulated.settings import WORD_BYTES

#: Bytes worked on at once: large enough for numpy, small enough for a core's cache and for an
#: allocator that asks the kernel for anything larger.
PORTION_BYTES = 1 << 16

Words = NDArray[np.uint64]


class PartStack(NamedTuple):
    """Part ``part`` of ``layers``, which follow each other and are alike: worked on at once.

    ``constants`` [layer, word].  The first of them begins at ``first_word`` of a Full Block, each
    other ``layer_words`` behind the one before.
    """

    layers: range
    part: int
    constants: Words
    first_word: int
    layer_words: int


class KvFunction:
    """The one right content of Layer Blocks and Full Blocks of a geometry.

    Raises ``ConfigError`` for KV of a token in a part that is no whole number of words.
    """

    def __init__(self, geometry: BlockGeometry) -> None:
        self.geometry = geometry
        self.layer_words = [
            tuple(_token_words(geometry, size) for size in sizes) for sizes in geometry.layer_parts
        ]
        self.portion_blocks = max(PORTION_BYTES // max(p.size_bytes for p in geometry.parts), 1)
        numbers = iter(mixed(np.arange(sum(map(sum, self.layer_words)), dtype=np.uint64)))
        self.constants: list[tuple[Words, ...]] = [
            tuple(np.fromiter(itertools.islice(numbers, w), np.uint64, w) for w in words)
            for words in self.layer_words
        ]
        self.stacks = tuple(self._stacks())

    def part_blocks(self, seeds: Seeds, layer: int, part: int) -> Words:
        """Return the content [block, token, word] of blocks with these seeds [block, token]."""
        content: Words = seeds[:, :, None] ^ self.constants[layer][part]
        return content

    def full_block(self, seeds: Seeds) -> Words:
        """Return the words of the Full Block with these seeds [token]."""
        parts = (constants for layer in self.constants for constants in layer)
        return np.concatenate([(seeds[:, None] ^ constants).ravel() for constants in parts])

    def in_full_block(self, stack: PartStack, full_block: memoryview) -> Words:
        """Return a stack's words [layer, token, word] in a Full Block's bytes."""
        memory = np.frombuffer(full_block, np.uint64)[stack.first_word :]
        layers, words = stack.constants.shape
        shape = (layers, self.geometry.block_tokens, words)
        strides = (stack.layer_words * WORD_BYTES, words * WORD_BYTES, WORD_BYTES)
        return as_strided(memory, shape, strides, writeable=False)

    def _stacks(self) -> Iterator[PartStack]:
        """Group layers with equal parts that follow each other."""
        tokens, first, first_word = self.geometry.block_tokens, 0, 0
        for words, alike in itertools.groupby(self.layer_words):
            layers = range(first, first + len(list(alike)))
            layer_words = sum(words) * tokens
            for part in range(len(words)):
                constants = np.stack([self.constants[layer][part] for layer in layers])
                before = first_word + sum(words[:part]) * tokens
                yield PartStack(layers, part, constants, before, layer_words)
            first, first_word = layers.stop, first_word + len(layers) * layer_words


def _token_words(geometry: BlockGeometry, part_bytes: int) -> int:
    token_bytes, rest = divmod(part_bytes, geometry.block_tokens)
    if rest or token_bytes % WORD_BYTES or token_bytes < WORD_BYTES:
        raise ConfigError(
            f"a part of {part_bytes} bytes for {geometry.block_tokens} tokens: each token needs a "
            f"multiple of {WORD_BYTES} bytes per layer and part; change the KV bytes per token"
        )
    return token_bytes // WORD_BYTES
