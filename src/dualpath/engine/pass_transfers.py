"""The transfers of one forward pass: how they are posted, and how chunks fail and are given up.

A chunk that has failed goes on moving, as the others of its pass do; nothing it moves is relied on.

When transfers with an agent stall (``engine.stalls``) the chunks that need it are given up, once:
no more of their steps are posted, and nobody waits for those that are under way.  They count as
over, so that the other chunks go on; what a late byte may still hit is theirs alone
(``engine.chunk_transfers``).  A chunk of an agent that has stalled before is given up as the pass
begins, but for a trial now and then.
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
    """Posts what a pass moves, on the pump's thread; used by that and the engine's thread.

    ``loads`` and ``sends`` say how far each layer is; ``failures`` has a reason for each request
    that has failed, the first one.
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
        self.patience = movers.patience()
        self.failures: dict[str, str] = {}
        self._layers = geometry.layers
        self._transfers = movers.transfers
        self._pump = movers.pump
        self._trace = movers.trace
        self._counters = counters
        self._lock = threads.lock()

    def load(self, layer: int, device_error: str | None, *, resident: bool) -> None:
        """Load a layer; nothing if the device failed.  ``resident``: all layers stay in HBM."""
        steps = [
            (number, step)
            for number, chunk in enumerate(self.chunks)
            for step in load_steps(chunk.layout, layer, chunk.chunk.chunk, resident=resident)
        ]
        self._hand_to_pump(device_error, self.loads[layer], steps, lambda: None)

    def sending(self, layer: int, then: Callable[[], None]) -> Callable[[str | None], None]:
        """Return what sends a layer, to be called once the device has computed it, or failed.

        With the device's error nothing is sent.  ``then`` follows in any case.
        """
        steps = [
            (number, step)
            for number, chunk in enumerate(self.chunks)
            for step in send_steps(chunk.layout, layer, chunk.chunk.chunk)
        ]
        work = self.sends[layer]
        return lambda device_error: self._hand_to_pump(device_error, work, steps, then)

    def stalled(self, agent: str, what: str) -> None:
        """Give up the chunks that need an agent; all of them if nothing can even be posted."""
        reason = f"{what}: transfers with {agent!r} stall, {{waited}}"
        if agent == POSTING.agent:
            reason = f"{what}: the thread that posts transfers stalls, {{waited}}"
            for work in (*self.loads, *self.sends):
                work.give_up(POSTING.chunk)
        else:
            self.patience.stalled.add(agent)
        waited = f"the pass waited {self.patience.deadline_s:g} s and what their bytes take"
        for number in range(len(self.chunks)):
            if agent in (POSTING.agent, *self._agents(number)):
                self._give_up(number, reason.format(waited=waited))

    def give_up_stalled(self) -> None:
        """Take no part with agents that have stalled, unless it is time to try them."""
        stalled, tried = self.patience.stalled, set[str]()
        for number in range(len(self.chunks)):
            agents = self._agents(number)
            for agent in filter(stalled.is_shut, agents - tried):
                self._give_up(number, f"transfers with {agent!r} stalled in an earlier pass")
                break
            else:
                for agent in agents - tried:
                    stalled.tried(agent)
                tried |= agents

    def give_up_all(self, reason: str) -> None:
        """Fail the whole pass; see ``stalled`` for what becomes of a chunk."""
        for number in range(len(self.chunks)):
            self._give_up(number, reason)

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

        Runs on the pump's thread, so that a transfer that copies while it is posted does so beside
        the computation.
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
        except Exception as error:  # a defect; who knows what was posted: it stays counted
            log.exception("request %s: a transfer cannot be posted", chunk.request_id)
            self._fail(number, f"a transfer cannot be posted: {error}")
            return False
        self.patience.posted(agent, transfer.bytes)
        if events:
            work.copy_queued(share, events)

        def ended(completion: Completion) -> None:
            self.patience.ended(agent, transfer.bytes)
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
        """Whom a chunk's transfers are with; agents have layers in turn, all else is alike."""
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
        """Fail a chunk, start nothing more for it and let nobody wait for what is under way."""
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
