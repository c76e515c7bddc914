"""Validation of the transfers that requests carry, and of the keys of their hits.

Only the router creates transfers.  But they arrive over HTTP and are used as indices, and a wrong
number must fail one request, not the engine.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dualpath.core.blocks import BlockGeometry, BlockKey
from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.core.transfers import (
    DecodeTransfer,
    PrefillTransfer,
    from_transfer_params,
    prompt_digest,
)
from dualpath.engine.settings import EngineSettings

log = logging.getLogger(__name__)

#: Above the size of any buffer; slots of another engine are checked when they are used.
_MAX_SLOTS = 1 << 32


class TransferChecks:
    """Checks of the transfers of one engine's requests; may be called from any thread."""

    def __init__(self, settings: EngineSettings, geometry: BlockGeometry) -> None:
        self._role = settings.role
        self._moves_bytes = settings.mode.moves_bytes
        self._geometry = geometry
        self._own_slots = settings.buffer_slots(geometry)

    def carried(self, params: dict[str, Any] | None) -> PrefillTransfer | DecodeTransfer | None:
        """Return the transfer in a request's ``kv_transfer_params``, None if there is none.

        Raises ``IncompatibleError`` for a malformed one, ``BadRequestError`` for one of the other
        role.
        """
        transfer = from_transfer_params(params)
        wanted = PrefillTransfer if self._role is Role.PREFILL else DecodeTransfer
        if not isinstance(transfer, wanted | None):
            raise BadRequestError(
                f"request {transfer.request_id}: a {self._role.value} engine needs a "
                f"{wanted.__name__} in kv_transfer_params; send it through the router"
            )
        return transfer

    def check(self, transfer: PrefillTransfer | DecodeTransfer, tokens: int) -> None:
        """Raise ``BadRequestError`` with the tokens, blocks or slots that are invalid.

        ``tokens`` are those of the request, generated ones included.  In modes without transfers no
        slots are needed.
        """
        request_id, prompt_tokens = transfer.request_id, transfer.prompt_tokens
        if not 1 <= prompt_tokens <= tokens:
            raise BadRequestError(
                f"request {request_id}: {tokens} tokens for a prompt of {prompt_tokens}, which "
                "needs at least 1; send it through the router"
            )
        blocks = self._geometry.blocks_for(prompt_tokens) if self._moves_bytes else 0
        if isinstance(transfer, DecodeTransfer):
            if transfer.hit_key_tail and prompt_tokens % self._geometry.block_tokens:
                raise BadRequestError(
                    f"request {request_id}: a hit of {prompt_tokens} tokens ends within a block of "
                    f"{self._geometry.block_tokens}; send it through the router"
                )
            if transfer.in_hbm:
                self._check_in_buffer(transfer)
            wanted = 0 if transfer.in_hbm else blocks
            _check_slots(request_id, "slots", transfer.slots, wanted, self._own_slots)
            return
        if transfer.de_hbm_blocks:
            _check_slots(request_id, "de_hbm_blocks", transfer.de_hbm_blocks, blocks, _MAX_SLOTS)
            blocks = 0
        _check_slots(request_id, "de_slots", transfer.de_slots, blocks, _MAX_SLOTS)
        if not 0 <= transfer.hit_blocks <= self._geometry.max_hit_blocks(prompt_tokens):
            raise BadRequestError(
                f"request {request_id}: {transfer.hit_blocks} hit blocks for a prompt of "
                f"{prompt_tokens} tokens; send it through the router"
            )
        if self._moves_bytes:
            _check_hits(transfer, self._own_slots)
            _check_windows(transfer, self._geometry.whole_from(transfer.hit_blocks))

    def _check_in_buffer(self, transfer: DecodeTransfer) -> None:
        """Raise ``BadRequestError`` for hits in the buffer that cannot be those of the prompt."""
        block = 0
        for run in transfer.hits:
            if run.side is not Role.DECODE or run.blocks.first < block:
                raise BadRequestError(
                    f"request {transfer.request_id}: hits at block {run.blocks.first} of the "
                    f"{run.side} engine, expected are those of the decode engine from block "
                    f"{block} on; send it through the router"
                )
            _check_slots(transfer.request_id, "hits", run.slots, run.blocks.count, self._own_slots)
            block = run.blocks.end
        most = self._geometry.max_hit_blocks(transfer.prompt_tokens)
        if block > most or transfer.hit_key_tail or not self._moves_bytes:
            raise BadRequestError(
                f"request {transfer.request_id}: {block} hit blocks, of at most {most}, of a whole "
                "prompt with its KV in HBM; send it through the router"
            )


