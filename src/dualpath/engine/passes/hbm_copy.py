"""Copies of whole prompts from DRAM to HBM (labels 8-9 of Fig. 4) and of single blocks to DRAM.

Their steps have both ends in this engine.  Without a copier of the device they are transfers of the
engine to itself: the CNIC-assisted copies of §5.2, if UCX moves them through the RDMA NIC.

Layers with a sliding window may have block ids of their own, and no block for tokens outside the
window: of those layers only the existing blocks are copied.  The first blocks of a prompt that are
in the engine's HBM prefix cache are not copied either.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from dualpath.core.errors import DualPathError
from dualpath.core.runs import BlockRun
from dualpath.engine.passes.device import PASSED, DeviceEvent
from dualpath.engine.passes.hbm_layout import NO_BLOCK, HbmBlock, block_ids
from dualpath.engine.passes.pass_transfers import BlockHolder
from dualpath.engine.passes.pump import TRIAL_S, Completion, Movers, TransferPump
from dualpath.engine.threads import Event, Lock, Threads, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step

log = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------- paced posts
# Transfers that no engine step waits for, posted a few at a time.
#
# A whole prompt is copied into HBM while other requests decode.  Posted at once, it would delay the
# decode step that posts it, as posting may copy bytes synchronously, and every copy that a step
# waits for would queue behind all of its bytes.  So the pump posts it, with few bytes under way at
# a time.

#: Bytes under way, behind which a copy that a step waits for may queue.  At 50 GB/s they take less
#: time than the pump's pause between two polls, during which no new bytes are posted.
MAX_BYTES = 8 << 20


class _Post(NamedTuple):
    size_bytes: int
    post: Callable[[Callable[[], None]], object]


class PacedPosts:
    """Posts transfers FIFO; a transfer larger than the limit is posted alone.

    Everything happens on the pump's thread.  A transfer that is not over after ``deadline_s`` does
    not count any more, as its hanging need not affect the others.
    """

    def __init__(
        self,
        pump: TransferPump,
        threads: Threads,
        deadline_s: float,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._pump = pump
        self._threads = threads
        self._deadline_ns = int(deadline_s * 1e9)
        self._max_bytes = max_bytes
        self._waiting: deque[_Post] = deque()
        #: Bytes and time of posting by number, in the order of posting.
        self._moving: dict[int, tuple[int, int]] = {}
        self._posted = 0
        self._posting = False
        pump.each_poll(self._advance)

    def add(self, size_bytes: int, post: Callable[[Callable[[], None]], object]) -> None:
        """Queue a transfer; ``post`` gets a callback to call on the pump's thread once it is over.

        ``post`` must not raise.
        """

        def queue() -> None:
            self._waiting.append(_Post(size_bytes, post))
            self._advance()

        self._pump.call(queue)

    def _advance(self) -> None:
        if self._posting:
            return  # a transfer was over at once; the outer call goes on
        self._posting = True
        while self._waiting and self._has_room(self._waiting[0].size_bytes):
            size_bytes, post = self._waiting.popleft()
            number = self._posted
            self._posted += 1
            self._moving[number] = (size_bytes, self._threads.now_ns())
            post(lambda number=number: self._over(number))  # type: ignore[misc]
        self._posting = False

    def _over(self, number: int) -> None:
        self._moving.pop(number, None)
        self._advance()

    def _has_room(self, size_bytes: int) -> bool:
        since_ns = self._threads.now_ns() - self._deadline_ns
        moving = [size for size, posted_ns in self._moving.values() if posted_ns > since_ns]
        return not moving or sum(moving) + size_bytes <= self._max_bytes


class _Countdown:
    """Counts the steps of one request; calls ``over`` after the last one.

    ``over`` gets the first error, or None, and whether all transfers have certainly ended.  The
    executed steps are traced before.
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
    """A block to copy out of HBM; ``done`` gets None or the error, once the copy is over.

    ``done`` is never called if it is unknown whether the copy still writes.
    """

    steps: Sequence[Step]
    hbm_block: HbmBlock
    done: Callable[[str | None], None]


class _CopyOut(NamedTuple):
    over: Event
    abandoned: Event
    device_events: Sequence[DeviceEvent]


def _side_by_side(steps: Sequence[Step]) -> Step:
    """Return steps of one block each, all of one layer, as one step with blocks numbered from 0."""
    return msgspec.structs.replace(
        steps[0],
        blocks=BlockRun(0, len(steps)),
        bytes=sum(step.bytes for step in steps),
        slots=tuple(slot for step in steps for slot in step.slots),
    )


def _runs(blocks: Sequence[int]) -> Iterator[BlockRun]:
    """Yield the runs of consecutive numbers in ``blocks``, which ascend."""
    first = 0
    for place, block in enumerate(blocks):
        if place + 1 == len(blocks) or blocks[place + 1] != block + 1:
            yield BlockRun(blocks[first], place + 1 - first)
            first = place + 1


def _nothing() -> None:
    """Do nothing."""


