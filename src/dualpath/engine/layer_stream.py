"""One forward pass of a prefill engine: KV comes and goes layer by layer (§4.1, Fig. 4, 3-7).

The PE's HBM holds ``buffers`` layers of KV.  Layer L uses region L mod ``buffers``.  With two:

    compute   | layer 0 | layer 1 | layer 2 | …
    load      | 1       | 2       | 3       |        into the region layer L-1 has left
    send      |         | 0       | 1       |        out of it before

Two rules keep the regions correct, for any number of buffers:

* a load into a region starts when the send of the layer that used it before is over;
* computation of layer L+1, which writes new KV into its region before anything is waited for,
  starts when the send of layer L+1-``buffers`` is over: ``computed(L)`` waits for that.

Both hold across passes, so that nothing waits between two of them: a pass that begins while the one
``before`` it is still computed loads its first layers when the last users of their regions have
been sent, and ``enter``, then ``computed``, wait for those before its own layers are computed.  The
last sends of a pass end behind the first layers of the next.  No rule asks which blocks a pass
has: a request may be in both, with the chunk that follows, whose reloads find in the DE buffer what
the first has sent, as a region's last user is sent after all others.

On a GPU the engine's thread runs ahead of the computation.  So a send is posted after the *event*
(``engine.device``) at which its layer is computed, also when it has nothing to send, as the next
load into the region depends on it.  A load that the device copies itself is waited for on the
device; one that a transport moves is seen over by the host, which then queues the layer.

Without overlap (mode Basic) all layers have a region of their own: everything is loaded before
the first layer and sent after the last.

With overlap all of this rests on the engine's word for each layer.  A layer computed without
``wait_loaded`` may have read what was in HBM before, and one without ``computed`` would be waited
for without end by the layers that need its region.  A pass that leaves either out has failed with
all of its chunks: from there on nothing is sent, and what was sent belongs to failed requests.  The
next pass of the same model would fail alike, so the engine is broken (``engine.health``): unless it
has waited for that layer in another pass, as vLLM leaves draft layers out where a prompt comes near
the end of their context.

When transfers with an agent stall, the chunks that need it are given up (``pass_transfers``); their
transfers count as over for the two rules above, so that the other chunks go on.  The wait for
computation has no limit here: a device that hangs is seen by the engine itself and by its health.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.engine.chunk_transfers import ChunkTransfers
from dualpath.engine.counters import Counters
from dualpath.engine.device import DeviceEvent
from dualpath.engine.layer_work import Stage
from dualpath.engine.movers import Movers
from dualpath.engine.pass_transfers import PassTransfers
from dualpath.engine.region_handover import RegionHandover
from dualpath.engine.shared_loads import SharedLoads
from dualpath.engine.step_transfers import PrefillChunk
from dualpath.engine.threads import Event

log = logging.getLogger(__name__)

#: Where a trace shows what a pass waited for: between layers, and in ``finish``.
WAIT_TRACK, FINISH_TRACK = "wait", "finish"
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
        before: "LayerStream | None" = None,
    ) -> None:
        self._moves = PassTransfers(chunks, geometry, movers, counters)
        self._settings = settings
        self._geometry = geometry
        self._transfers = movers.transfers
        self._device = movers.device
        self._after = movers.after
        self._trace = movers.trace
        self._patience = self._moves.patience
        self._health = movers.health
        self._announced = movers.announced
        self._shared = shared
        self._before = before
        self._regions = min(settings.buffers, geometry.layers)
        self._handover = RegionHandover(movers.threads)
        self._closing = movers.threads.lock()
        self._entered = False
        self._finishing = False
        self._finished = False
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
        """Post the loads of the first layers, each when its region is free.

        Behind a pass ``before`` that may still be computed, ``enter`` must follow that pass.
        Without one the computation begins now; without overlap when all loads are over.
        """
        self._moves.give_up_stalled()
        if self._before is not None:
            for layer in range(self._regions):
                self._before.when_left(layer, functools.partial(self._load, layer))
            return
        self._begin_ns = self._trace.now_ns()
        earlier = self._device.record()  # passes before may still use the blocks
        for layer in range(self._regions):
            self._after.call(earlier, functools.partial(self._load, layer))
        self.enter()

    def enter(self) -> None:
        """The engine is through with the pass before: return when it may write layer 0's KV."""
        if self._entered:
            return
        self._entered = True
        self._begin_ns = self._begin_ns or self._trace.now_ns()
        self._make_room(0)
        if not self._settings.overlap:
            for layer in range(self._regions):
                self.wait_loaded(layer)
        self._layer_start_ns = self._trace.now_ns()

    def when_left(self, region: int, then: Callable[[], None]) -> None:
        """Call ``then`` when this pass has left a region for good, on whatever thread sees it."""
        self._handover.when_left(region, then)

    def leave(self, region: int) -> str:
        """Return when the last user of a region has been sent, with what was waited for.

        For the pass that follows; the engine has computed all of this one.
        """
        self._all_computed()
        last = self._geometry.layers - 1
        last -= (last - region) % self._regions
        what = f"send of layer {last}"
        self._until(self._moves.sends[last].over, what, follows=True)
        return what

    def wait_loaded(self, layer: int) -> None:
        """Let computation queued from now on find the KV before the chunk in ``layer``'s HBM.

        Blocks for what the transport loads; for the device's own copies the device waits.
        """
        self.enter()
        self._must_be_computed(layer - self._regions)
        self._waited.add(layer)
        self._announced.add(layer)
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
            if layer + 1 < self._geometry.layers:
                self._make_room(layer + 1)
        self._layer_start_ns = self._trace.now_ns()

    def finish(self) -> None:
        """Block until everything is in the DE buffer; ``failures`` is complete afterwards.

        The pass before ends first: a request that has failed there has failed in this one.
        """
        if self._finished:
            return
        if self._before is not None:
            self._before.finish()
        self._finishing = True
        if not self._settings.overlap:
            computed = self._device.record()
            for layer in range(self._geometry.layers):
                self._send(layer, computed)
        self._all_computed()
        for layer in range(self._geometry.layers):
            self._wait(self._moves.loads[layer].over, f"load of layer {layer}")
            self._wait(self._moves.sends[layer].over, f"send of layer {layer}")
        self._end_ns = self._trace.now_ns()
        before, self._before = self._before, None
        earlier = {} if before is None else before.failures
        for request_id in earlier.keys() & set(self.request_ids):
            self.failures.setdefault(request_id, earlier[request_id])
        self._finished = True

    def _all_computed(self) -> None:
        """The engine says no more of this pass; whoever waits for it first looks what is missing.

        That may be the pass that follows or the thread that ends this one.
        """
        if len(self._computed) == self._geometry.layers:
            return
        with self._closing:
            for layer in range(self._geometry.layers):
                self._must_be_computed(layer)

    def _make_room(self, layer: int) -> None:
        """Return when the one that used ``layer``'s region before has left it."""
        leaving = layer - self._regions
        if leaving >= 0:
            self._must_be_computed(leaving)
            self._wait(self._moves.sends[leaving].over, f"send of layer {leaving}")
        elif self._before is not None:
            start_ns = self._trace.now_ns()
            self._note_wait(self._before.leave(layer), start_ns)

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
        if layer not in self._announced:
            self._health.fail(reason)

    def _load(self, layer: int, device_error: str | None = None) -> None:
        resident = self._settings.buffers >= self._geometry.layers
        self._moves.load(layer, device_error, resident=resident)

    def _send(self, layer: int, computed: DeviceEvent) -> None:
        following = layer + self._regions

        def hand_on() -> None:
            if following < self._geometry.layers:
                self._load(following)
            else:
                self._handover.left(layer % self._regions)

        self._after.call(computed, self._moves.sending(layer, hand_on))

    def _wait(self, stage: Stage, what: str) -> None:
        if not stage.reached.is_set():
            start_ns = self._trace.now_ns()
            self._until(stage, what)
            self._note_wait(what, start_ns)

    def _note_wait(self, what: str, start_ns: int) -> None:
        end_ns = self._trace.now_ns()
        self.waited_ns += end_ns - start_ns
        track = FINISH_TRACK if self._finishing else WAIT_TRACK
        self._trace.record(what, track, start_ns, end_ns)

    def _until(self, stage: Stage, what: str, *, follows: bool = False) -> None:
        """Wait, and give up who stalls.

        The pass that ``follows`` leaves that to the thread that ends this one, if it does.
        """
        while not stage.reached.is_set() and not self._block(stage.reached):
            if not (follows and self._finishing):
                for agent in self._patience.waited(stage.agents(), _LOOK_S):
                    self._moves.stalled(agent, what)

    def _block(self, event: Event) -> bool:
        return event.wait(_LOOK_S)
