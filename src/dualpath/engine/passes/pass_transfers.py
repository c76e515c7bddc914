"""The transfers of one forward pass: how they are posted, and how chunks fail or are abandoned.

The transfers of a failed chunk go on like those of other chunks; their KV is not used.

When transfers with an agent stall (``engine.stalls``) the chunks that need it are abandoned: no
more of their steps are posted, and the pass does not wait for those under way.  They count as over,
so that the other chunks go on; late bytes can only reach memory of the abandoned chunk
(``engine.chunk_transfers``).  A chunk of an agent that has stalled before is abandoned when the
pass begins, except for occasional trials.
"""

import collections
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import DualPathError
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.passes.device import DeviceEvent
from dualpath.engine.passes.pump import Completion, Movers
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step, load_steps, send_steps

# --------------------------------------------------------------------------------- chunk transfers
# The transfers of one chunk in one forward pass, and the HBM blocks of abandoned transfers.


class BlockHolder(Protocol):
    """The allocator of an engine's HBM blocks, which can hold blocks back from reuse.

    An abandoned transfer may still write.  Its HBM blocks must not be reused meanwhile, though the
    engine has freed them.  This suffices also if layers share a region: a late byte of layer L and
    block b arrives in region L mod ``buffers`` at block b, which all other layers use for the same
    block b, and no other request has that block.

    Both methods are called from any thread; ``hold`` before the end of the pass in which the
    request failed.
    """

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Do not allocate these blocks until ``unhold``, whether they are free now or later."""
        ...

    def unhold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Allow reuse again: no transfer writes to these blocks any more."""
        ...


class NoHolder:
    """The holder of an engine that never reuses HBM blocks for other requests."""

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Do nothing: the blocks are not reused."""

    def unhold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Do nothing: no block was held."""


class ChunkTransfers:
    """Counts the transfers under way; an abandoned chunk gets no new transfers."""

    def __init__(
        self, chunk: PrefillChunk, geometry: BlockGeometry, threads: Threads = OS_THREADS
    ) -> None:
        self.chunk = chunk
        self.layout = chunk.layout(geometry)
        self._lock = threads.lock()
        self._moving = 0
        self._given_up = False
        self._then: Callable[[], None] | None = None

    @property
    def request_id(self) -> str:
        """The request of the chunk."""
        return self.chunk.transfer.request_id

    @property
    def moves(self) -> bool:
        """Whether a transfer may still write."""
        with self._lock:
            return self._moving > 0

    def start(self) -> bool:
        """Count a transfer that is about to be posted; False if the chunk is abandoned."""
        with self._lock:
            self._moving += not self._given_up
            return not self._given_up

    def ended(self) -> None:
        """A transfer has ended and writes no more."""
        with self._lock:
            assert self._moving > 0, f"request {self.request_id}: no transfer is under way"
            self._moving -= 1
            then = None if self._moving else self._then
        if then is not None:
            then()

    def give_up(self) -> None:
        """Abandon the chunk: no new transfer is started."""
        with self._lock:
            self._given_up = True

    def when_idle(self, then: Callable[[], None]) -> None:
        """Call ``then`` once no transfer is under way; no transfer may start after this call."""
        with self._lock:
            if self._moving:
                self._then = then
                return
        then()


# -------------------------------------------------------------------------------------- layer work
# Progress of the transfers of one layer in one direction.


class Share(NamedTuple):
    """Transfers of one chunk of the pass with one agent."""

    chunk: int
    agent: str


#: Stands for the posting itself: no stage is complete before all transfers have been posted.
POSTING = Share(-1, "")


class Stage:
    """A milestone of transfers; ``reached`` is set when the last one has come to it.

    A transfer comes to a stage at most once: when it ends, or when it is abandoned.
    """

    def __init__(self, threads: Threads) -> None:
        self.reached = threads.event()
        self._lock = threads.lock()
        self._left: collections.Counter[Share] = collections.Counter()
        self._expected = False

    @property
    def complete(self) -> bool:
        """Whether all expected transfers have come here; an atomic read without the lock.

        ``reached`` is set soon after.
        """
        return self._expected and not self._left

    def expect(self, shares: Iterable[Share]) -> None:
        """Wait for these transfers; called once."""
        with self._lock:
            assert not self._expected, "the transfers of a stage are set twice"
            self._expected = True
            self._left.update(shares)

    def agents(self) -> set[str]:
        """Return the agents with missing transfers; empty before ``expect``."""
        with self._lock:
            return {share.agent for share in self._left}

    def arrived(self, share: Share) -> bool:
        """Count a transfer; return whether it was the last.  Abandoned ones are ignored."""
        with self._lock:
            if share not in self._left:
                return False
            self._left[share] -= 1
            if not self._left[share]:
                del self._left[share]
            return not self._left

    def give_up(self, chunk: int) -> bool:
        """Abandon the missing transfers of a chunk; return whether no others are missing."""
        with self._lock:
            given_up = [share for share in self._left if share.chunk == chunk]
            for share in given_up:
                del self._left[share]
            return bool(given_up) and not self._left


