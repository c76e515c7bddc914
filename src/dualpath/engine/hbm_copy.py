"""Host-device copies of whole prompts and single blocks: labels 8-9 of Fig. 4, and back.

Their steps have both ends in this engine.  Without a copier of the device they are transfers of the
engine to itself, the form of the CNIC-assisted copies of §5.2: with an RDMA NIC they are what the
paper does.
"""

from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.errors import DualPathError, TransportError
from dualpath.engine.device import Device, DeviceEvent
from dualpath.engine.event_waiter import EventWaiter
from dualpath.engine.pump import Completion, TransferPump
from dualpath.engine.step_transfers import StepTransfers
from dualpath.engine.threads import OS_THREADS, Event, Lock, Threads
from dualpath.engine.trace import TraceRecorder
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step
from dualpath.transport.contract import RegionInfo

#: Longest an engine step waits for one block to leave HBM.
COPY_DEADLINE_S = 30.0


class HbmLayout(msgspec.Struct, frozen=True):
    """The engine's KV memory: ``region_of_layer[l]`` names the region that holds layer ``l``.

    With layerwise prefill several layers share a region.  ``capacity_tokens`` of all layers.
    """

    regions: tuple[RegionInfo, ...]
    region_of_layer: tuple[str, ...]
    capacity_tokens: int


class _Countdown:
    """Collects steps of one request; calls ``over`` with the first error, or None, after the last.

    What was executed enters the trace first.
    """

    def __init__(
        self,
        request_id: str,
        left: int,
        trace: TraceRecorder,
        over: Callable[[str | None], None],
        lock: Lock,
    ) -> None:
        self._request_id = request_id
        self._left = left
        self._trace = trace
        self._over = over
        self._error: str | None = None
        self._executed: list[tuple[str, Executed]] = []
        self._lock = lock

    def step_over(self, step: Step, start_ns: int, error: str | None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if error is None:
                done = Executed(step, start_ns, self._trace.now_ns())
                self._executed.append((self._request_id, done))
            last = self._left == 0
        if last:
            self._trace.moved(self._executed, request=self._request_id)
            self._over(self._error)


class HbmCopier:
    """Copies between an engine's own DRAM and HBM, all layers of some blocks at a time.

    Copies start when the computation queued before them is over, as it may still use the blocks.
    """

    def __init__(
        self,
        transfers: StepTransfers,
        pump: TransferPump,
        device: Device,
        after: EventWaiter,
        trace: TraceRecorder,
        threads: Threads = OS_THREADS,
    ) -> None:
        self._threads = threads
        self._transfers = transfers
        self._pump = pump
        self._device = device
        self._after = after
        self._trace = trace

    def into_hbm(
        self,
        request_id: str,
        steps: Sequence[Step],
        hbm_blocks: Sequence[int],
        done: Callable[[str | None], None],
    ) -> None:
        """Post H2D of all layers; ``done`` gets the first error once all are over."""
        countdown = self._countdown(request_id, steps, done)
        earlier = self._device.record()

        def post(device_error: str | None) -> None:
            for step in steps:
                if device_error is not None:
                    countdown.step_over(step, 0, device_error)
                else:
                    self._post(step, hbm_blocks, earlier, countdown)

        if self._device.copier is not None:
            post(None)
        else:
            self._after.call(earlier, post)

    def out_of_hbm(
        self, steps: Sequence[Step], hbm_block: int, done: Callable[[str | None], None]
    ) -> None:
        """Copy one block to its staging slot; ``done`` gets None or why it failed, once it is over.

        Returns when computation queued from now on may overwrite the block.  Raises
        ``TransportError`` if the copy does not end: ``done`` was not called then, and the slot
        must never be reused.
        """
        over = self._threads.event()

        def ended(error: str | None) -> None:
            try:
                done(error)
            finally:
                over.set()

        earlier = self._device.record()
        if self._device.copier is None:
            earlier.wait()
        countdown = self._countdown("", steps, ended)
        events = [self._post(step, [hbm_block], earlier, countdown) for step in steps]
        if self._device.copier is None:
            self._wait(over)
        for event in events:
            if event is not None:
                self._device.wait(event)

    def _countdown(
        self, request_id: str, steps: Sequence[Step], over: Callable[[str | None], None]
    ) -> _Countdown:
        return _Countdown(request_id, len(steps), self._trace, over, self._threads.lock())

    def _wait(self, over: Event) -> None:
        if not over.wait(COPY_DEADLINE_S):
            raise TransportError(
                f"copy of a generated block is not over after {COPY_DEADLINE_S:g} s; its staging "
                "slot is given up"
            )

    def _post(
        self, step: Step, hbm_blocks: Sequence[int], earlier: DeviceEvent, countdown: _Countdown
    ) -> DeviceEvent | None:
        """Post one layer; return the event of its end if the device copies it itself."""
        start_ns = self._trace.now_ns()

        def over(completion: Completion) -> None:
            countdown.step_over(step, start_ns, completion.error)

        try:
            transfer, event = self._transfers.post(step, hbm_blocks, earlier=earlier)
        except DualPathError as error:
            countdown.step_over(step, start_ns, str(error))
            return None
        self._pump.watch(transfer, over)
        return event
