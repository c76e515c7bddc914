"""A cache of block keys for prompts with a known prefix (agents resend their whole context).

Tokens are compared by a SHA-256 chain over runs of blocks, so that a cached key is as reliable as a
computed one.
"""

import hashlib
from array import array
from collections.abc import Sequence

import cbor2
import msgspec

from dualpath.core.blocks import (
    BlockKey,
    KeyExtras,
    PromptItem,
    chain_root,
    chained_keys,
    token_array,
)
from dualpath.core.names import Name

# ---------------------------------------------------------------------------------------- adapters
# LoRA adapters: names for clients, paths at engines, and their effect on block keys.


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter as an engine has loaded it.

    ``name`` is the ``model`` of requests, ``path`` its path exactly as written on command lines:
    both enter vLLM's keys, so router and engines must spell them alike.  ``digest`` covers its
    weights and everything else that changes its output.
    """

    name: Name
    path: Name
    digest: Name

    def salt(self, cache_salt: str | None) -> str:
        """Return the salt that engines hash in place of the client's.

        vLLM's keys contain only the name and path of an adapter.  So its digest, of constant
        length, is prepended to the client's salt, and another adapter at the same path shares no
        KV.
        """
        return f"{self.digest}:{cache_salt}" if cache_salt else self.digest

    def extras(self, cache_salt: str | None, items: tuple[PromptItem, ...] = ()) -> KeyExtras:
        """Return the extra keys of a request for this adapter."""
        every = (("lora", self.name, self.path),)
        return KeyExtras(every=every, cache_salt=self.salt(cache_salt), items=items)


#: A run takes 1.5 KB, all of them 50 MB: the contexts of 1,000 agents of 32K tokens.
CAPACITY_RUNS = 1 << 15
#: Tokens of a run; the keys after a prompt's last whole run are always computed.
RUN_TOKENS = 1024
NO_EXTRAS = KeyExtras()


class KeyCache:
    """Caches the keys of the latest ``capacity_runs`` runs of tokens; not thread-safe."""

    def __init__(self, block_tokens: int, capacity_runs: int = CAPACITY_RUNS) -> None:
        self._block_tokens = block_tokens
        self._run_tokens = max(RUN_TOKENS // block_tokens, 1) * block_tokens
        self._capacity_runs = capacity_runs
        self._runs: dict[bytes, list[BlockKey]] = {}

    def __len__(self) -> int:
        """Number of cached runs."""
        return len(self._runs)

    def keys(self, token_ids: Sequence[int], extras: KeyExtras = NO_EXTRAS) -> list[BlockKey]:
        """Return the keys of the full blocks of ``token_ids`` with these extra keys."""
        keys: list[BlockKey] = []
        token_ids = token_array(token_ids)
        names = self._names(token_ids, extras)
        for name in names:
            if (run := self._runs.get(name)) is None:
                break
            keys += run
        keys = self.continued(keys, token_ids, extras)
        self._store(names, keys)
        return keys

    def continued(
        self, known: Sequence[BlockKey], token_ids: Sequence[int], extras: KeyExtras = NO_EXTRAS
    ) -> list[BlockKey]:
        """Return the keys of ``token_ids``, the first of which are ``known``; caches nothing."""
        known = known[: len(token_ids) // self._block_tokens]
        parent = known[-1] if known else chain_root()
        rest = token_ids[len(known) * self._block_tokens :]
        return [*known, *chained_keys(parent, rest, self._block_tokens, extras, len(known))]

    def _names(self, token_ids: Sequence[int], extras: KeyExtras) -> list[bytes]:
        """Return a digest of each whole run: of its tokens, its extra keys and all runs before.

        Empty unless the tokens are an array, since one of them exceeds 32 bits.
        """
        if not isinstance(token_ids, array):
            return []
        blocks = self._run_tokens // self._block_tokens
        runs = len(token_ids) // self._run_tokens
        tokens = memoryview(token_ids)
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

    def _store(self, names: list[bytes], keys: list[BlockKey]) -> None:
        """Make a prompt's runs the most recent, the first one last, as the others depend on it."""
        blocks = self._run_tokens // self._block_tokens
        for number in reversed(range(len(names))):
            known = self._runs.pop(names[number], None)
            self._runs[names[number]] = known or keys[number * blocks : (number + 1) * blocks]
        while len(self._runs) > self._capacity_runs:
            del self._runs[next(iter(self._runs))]
