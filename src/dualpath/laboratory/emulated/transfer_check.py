"""Whether a hand-over or take-over can be meant: its blocks and slots fit prompt and buffers.

Only the router makes them, and it is right.  But what comes over HTTP is indexed with, and a wrong
number must end one request, not the engine's thread.
"""

from collections.abc import Iterable

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.control import DecodeTransfer, PrefillTransfer
from dualpath.core.errors import BadRequestError

#: Above any buffer; slots of another engine are checked against its own size when they are used.
_MOST_SLOTS = 1 << 32


def check_transfer(
    ours: PrefillTransfer | DecodeTransfer,
    geometry: BlockGeometry,
    own_slots: int,
    moves_bytes: bool,
) -> None:
    """Raise ``BadRequestError`` that names what does not fit; ``own_slots`` of this engine."""
    blocks = geometry.blocks_for(ours.prompt_tokens) if moves_bytes else 0
    if isinstance(ours, DecodeTransfer):
        _check_slots(ours.request_id, "slots", ours.slots, blocks, own_slots)
        return
    _check_slots(ours.request_id, "de_slots", ours.de_slots, blocks, _MOST_SLOTS)
    if not 0 <= ours.hit_blocks <= geometry.max_hit_blocks(ours.prompt_tokens):
        raise BadRequestError(
            f"request {ours.request_id}: {ours.hit_blocks} hit blocks for a prompt of "
            f"{ours.prompt_tokens} tokens; send it through the router"
        )
    if moves_bytes:
        _check_hits(ours, own_slots)


def _check_hits(prefill_transfer: PrefillTransfer, own_slots: int) -> None:
    block = 0
    for run in prefill_transfer.hits:
        if run.first_block != block:
            raise BadRequestError(
                f"request {prefill_transfer.request_id}: a run of hits begins at block "
                f"{run.first_block}, block {block} is next; send it through the router"
            )
        most = own_slots if run.side is Role.PREFILL else _MOST_SLOTS
        _check_slots(prefill_transfer.request_id, "hits", run.slots, len(run.slots), most)
        block += len(run.slots)
    if block != prefill_transfer.hit_blocks:
        raise BadRequestError(
            f"request {prefill_transfer.request_id}: {block} blocks lie in buffers, "
            f"{prefill_transfer.hit_blocks} are hit; send it through the router"
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
