"""A forward pass of a prefill engine: the interface of an engine to its traffic manager.

All kinds of engines call the same methods: begin, then for each layer wait for its stored KV and
announce its new KV, then finish.  An engine that begins a pass while the pass before is still being
computed calls ``enter`` when it starts to compute it; passes end in the order in which they began.
"""

from collections.abc import Callable, Mapping, Sequence

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.control import EngineMessage
from dualpath.core.errors import TransportError
from dualpath.core.transfers import PrefillTransfer
from dualpath.engine.control.traffic_manager import TrafficManager
from dualpath.engine.counters import Counter
from dualpath.engine.passes.layer_stream import LayerSettings, LayerStream
from dualpath.engine.passes.prefill_passes import RELEASED
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.settings import EngineSettings
from dualpath.plan.counts import is_first_chunk
from dualpath.policy.batching import ComputeQuota


def layer_settings(settings: EngineSettings, geometry: BlockGeometry) -> LayerSettings:
    """Return the settings of the layer streams of an engine's passes."""
    return LayerSettings(
        buffers=settings.layers_in_hbm(geometry.layers), overlap=settings.mode.layerwise
    )


def admit_chunk(
    quota: ComputeQuota,
    transfer: PrefillTransfer,
    cached: int,
    remaining: int,
    limit: int | None,
    *,
    block_tokens: int,
    resident: bool,
) -> int:
    """Return how many of a request's ``remaining`` tokens enter a pass (``ComputeQuota.admit``).

    The bound on loads counts for requests that their DE receives in HBM.  With all layers
    ``resident`` in HBM only a prompt's first chunk loads KV.
    """
    is_first = is_first_chunk(cached // block_tokens, transfer.hit_blocks)
    return quota.admit(
        cached,
        remaining,
        limit,
        loaded=cached if is_first or not resident else 0,
        bounded=bool(transfer.de_hbm_blocks),
    )


class StreamedPass:
    """A rank's transfers around the computation of each layer; none in modes without transfers."""

    def __init__(self, stream: LayerStream | None) -> None:
        self._stream = stream

    def failed(self, request_id: str) -> bool:
        """Whether a request's loaded KV is unusable."""
        return self._stream is not None and request_id in self._stream.failures

    def enter(self) -> None:
        """The pass before is computed: return when this pass may write new KV."""
        if self._stream is not None:
            self._stream.enter()

    def wait_loaded(self, layer: int) -> None:
        """Return when a layer's stored KV is in HBM, or queued before the next computation."""
        if self._stream is not None:
            self._stream.wait_loaded(layer)

    def computed(self, layer: int) -> None:
        """A layer's new KV is in HBM, or will be once all work queued so far is over."""
        if self._stream is not None:
            self._stream.computed(layer)


class ForwardPass(StreamedPass):
    """Starts the transfers of its parts; used by the engine's thread, ``finish`` must follow.

    A part that is too late, since its request was released or its slots belong to another request,
    gets no transfers; the engine may compute it anyway.  ``send`` sends reports to the router.
    ``before`` is the pass before, if it may not be over; it may have an earlier chunk of a request.
    """

    def __init__(
        self,
        manager: TrafficManager,
        send: Callable[[EngineMessage], None],
        parts: Sequence[PrefillChunk],
        before: "ForwardPass | None" = None,
    ) -> None:
        self._before = before
        #: Failures of this pass, and of its requests in earlier passes; complete at its end.
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
            manager.passes.begin(chunks, layers, stream_before) if moves_bytes else None
        )
        manager.trace.record("begin", "pass", start_ns, manager.trace.now_ns())
        manager.made_step()

    def failed(self, request_id: str) -> bool:
        """Whether a request's loaded KV is unusable.

        That of a request that was released in mid-pass is: a DE that has released it as well may
        reuse the slots of its hits, which this pass still reads.
        """
        before = self._before
        return (
            self._manager.active.is_released(request_id)
            or super().failed(request_id)
            or request_id in self._rejected
            or request_id in self.failures
            or (before is not None and before.failed(request_id))
        )

    def finish(self, wrong: Mapping[str, str]) -> dict[str, str]:
        """Wait for the last transfers, report completed prefills; return failures with reasons.

        A prefill is complete with its last block, or when it has failed: in the pass before, which
        has reported it, or in this one.  A request that was released in mid-pass has failed.
        ``wrong`` are requests with wrong KV found by the engine, and why.
        """
        self._manager.made_step()
        earlier = self._before.failures if self._before is not None else {}
        transfers = self._manager.passes.end(self._stream) if self._stream is not None else {}
        found = {**self._rejected, **transfers, **wrong}
        for part in self._parts:
            request_id = part.transfer.request_id
            if request_id not in self._rejected and self._manager.active.is_released(request_id):
                found[request_id] = RELEASED
            blocks = self._manager.geometry.blocks_for(part.transfer.prompt_tokens)
            failure = earlier.get(request_id, found.get(request_id))
            if failure is not None:
                self.failures[request_id] = failure
            ends = failure is not None or part.chunk.end == blocks
            if ends and request_id not in earlier:
                self._send(self._manager.sent(request_id, failure))
        self._before = None  # its failures of requests of this pass are in ``failures`` now
        return self.failures

    def _chunk(self, part: PrefillChunk) -> PrefillChunk | None:
        try:
            return self._checked_chunk(part)
        except TransportError as error:
            self._rejected[part.transfer.request_id] = str(error)
            return None

    def _checked_chunk(self, part: PrefillChunk) -> PrefillChunk:
        manager, transfer = self._manager, part.transfer
        request_id = transfer.request_id
        if not manager.take_call(transfer):
            raise TransportError(f"request {request_id}: {RELEASED}")
        if part.chunk.first < transfer.shared_blocks:
            raise TransportError(
                f"request {request_id}: block {part.chunk.first} is computed, but its slot at the "
                f"DE, as those of {transfer.shared_blocks} blocks, is shared with other requests"
            )
        own = (run for run in transfer.hits if run.is_at(Role.PREFILL))
        own_slots = [slot for run in own for slot in run.slots]
        # After a short read the transfer carries fewer slots than the request holds.
        if manager.buffer.slots_of(request_id)[: len(own_slots)] != tuple(own_slots):
            manager.counters.add(Counter.STALE_TRANSFERS, 1)
            raise TransportError(f"request {request_id}: its buffer slots have a new owner")
        if not manager.settings.mode.moves_bytes:
            return part.without_peers()
        return part.connected(manager.peers.agents_of)
