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
"""

import functools
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import DualPathError
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.device import Device, DeviceEvent
from dualpath.engine.event_waiter import EventWaiter
from dualpath.engine.layer_work import LayerWork
from dualpath.engine.pump import Completion, TransferPump
from dualpath.engine.step_transfers import PrefillChunk, StepTransfers
from dualpath.engine.threads import OS_THREADS, Event, Threads
from dualpath.engine.trace import TraceRecorder
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step, load_steps, send_steps

#: Longest a forward pass waits for one layer's transfers before its requests are failed.
TRANSFER_DEADLINE_S = 30.0


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
        transfers: StepTransfers,
        pump: TransferPump,
        device: Device,
        after: EventWaiter,
        counters: Counters,
        trace: TraceRecorder,
        threads: Threads = OS_THREADS,
    ) -> None:
        self._chunks = chunks
        self._layouts = [chunk.layout(geometry) for chunk in chunks]
        self._settings = settings
        self._geometry = geometry
        self._transfers = transfers
        self._pump = pump
        self._device = device
        self._after = after
        self._counters = counters
        self._trace = trace
        self._lock = threads.lock()
        self._loads = [LayerWork(threads) for _ in range(geometry.layers)]
        self._sends = [LayerWork(threads) for _ in range(geometry.layers)]
        self._layer_start_ns = 0
        self._begin_ns = 0
        self._end_ns = 0
        #: What the engine's thread has waited for transfers: the part of them left uncovered.  On
        #: a GPU this thread runs ahead, and its waits contain computation as well.
        self.waited_ns = 0
        self.failures: dict[str, str] = {}
        #: False once a transfer outlived its deadline: slots it may touch must stay untouched.
        self.settled = True

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that take part."""
        return tuple(chunk.prefill_transfer.request_id for chunk in self._chunks)

    @property
    def pass_ns(self) -> int:
        """How long the forward pass took, waits included; known after ``finish``."""
        return self._end_ns - self._begin_ns

    def begin(self) -> None:
        """Post the loads of the first layers; without overlap wait for all of them."""
        self._begin_ns = self._trace.now_ns()
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
        work = self._loads[layer]
        self._wait(work.queued, f"load of layer {layer}")
        for event in work.events:
            self._device.wait(event)

    def computed(self, layer: int) -> None:
        """The engine has queued all of ``layer``: send its KV, make room for the layers ahead."""
        now_ns = self._trace.now_ns()
        self._trace.record(f"compute L{layer}", "compute", self._layer_start_ns, now_ns)
        if self._settings.overlap:
            self._send(layer, self._device.record())
            leaving = layer + 1 - self._settings.buffers
            if leaving >= 0:
                self._wait(self._sends[leaving].over, f"send of layer {leaving}")
        self._layer_start_ns = self._trace.now_ns()

    def finish(self) -> None:
        """Block until everything is in the DE buffer; ``failures`` is complete afterwards."""
        if not self._settings.overlap:
            computed = self._device.record()
            for layer in range(self._geometry.layers):
                self._send(layer, computed)
        for layer in range(self._geometry.layers):
            self._wait(self._loads[layer].over, f"load of layer {layer}")
            self._wait(self._sends[layer].over, f"send of layer {layer}")
        self._end_ns = self._trace.now_ns()

    def _load(self, layer: int, device_error: str | None = None) -> None:
        resident = self._settings.buffers >= self._geometry.layers
        steps = [
            (chunk, step)
            for chunk, layout in zip(self._chunks, self._layouts, strict=True)
            for step in load_steps(layout, layer, chunk.chunk, resident=resident)
        ]
        self._hand_to_pump(device_error, self._loads[layer], steps, lambda: None)

    def _send(self, layer: int, computed: DeviceEvent) -> None:
        steps = [
            (chunk, step)
            for chunk, layout in zip(self._chunks, self._layouts, strict=True)
            for step in send_steps(layout, layer, chunk.chunk)
        ]
        following = layer + self._settings.buffers

        def load_next() -> None:
            if self._settings.overlap and following < self._geometry.layers:
                self._load(following)

        def send(device_error: str | None) -> None:
            self._hand_to_pump(device_error, self._sends[layer], steps, load_next)

        self._after.call(computed, send)

    def _hand_to_pump(
        self,
        device_error: str | None,
        work: LayerWork,
        steps: Sequence[tuple[PrefillChunk, Step]],
        then: Callable[[], None],
    ) -> None:
        """Let the pump post ``steps``; none of them if the device failed."""
        if device_error is not None:
            for chunk in self._chunks:
                self._fail(chunk, device_error)
            steps = ()
        self._pump.call(lambda: self._post(work, steps, then))

    def _post(
        self,
        work: LayerWork,
        steps: Sequence[tuple[PrefillChunk, Step]],
        then: Callable[[], None],
    ) -> None:
        """Post one transfer per (request, step); ``then`` runs when the last of them is over.

        Runs on the pump's thread, so that a transfer that copies while it is posted does so beside
        the computation.
        """
        work.begin(len(steps) + 1)
        executed: list[tuple[str, Executed]] = []

        def part_over(by_device: bool) -> None:
            if work.part_over(by_device=by_device):
                self._trace.moved(executed)
                try:
                    then()
                finally:
                    work.over.set()

        def ended(
            chunk: PrefillChunk, step: Step, start_ns: int, by_device: bool, completion: Completion
        ) -> None:
            if completion.error is not None:
                self._fail(chunk, completion.error)
            else:
                done = Executed(step, start_ns, self._trace.now_ns())
                executed.append((chunk.prefill_transfer.request_id, done))
            part_over(by_device)

        for chunk, step in steps:
            start_ns = self._trace.now_ns()
            try:
                transfer, event = self._transfers.post(step, chunk.hbm_blocks, chunk.decode_agent)
            except DualPathError as error:
                self._fail(chunk, str(error))
                part_over(False)
                continue
            if event is not None:
                work.copy_queued(event)
            by_device = event is not None
            self._pump.watch(transfer, functools.partial(ended, chunk, step, start_ns, by_device))
        part_over(False)

    def _wait(self, event: Event, what: str) -> None:
        if event.is_set():
            return
        start_ns = self._trace.now_ns()
        over = self._block(event)
        self.waited_ns += self._trace.now_ns() - start_ns
        if not over:
            self.settled = False
            for chunk in self._chunks:
                self._fail(chunk, f"{what} is not over after {TRANSFER_DEADLINE_S} s")

    def _block(self, event: Event) -> bool:
        return event.wait(TRANSFER_DEADLINE_S)

    def _fail(self, chunk: PrefillChunk, reason: str) -> None:
        with self._lock:
            first = chunk.prefill_transfer.request_id not in self.failures
            self.failures.setdefault(chunk.prefill_transfer.request_id, reason)
        if first:
            self._counters.add(Counter.TRANSFER_FAILURES, 1)
