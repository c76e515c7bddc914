"""Host-device copies of whole prompts and single blocks: labels 8-9 of Fig. 4, and back.

They are transfers of the engine to itself, the form of the CNIC-assisted copies of §5.2: with an
RDMA NIC they are what the paper does.  A device with a copier does them itself, on streams of its
own.
"""

import threading
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.errors import DualPathError, TransportError
from dualpath.engine.buffer import BUFFER_REGION, BlockBuffer
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.device import Device, DeviceEvent
from dualpath.engine.event_waiter import EventWaiter
from dualpath.engine.pump import Completion, TransferPump
from dualpath.transport.contract import Direction, PieceIndices, RegionInfo, Transport

#: Region through which generated blocks leave HBM.
STAGING_REGION = "staging"

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
    """Calls ``over`` with the first error, or None, when ``left`` parts have ended."""

    def __init__(self, left: int, over: Callable[[str | None], None]) -> None:
        self._left = left
        self._over = over
        self._error: str | None = None
        self._lock = threading.Lock()

    def part_over(self, error: str | None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            last = self._left == 0
        if last:
            self._over(self._error)


class HbmCopier:
    """Copies between an engine's own DRAM and HBM, all layers of some blocks at a time.

    Copies start when the computation queued before them is over, as it may still use the blocks.
    """

    def __init__(
        self,
        transport: Transport,
        pump: TransferPump,
        device: Device,
        after: EventWaiter,
        counters: Counters,
        layout: HbmLayout,
        agent: str,
    ) -> None:
        self._transport = transport
        self._pump = pump
        self._device = device
        self._after = after
        self._counters = counters
        self._layout = layout
        self._agent = agent

    def into_hbm(
        self,
        buffer: BlockBuffer,
        slots: Sequence[int],
        hbm_blocks: Sequence[int],
        done: Callable[[str | None], None],
    ) -> None:
        """Post H2D of all layers; ``done`` gets the first error once all are over."""
        layers = len(self._layout.region_of_layer)
        countdown = _Countdown(layers, done)
        earlier = self._device.record()

        def post(device_error: str | None) -> None:
            for layer, region in enumerate(self._layout.region_of_layer):
                if device_error is not None:
                    countdown.part_over(device_error)
                    continue
                pieces = buffer.pieces(slots, layer)
                self._post(BUFFER_REGION, pieces, region, hbm_blocks, earlier, countdown.part_over)

        if self._device.copier is not None:
            post(None)
        else:
            self._after.call(earlier, post)
        piece_bytes = buffer.geometry.layer_block_bytes
        self._counters.add(Counter.H2D_BYTES, layers * len(slots) * piece_bytes)

    def out_of_hbm(
        self,
        block_id: int,
        staging: BlockBuffer,
        slot: int,
        done: Callable[[str | None], None],
    ) -> None:
        """Copy one block to a staging slot; ``done`` gets None or why it failed, once it is over.

        Returns when computation queued from now on may overwrite the block.  Raises
        ``TransportError`` if the copy does not end: ``done`` was not called then, and the slot
        must never be reused.
        """
        over = threading.Event()

        def ended(error: str | None) -> None:
            try:
                done(error)
            finally:
                over.set()

        earlier = self._device.record()
        if self._device.copier is None:
            earlier.wait()
        countdown = _Countdown(len(self._layout.region_of_layer), ended)
        events = []
        for layer, region in enumerate(self._layout.region_of_layer):
            pieces = staging.pieces([slot], layer)
            event = self._post(
                region, [block_id], STAGING_REGION, pieces, earlier, countdown.part_over
            )
            if event is not None:
                events.append(event)
        self._counters.add(Counter.D2H_BYTES, staging.geometry.full_block_bytes)
        if self._device.copier is None:
            self._wait(over)
        for event in events:
            self._device.wait(event)

    def _wait(self, over: threading.Event) -> None:
        if not over.wait(COPY_DEADLINE_S):
            raise TransportError(
                f"copy of a generated block is not over after {COPY_DEADLINE_S:g} s; its staging "
                "slot is given up"
            )

    def _post(
        self,
        source: str,
        source_pieces: PieceIndices,
        destination: str,
        destination_pieces: PieceIndices,
        earlier: DeviceEvent,
        ended: Callable[[str | None], None],
    ) -> DeviceEvent | None:
        """Post one layer; return the event of its end if the device copies it itself."""

        def over(completion: Completion) -> None:
            ended(completion.error)

        try:
            if self._device.copier is not None:
                copy = self._device.copier.copy(
                    source, source_pieces, destination, destination_pieces, earlier
                )
                self._pump.watch(copy, over)
                return copy.event
            transfer = self._transport.post(
                Direction.WRITE,
                source,
                source_pieces,
                self._agent,
                destination,
                destination_pieces,
            )
        except DualPathError as error:
            ended(str(error))
            return None
        self._pump.watch(transfer, over)
        return None
