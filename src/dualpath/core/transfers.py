"""What rides on a vLLM request: where hit KV lies, where the complete KV goes, where it waits.

Control messages (``core.control``) say what an engine is to do; these two go with the request that
vLLM computes, under one key of its ``kv_transfer_params``.
"""

from typing import Any

import msgspec

from dualpath.core.blocks import TenantTag
from dualpath.core.errors import IncompatibleError
from dualpath.core.names import Name
from dualpath.core.runs import HitRun

#: Key under which a prefill or decode transfer travels in vLLM's ``kv_transfer_params``.
TRANSFER_PARAMS_KEY = "dualpath"


class PrefillTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rides on the PE's vLLM request: where hit KV lies and where the complete KV has to go.

    ``hit_key_tail`` is the key of the last hit block, empty without hits: the PE compares it
    with its own chain before it trusts any loaded block.  ``de_slots`` has one slot per prompt
    block, the last possibly partial; nothing may be written to the first ``shared_blocks`` of them,
    whose KV other requests use as well.
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


class DecodeTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rides on the DE's vLLM request: the prompt's KV waits in this engine's own buffer.

    ``tenant`` is whose the blocks of the tokens are that follow.
    """

    request_id: Name
    prompt_tokens: int
    slots: tuple[int, ...]
    tenant: TenantTag = ""


def to_transfer_params(value: PrefillTransfer | DecodeTransfer) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` dictionary that carries ``value`` (JSON-safe)."""
    kind = "prefill_transfer" if isinstance(value, PrefillTransfer) else "decode_transfer"
    return {TRANSFER_PARAMS_KEY: {kind: msgspec.to_builtins(value)}}


def from_transfer_params(params: dict[str, Any] | None) -> PrefillTransfer | DecodeTransfer | None:
    """Return what a vLLM request carries for us, None if nothing.

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
