"""One forward pass of a prefill engine: KV is loaded and sent layer by layer (§4.1, Fig. 4, 3-7).

The PE's HBM has regions for ``buffers`` layers of KV.  Layer L uses region L mod ``buffers``.  With
two:

    compute   | layer 0 | layer 1 | layer 2 | …
    load      | 1       | 2       | 3       |        into the region of layer L-1
    send      |         | 0       | 1       |        out of that region, before the load

Two rules keep the regions correct, for any number of buffers:

* a load into a region starts when the send of the region's previous layer is over;
* computation of layer L+1, which writes new KV into its region without any further wait, starts
  when the send of layer L+1-``buffers`` is over: ``computed(L)`` waits for it.

Both rules hold across passes, so that consecutive passes overlap: a pass that begins while the pass
``before`` it is still being computed loads its first layers when the last layers in their regions
have been sent, and ``enter``, then ``computed``, wait for these sends before its own layers are
computed.  The last sends of a pass overlap with the first layers of the next pass.  The rules do
not depend on the blocks of a pass: a request may have consecutive chunks in both passes; the
reloads of the second chunk find the first one complete in the DE buffer, as the last layer of a
region is sent after all others.

On a GPU the engine's thread runs ahead of the computation.  So a send is posted after the *event*
(``engine.device``) at which its layer is computed, also if there is nothing to send, as the next
load into the region depends on it.  For a load by the device's copier the device waits; the end of
a load by a transport is observed by the host, which then queues the layer.

Without overlap (mode Basic) all layers have a region of their own: everything is loaded before
the first layer and sent after the last.

With overlap all of this depends on the engine's calls for each layer.  A layer computed without
``wait_loaded`` may have read old contents of HBM, and layers that need the region of a layer
without ``computed`` would wait forever.  A pass without one of these calls fails with all of its
chunks: nothing more is sent, and everything sent belongs to failed requests.  The next pass of the
same model would fail likewise, so the engine is broken (``engine.health``), unless it has waited
for that layer in another pass: vLLM skips draft layers when a prompt is near the end of their
context.

When transfers with an agent stall, the chunks that need it are abandoned (``pass_transfers``);
their transfers count as over for the two rules above, so that the other chunks go on.  The wait for
computation has no limit here: a device that hangs is detected by the engine and by its health.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.engine.counters import Counters
from dualpath.engine.passes.device import DeviceEvent
from dualpath.engine.passes.pass_transfers import ChunkTransfers, PassTransfers, Stage
from dualpath.engine.passes.pump import Movers
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.ranks.group import SharedLoads
from dualpath.engine.threads import OS_THREADS, Event, Threads

# --------------------------------------------------------------------------------- region handover
# Handover of the layer regions of HBM from one forward pass to the next.


class RegionHandover:
    """The regions that a pass no longer uses; called by the engine's thread and the pump.

    The pass calls ``left`` once for each region; the following pass waits for each region once.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._lock = threads.lock()
        self._left: set[int] = set()
        self._waiting: dict[int, Callable[[], None]] = {}

    def left(self, region: int) -> None:
        """The last layer of a region has been sent."""
        with self._lock:
            assert region not in self._left, f"region {region} is left twice"
            self._left.add(region)
            then = self._waiting.pop(region, None)
        if then is not None:
            then()

    def has_left(self, region: int) -> bool:
        """Whether a region is left; an atomic read without the lock."""
        return region in self._left

    def when_left(self, region: int, then: Callable[[], None]) -> None:
        """Call ``then`` once the region is left: now, or on the thread that calls ``left``."""
        with self._lock:
            if region not in self._left:
                self._waiting[region] = then
                return
        then()


log = logging.getLogger(__name__)

#: Tracks of a trace for the waits of a pass: between layers, and in ``finish``.
WAIT_TRACK, FINISH_TRACK = "wait", "finish"
#: Polling interval of a wait, which is also charged to the agents' wait budgets.
_POLL_S = 0.25


