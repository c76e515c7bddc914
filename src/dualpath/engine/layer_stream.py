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

When transfers with an agent stall (``engine.stalls``) the chunks that need it are given up, once:
no more of their steps are posted, and nobody waits for those that are under way.  They count as
over for the two rules above, so that the other chunks go on; what a late byte may still hit is
theirs alone (``engine.chunk_transfers``).  A chunk of an agent that has stalled before is given up
as the pass begins, but for a trial now and then.  The wait for computation has no limit here: a
device that hangs is seen by the engine itself and by its health.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import DualPathError
from dualpath.engine.chunk_transfers import ChunkTransfers
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.device import DeviceEvent
from dualpath.engine.layer_work import POSTING, LayerWork, Share, Stage
from dualpath.engine.movers import Movers
from dualpath.engine.pump import Completion
from dualpath.engine.shared_loads import SharedLoads
from dualpath.engine.step_transfers import PrefillChunk
from dualpath.engine.threads import Event
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step, load_steps, send_steps

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
        threads = movers.threads
        self._chunks = [ChunkTransfers(chunk, geometry, threads) for chunk in chunks]
        self._settings = settings
        self._geometry = geometry
        self._transfers = movers.transfers
        self._pump = movers.pump
        self._device = movers.device
        self._after = movers.after
        self._trace = movers.trace
        self._patience = movers.patience()
        self._counters = counters
        self._shared = shared
        self._lock = threads.lock()
        self._loads = [LayerWork(threads) for _ in range(geometry.layers)]
        self._sends = [LayerWork(threads) for _ in range(geometry.layers)]
        self._waited: set[int] = set()
        self._computed: set[int] = set()
        self._layer_start_ns = 0
        self._begin_ns = 0
        self._end_ns = 0
        #: What the engine's thread has waited for transfers: the part of them left uncovered.  On
        #: a GPU this thread runs ahead, and its waits contain computation as well.
        self.waited_ns = 0
        self.failures: dict[str, str] = {}
        #: The pass's place in what all ranks of the engine do (``engine.rank_work``).
        self.number = number

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that take part."""
        return tuple(chunk.request_id for chunk in self._chunks)

    @property
    def late(self) -> list[ChunkTransfers]:
        """Chunks that were given up while some of their transfers may still write."""
        return [chunk for chunk in self._chunks if chunk.moves]

    @property
    def pass_ns(self) -> int:
        """How long the forward pass took, waits included; known after ``finish``."""
        return self._end_ns - self._begin_ns

    def begin(self) -> None:
        """Post the loads of the first layers; without overlap wait for all of them."""
        self._begin_ns = self._trace.now_ns()
        self._give_up_stalled()
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
        work = self._loads[layer]
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
                self._wait(self._sends[leaving].over, f"send of layer {leaving}")
        self._layer_start_ns = self._trace.now_ns()

    def finish(self) -> None:
        """Block until everything is in the DE buffer; ``failures`` is complete afterwards."""
        if not self._settings.overlap:
            computed = self._device.record()
            for layer in range(self._geometry.layers):
                self._send(layer, computed)
        for layer in range(self._geometry.layers):
            self._must_be_computed(layer)
            self._wait(self._loads[layer].over, f"load of layer {layer}")
            self._wait(self._sends[layer].over, f"send of layer {layer}")
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
        for number in range(len(self._chunks)):
            self._give_up(number, reason)

    def _load(self, layer: int, device_error: str | None = None) -> None:
        resident = self._settings.buffers >= self._geometry.layers
        steps = [
            (number, step)
            for number, chunk in enumerate(self._chunks)
            for step in load_steps(chunk.layout, layer, chunk.chunk.chunk, resident=resident)
        ]
        self._hand_to_pump(device_error, self._loads[layer], steps, lambda: None)

    def _send(self, layer: int, computed: DeviceEvent) -> None:
        steps = [
            (number, step)
            for number, chunk in enumerate(self._chunks)
            for step in send_steps(chunk.layout, layer, chunk.chunk.chunk)
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
        steps: Sequence[tuple[int, Step]],
        then: Callable[[], None],
    ) -> None:
        """Let the pump post ``steps``, one transfer each; none of them if the device failed.

        ``then`` follows when the last of them is over.
        """
        if device_error is not None:
            for number in range(len(self._chunks)):
                self._fail(number, device_error)
            steps = ()
        executed: list[tuple[str, Executed]] = []

        def over() -> None:
            self._trace.moved(executed)
            then()

        work.begin((self._share_of(number, step) for number, step in steps), over)
        self._pump.call(lambda: self._post(work, steps, executed))

    def _post(
        self,
        work: LayerWork,
        steps: Sequence[tuple[int, Step]],
        executed: list[tuple[str, Executed]],
    ) -> None:
        """Post one transfer per (chunk, step).

        Runs on the pump's thread, so that a transfer that copies while it is posted does so beside
        the computation.
        """
        for number, step in steps:
            share = self._share_of(number, step)
            posted = self._chunks[number].start() and self._post_one(work, share, step, executed)
            if not posted:
                work.ended(share)
        work.ended(POSTING)

    def _post_one(
        self, work: LayerWork, share: Share, step: Step, executed: list[tuple[str, Executed]]
    ) -> bool:
        """Post a transfer and have it watched; False if it failed at once."""
        number, agent = share
        chunk, start_ns = self._chunks[number], self._trace.now_ns()
        try:
            transfer, events = self._transfers.post(
                step, chunk.chunk.hbm_blocks, chunk.chunk.decode_agents
            )
        except DualPathError as error:
            self._fail(number, str(error))
            chunk.ended()
            return False
        except Exception as error:  # a defect; who knows what was posted: it stays counted
            log.exception("request %s: a transfer cannot be posted", chunk.request_id)
            self._fail(number, f"a transfer cannot be posted: {error}")
            return False
        self._patience.posted(agent, transfer.bytes)
        if events:
            work.copy_queued(share, events)

        def ended(completion: Completion) -> None:
            self._patience.ended(agent, transfer.bytes)
            if completion.error is not None:
                self._fail(number, completion.error)
            else:
                done = Executed(step, start_ns, self._trace.now_ns())
                executed.append((chunk.request_id, done))
            if completion.settled:
                chunk.ended()
            work.ended(share, by_device=bool(events))

        self._pump.watch(transfer, ended)
        return True

    def _share_of(self, number: int, step: Step) -> Share:
        agent = self._transfers.agent_of(step, self._chunks[number].chunk.decode_agents)
        return Share(number, agent)

    def _wait(self, stage: Stage, what: str) -> None:
        if stage.reached.is_set():
            return
        start_ns = self._trace.now_ns()
        while not self._block(stage.reached):
            for agent in self._patience.waited(stage.agents(), _LOOK_S):
                self._stalled(agent, what)
        self.waited_ns += self._trace.now_ns() - start_ns

    def _block(self, event: Event) -> bool:
        return event.wait(_LOOK_S)

    def _stalled(self, agent: str, what: str) -> None:
        """Give up the chunks that need an agent; all of them if nothing can even be posted."""
        reason = f"{what}: transfers with {agent!r} stall, {{waited}}"
        if agent == POSTING.agent:
            reason = f"{what}: the thread that posts transfers stalls, {{waited}}"
            for work in (*self._loads, *self._sends):
                work.give_up(POSTING.chunk)
        else:
            self._patience.stalled.add(agent)
        waited = f"the pass waited {self._patience.deadline_s:g} s and what their bytes take"
        for number in range(len(self._chunks)):
            if agent in (POSTING.agent, *self._agents(number)):
                self._give_up(number, reason.format(waited=waited))

    def _give_up_stalled(self) -> None:
        """Take no part with agents that have stalled, unless it is time to try them."""
        stalled, tried = self._patience.stalled, set[str]()
        for number in range(len(self._chunks)):
            agents = self._agents(number)
            for agent in filter(stalled.is_shut, agents - tried):
                self._give_up(number, f"transfers with {agent!r} stalled in an earlier pass")
                break
            else:
                for agent in agents - tried:
                    stalled.tried(agent)
                tried |= agents

    def _agents(self, number: int) -> set[str]:
        """Whom a chunk's transfers are with; agents have layers in turn, all else is alike."""
        chunk = self._chunks[number]
        turns = min(len(chunk.chunk.decode_agents), self._geometry.layers)
        steps = (
            step
            for layer in range(max(turns, 1))
            for steps in (load_steps, send_steps)
            for step in steps(chunk.layout, layer, chunk.chunk.chunk)
        )
        return {self._share_of(number, step).agent for step in steps}

    def _give_up(self, number: int, reason: str) -> None:
        """Fail a chunk, start nothing more for it and let nobody wait for what is under way."""
        self._fail(number, reason)
        self._chunks[number].give_up()
        for work in (*self._loads, *self._sends):
            work.give_up(number)

    def _fail(self, number: int, reason: str) -> None:
        request_id = self._chunks[number].request_id
        with self._lock:
            first = request_id not in self.failures
            self.failures.setdefault(request_id, reason)
        if first:
            self._counters.add(Counter.TRANSFER_FAILURES, 1)
