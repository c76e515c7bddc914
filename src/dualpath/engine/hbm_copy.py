"""Host-device copies of whole prompts and single blocks: labels 8-9 of Fig. 4, and back.

Their steps have both ends in this engine.  Without a copier of the device they are transfers of the
engine to itself, the form of the CNIC-assisted copies of §5.2: with an RDMA NIC they are what the
paper does.

Layers with a sliding window may have block ids of their own, and no block for what lies behind the
window: of those layers only the blocks that exist are copied.  Nor are the first blocks of a prompt
that an engine keeps in HBM from earlier ones.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dualpath.core.errors import DualPathError
from dualpath.core.runs import BlockRun
from dualpath.engine.chunk_transfers import BlockHolder
from dualpath.engine.device import DeviceEvent
from dualpath.engine.hbm_layout import NO_BLOCK, HbmBlock, block_ids
from dualpath.engine.movers import Movers
from dualpath.engine.paced_posts import PacedPosts
from dualpath.engine.pump import Completion
from dualpath.engine.stalls import TRIAL_S
from dualpath.engine.threads import Event, Lock, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step


class _Countdown:
    """Collects steps of one request; calls ``over`` after the last.

    It gets the first error, or None, and whether nothing can write any more.  What was executed
    enters the trace first.
    """

    def __init__(
        self,
        request_id: str,
        left: int,
        trace: TraceRecorder,
        over: Callable[[str | None, bool], None],
        lock: Lock,
    ) -> None:
        self._request_id = request_id
        self._left = left
        self._trace = trace
        self._over = over
        self._error: str | None = None
        self._settled = True
        self._executed: list[tuple[str, Executed]] = []
        self._lock = lock

    def step_over(
        self, step: Step, start_ns: int, error: str | None, *, settled: bool = True
    ) -> None:
        with self._lock:
            self._left -= 1
            self._settled = self._settled and settled
            self._error = self._error or error
            if error is None:
                done = Executed(step, start_ns, self._trace.now_ns())
                self._executed.append((self._request_id, done))
            last = self._left == 0
        if last:
            self._trace.moved(self._executed, request=self._request_id)
            self._over(self._error, self._settled)


class BlockOut(NamedTuple):
    """A block that leaves HBM; ``done`` gets None or why that failed, once the copy is over.

    Where nobody knows whether a copy still writes, ``done`` is never called.
    """

    steps: Sequence[Step]
    hbm_block: HbmBlock
    done: Callable[[str | None], None]


class _Leaving(NamedTuple):
    over: Event
    given_up: Event
    device_events: Sequence[DeviceEvent]


def _nothing() -> None:
    """Nobody waits."""


class HbmCopier:
    """Copies between an engine's own DRAM and HBM, all layers of some blocks at a time.

    Copies start when the computation queued before them is over, as it may still use the blocks.
    Blocks that nobody knows to be still go to ``holder``.
    """

    def __init__(
        self,
        movers: Movers,
        holder: BlockHolder,
    ) -> None:
        self._holder = holder
        self._threads = movers.threads
        self._transfers = movers.transfers
        self._pump = movers.pump
        self._device = movers.device
        self._after = movers.after
        self._trace = movers.trace
        self._stalled = movers.stalled
        self._deadline_s = movers.transfer_deadline_s
        self.paced = PacedPosts(movers.pump, movers.threads, movers.transfer_deadline_s)

    def into_hbm(
        self,
        request_id: str,
        steps: Sequence[Step],
        hbm_blocks: Sequence[HbmBlock],
        done: Callable[[str | None], None],
    ) -> None:
        """Have H2D of all layers posted; ``done`` gets the first error once all are over.

        Where the device does not copy itself, the caller's step is not held: the pump posts.
        ``hbm_blocks`` of the request's blocks 0 and following; blocks behind them are not copied,
        nor those that have no id.
        """

        def over(error: str | None, settled: bool) -> None:
            if not settled:
                self._holder.hold(block_ids(hbm_blocks))
            done(error)

        copies = self._copies(steps, hbm_blocks)
        if not copies:
            done(None)
            return
        countdown = self._countdown(request_id, len(copies), over)
        earlier = self._device.record()

        def post(device_error: str | None) -> None:
            for step, blocks in copies:
                load = functools.partial(self._post, step, blocks, earlier, countdown)
                if device_error is not None:
                    countdown.step_over(step, 0, device_error)
                elif self._device.copier is not None:
                    load()
                else:
                    self.paced.add(step.bytes, load)

        if self._device.copier is not None:
            post(None)
        else:
            self._after.call(earlier, post)

    def out_of_hbm(self, blocks: Sequence[BlockOut]) -> list[bool]:
        """Copy blocks to their staging slots, all at a time.

        Returns when computation queued from now on may overwrite them.  A copy that was not over
        by then has failed, however it ends: it may have read what came after; False says so of a
        block.  While copies stall none is begun.
        """
        own_agent = self._transfers.own_agent
        if self._stalled.is_shut(own_agent):
            for block in blocks:
                block.done("copies within this engine stall")
            return [True for _ in blocks]
        if not blocks:
            return []
        earlier = self._device.record()
        if self._device.copier is None:
            earlier.wait()
        leaving = [self._leave(block, earlier) for block in blocks]
        if self._device.copier is None:
            limit = self._patience()
            for one in leaving:
                if not self._wait(one.over, limit):
                    one.given_up.set()
                    self._stalled.add(own_agent)
        for event in (event for one in leaving for event in one.device_events):
            self._device.wait(event)
        return [not one.given_up.is_set() for one in leaving]

    def _leave(self, block: BlockOut, earlier: DeviceEvent) -> _Leaving:
        over, given_up = self._threads.event(), self._threads.event()

        def ended(error: str | None, settled: bool) -> None:
            try:
                if settled:
                    late = "it left HBM too late" if given_up.is_set() else None
                    block.done(error or late)
            finally:
                over.set()

        copies = self._copies(block.steps, [block.hbm_block])
        countdown = self._countdown("", len(copies), ended)
        events = [e for copy in copies for e in self._post(*copy, earlier, countdown)]
        return _Leaving(over, given_up, events)

    def _copies(
        self, steps: Sequence[Step], hbm_blocks: Sequence[HbmBlock]
    ) -> list[tuple[Step, list[int]]]:
        """Return what of each step has blocks in HBM, with their ids by a request's block."""
        copies = []
        ids_of_group: dict[int, list[int]] = {}
        for step in steps:
            group = self._group_of(step)
            if group not in ids_of_group:
                ids_of_group[group] = [b if isinstance(b, int) else b[group] for b in hbm_blocks]
            ids = ids_of_group[group]
            end = min(step.blocks.end, len(ids))
            first = step.blocks.first
            while first < end and ids[first] == NO_BLOCK:
                first += 1
            if first < end:
                copies.append((step.only(BlockRun(first, end - first)), ids))
        return copies

    def _group_of(self, step: Step) -> int:
        assert step.layer is not None, "Full Blocks are moved by storage"
        groups = self._transfers.group_of_layer
        return groups[step.layer] if groups else 0

    def _countdown(
        self, request_id: str, steps: int, over: Callable[[str | None, bool], None]
    ) -> _Countdown:
        return _Countdown(request_id, steps, self._trace, over, self._threads.lock())

    def _patience(self) -> TimeLimit:
        """Return the limit of a step's wait for its copies, all in all."""
        own_agent = self._transfers.own_agent
        tried_before = own_agent in self._stalled
        self._stalled.tried(own_agent)
        limit_s = min(TRIAL_S, self._deadline_s) if tried_before else self._deadline_s
        return TimeLimit(self._threads, limit_s)

    def _wait(self, over: Event, limit: TimeLimit) -> bool:
        return over.wait(limit.left_s())

    def _post(
        self,
        step: Step,
        hbm_blocks: Sequence[int],
        earlier: DeviceEvent,
        countdown: _Countdown,
        then: Callable[[], None] = _nothing,
    ) -> tuple[DeviceEvent, ...]:
        """Post one layer; return the events of its end if the device copies it itself."""
        start_ns, own_agent = self._trace.now_ns(), self._transfers.own_agent

        def over(completion: Completion) -> None:
            self._stalled.ended(own_agent)
            countdown.step_over(step, start_ns, completion.error, settled=completion.settled)
            then()

        try:
            transfer, events = self._transfers.post(step, hbm_blocks, earlier=earlier)
        except DualPathError as error:
            countdown.step_over(step, start_ns, str(error))
            then()
            return ()
        self._stalled.posted(own_agent)
        self._pump.watch(transfer, over)
        return events
