"""A forward pass of a prefill engine, between the engine that computes and the traffic manager.

Engines of all kinds call the same things: begin, then for each layer wait for stored KV and hand
new KV over, then finish.  One that begins a pass while the one before it is still computed says
when it ``enter``s it; passes end in the order in which they began.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.control import EngineMessage
from dualpath.core.errors import TransportError
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import PrefillTransfer
from dualpath.engine.counters import Counter
from dualpath.engine.layer_stream import LayerSettings, LayerStream
from dualpath.engine.prefill_passes import RELEASED
from dualpath.engine.settings import EngineSettings
from dualpath.engine.step_transfers import PrefillChunk
from dualpath.engine.traffic_manager import TrafficManager


class PromptPart(msgspec.Struct, frozen=True):
    """What a forward pass computes of a request.

    ``hbm_blocks`` are engine block ids of prompt blocks ``0 … chunk.end - 1``, at least.
    """

    transfer: PrefillTransfer
    chunk: BlockRun
    hbm_blocks: tuple[int, ...]

    def chunk_with(self, decode_agents: tuple[str, ...]) -> PrefillChunk:
        """Return what a rank moves for it, which speaks with these agents of the DE."""
        blocks = self.hbm_blocks[: self.chunk.end]
        return PrefillChunk(self.transfer, self.chunk, blocks, decode_agents)


def layer_settings(settings: EngineSettings, geometry: BlockGeometry) -> LayerSettings:
    """Return how an engine's passes move KV."""
    return LayerSettings(
        buffers=settings.layers_in_hbm(geometry.layers), overlap=settings.mode.layerwise
    )


class StreamedPass:
    """A rank's transfers around the computation of each layer; none where no bytes move."""

    def __init__(self, stream: LayerStream | None) -> None:
        self._stream = stream

    def failed(self, request_id: str) -> bool:
        """Whether a request's loaded KV is not to be relied on."""
        return self._stream is not None and request_id in self._stream.failures

    def enter(self) -> None:
        """The pass before is computed: return when this one's new KV may be written."""
        if self._stream is not None:
            self._stream.enter()

    def wait_loaded(self, layer: int) -> None:
        """Return when a layer's stored KV is in HBM, or on its way before what is computed next."""
        if self._stream is not None:
            self._stream.wait_loaded(layer)

    def computed(self, layer: int) -> None:
        """A layer's new KV is in HBM, or will be when what was queued so far is over."""
        if self._stream is not None:
            self._stream.computed(layer)


class ForwardPass(StreamedPass):
    """Starts the transfers of its parts; used by the engine's thread, ``finish`` must follow.

    A part that is too late, since its request was released or its slots went to another one, takes
    no part in transfers; the engine may compute it all the same.  ``send`` reports to the router.
    ``before`` is a pass that may not be over, of which a request may have an earlier chunk.
    """

    def __init__(
        self,
        manager: TrafficManager,
        send: Callable[[EngineMessage], None],
        parts: Sequence[PromptPart],
        before: "ForwardPass | None" = None,
    ) -> None:
        self._before = before
        #: Of this pass and those before it that its requests took part in; complete at its end.
        self.failures: dict[str, str] = {}
        self._manager = manager
        self._send = send
        self._parts = parts
        self._rejected: dict[str, str] = {}
        start_ns = manager.trace.now_ns()
        chunks = [chunk for part in parts if (chunk := self._chunk(part)) is not None]
        layers = layer_settings(manager.settings, manager.geometry)
        moves_bytes = manager.settings.mode.moves_bytes
        stream_before = before._stream if before is not None else None
        super().__init__(
            manager.begin_prefill(chunks, layers, stream_before) if moves_bytes else None
        )
        manager.trace.record("begin", "pass", start_ns, manager.trace.now_ns())

    def failed(self, request_id: str) -> bool:
        """Whether a request's loaded KV is not to be relied on."""
        before = self._before
        return (
            super().failed(request_id)
            or request_id in self._rejected
            or request_id in self.failures
            or (before is not None and before.failed(request_id))
        )

    def finish(self, wrong: Mapping[str, str]) -> dict[str, str]:
        """Wait for the last transfers and report what ended; return failed requests with reasons.

        A request ends with its last block, or when it failed: in the pass before, of which that
        has been reported, or in this one.  ``wrong`` are those whose KV the engine found to be
        wrong, and why.
        """
        earlier = self._before.failures if self._before is not None else {}
        transfers = self._manager.end_prefill(self._stream) if self._stream is not None else {}
        found = {**self._rejected, **transfers, **wrong}
        for part in self._parts:
            request_id = part.transfer.request_id
            blocks = self._manager.geometry.blocks_for(part.transfer.prompt_tokens)
            failure = earlier.get(request_id, found.get(request_id))
            if failure is not None:
                self.failures[request_id] = failure
            ends = failure is not None or part.chunk.end == blocks
            if ends and request_id not in earlier:
                self._send(self._manager.sent(request_id, failure))
        self._before = None  # what failed there and is part of this pass is known here now
        return self.failures

    def _chunk(self, part: PromptPart) -> PrefillChunk | None:
        try:
            return self._checked_chunk(part)
        except TransportError as error:
            self._rejected[part.transfer.request_id] = str(error)
            return None

    def _checked_chunk(self, part: PromptPart) -> PrefillChunk:
        manager, transfer = self._manager, part.transfer
        request_id = transfer.request_id
        if not manager.is_active(request_id):
            raise TransportError(f"request {request_id}: {RELEASED}")
        if part.chunk.first < transfer.shared_blocks:
            raise TransportError(
                f"request {request_id}: block {part.chunk.first} is computed, but its slot at the "
                f"DE, as those of {transfer.shared_blocks} blocks, is shared with other requests"
            )
        own_slots = [s for run in transfer.hits if run.side is Role.PREFILL for s in run.slots]
        # After a short read the transfer carries fewer slots than the request holds.
        if manager.buffer.slots_of(request_id)[: len(own_slots)] != tuple(own_slots):
            manager.counters.add(Counter.STALE_TRANSFERS, 1)
            raise TransportError(f"request {request_id}: its buffer slots changed hands")
        agents: tuple[str, ...] = ()
        if manager.settings.mode.moves_bytes:
            agents = manager.decode_agents(transfer.decode_engine, transfer.decode_epoch)
        return part.chunk_with(agents)
