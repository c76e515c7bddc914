"""LoRA adapters: names for clients, paths at engines, and their effect on block keys."""

import msgspec

from dualpath.core.key_extras import KeyExtras, PromptItem
from dualpath.core.names import Name


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
