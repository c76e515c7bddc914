"""One forward pass of a prefill engine: KV comes and goes layer by layer (§4.1, Fig. 4, 3-7).

The PE's HBM holds ``buffers`` layers of KV.  Layer L uses region L mod ``buffers``.  With two:

    compute   | layer 0 | layer 1 | layer 2 | …
    load      | 1       | 2       | 3       |        into the region layer L-1 has left
    send      |         | 0       | 1       |        out of it before

Two rules keep the regions correct, for any number of buffers:

* a load into a region starts when the send of the layer that used it before is over;
* computation of layer L+1, which writes new KV into its region before anything is waited for,
  starts when the send of layer L+1-``buffers`` is over: ``computed(L)`` waits for that.

Without overlap (mode Basic) all layers have a region of their own: everything is loaded before
the first layer and sent after the last.
"""

import functools
import threading
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.control import HandOver
from dualpath.core.errors import DualPathError, TransportError
from dualpath.datapath.plan import (
    BlockRun,
    Place,
    PromptLayout,
    SidedRun,
    Step,
    load_steps,
    send_steps,
)
from dualpath.engine.buffer import BUFFER_REGION, BlockBuffer
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.pump import Completion, TransferPump
from dualpath.engine.trace import TraceRecorder
from dualpath.transport.contract import Direction, PieceIndices, Transfer, Transport

#: Longest a forward pass waits for one layer's transfers before its requests are failed.
TRANSFER_DEADLINE_S = 30.0

_COUNTER_OF = {
    Place.PE_BUFFER: Counter.H2D_BYTES,
    Place.DE_BUFFER: Counter.DE_TO_PE_BYTES,
    Place.PE_HBM: Counter.PE_TO_DE_BYTES,
}


class PrefillChunk(msgspec.Struct, frozen=True):
    """One request's part in a forward pass.

    ``hbm_blocks`` are the engine's block ids for prompt blocks ``0 … chunk.end - 1``;
    ``decode_agent`` is the transport agent of the DE.
    """

    hand_over: HandOver
    chunk: BlockRun
    hbm_blocks: tuple[int, ...]
    decode_agent: str

    def layout(self, geometry: BlockGeometry) -> PromptLayout:
        """Return the plan's view of the prompt."""
        hits = tuple(
            SidedRun(side=run.side, blocks=BlockRun(run.first_block, len(run.slots)))
            for run in self.hand_over.hits
        )
        return PromptLayout(
            geometry=geometry, prompt_tokens=self.hand_over.prompt_tokens, hits=hits
        )


class LayerSettings(msgspec.Struct, frozen=True):
    """``buffers`` layer regions in HBM; ``overlap`` False loads and sends around the pass."""

    buffers: int
    overlap: bool