class LayerWork:
    """One layer's loads or sends; the pump's thread counts, the engine's thread waits.

    ``over``: every transfer has ended, and the follow-up has run.  ``queued``: the transport's
    transfers have ended, and the device's copies, which end at ``events``, are queued: the device
    can wait for them.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self.queued = Stage(threads)
        self.over = Stage(threads)
        self.events: list[DeviceEvent] = []
        self._then: Callable[[], None] = lambda: None

    def begin(self, shares: Iterable[Share], then: Callable[[], None]) -> None:
        """Expect these transfers, one share each; ``then`` is called after the last one."""
        expected = [*shares, POSTING]
        self._then = then
        self.queued.expect(expected)
        self.over.expect(expected)

    def copy_queued(self, share: Share, events: Iterable[DeviceEvent]) -> None:
        """One transfer is queued on the device and ends when ``events`` have passed."""
        self.events.extend(events)
        if self.queued.arrived(share):
            self.queued.reached.set()

    def ended(self, share: Share, *, by_device: bool = False) -> None:
        """One transfer is over, or was not posted."""
        if not by_device and self.queued.arrived(share):
            self.queued.reached.set()
        if self.over.arrived(share):
            self._finish()

    def give_up(self, chunk: int) -> None:
        """Abandon the transfers of a chunk: neither stage waits for them any more."""
        if self.queued.give_up(chunk):
            self.queued.reached.set()
        if self.over.give_up(chunk):
            self._finish()

    def _finish(self) -> None:
        try:
            self._then()
        finally:
            self.over.reached.set()


class LayerWorks(dict[int, LayerWork]):
    """The work of each layer, created when it is first needed by whichever thread needs it."""

    def __init__(self, threads: Threads) -> None:
        super().__init__()
        self._threads = threads

    def __missing__(self, layer: int) -> LayerWork:
        """Return the work of a layer, the same for both threads (``setdefault`` is atomic)."""
        return self.setdefault(layer, LayerWork(self._threads))


log = logging.getLogger(__name__)


class PassTransfers:
    """Posts the steps of a pass on the pump's thread; used by that thread and the engine's.

    ``loads`` and ``sends`` have the progress of each layer; ``failures`` has the first reason of
    each failed request.
    """

    def __init__(
        self,
        chunks: Sequence[PrefillChunk],
        geometry: BlockGeometry,
        movers: Movers,
        counters: Counters,
    ) -> None:
        threads = movers.health.threads
        self.chunks = [ChunkTransfers(chunk, geometry, threads) for chunk in chunks]
        self.loads = LayerWorks(threads)
        self.sends = LayerWorks(threads)
        self.budget = movers.wait_budget()
        self.failures: dict[str, str] = {}
        self._layers = geometry.layers
        self._transfers = movers.transfers
        self._pump = movers.pump
        self._trace = movers.trace
        self._load_times = movers.load_times
        self._counters = counters
        self._lock = threads.lock()

    def load(self, layer: int, device_error: str | None, *, resident: bool) -> None:
        """Load a layer, nothing if the device failed; ``resident``: all layers stay in HBM."""
        steps = [
            (number, step)
            for number, chunk in enumerate(self.chunks)
            for step in load_steps(chunk.layout, layer, chunk.chunk.chunk, resident=resident)
        ]
        if device_error is not None or not steps:
            self._queue(device_error, self.loads[layer], steps, lambda executed: None)
            return

        def over(executed: Sequence[Executed]) -> None:
            whole = len(executed) == len(steps)
            self._load_times.ended(sum(done.step.bytes for done in executed) if whole else 0)

        self._load_times.began()
        self._queue(None, self.loads[layer], steps, over)

    def sending(self, layer: int, then: Callable[[], None]) -> Callable[[str | None], None]:
        """Return a callback that sends a layer, for the time when the device has computed it.

        It gets the device's error, or None; with an error nothing is sent.  ``then`` is called
        afterwards in any case.
        """
        steps = [
            (number, step)
            for number, chunk in enumerate(self.chunks)
            for step in send_steps(chunk.layout, layer, chunk.chunk.chunk)
        ]
        work = self.sends[layer]
        return lambda device_error: self._queue(device_error, work, steps, lambda executed: then())

    def stalled(self, agent: str, what: str) -> None:
        """Abandon the chunks that need an agent; all chunks if the pump itself stalls."""
        reason = f"{what}: transfers with {agent!r} stall, {{waited}}"
        if agent == POSTING.agent:
            reason = f"{what}: the thread that posts transfers stalls, {{waited}}"
            for work in self._begun():
                work.give_up(POSTING.chunk)
        else:
            self.budget.stalled.add(agent)
        waited = f"the pass waited {self.budget.deadline_s:g} s and the time for their bytes"
        for number in range(len(self.chunks)):
            if agent in (POSTING.agent, *self._agents(number)):
                self._give_up(number, reason.format(waited=waited))

    def give_up_stalled(self) -> None:
        """Abandon chunks of agents that have stalled, unless a trial is due."""
        stalled, tried = self.budget.stalled, set[str]()
        for number in range(len(self.chunks)):
            agents = self._agents(number)
            for agent in filter(stalled.is_avoided, agents - tried):
                self._give_up(number, f"transfers with {agent!r} stalled in an earlier pass")
                break
            else:
                for agent in agents - tried:
                    stalled.tried(agent)
                tried |= agents

    def give_up_all(self, reason: str) -> None:
        """Abandon all chunks of the pass."""
        for number in range(len(self.chunks)):
            self._give_up(number, reason)

    def _queue(
        self,
        device_error: str | None,
        work: LayerWork,
        steps: Sequence[tuple[int, Step]],
        then: Callable[[Sequence[Executed]], None],
    ) -> None:
        """Queue ``steps`` for the pump, one transfer each; none if the device failed.

        ``then`` is called when the last of them is over, with those that have succeeded.
        """
        if device_error is not None:
            for number in range(len(self.chunks)):
                self._fail(number, device_error)
            steps = ()
        executed: list[tuple[str, Executed]] = []

        def over() -> None:
            self._trace.moved(executed)
            then([done for _, done in executed])

        work.begin((self._share_of(number, step) for number, step in steps), over)
        self._pump.call(lambda: self._post(work, steps, executed))

    def _post(
        self,
        work: LayerWork,
        steps: Sequence[tuple[int, Step]],
        executed: list[tuple[str, Executed]],
    ) -> None:
        """Post one transfer per (chunk, step).

        Runs on the pump's thread, so that a transfer that copies bytes while it is posted does not
        block the computation.
        """
        for number, step in steps:
            share = self._share_of(number, step)
            posted = self.chunks[number].start() and self._post_one(work, share, step, executed)
            if not posted:
                work.ended(share)
        work.ended(POSTING)

    def _post_one(
        self, work: LayerWork, share: Share, step: Step, executed: list[tuple[str, Executed]]
    ) -> bool:
        """Post a transfer and have it watched; False if it failed at once."""
        number, agent = share
        chunk, start_ns = self.chunks[number], self._trace.now_ns()
        try:
            transfer, events = self._transfers.post(
                step, chunk.chunk.hbm_blocks, chunk.chunk.agents_at(step)
            )
        except DualPathError as error:
            self._fail(number, str(error))
            chunk.ended()
            return False
        except Exception as error:  # a defect: the transfer may be posted, so it stays counted
            log.exception("request %s: a transfer cannot be posted", chunk.request_id)
            self._fail(number, f"a transfer cannot be posted: {error}")
            return False
        self.budget.posted(agent, transfer.bytes)
        if events:
            work.copy_queued(share, events)

        def ended(completion: Completion) -> None:
            self.budget.ended(agent, transfer.bytes)
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
        agent = self._transfers.agent_of(step, self.chunks[number].chunk.agents_at(step))
        return Share(number, agent)

    def _agents(self, number: int) -> set[str]:
        """Return the agents of a chunk's transfers, from its first layers.

        Agents have layers in turn; apart from that all layers have the same steps.
        """
        chunk = self.chunks[number]
        turns = min(max(map(len, chunk.chunk.peers)), self._layers)
        steps = (
            step
            for layer in range(max(turns, 1))
            for steps in (load_steps, send_steps)
            for step in steps(chunk.layout, layer, chunk.chunk.chunk)
        )
        return {self._share_of(number, step).agent for step in steps}

    def _give_up(self, number: int, reason: str) -> None:
        """Fail a chunk, post no more of its steps, and do not wait for those under way."""
        self._fail(number, reason)
        self.chunks[number].give_up()
        for work in self._begun():
            work.give_up(number)

    def _begun(self) -> list[LayerWork]:
        """Return the work of layers so far; that of others posts nothing of abandoned chunks."""
        return [*self.loads.values(), *self.sends.values()]

    def _fail(self, number: int, reason: str) -> None:
        request_id = self.chunks[number].request_id
        with self._lock:
            first = request_id not in self.failures
            self.failures.setdefault(request_id, reason)
        if first:
            self._counters.add(Counter.TRANSFER_FAILURES, 1)
