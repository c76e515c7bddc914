"""What a session could hit at best, from the tokens it really sent (§A.4).

The hit length is "calculated in the client": the longest prefix, in Full Blocks, of what the same
session has sent or received before.  It comes from comparing blocks, never from adding lengths
up, because sessions that compact or edit their context are no pure appends.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from dualpath.core.errors import ConfigError

_TOKEN_BYTES = 4


class PrefixHistory:
    """All token prefixes of one session, as a tree of Full Blocks of ``block_tokens`` tokens."""

    def __init__(self, block_tokens: int) -> None:
        """Start empty; raise ``ConfigError`` unless ``block_tokens`` ≥ 1."""
        if block_tokens < 1:
            raise ConfigError(
                f"block_tokens is {block_tokens}, must be at least 1; pass the block size served"
            )
        self._block_tokens = block_tokens
        self._children: dict[tuple[int, bytes], int] = {}

    def hit_tokens(self, prompt_token_ids: Sequence[int]) -> int:
        """Return the tokens of ``prompt_token_ids`` that a perfect store would hit.

        A multiple of ``block_tokens``, and less than the prompt: its last token is always
        computed, as in ``BlockGeometry.max_hit_blocks``.
        """
        most_blocks = max(len(prompt_token_ids) - 1, 0) // self._block_tokens
        node = blocks = 0
        for block in self._blocks(prompt_token_ids[: most_blocks * self._block_tokens]):
            child = self._children.get((node, block))
            if child is None:
                break
            node = child
            blocks += 1
        return blocks * self._block_tokens

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember a prompt with the tokens generated after it.

        Leave the very last generated token out: it was never fed back, so it has no KV-cache.
        """
        node = 0
        for block in self._blocks(token_ids):
            node = self._children.setdefault((node, block), len(self._children) + 1)

    def _blocks(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        raw = np.asarray(token_ids, dtype=np.uint32).tobytes()
        step = self._block_tokens * _TOKEN_BYTES
        for start in range(0, len(raw) - step + 1, step):
            yield raw[start : start + step]
