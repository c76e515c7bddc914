"""A prompt's KV in the DE's buffer: it is written to storage and copied to HBM.

Slots of a request at the decode engine are freed when three conditions hold: the KV was copied to
HBM (or the router released the request), the router's ``Persist`` has arrived, so that no new block
is lost, and the slots are not pinned.
"""

import functools
from collections.abc import Callable, Sequence

from dualpath.core.blocks import chain_root
from dualpath.core.control import EngineMessage
from dualpath.core.request_messages import KvInHbm, Persist
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.active_requests import ActiveRequests
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.counters import Counter
from dualpath.engine.hbm_layout import HbmBlock
from dualpath.engine.persister import Persister, WriteTask
from dualpath.engine.rank import Rank
from dualpath.plan.movements import PERSIST_PROMPT
from dualpath.plan.steps import PromptLayout, decode_steps, step_of

_NS_PER_S = 1_000_000_000


class ServedPrompts:
    """``moves_bytes`` False (mode Oracle): there are no slots, and only lengths are stored."""

    def __init__(
        self,
        rank: Rank,
        active: ActiveRequests,
        buffer: BlockBuffer,
        persister: Persister,
        send: Callable[[EngineMessage], None],
        *,
        moves_bytes: bool,
    ) -> None:
        self._geometry = rank.geometry
        self._rank = rank
        self._active = active
        self._buffer = buffer
        self._persister = persister
        self._counters = rank.counters
        self._trace = rank.trace
        self._send = send
        self._moves_bytes = moves_bytes

    def persist(self, message: Persist) -> None:
        """Write a prompt's new blocks to storage; drop them if the request is no longer here."""
        blocks = BlockRun(message.first_block, len(message.keys))
        held = self._buffer.slots_of(message.request_id)
        slots = held[blocks.first : blocks.end]
        complete = len(slots) == len(message.keys) or not self._moves_bytes
        if not complete or not self._active.is_active(message.request_id):
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, len(message.keys))
            return
        self._buffer.pin(slots)
        self._cache(message, held)
        # From here on another thread may free the request's slots, once its KV is in HBM.
        self._active.persist_seen(message.request_id)
        step = step_of(PERSIST_PROMPT, self._geometry, blocks, slots=slots)
        sources = [self._buffer.view(slot) for slot in slots]
        over = functools.partial(self._buffer.unpin, slots)
        self._persister.add(
            WriteTask(message.request_id, step, message.keys, sources, over, message.origin)
        )
        self._free_if_served(message.request_id)

    def _cache(self, message: Persist, held: Sequence[int]) -> None:
        """Cache the full blocks of a prompt, to which no transfer writes any more.

        In a model with window layers hit blocks may lack layers here and are not added.
        """
        hit_keys, first = message.hit_keys, message.first_block
        if self._moves_bytes and len(hit_keys) == first:
            begin = first if self._geometry.layer_windows else 0
            keys = (hit_keys + message.keys)[begin:]
            slots = held[begin : begin + len(keys)]
            parent = hit_keys[begin - 1] if begin else chain_root()
            self._buffer.cache_blocks(message.request_id, slots, keys, parent)

    def fill_hbm(
        self,
        decode_transfer: DecodeTransfer,
        hbm_blocks: Sequence[HbmBlock],
        done: Callable[[str | None], None],
    ) -> None:
        """See ``TrafficManager.fill_hbm``."""
        request_id, slots = decode_transfer.request_id, decode_transfer.slots
        start_ns = self._trace.now_ns()
        if not self._moves_bytes:
            self._kv_in_hbm(request_id, 0.0)
            done(None)
            return
        number = self._rank.work.begin()

        def over(error: str | None) -> None:
            self._buffer.unpin(slots)
            if error is None:
                self._kv_in_hbm(request_id, (self._trace.now_ns() - start_ns) / _NS_PER_S)

        def copied(error: str | None) -> None:
            # Each rank reports its own copy to the engine, which fails the request if one failed.
            self._rank.work.when_idle(number, functools.partial(over, error))
            done(error)

        if not self._buffer.pin_lease(request_id, slots):
            self._counters.add(Counter.STALE_TRANSFERS, 1)
            done(f"request {request_id}: its DE buffer slots have a new owner")
        else:
            prompt = PromptLayout(self._geometry, decode_transfer.prompt_tokens, de_slots=slots)
            self._rank.copier.into_hbm(request_id, decode_steps(prompt), hbm_blocks, copied)

    def _kv_in_hbm(self, request_id: str, h2d_s: float) -> None:
        self._active.kv_in_hbm(request_id)
        self._send(KvInHbm(request_id=request_id, h2d_s=h2d_s))
        self._free_if_served(request_id)

    def _free_if_served(self, request_id: str) -> None:
        if self._active.done_with_buffer(request_id):
            self._buffer.release(request_id)
