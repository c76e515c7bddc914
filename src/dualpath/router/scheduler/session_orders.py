"""Orders to decode engines: which blocks to retain for agents' next turns, and when to prefetch.

``policy.session_warmth`` decides; this module has its clock, its view of the decode engines, and
its messages.  An order that is lost or late costs a read, nothing else.
"""

import asyncio
from collections.abc import Callable, Iterable

from dualpath.core.cluster import Role
from dualpath.core.control import Retain, RouterMessage
from dualpath.core.session_hints import SessionHints
from dualpath.policy.session_warmth import (
    DecodeBuffer,
    Order,
    SessionName,
    SessionWarmth,
    WarmthSettings,
)
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.registry import Registry
from dualpath.router.scheduling import Answered, RequestOrder

#: A client sends hints on a session while its tool runs (POST), or ends it (DELETE).
SESSION_PATH = "/dualpath/v1/sessions/{session_id}"


class SessionOrders:
    """Agents' sessions of one router; lives in its event loop.

    ``wanted`` returns whether hits are served from the buffers of decode engines at all.  ``clock``
    gives monotonic seconds; ``ordered`` is called with each order's reason and number of blocks.
    ``read_tokens_per_s`` is the read speed of engines that do not report theirs, 0: not known.
    """

    def __init__(
        self,
        settings: WarmthSettings,
        registry: Registry,
        send: Callable[[str, RouterMessage], None],
        wanted: Callable[[], bool],
        clock: Callable[[], float],
        ordered: Callable[[str, int], None],
        read_tokens_per_s: Callable[[], float],
    ) -> None:
        self._warmth = SessionWarmth(settings)
        self._registry = registry
        self._send = send
        self._wanted = wanted
        self._clock = clock
        self._ordered = ordered
        self._read_tokens_per_s = read_tokens_per_s
        self._buffers: dict[str, DecodeBuffer] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def cached_blocks(self) -> int:
        """Blocks that count as cached for next turns, over all decode engines."""
        return sum(map(self._warmth.retained_blocks, self._buffers))

    def began(self, order: RequestOrder) -> SessionName:
        """Note a turn; return its session's name."""
        return self._warmth.turn_began(order.tenant, order.hints, order.keys, self._clock())

    def ended(self, name: SessionName, answered: Answered, assigned_blocks: int) -> None:
        """Note a turn's answer; the DE was assigned a prompt of ``assigned_blocks`` full blocks."""
        if not self._wanted():
            return
        self._send_orders(
            self._warmth.turn_ended(
                name,
                answered.prompt_blocks,
                answered.keys,
                answered.decode_engine,
                self._clock(),
                self._buffers,
                assigned_blocks,
            )
        )

    def hint(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Apply a client's hints while its tool runs; False if the session is unknown."""
        name = tenant, session_id
        if name not in self._warmth:
            return False
        self._send_orders(self._warmth.hint(name, hints, self._clock(), self._buffers))
        return True

    def engine_joined(self, info: EngineInfo) -> None:
        """An engine has joined; its buffer caches nothing yet."""
        if info.role is Role.DECODE:
            self._buffers[info.engine_id] = self._buffer(info)

    def engines_lost(self, lost: Iterable[EngineInfo]) -> None:
        """Engines are lost and cache nothing any more."""
        for info in lost:
            self._warmth.engine_lost(info.engine_id)
            self._buffers.pop(info.engine_id, None)

    def read_rate_changed(self) -> None:
        """Take the new rate for engines that do not know their own read speed."""
        for info in self._registry.alive(Role.DECODE):
            if info.rates.read_bytes is None:
                self._buffers[info.engine_id] = self._buffer(info)

    def stop(self) -> None:
        """Send no more orders."""
        if self._timer is not None:
            self._timer.cancel()

    def _buffer(self, info: EngineInfo) -> DecodeBuffer:
        assert self._registry.namespace is not None, "an engine that lives has brought it"
        geometry = self._registry.namespace.geometry
        read = info.rates.read_bytes
        return DecodeBuffer(
            blocks=info.buffer_tokens // geometry.block_tokens,
            # A DE measures it for storage_codec auto only; else the PEs' measurements hold for all
            # nodes, as in α.
            blocks_per_s=read.per_s / geometry.full_block_bytes
            if read
            else self._read_tokens_per_s() / geometry.block_tokens,
        )

    def _due(self) -> None:
        self._timer = None
        self._send_orders(self._warmth.due(self._clock(), self._buffers))

    def _send_orders(self, orders: Iterable[Order]) -> None:
        for order in orders:
            self._send(order.engine_id, _message(order))
            self._ordered(order.reason, len(order.keys))
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (next_s := self._warmth.next_s()) is not None:
            delay_s = max(next_s - self._clock(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._due)


def _message(order: Order) -> Retain:
    keys, assigned = order.keys, order.assigned_blocks
    prompt_tail = keys[assigned - 1] if assigned else b""
    return Retain(prompt_tail, keys[assigned:], order.retain_s, order.fetch, order.expected_s)