class LayerSettings(msgspec.Struct, frozen=True):
    """``buffers`` layer regions in HBM; ``overlap`` False: load before and send after the pass."""

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
        self._budget = self._moves.budget
        self._health = movers.health
        self._announced = movers.announced
        self._shared = shared
        self._before = before
        self._regions = min(settings.buffers, geometry.layers)
        self.handover = RegionHandover(movers.health.threads)
        self._closing = movers.health.threads.lock()
        self._entered = False
        self._finishing = False
        self._finished = False
        self._waited: set[int] = set()
        self._computed: set[int] = set()
        self._layer_start_ns = 0
        self._begin_ns = 0
        self._end_ns = 0
        #: Time for which the engine's thread has waited for transfers that did not overlap with
        #: computation.  On a GPU this thread runs ahead, and its waits include computation.
        self.waited_ns = 0
        self.failures = self._moves.failures
        #: The pass's number as a work item of all ranks of the engine (``engine.rank_work``).
        self.number = number

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that take part."""
        return tuple(chunk.request_id for chunk in self._moves.chunks)

    @property
    def late(self) -> list[ChunkTransfers]:
        """Abandoned chunks with transfers that may still write."""
        return [chunk for chunk in self._moves.chunks if chunk.moves]

    @property
    def pass_ns(self) -> int:
        """Duration of the forward pass, waits included; known after ``finish``."""
        return self._end_ns - self._begin_ns

    def begin(self) -> None:
        """Post the loads of the first layers, each when its region is free.

        With a pass ``before`` that may still be computed, ``enter`` must be called after that pass.
        Without one the computation may begin now; without overlap when all loads are over.
        """
        self._moves.give_up_stalled()
        if self._before is not None:
            for layer in range(self._regions):
                self._before.handover.when_left(layer, functools.partial(self._load, layer))
            return
        self._begin_ns = self._trace.now_ns()
        earlier = self._device.record()  # earlier passes may still use the blocks
        for layer in range(self._regions):
            self._after.call(earlier, functools.partial(self._load, layer))
        self.enter()

    def enter(self) -> None:
        """The pass before is computed: return when the engine may write layer 0's KV."""
        if self._entered:
            return
        self._entered = True
        self._begin_ns = self._begin_ns or self._trace.now_ns()
        self._make_room(0)
        if not self._settings.overlap:
            for layer in range(self._regions):
                self.wait_loaded(layer)
        self._layer_start_ns = self._trace.now_ns()

    def leave(self, region: int) -> str:
        """Return once the last layer of a region has been sent, with a description of the wait.

        Called by the following pass, when the engine has computed all of this one.
        """
        self._all_computed()
        last = self._geometry.layers - 1
        last -= (last - region) % self._regions
        what = f"send of layer {last}"
        self._until(self._moves.sends[last].over, what, follows=True)
        return what

    def wait_loaded(self, layer: int) -> None:
        """Make the KV before the chunks available in ``layer``'s HBM to computation queued next.

        Blocks for loads by the transport; for copies by the device, the device waits.
        """
        self.enter()
        self._must_be_computed(layer - self._regions)
        # ``computed`` of the layer before has waited, and new KV may have been written since.
        previous = layer - self._regions
        if self._settings.overlap and previous >= 0 and layer - 1 in self._computed:
            assert self._moves.sends[previous].over.complete, (
                f"layer {layer} is computed before layer {previous} has left its region"
            )
        self._waited.add(layer)
        self._announced.add(layer)
        work = self._moves.loads[layer]
        self._wait(work.queued, f"load of layer {layer}")
        for event in work.events:
            self._device.wait(event)
        if self._shared is not None:
            self._shared.complete(layer)

    def computed(self, layer: int) -> None:
        """The engine has queued all of ``layer``: send its KV, wait for the next layer's region.

        A draft model's layers are computed once for each token it proposes.  The first computation
        is the prompt's; later ones write only after the chunk, and their KV is sent with the chunk
        that contains it.
        """
        if layer in self._computed:
            return
        self._computed.add(layer)
        self._health.steps += 1
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

        The pass before is finished first: its failed requests have failed in this pass, too.
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
        """The engine makes no more calls for this pass: find the layers without ``computed``.

        Done once, by the pass that follows or by the thread that ends this one.
        """
        if len(self._computed) == self._geometry.layers:
            return
        with self._closing:
            for layer in range(self._geometry.layers):
                self._must_be_computed(layer)

    def _make_room(self, layer: int) -> None:
        """Return when the previous layer in ``layer``'s region has been sent."""
        leaving = layer - self._regions
        if leaving >= 0:
            self._must_be_computed(leaving)
            self._wait(self._moves.sends[leaving].over, f"send of layer {leaving}")
        elif self._before is not None:
            start_ns = self._trace.now_ns()
            self._note_wait(self._before.leave(layer), start_ns)

    def _must_be_computed(self, layer: int) -> None:
        """Fail the pass if the engine has not called ``computed`` for a layer (< 0: none)."""
        if self._settings.overlap and layer >= 0 and layer not in self._computed:
            self._unannounced(layer, "without notice that its KV is complete")
            self._waited.add(layer)
            self.computed(layer)

    def _unannounced(self, layer: int, how: str) -> None:
        reason = (
            f"{self._transfers.layer_name(layer)} is computed {how}, so that its KV is unusable: "
            "its attention does not call the connector; serve another model, or this one without "
            "dualpath"
        )
        if not self.failures:
            log.error("%s", reason)
        self._moves.give_up_all(reason)
        if layer not in self._announced:
            self._health.fail(reason)

    def _load(self, layer: int, device_error: str | None = None) -> None:
        previous, before = layer - self._regions, self._before
        assert previous < 0 or self._moves.sends[previous].over.complete, (
            f"layer {layer} is loaded before layer {previous} has left its region"
        )
        assert previous >= 0 or before is None or before.handover.has_left(layer), (
            f"layer {layer} is loaded before the pass before has left its region"
        )
        resident = self._settings.buffers >= self._geometry.layers
        self._moves.load(layer, device_error, resident=resident)

    def _send(self, layer: int, computed: DeviceEvent) -> None:
        following = layer + self._regions

        def sent() -> None:
            if following < self._geometry.layers:
                self._load(following)
            else:
                self.handover.left(layer % self._regions)

        self._after.call(computed, self._moves.sending(layer, sent))

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
        """Wait for a stage, and abandon the chunks of agents that stall.

        ``follows``: the following pass waits; it leaves this to the thread in ``finish``, if any.
        """
        while not stage.reached.is_set() and not self._block(stage.reached):
            self._health.steps += 1  # The core does not hang: this wait has a limit.
            if not (follows and self._finishing):
                for agent in self._budget.waited(stage.agents(), _POLL_S):
                    self._moves.stalled(agent, what)

    def _block(self, event: Event) -> bool:
        return event.wait(_POLL_S)
