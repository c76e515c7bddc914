"""KV whose every byte can be checked: a function of (token prefix, layer).

The KV of a token in a layer is some 64-bit words; word ``w`` is the token's seed (a hash of the
whole prefix) XOR a constant of (layer, ``w``).  Every single word thus identifies prefix and
layer, at the cost of one pass over the memory.
"""

import numpy as np
from numpy.typing import NDArray

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import ConfigError
from dualpath.laboratory.emulated.prefix import Seeds, mixed
from dualpath.laboratory.emulated.settings import WORD_BYTES

#: Bytes worked on at once: large enough for numpy, small enough for a core's cache and for an
#: allocator that asks the kernel for anything larger.
PORTION_BYTES = 1 << 16

Words = NDArray[np.uint64]


class KvFunction:
    """The one right content of Layer Blocks and Full Blocks of a geometry.

    Raises ``ConfigError`` for KV of a token and layer that is no whole number of words.
    """

    def __init__(self, geometry: BlockGeometry) -> None:
        token_bytes, rest = divmod(geometry.layer_block_bytes, geometry.block_tokens)
        if rest or token_bytes % WORD_BYTES or token_bytes < WORD_BYTES:
            raise ConfigError(
                f"a Layer Block of {geometry.layer_block_bytes} bytes for {geometry.block_tokens} "
                f"tokens: each token needs a multiple of {WORD_BYTES} bytes per layer; change the "
                "KV bytes per token"
            )
        self.geometry = geometry
        self.words = token_bytes // WORD_BYTES
        self.portion_blocks = max(PORTION_BYTES // geometry.layer_block_bytes, 1)
        numbers = np.arange(geometry.layers * self.words, dtype=np.uint64)
        self.constants: Words = mixed(numbers).reshape(geometry.layers, self.words)

    def layer_blocks(self, seeds: Seeds, layer: int) -> Words:
        """Return the content [block, token, word] of blocks with these seeds [block, token]."""
        content: Words = seeds[:, :, None] ^ self.constants[layer]
        return content

    def full_block(self, seeds: Seeds) -> Words:
        """Return the content [layer, token, word] of the block with these seeds [token]."""
        return seeds[None, :, None] ^ self.constants[:, None, :]

    def token(self, seed: np.uint64) -> Words:
        """Return the content [layer, word] of one token."""
        return seed ^ self.constants

    def as_words(self, full_block: memoryview) -> Words:
        """Return a Full Block's bytes as [layer, token, word]."""
        shape = (self.geometry.layers, self.geometry.block_tokens, self.words)
        return np.frombuffer(full_block, np.uint64).reshape(shape)