class HbmCopier:
    """Copies between an engine's own DRAM and HBM, all layers of some blocks at a time.

    Copies start when the computation queued before them is over, as it may still use the blocks.
    HBM blocks to which a transfer may still write are held back by ``holder``.
    """

    def __init__(
        self,
        movers: Movers,
        holder: BlockHolder,
    ) -> None:
        self._holder = holder
        self._threads = movers.health.threads
        self._transfers = movers.transfers
        self._pump = movers.pump
        self._device = movers.device
        self._after = movers.after
        self._trace = movers.trace
        self._stalled = movers.stalled
        self._deadline_s = movers.transfer_deadline_s
        self.paced = PacedPosts(movers.pump, movers.health.threads, movers.transfer_deadline_s)

    def into_hbm(
        self,
        request_id: str,
        steps: Sequence[Step],
        hbm_blocks: Sequence[HbmBlock],
        done: Callable[[str | None], None],
    ) -> None:
        """Start H2D of all layers; ``done`` gets None or the first error once all are over.

        The pump posts the copies, so that the caller, which is the engine's thread, does not wait:
        a prompt has thousands of pieces.  ``hbm_blocks`` are those of the request's blocks from 0
        on; blocks after them, and blocks without an id, are not copied.
        """

        def over(error: str | None, settled: bool) -> None:
            if not settled:
                self._holder.hold(block_ids(hbm_blocks))
            done(error)

        copies = deque(self._copies(steps, hbm_blocks))
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
                else:
                    self.paced.add(step.bytes, load)

        def queue_next() -> None:
            """Queue one layer on the device, which waits for ``earlier``; then the pump polls."""
            self._post(*copies.popleft(), earlier, countdown)
            if copies:
                self._pump.call(queue_next)

        if self._device.copier is not None:
            self._pump.call(queue_next)
        else:
            self._after.call(earlier, post)

    def out_of_hbm(self, blocks: Sequence[BlockOut]) -> list[bool]:
        """Copy blocks to their staging slots, all blocks of a layer in one transfer for each part.

        Returns when computation queued from now on may overwrite them.  Copies that are not over by
        then have failed, as they may read overwritten bytes: the result is False for each block.
        No copy is started while others stall.
        """
        own_agent = self._transfers.own_agent
        if self._stalled.is_avoided(own_agent):
            for block in blocks:
                block.done("copies within this engine stall")
            return [True for _ in blocks]
        if not blocks:
            return []
        earlier = self._device.record()
        if self._device.copier is None:
            earlier.wait()
        copy = self._copy_out(blocks, earlier)
        if self._device.copier is None and not self._wait(copy.over, self._wait_limit()):
            copy.abandoned.set()
            self._stalled.add(own_agent)
        for event in copy.device_events:
            self._device.wait(event)
        return [not copy.abandoned.is_set() for _ in blocks]

    def out_later(self, block: BlockOut) -> None:
        """Copy one block to its staging slot when few bytes are under way; on the pump's thread.

        Nothing computes in the block meanwhile, and its KV has arrived: the copy waits for no work
        of the device.
        """

        def post(over: Callable[[], None]) -> None:
            def done(error: str | None) -> None:
                over()
                block.done(error)

            self._copy_out([block._replace(done=done)], PASSED)

        self.paced.add(sum(step.bytes for step in block.steps), post)

    def _copy_out(self, blocks: Sequence[BlockOut], earlier: DeviceEvent) -> _CopyOut:
        """Post one transfer per layer and part for all blocks; they end or fail together."""
        over, abandoned = self._threads.event(), self._threads.event()

        def ended(error: str | None, settled: bool) -> None:
            try:
                if settled:
                    late = "its copy out of HBM was too late" if abandoned.is_set() else None
                    for block in blocks:
                        block.done(error or late)
            finally:
                over.set()

        layers = zip(*(block.steps for block in blocks), strict=True)
        steps = [_side_by_side(steps) for steps in layers]
        copies = self._copies(steps, [block.hbm_block for block in blocks])
        if sum(part.bytes for part, _ in copies) != sum(step.bytes for step in steps):
            ended("a layer of a block is not in HBM any more", True)
            return _CopyOut(over, abandoned, ())
        countdown = self._countdown("", len(copies), ended)
        events = [e for copy in copies for e in self._post(*copy, earlier, countdown)]
        return _CopyOut(over, abandoned, events)

    def _copies(
        self, steps: Sequence[Step], hbm_blocks: Sequence[HbmBlock]
    ) -> list[tuple[Step, list[int]]]:
        """Return the parts of the steps with blocks in HBM, each with the ids by prompt block."""
        copies = []
        ids_of_group: dict[int, list[int]] = {}
        for step in steps:
            group = self._group_of(step)
            if group not in ids_of_group:
                ids_of_group[group] = [b if isinstance(b, int) else b[group] for b in hbm_blocks]
            ids = ids_of_group[group]
            end = min(step.blocks.end, len(ids))
            here = [b for b in range(step.blocks.first, end) if ids[b] != NO_BLOCK]
            copies += [(step.only(run), ids) for run in _runs(here)]
        return copies

    def _group_of(self, step: Step) -> int:
        assert step.layer is not None, "Full Blocks are moved by storage"
        groups = self._transfers.group_of_layer
        return groups[step.layer] if groups else 0

    def _countdown(
        self, request_id: str, steps: int, over: Callable[[str | None, bool], None]
    ) -> _Countdown:
        return _Countdown(request_id, steps, self._trace, over, self._threads.lock())

    def _wait_limit(self) -> TimeLimit:
        """Return the total limit of a step's wait for its copies."""
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
        """Post one layer; return the events of its end if the device copies it."""
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
        except Exception as error:  # a defect: it is unknown whether the copy writes
            log.exception("a copy between DRAM and HBM cannot be posted")
            reason = f"a copy between DRAM and HBM cannot be posted: {error}"
            countdown.step_over(step, start_ns, reason, settled=False)
            then()
            return ()
        self._stalled.posted(own_agent)
        self._pump.watch(transfer, over)
        return events
