"""The extra keys of blocks: everything besides the tokens that changes their KV.

The same values in the same order as in vLLM 0.32 (``v1/core/kv_cache_utils.py``,
``generate_block_hash_extra_keys``): those of every block, then the images that touch a block, then,
in the first block, the salt.
"""

import cbor2
import msgspec


class PromptItem(msgspec.Struct, frozen=True):
    """An image, or another item, in place of ``tokens`` ≥ 1 tokens from ``first_token`` on.

    ``identifier`` names its content: equal identifiers after equal prefixes mean equal KV.
    """

    identifier: str
    first_token: int
    tokens: int

    @property
    def end_token(self) -> int:
        """The token after its last one."""
        return self.first_token + self.tokens

    def blocks(self, block_tokens: int) -> range:
        """Return the blocks that it overlaps."""
        return range(self.first_token // block_tokens, -(-self.end_token // block_tokens))


class KeyExtras(msgspec.Struct, frozen=True):
    """The extra keys of one prompt's blocks and of its continuation.

    ``every`` are those of each block (the adapter, say), ``items`` do not overlap and are in the
    order of their tokens, ``cache_salt`` enters the first block and, through the chain, all.
    """

    every: tuple[object, ...] = ()
    cache_salt: str | None = None
    items: tuple[PromptItem, ...] = ()

    def encoded(self, first_block: int, blocks: int, block_tokens: int) -> list[bytes]:
        """Return the canonical CBOR of the extra keys of ``blocks`` blocks from ``first_block``."""
        common = cbor2.dumps(self.every or None, canonical=True)
        found = [common] * blocks
        for block, own in self._own(first_block, first_block + blocks, block_tokens).items():
            found[block - first_block] = cbor2.dumps((*self.every, *own), canonical=True)
        return found

    def _own(self, begin: int, end: int, block_tokens: int) -> dict[int, list[object]]:
        """Return the extra keys of single blocks of ``[begin, end)``, without ``every``."""
        own: dict[int, list[object]] = {}
        for item in self.items:
            touched = item.blocks(block_tokens)
            for block in range(max(touched.start, begin), min(touched.stop, end)):
                offset = item.first_token - block * block_tokens
                own.setdefault(block, []).append(("mm", item.identifier, offset))
        if self.cache_salt and begin == 0 < end:
            own.setdefault(0, []).append(("cache_salt", self.cache_salt))
        return own