class _LayerWork:
    """Transfers of one layer in one direction; over when all of them are."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.start_ns = 0
        self.left = 0


class LayerStream:
    """Executes the plan of one forward pass; used by the engine's thread and the pump."""

    def __init__(
        self,
        chunks: Sequence[PrefillChunk],
        settings: LayerSettings,
        geometry: BlockGeometry,
        buffer: BlockBuffer,
        transport: Transport,
        pump: TransferPump,
        counters: Counters,
        trace: TraceRecorder,
        agent: str,
        hbm_region: Sequence[str],
    ) -> None:
        self._chunks = chunks
        self._layouts = [chunk.layout(geometry) for chunk in chunks]
        self._settings = settings
        self._geometry = geometry
        self._buffer = buffer
        self._transport = transport
        self._pump = pump
        self._counters = counters
        self._trace = trace
        self._agent = agent
        self._hbm_region = hbm_region
        self._lock = threading.Lock()
        self._loads = [_LayerWork() for _ in range(geometry.layers)]
        self._sends = [_LayerWork() for _ in range(geometry.layers)]
        self._layer_start_ns = 0
        self.failures: dict[str, str] = {}
        #: False once a transfer outlived its deadline: slots it may touch must stay untouched.
        self.settled = True

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that take part."""
        return tuple(chunk.hand_over.request_id for chunk in self._chunks)

    def begin(self) -> None:
        """Post the loads of the first layers; without overlap wait for all of them."""
        ahead = min(self._settings.buffers, self._geometry.layers)
        for layer in range(ahead):
            self._load(layer)
        if not self._settings.overlap:
            for layer in range(ahead):
                self._wait(self._loads[layer], f"load of layer {layer}")
        self._layer_start_ns = self._trace.now_ns()

    def wait_loaded(self, layer: int) -> None:
        """Block until the KV before the chunk is in HBM for ``layer``."""
        self._wait(self._loads[layer], f"load of layer {layer}")

    def computed(self, layer: int) -> None:
        """The engine has computed ``layer``: send its KV and make room for the layers ahead."""
        now_ns = self._trace.now_ns()
        self._trace.record(f"compute L{layer}", "compute", self._layer_start_ns, now_ns)
        if self._settings.overlap:
            self._send(layer)
            leaving = layer + 1 - self._settings.buffers
            if leaving >= 0:
                self._wait(self._sends[leaving], f"send of layer {leaving}")
        self._layer_start_ns = self._trace.now_ns()

    def finish(self) -> None:
        """Block until everything is in the DE buffer; ``failures`` is complete afterwards."""
        for layer in range(self._geometry.layers):
            if not self._settings.overlap:
                self._send(layer)
        for layer in range(self._geometry.layers):
            self._wait(self._loads[layer], f"load of layer {layer}")
            self._wait(self._sends[layer], f"send of layer {layer}")

    def _load(self, layer: int) -> None:
        resident = self._settings.buffers >= self._geometry.layers
        steps = [
            (chunk, step)
            for chunk, layout in zip(self._chunks, self._layouts, strict=True)
            for step in load_steps(layout, layer, chunk.chunk, resident=resident)
        ]
        self._pump.call(lambda: self._post(self._loads[layer], steps, layer, "load", lambda: None))

    def _send(self, layer: int) -> None:
        steps = [
            (chunk, step)
            for chunk, layout in zip(self._chunks, self._layouts, strict=True)
            for step in send_steps(layout, layer, chunk.chunk)
        ]
        following = layer + self._settings.buffers

        def load_next() -> None:
            if self._settings.overlap and following < self._geometry.layers:
                self._load(following)

        self._pump.call(lambda: self._post(self._sends[layer], steps, layer, "send", load_next))

    def _post(
        self,
        work: _LayerWork,
        steps: Sequence[tuple[PrefillChunk, Step]],
        layer: int,
        track: str,
        then: Callable[[], None],
    ) -> None:
        """Post one transfer per (request, step); ``then`` runs when the last of them is over.

        Runs on the pump's thread, so that a transfer that copies while it is posted does so beside
        the computation.
        """
        work.start_ns = self._trace.now_ns()
        work.left = len(steps) + 1

        def one_over(chunk: PrefillChunk | None, completion: Completion | None) -> None:
            if chunk is not None and completion is not None and completion.error is not None:
                self._fail(chunk, completion.error)
            with self._lock:
                work.left -= 1
                last = work.left == 0
            if last:
                self._trace.record(f"{track} L{layer}", track, work.start_ns, self._trace.now_ns())
                try:
                    then()
                finally:
                    work.over.set()

        for chunk, step in steps:
            transfer = self._post_step(chunk, step, layer)
            if transfer is None:
                one_over(chunk, None)
            else:
                self._pump.watch(transfer, functools.partial(one_over, chunk))
        one_over(None, None)

    def _post_step(self, chunk: PrefillChunk, step: Step, layer: int) -> Transfer | None:
        """Post a step of the plan; None if that fails, the request is marked then."""
        try:
            transfer = self._transport.post(
                *self._operands(chunk, step, layer), traffic_class=step.traffic_class.value
            )
        except DualPathError as error:
            self._fail(chunk, str(error))
            return None
        self._counters.add(_COUNTER_OF[step.source], step.bytes)
        if layer == 0 and step.destination is Place.PE_HBM:
            self._counters.add(Counter.LOADED_BLOCKS, step.blocks.count)
        return transfer

    def _operands(
        self, chunk: PrefillChunk, step: Step, layer: int
    ) -> tuple[Direction, str, PieceIndices, str, str, PieceIndices]:
        """Translate a step into the arguments of ``Transport.post``.

        The PE starts all of them: it writes its own buffer to its HBM, reads the DE's buffer into
        its HBM and writes its HBM to the DE's buffer.
        """
        hbm = self._hbm_region[layer]
        hbm_blocks = chunk.hbm_blocks[step.blocks.first : step.blocks.end]
        if step.source is Place.PE_BUFFER:
            local = self._buffer.pieces(self._hit_slots(chunk, step.blocks), layer)
            return Direction.WRITE, BUFFER_REGION, local, self._agent, hbm, hbm_blocks
        de_slots = chunk.hand_over.de_slots[step.blocks.first : step.blocks.end]
        remote = self._buffer.pieces(de_slots, layer)
        direction = Direction.READ if step.source is Place.DE_BUFFER else Direction.WRITE
        return direction, hbm, hbm_blocks, chunk.decode_agent, BUFFER_REGION, remote

    def _hit_slots(self, chunk: PrefillChunk, blocks: BlockRun) -> tuple[int, ...]:
        for run in chunk.hand_over.hits:
            if run.first_block == blocks.first and len(run.slots) == blocks.count:
                return run.slots
        raise TransportError(
            f"request {chunk.hand_over.request_id}: hit blocks {blocks.first}..{blocks.end} "
            "are in no buffer; the plan and the hand-over disagree"
        )

    def _wait(self, work: _LayerWork, what: str) -> None:
        if not work.over.wait(TRANSFER_DEADLINE_S):
            self.settled = False
            for chunk in self._chunks:
                self._fail(chunk, f"{what} is not over after {TRANSFER_DEADLINE_S} s")

    def _fail(self, chunk: PrefillChunk, reason: str) -> None:
        with self._lock:
            first = chunk.hand_over.request_id not in self.failures
            self.failures.setdefault(chunk.hand_over.request_id, reason)
        if first:
            self._counters.add(Counter.TRANSFER_FAILURES, 1)
