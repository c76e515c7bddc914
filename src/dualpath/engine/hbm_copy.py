"""Host-device copies of whole prompts and single blocks: labels 8-9 of Fig. 4, and back.

Both are transfers of the engine to itself, the form of the CNIC-assisted copies of §5.2: with an
RDMA NIC they are what the paper does, without one they run through shared memory.
"""

import threading
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.errors import DualPathError, TransportError
from dualpath.engine.buffer import BUFFER_REGION, BlockBuffer
from dualpath.engine.counters import Counter, Counters
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
    """Copies between an engine's own DRAM and HBM, all layers of some blocks at a time."""

    def __init__(
        self,
        transport: Transport,
        pump: TransferPump,
        counters: Counters,
        layout: HbmLayout,
        agent: str,
    ) -> None:
        self._transport = transport
        self._pump = pump
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
        for layer, region in enumerate(self._layout.region_of_layer):
            self._post(
                BUFFER_REGION, buffer.pieces(slots, layer), region, hbm_blocks, countdown.part_over
            )
        piece_bytes = buffer.geometry.layer_block_bytes
        self._counters.add(Counter.H2D_BYTES, layers * len(slots) * piece_bytes)

    def out_of_hbm(self, block_id: int, staging: BlockBuffer, slot: int) -> str | None:
        """Copy one block to a staging slot and wait; return why it failed, None if it did not.

        Raises ``TransportError`` if the copy does not end: the slot must then never be reused.
        """
        over = threading.Event()
        errors: list[str] = []

        def ended(error: str | None) -> None:
            if error is not None:
                errors.append(error)
            over.set()

        countdown = _Countdown(len(self._layout.region_of_layer), ended)
        for layer, region in enumerate(self._layout.region_of_layer):
            pieces = staging.pieces([slot], layer)
            self._post(region, [block_id], STAGING_REGION, pieces, countdown.part_over)
        if not over.wait(COPY_DEADLINE_S):
            raise TransportError(
                f"copy of a generated block is not over after {COPY_DEADLINE_S:g} s; its staging "
                "slot is given up"
            )
        return errors[0] if errors else None

    def _post(
        self,
        source: str,
        source_pieces: PieceIndices,
        destination: str,
        destination_pieces: PieceIndices,
        ended: Callable[[str | None], None],
    ) -> None:
        def over(completion: Completion) -> None:
            ended(completion.error)

        try:
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
            return
        self._pump.watch(transfer, over)
