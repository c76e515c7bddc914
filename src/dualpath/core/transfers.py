"""The transfers that a vLLM request carries: the places of hit KV and of the complete KV.

Control messages (``core.control``) are commands to an engine; these two travel with the request
that vLLM computes, under one key of its ``kv_transfer_params``.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from dualpath.core.blocks import BlockKey, TenantTag, holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.errors import IncompatibleError
from dualpath.core.names import Name
from dualpath.core.runs import BlockRun, HitRun

#: Key under which a prefill or decode transfer travels in vLLM's ``kv_transfer_params``.
TRANSFER_PARAMS_KEY = "dualpath"


class CallAssignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The assignment of a request to a PE that comes with its call, in place of an ``Assign``.

    It is valid in this ``session`` of the PE with the router only, and once: ``number`` counts the
    assignments of this kind in the session, from 1 on.  ``tokens`` count against the PE's load.
    """

    session: Name
    number: Annotated[int, msgspec.Meta(ge=1)]
    tokens: Annotated[int, msgspec.Meta(ge=0)]


class ThirdEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A third DE, in the epoch in which it has granted its slots."""

    engine_id: Name
    epoch: Name


class PrefillTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Travels with the PE's vLLM request: the source of hit KV, the destination of the whole KV.

    ``hit_key_tail`` is the key of the last hit block, empty without hits: the PE compares it
    with its own chain before it trusts any loaded block.  ``de_slots`` has one slot per prompt
    block, the last possibly partial; the first ``shared_blocks`` of them are shared with other
    requests and must not be written to.  With a hand-over in HBM ``de_hbm_blocks`` has the DE's HBM
    block of each prompt block, and ``de_slots`` is empty.  ``prompt_digest`` is set where the
    engine makes its own tokens of the request: KV of other tokens is then not used.
    ``assignment`` is None if the PE was sent an ``Assign``.  ``thirds`` are the third DEs of
    ``hits``.
    """

    request_id: Name
    prompt_tokens: int
    hit_blocks: int
    hit_key_tail: bytes
    hits: tuple[HitRun, ...]
    decode_engine: Name
    decode_epoch: Name
    de_slots: tuple[int, ...]
    shared_blocks: int = 0
    prompt_digest: bytes = b""
    assignment: CallAssignment | None = None
    de_hbm_blocks: tuple[int, ...] = ()
    thirds: tuple[ThirdEngine, ...] = ()


class DecodeTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Travels with the DE's vLLM request: KV of its first tokens is at the DE, by default in slots.

    These ``prompt_tokens`` are the whole prompt; or its hit, in full blocks, if the DE computes the
    append: then ``hit_key_tail`` is the key of the last of them, which the DE compares with its own
    chain before it trusts any of these blocks.  ``tenant`` owns the blocks of all tokens that
    follow, ``prompt_digest`` is as in ``PrefillTransfer``.  ``hits`` are the runs that the DE
    itself had in its buffer or read.  ``in_hbm``: the PE has sent the rest into HBM that the DE has
    reserved for the request.  Then ``slots`` is empty, and ``hits`` have their slots; else these
    are without slots, for metrics only.
    The DE writes its full blocks from ``persist_from`` on to storage, under the keys of its
    ``Assign``; None: it waits for ``Persist``, as it does with ``in_hbm``.
    """

    request_id: Name
    prompt_tokens: int
    slots: tuple[int, ...]
    tenant: TenantTag = ""
    hit_key_tail: bytes = b""
    prompt_digest: bytes = b""
    hits: tuple[HitRun, ...] = ()
    persist_from: Annotated[int, msgspec.Meta(ge=0)] | None = None
    in_hbm: bool = False

    @property
    def in_buffer(self) -> tuple[HitRun, ...]:
        """The blocks that are copied from the DE's buffer into its HBM, with their slots."""
        if self.in_hbm:
            return self.hits
        return (HitRun(Role.DECODE, BlockRun(0, len(self.slots)), self.slots),)

    def loaded_blocks(self, block_tokens: int) -> int:
        """Return how many blocks of KV are in HBM once the transfer is over."""
        if self.in_hbm:
            return holding_blocks(self.prompt_tokens, block_tokens)
        return len(self.slots)


def prompt_digest(keys: Sequence[BlockKey], token_ids: Sequence[int], block_tokens: int) -> bytes:
    """Return a digest of a prompt's tokens and of what changes their KV (salt, adapter, images).

    ``keys`` are those of its full blocks, a chain: the last one stands for all before it.
    """
    rest = token_ids[len(keys) * block_tokens :]
    return hashlib.sha256((keys[-1] if keys else b"") + array("q", rest).tobytes()).digest()


def to_transfer_params(value: PrefillTransfer | DecodeTransfer) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` dictionary that carries ``value`` (JSON-safe)."""
    kind = "prefill_transfer" if isinstance(value, PrefillTransfer) else "decode_transfer"
    return {TRANSFER_PARAMS_KEY: {kind: msgspec.to_builtins(value)}}


def from_transfer_params(params: dict[str, Any] | None) -> PrefillTransfer | DecodeTransfer | None:
    """Return the transfer in a vLLM request's parameters, None if there is none.

    Raises ``IncompatibleError`` for a malformed value.
    """
    ours = (params or {}).get(TRANSFER_PARAMS_KEY)
    if ours is None:
        return None
    try:
        if "prefill_transfer" in ours:
            return msgspec.convert(ours["prefill_transfer"], PrefillTransfer)
        return msgspec.convert(ours["decode_transfer"], DecodeTransfer)
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        raise IncompatibleError(
            f"kv_transfer_params[{TRANSFER_PARAMS_KEY!r}] is malformed: {error}; "
            "run the same dualpath version on router and engines"
        ) from error