def check_prompt(
    transfer: PrefillTransfer | DecodeTransfer,
    own_keys: Sequence[BlockKey],
    token_ids: Sequence[int],
    block_tokens: int,
) -> None:
    """Raise ``BadRequestError`` if the transfer is for other tokens than the request's prompt.

    ``own_keys`` and ``token_ids`` are those that this engine has made of the request.
    """
    if not transfer.prompt_digest:
        return
    tokens = token_ids[: transfer.prompt_tokens]
    keys = own_keys[: transfer.prompt_tokens // block_tokens]
    if prompt_digest(keys, tokens, block_tokens) != transfer.prompt_digest:
        raise BadRequestError(
            f"request {transfer.request_id}: its prompt of {len(token_ids)} tokens is not the one "
            f"of {transfer.prompt_tokens} tokens whose KV it refers to; send the same prompt, "
            "model and cache_salt to both engines"
        )


def with_own_hits(transfer: PrefillTransfer, own_keys: Sequence[BlockKey]) -> PrefillTransfer:
    """Return the transfer, without hits if the key of the last hit block is not the prompt's.

    ``own_keys`` are computed by this engine from the prompt's tokens.  Keys are a chain: if the
    last one is equal, all are.
    """
    hits = transfer.hit_blocks
    if hits == 0 or own_keys[hits - 1 : hits] == [transfer.hit_key_tail]:
        return transfer
    log.warning(
        "request %s: the key of hit block %d is not that of this prompt; its %d hit blocks "
        "are recomputed (router and engine disagree on block size or hash algorithm)",
        *(transfer.request_id, hits - 1, hits),
    )
    return msgspec.structs.replace(transfer, hit_blocks=0, hit_key_tail=b"", hits=())


def is_own_append(transfer: DecodeTransfer, own_keys: Sequence[BlockKey]) -> bool:
    """Return whether a DE may use the hit behind which it computes, by the key of its last block.

    ``own_keys`` as for ``with_own_hits``; True if the transfer names no key, as for a whole prompt.
    """
    if not transfer.hit_key_tail or own_keys[len(transfer.slots) - 1 : len(transfer.slots)] == [
        transfer.hit_key_tail
    ]:
        return True
    log.warning(
        "request %s: the key of hit block %d is not that of this prompt; the whole prompt is "
        "computed (router and engine disagree on block size or hash algorithm)",
        *(transfer.request_id, len(transfer.slots) - 1),
    )
    return False


def _check_hits(transfer: PrefillTransfer, own_slots: int) -> None:
    block = 0
    for run in transfer.hits:
        if run.blocks.first != block:
            raise BadRequestError(
                f"request {transfer.request_id}: a run of hits begins at block "
                f"{run.blocks.first}, block {block} is next; send it through the router"
            )
        if run.third and run.third not in {third.engine_id for third in transfer.thirds}:
            raise BadRequestError(
                f"request {transfer.request_id}: hits at block {run.blocks.first} are at engine "
                f"{run.third!r}, of which no process is named; send it through the router"
            )
        most = own_slots if run.is_at(Role.PREFILL) else _MAX_SLOTS
        _check_slots(transfer.request_id, "hits", run.slots, run.blocks.count, most)
        block += run.blocks.count
    if block != transfer.hit_blocks:
        raise BadRequestError(
            f"request {transfer.request_id}: {block} blocks are in buffers, "
            f"{transfer.hit_blocks} are hit; send it through the router"
        )


def _check_windows(transfer: PrefillTransfer, whole_from: int) -> None:
    """Raise ``BadRequestError`` if a window layer would use KV that was not read."""
    for run in transfer.hits:
        block = max(run.blocks.first, whole_from)
        if block < run.whole_from:
            raise BadRequestError(
                f"request {transfer.request_id}: block {block} is in a buffer without its window "
                f"layers, a hit of {transfer.hit_blocks} blocks needs them from block {whole_from} "
                "on; send it through the router"
            )


def _check_slots(
    request_id: str, name: str, slots: Iterable[int], wanted: int, buffer_slots: int
) -> None:
    given = list(slots)
    if len(given) != wanted or any(not 0 <= slot < buffer_slots for slot in given):
        raise BadRequestError(
            f"request {request_id}: {name} are {given[:8]}, {wanted} of a buffer of {buffer_slots} "
            "are needed; send it through the router"
        )
