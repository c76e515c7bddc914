"""One forward pass of a prefill engine: KV comes and goes layer by layer (§4.1, Fig. 4, 3-7).

The PE's HBM holds ``buffers`` layers of KV.  Layer L uses region L mod ``buffers``.  With two:

    compute   | layer 0 | layer 1 | layer 2 | …
    load      | 1       | 2       | 3       |        into the region layer L-1 has left
    send      |         | 0       | 1       |        out of it before

Two rules keep the regions correct, for any number of buffers:

* a load into a region starts when the send of the layer that used it before is over;
* computation of layer L+1, which writes new KV into its region before anything is waited for,
  starts when the send of layer L+1-``buffers`` is over: ``computed(L)`` waits for that.

On a GPU the engine's thread runs ahead of the computation.  So a send is posted after the *event*
(``engine.device``) at which its layer is computed, also when it has nothing to send, as the next
load into the region depends on it.  A load that the device copies itself is waited for on the
device; one that a transport moves is seen over by the host, which then queues the layer.

Without overlap (mode Basic) all layers have a region of their own: everything is loaded before
the first layer and sent after the last.

With overlap all of this rests on the engine's word for each layer.  A layer computed without
``wait_loaded`` may have read what was in HBM before, and one without ``computed`` would be waited
for without end by the layers that need its region.  A pass that leaves either out has failed with
all of its chunks: from there on nothing is sent, and what was sent belongs to failed requests.

When transfers with an agent stall, the chunks that need it are given up (``pass_transfers``); their
transfers count as over for the two rules above, so that the other chunks go on.  The wait for
computation has no limit here: a device that hangs is seen by the engine itself and by its health.
"""

import functools
import logging
from collections.abc import Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.engine.chunk_transfers import ChunkTransfers
from dualpath.engine.counters import Counters
from dualpath.engine.device import DeviceEvent
from dualpath.engine.layer_work import Stage
from dualpath.engine.movers import Movers
from dualpath.engine.pass_transfers import PassTransfers
from dualpath.engine.shared_loads import SharedLoads
from dualpath.engine.step_transfers import PrefillChunk
from dualpath.engine.threads import Event

log = logging.getLogger(__name__)

#: How often a wait looks whether it goes on; what it takes off an agent's patience each time.
_LOOK_S = 0.25


class LayerSettings(msgspec.Struct, frozen=True):
    """``buffers`` layer regions in HBM; ``overlap`` False loads and sends around the pass."""

    buffers: int
    overlap: bool


