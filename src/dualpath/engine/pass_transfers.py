"""The transfers of one forward pass: how they are posted, and how chunks fail or are abandoned.

The transfers of a failed chunk go on like those of other chunks; their KV is not used.

When transfers with an agent stall (``engine.stalls``) the chunks that need it are abandoned: no
more of their steps are posted, and the pass does not wait for those under way.  They count as over,
so that the other chunks go on; late bytes can only reach memory of the abandoned chunk
(``engine.chunk_transfers``).  A chunk of an agent that has stalled before is abandoned when the
pass begins, except for occasional trials.
"""

import logging
from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import DualPathError
from dualpath.engine.chunk_transfers import ChunkTransfers
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.layer_work import POSTING, LayerWork, Share
from dualpath.engine.movers import Movers
from dualpath.engine.pump import Completion
from dualpath.engine.step_transfers import PrefillChunk
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step, load_steps, send_steps

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
        threads = movers.threads
        self.chunks = [ChunkTransfers(chunk, geometry, threads) for chunk in chunks]
        self.loads = [LayerWork(threads) for _ in range(geometry.layers)]
        self.sends = [LayerWork(threads) for _ in range(geometry.layers)]
        self.budget = movers.wait_budget()
        self.failures: dict[str, str] = {}
        self._layers = geometry.layers
        self._transfers = movers.transfers
        self._pump = movers.pump
        self._trace = movers.trace
        self._counters = counters
        self._lock = threads.lock()

    def load(self, layer: int, device_error: str | None, *, resident: bool) -> None:
        """Load a layer, nothing if the device failed; ``resident``: all layers stay in HBM."""
        steps = [
            (number, step)
            for number, chunk in enumerate(self.chunks)
            for step in load_steps(chunk.layout, layer, chunk.chunk.chunk, resident=resident)
        ]
        self._queue(device_error, self.loads[layer], steps, lambda: None)

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
        return lambda device_error: self._queue(device_error, work, steps, then)

    def stalled(self, agent: str, what: str) -> None:
        """Abandon the chunks that need an agent; all chunks if the pump itself stalls."""
        reason = f"{what}: transfers with {agent!r} stall, {{waited}}"
        if agent == POSTING.agent:
            reason = f"{what}: the thread that posts transfers stalls, {{waited}}"
            for work in (*self.loads, *self.sends):
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
        then: Callable[[], None],
    ) -> None:
        """Queue ``steps`` for the pump, one transfer each; none if the device failed.

        ``then`` is called when the last of them is over.
        """
        if device_error is not None:
            for number in range(len(self.chunks)):
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
                step, chunk.chunk.hbm_blocks, chunk.chunk.decode_agents
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
        agent = self._transfers.agent_of(step, self.chunks[number].chunk.decode_agents)
        return Share(number, agent)

    def _agents(self, number: int) -> set[str]:
        """Return the agents of a chunk's transfers, from its first layers.

        Agents have layers in turn; apart from that all layers have the same steps.
        """
        chunk = self.chunks[number]
        turns = min(len(chunk.chunk.decode_agents), self._layers)
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
        for work in (*self.loads, *self.sends):
            work.give_up(number)

    def _fail(self, number: int, reason: str) -> None:
        request_id = self.chunks[number].request_id
        with self._lock:
            first = request_id not in self.failures
            self.failures.setdefault(request_id, reason)
        if first:
            self._counters.add(Counter.TRANSFER_FAILURES, 1)
