"""What an orchestrator says about the KV of one request: how much to load, and which blocks.

Both are in ``kv_transfer_params``, by the names that vLLM's connectors use: ``max_load_tokens``
bounds the prompt tokens that are loaded, ``kv_hint`` is vLLM's envelope of hints (protocol 0.1,
``vllm.v1.kv_hints``), as Dynamo sends it.  vLLM 0.32 takes the envelope from Python only, so there
it arrives as ``kv_hints`` of the request.

A hint is advisory: a request is served whatever became of its hints.  The one action that is known
is ``kv.fetch`` 1.0, which names blocks at the head of the prompt that can be fetched.  Blocks that
are stored or in the DRAM of an engine are loaded by either engine, as for every request; the source
that the action names is not contacted.  Other actions and versions are unsupported.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.errors import BadRequestError

PROTOCOL_VERSION = "0.1"
FETCH = "kv.fetch"
FETCH_VERSION = "1.0"
#: The names in ``kv_transfer_params``.
HINT_KEY = "kv_hint"
LIMIT_KEY = "max_load_tokens"

#: More actions than any orchestrator sends with a request.
_MOST_ACTIONS = 64
#: Identifiers are logged, so they are bounded.
_Identifier = Annotated[str, msgspec.Meta(max_length=256)]
_MASK = (1 << 64) - 1


class KvHintAction(msgspec.Struct, frozen=True):
    """One hint; ``payload`` is checked by whoever implements the action."""

    action_id: _Identifier
    action_type: _Identifier
    action_version: _Identifier
    payload: dict[str, Any]


class KvHints(msgspec.Struct, frozen=True):
    """The envelope of a request's hints."""

    protocol_version: _Identifier
    message_id: _Identifier
    actions: Annotated[list[KvHintAction], msgspec.Meta(max_length=_MOST_ACTIONS)]


class HintStatus(StrEnum):
    """What became of an action, by vLLM's names."""

    APPLIED = "applied"
    REJECTED = "rejected"
    """The action is known, and its payload cannot be used."""
    UNSUPPORTED = "unsupported"
    """The action, its version or the protocol is not known."""


class HintResult(NamedTuple):
    """The result of an action, and its reason."""

    action: KvHintAction
    status: HintStatus
    reason: str


class _Fetch(msgspec.Struct, frozen=True):
    """Payload of ``kv.fetch`` 1.0.

    ``block_hashes`` are the last 64 bits of block keys, as KV events have them with
    ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES``.
    """

    block_hashes: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]
    source_control_endpoint: str | None = None
    mode: str = "copy"
    no_retain: bool | None = None


class KvRequestHints(msgspec.Struct, frozen=True):
    """The hints of one request; all defaults without any."""

    max_load_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    kv_hint: KvHints | None = None


NO_KV_HINTS = KvRequestHints()


def kv_request_hints(transfer_params: object, envelope: object = None) -> KvRequestHints:
    """Return the hints in a request's ``kv_transfer_params``; there are none in another value.

    ``envelope`` is the one that vLLM carries beside them, and takes precedence.  Raises
    ``BadRequestError`` for a limit or an envelope that is malformed.
    """
    params = transfer_params if isinstance(transfer_params, Mapping) else {}
    given = {key: params.get(key) for key in (LIMIT_KEY, HINT_KEY)}
    if envelope is not None:
        given[HINT_KEY] = msgspec.to_builtins(envelope)
    if all(value is None for value in given.values()):
        return NO_KV_HINTS
    try:
        return msgspec.convert(given, KvRequestHints)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise BadRequestError(
            f"kv_transfer_params: {error}; send {LIMIT_KEY} as a number of tokens from 0, and "
            f"{HINT_KEY} as an envelope of protocol {PROTOCOL_VERSION} with at most "
            f"{_MOST_ACTIONS} actions"
        ) from error


def hint_results(hints: KvHints, keys: Sequence[BlockKey]) -> list[HintResult]:
    """Return what becomes of each action for a prompt with these block keys."""
    if hints.protocol_version != PROTOCOL_VERSION:
        reason = f"the protocol is {hints.protocol_version!r}, known is {PROTOCOL_VERSION}"
        return [HintResult(action, HintStatus.UNSUPPORTED, reason) for action in hints.actions]
    return [HintResult(action, *_result(action, keys)) for action in hints.actions]


def _result(action: KvHintAction, keys: Sequence[BlockKey]) -> tuple[HintStatus, str]:
    if (action.action_type, action.action_version) != (FETCH, FETCH_VERSION):
        return HintStatus.UNSUPPORTED, f"known is {FETCH} {FETCH_VERSION}"
    try:
        fetch = msgspec.convert(action.payload, _Fetch)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        return HintStatus.REJECTED, f"its payload: {error}"
    if fetch.mode != "copy":
        return HintStatus.REJECTED, f"its mode is {fetch.mode!r}; blocks are only copied"
    if fetch.no_retain:
        return HintStatus.REJECTED, "no_retain: blocks that were loaded stay in DRAM"
    named = named_blocks(fetch.block_hashes, keys)
    if not named:
        return HintStatus.REJECTED, "it names no block of this prompt"
    return HintStatus.APPLIED, f"it names {named} of {len(keys)} blocks"


def named_blocks(block_hashes: Sequence[int], keys: Sequence[BlockKey]) -> int:
    """Return how many blocks at the head of a prompt are among ``block_hashes``."""
    named = set(block_hashes)
    count = 0
    while count < len(keys) and int.from_bytes(keys[count], "big") & _MASK in named:
        count += 1
    return count