class LayerStream:
    """Executes the plan of one forward pass; used by the engine's thread and the pump."""

    def __init__(
        self,
        chunks: Sequence[PrefillChunk],
        settings: LayerSettings,
        geometry: BlockGeometry,
        movers: Movers,
        counters: Counters,
        number: int = 0,
        shared: SharedLoads | None = None,
    ) -> None:
        self._moves = PassTransfers(chunks, geometry, movers, counters)
        self._settings = settings
        self._geometry = geometry
        self._transfers = movers.transfers
        self._device = movers.device
        self._after = movers.after
        self._trace = movers.trace
        self._patience = self._moves.patience
        self._shared = shared
        self._waited: set[int] = set()
        self._computed: set[int] = set()
        self._layer_start_ns = 0
        self._begin_ns = 0
        self._end_ns = 0
        #: What the engine's thread has waited for transfers: the part of them left uncovered.  On
        #: a GPU this thread runs ahead, and its waits contain computation as well.
        self.waited_ns = 0
        self.failures = self._moves.failures
        #: The pass's place in what all ranks of the engine do (``engine.rank_work``).
        self.number = number

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that take part."""
        return tuple(chunk.request_id for chunk in self._moves.chunks)

    @property
    def late(self) -> list[ChunkTransfers]:
        """Chunks that were given up while some of their transfers may still write."""
        return [chunk for chunk in self._moves.chunks if chunk.moves]

    @property
    def pass_ns(self) -> int:
        """How long the forward pass took, waits included; known after ``finish``."""
        return self._end_ns - self._begin_ns

    def begin(self) -> None:
        """Post the loads of the first layers; without overlap wait for all of them."""
        self._begin_ns = self._trace.now_ns()
        self._moves.give_up_stalled()
        ahead = min(self._settings.buffers, self._geometry.layers)
        earlier = self._device.record()  # passes before may still use the blocks
        for layer in range(ahead):
            self._after.call(earlier, functools.partial(self._load, layer))
        if not self._settings.overlap:
            for layer in range(ahead):
                self.wait_loaded(layer)
        self._layer_start_ns = self._trace.now_ns()

    def wait_loaded(self, layer: int) -> None:
        """Let computation queued from now on find the KV before the chunk in ``layer``'s HBM.

        Blocks for what the transport loads; for the device's own copies the device waits.
        """
        self._must_be_computed(layer - self._settings.buffers)
        self._waited.add(layer)
        work = self._moves.loads[layer]
        self._wait(work.queued, f"load of layer {layer}")
        for event in work.events:
            self._device.wait(event)
        if self._shared is not None:
            self._shared.complete(layer)

    def computed(self, layer: int) -> None:
        """The engine has queued all of ``layer``: send its KV, make room for the layers ahead.

        A draft model's layers are computed once for each token it proposes.  The first time is the
        prompt's; what follows writes behind the chunk only, and is sent when it is part of one.
        """
        if layer in self._computed:
            return
        self._computed.add(layer)
        if layer not in self._waited:
            self._unannounced(layer, "without a wait for its stored KV")
        now_ns = self._trace.now_ns()
        self._trace.record(f"compute L{layer}", "compute", self._layer_start_ns, now_ns)
        if self._settings.overlap:
            self._send(layer, self._device.record())
            leaving = layer + 1 - self._settings.buffers
            if leaving >= 0:
                self._must_be_computed(leaving)
                self._wait(self._moves.sends[leaving].over, f"send of layer {leaving}")
        self._layer_start_ns = self._trace.now_ns()

    def finish(self) -> None:
        """Block until everything is in the DE buffer; ``failures`` is complete afterwards."""
        if not self._settings.overlap:
            computed = self._device.record()
            for layer in range(self._geometry.layers):
                self._send(layer, computed)
        for layer in range(self._geometry.layers):
            self._must_be_computed(layer)
            self._wait(self._moves.loads[layer].over, f"load of layer {layer}")
            self._wait(self._moves.sends[layer].over, f"send of layer {layer}")
        self._end_ns = self._trace.now_ns()

    def _must_be_computed(self, layer: int) -> None:
        """Fail the pass if the engine has kept silent about a layer (< 0: none), and go on."""
        if self._settings.overlap and layer >= 0 and layer not in self._computed:
            self._unannounced(layer, "without a word that its KV is there")
            self._waited.add(layer)
            self.computed(layer)

    def _unannounced(self, layer: int, how: str) -> None:
        reason = (
            f"{self._transfers.layer_name(layer)} is computed {how}, so that its KV cannot be "
            "relied on: its attention does not call the connector; serve another model, or this "
            "one without dualpath"
        )
        if not self.failures:
            log.error("%s", reason)
        self._moves.give_up_all(reason)

    def _load(self, layer: int, device_error: str | None = None) -> None:
        resident = self._settings.buffers >= self._geometry.layers
        self._moves.load(layer, device_error, resident=resident)

    def _send(self, layer: int, computed: DeviceEvent) -> None:
        following = layer + self._settings.buffers

        def load_next() -> None:
            if self._settings.overlap and following < self._geometry.layers:
                self._load(following)

        self._after.call(computed, self._moves.sending(layer, load_next))

    def _wait(self, stage: Stage, what: str) -> None:
        if stage.reached.is_set():
            return
        start_ns = self._trace.now_ns()
        while not self._block(stage.reached):
            for agent in self._patience.waited(stage.agents(), _LOOK_S):
                self._moves.stalled(agent, what)
        self.waited_ns += self._trace.now_ns() - start_ns

    def _block(self, event: Event) -> bool:
        return event.wait(_LOOK_S)
