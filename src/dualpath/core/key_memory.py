"""Block keys of prompts that begin as earlier ones did (agents resend their whole context).

Tokens are compared by SHA-256 over runs of blocks and what came before them, so that a remembered
key is as certain as a computed one.
"""

import hashlib
from array import array
from collections.abc import Sequence

import cbor2

from dualpath.core.blocks import BlockKey, chain_root, chained_keys, extras_of

#: Runs cost 1.5 KB each, together 50 MB; they hold the contexts of 1,000 agents of 32K tokens.
CAPACITY_RUNS = 1 << 15
#: Tokens that are hashed at once; what a prompt has beyond its last whole run is computed anew.
RUN_TOKENS = 1024


class KeyMemory:
    """Remembers the latest ``capacity_runs`` runs of tokens; one owner, one block size."""

    def __init__(self, block_tokens: int, capacity_runs: int = CAPACITY_RUNS) -> None:
        self._block_tokens = block_tokens
        self._run_tokens = max(RUN_TOKENS // block_tokens, 1) * block_tokens
        self._capacity_runs = capacity_runs
        self._runs: dict[bytes, list[BlockKey]] = {}

    def __len__(self) -> int:
        """Runs that are remembered."""
        return len(self._runs)

    def keys(self, token_ids: Sequence[int], cache_salt: str | None = None) -> list[BlockKey]:
        """Return what ``block_keys`` does."""
        keys: list[BlockKey] = []
        names = self._names(token_ids, cache_salt)
        for name in names:
            if (run := self._runs.get(name)) is None:
                break
            keys += run
        parent = keys[-1] if keys else chain_root()
        first, others = extras_of(None if keys else cache_salt, ())
        rest = token_ids[len(keys) * self._block_tokens :]
        keys += chained_keys(parent, rest, self._block_tokens, first, others)
        self._remember(names, keys)
        return keys

    def _names(self, token_ids: Sequence[int], cache_salt: str | None) -> list[bytes]:
        """Name each whole run by its tokens and all before; none where ids are not 32 bits wide."""
        whole = len(token_ids) // self._run_tokens * self._run_tokens
        try:
            tokens = memoryview(array("I", token_ids[:whole]))
        except OverflowError:
            return []
        names = []
        name = hashlib.sha256(cbor2.dumps(cache_salt or None)).digest()
        for start in range(0, whole, self._run_tokens):
            running = hashlib.sha256(name)
            running.update(tokens[start : start + self._run_tokens])
            names.append(name := running.digest())
        return names

    def _remember(self, names: list[bytes], keys: list[BlockKey]) -> None:
        """Put a prompt's runs last; its first one very last, as the others need it."""
        blocks = self._run_tokens // self._block_tokens
        for number in reversed(range(len(names))):
            known = self._runs.pop(names[number], None)
            self._runs[names[number]] = known or keys[number * blocks : (number + 1) * blocks]
        while len(self._runs) > self._capacity_runs:
            del self._runs[next(iter(self._runs))]
