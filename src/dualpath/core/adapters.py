"""LoRA adapters: what clients call them, where engines find them, and what their KV depends on."""

import msgspec

from dualpath.core.key_extras import KeyExtras, PromptItem
from dualpath.core.names import Name


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter as an engine has loaded it.

    ``name`` is the ``model`` of requests, ``path`` the text that stands for its place on command
    lines: vLLM's keys hold both, so router and engines must write them alike.  ``digest`` is over
    its weights and all else that changes what it computes.
    """

    name: Name
    path: Name
    digest: Name

    def salt(self, cache_salt: str | None) -> str:
        """Return the salt that engines hash in the place of the client's.

        vLLM's keys know an adapter by name and path only.  So its digest, of one length always,
        stands before the client's salt, and another adapter in its place shares no KV.
        """
        return f"{self.digest}:{cache_salt}" if cache_salt else self.digest

    def extras(self, cache_salt: str | None, items: tuple[PromptItem, ...] = ()) -> KeyExtras:
        """Return what enters the keys of a request for this adapter."""
        every = (("lora", self.name, self.path),)
        return KeyExtras(every=every, cache_salt=self.salt(cache_salt), items=items)
