"""Block keys of prompts that begin as earlier ones did (agents resend their whole context).

Tokens are compared by SHA-256 over runs of blocks and what came before them, so that a remembered
key is as certain as a computed one.
"""

import hashlib
from array import array
from collections.abc import Sequence

import cbor2

from dualpath.core.blocks import BlockKey, chain_root, chained_keys
from dualpath.core.key_extras import KeyExtras

#: Runs cost 1.5 KB each, together 50 MB; they hold the contexts of 1,000 agents of 32K tokens.
CAPACITY_RUNS = 1 << 15
#: Tokens that are hashed at once; what a prompt has beyond its last whole run is computed anew.
RUN_TOKENS = 1024
NO_EXTRAS = KeyExtras()


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

    def keys(self, token_ids: Sequence[int], extras: KeyExtras = NO_EXTRAS) -> list[BlockKey]:
        """Return the keys of the full blocks of ``token_ids`` with these extra keys."""
        keys: list[BlockKey] = []
        names = self._names(token_ids, extras)
        for name in names:
            if (run := self._runs.get(name)) is None:
                break
            keys += run
        keys = self.continued(keys, token_ids, extras)
        self._remember(names, keys)
        return keys

    def continued(
        self, known: Sequence[BlockKey], token_ids: Sequence[int], extras: KeyExtras = NO_EXTRAS
    ) -> list[BlockKey]:
        """Return the keys of ``token_ids``, the first of which are ``known``; remembers nothing."""
        known = known[: len(token_ids) // self._block_tokens]
        parent = known[-1] if known else chain_root()
        rest = token_ids[len(known) * self._block_tokens :]
        return [*known, *chained_keys(parent, rest, self._block_tokens, extras, len(known))]

    def _names(self, token_ids: Sequence[int], extras: KeyExtras) -> list[bytes]:
        """Name each whole run by its tokens, extra keys and all before.

        None where ids are not 32 bits wide.
        """
        blocks = self._run_tokens // self._block_tokens
        runs = len(token_ids) // self._run_tokens
        try:
            tokens = memoryview(array("I", token_ids[: runs * self._run_tokens]))
        except OverflowError:
            return []
        names = []
        name = hashlib.sha256(cbor2.dumps((extras.every, extras.cache_salt or None))).digest()
        for run in range(runs):
            running = hashlib.sha256(name)
            running.update(tokens[run * self._run_tokens : (run + 1) * self._run_tokens])
            if extras.items:
                for each in extras.encoded(run * blocks, blocks, self._block_tokens):
                    running.update(each)
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
