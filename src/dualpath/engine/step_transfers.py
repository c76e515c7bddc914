"""From a step of the plan to a posted transfer: which regions, which pieces, which way.

The prefill engine starts all of them: it writes its own buffer to its HBM, reads the DE's buffer
into its HBM and writes its HBM to the DE's buffer.  The first of these is a copy within the engine,
which the device does itself where it has a copier.
"""

from collections.abc import Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.control import PrefillTransfer
from dualpath.core.errors import TransportError
from dualpath.core.runs import BlockRun
from dualpath.engine.buffer import BUFFER_REGION, BlockBuffer
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.device import PASSED, Device, DeviceEvent
from dualpath.plan.steps import (
    LOAD_FROM_DE_BUFFER,
    RELOAD_CHUNK,
    SEND_HITS,
    SEND_MISSES,
    Place,
    PromptLayout,
    Step,
)
from dualpath.transport.contract import Direction, PieceIndices, Transfer, Transport

_Operands = tuple[Direction, str, PieceIndices, str, str, PieceIndices]

_COUNTER_OF = {
    Place.PE_BUFFER: Counter.H2D_BYTES,
    Place.DE_BUFFER: Counter.DE_TO_PE_BYTES,
    Place.PE_HBM: Counter.PE_TO_DE_BYTES,
}
_PART_OF = {
    LOAD_FROM_DE_BUFFER.label: Counter.DE_HIT_BYTES,
    RELOAD_CHUNK.label: Counter.RELOAD_BYTES,
    SEND_HITS.label: Counter.PE_HIT_BYTES,
    SEND_MISSES.label: Counter.MISS_BYTES,
}


class PrefillChunk(msgspec.Struct, frozen=True):
    """One request's part in a forward pass.

    ``hbm_blocks`` are the engine's block ids for prompt blocks ``0 … chunk.end - 1``;
    ``decode_agent`` is the transport agent of the DE.
    """

    prefill_transfer: PrefillTransfer
    chunk: BlockRun
    hbm_blocks: tuple[int, ...]
    decode_agent: str

    def layout(self, geometry: BlockGeometry) -> PromptLayout:
        """Return the plan's view of the prompt."""
        transfer = self.prefill_transfer
        return PromptLayout(
            geometry=geometry, prompt_tokens=transfer.prompt_tokens, hits=transfer.hits
        )


class StepTransfers:
    """Posts steps of a prefill engine's plans; ``hbm_region[l]`` holds layer ``l``."""

    def __init__(
        self,
        buffer: BlockBuffer,
        transport: Transport,
        device: Device,
        counters: Counters,
        agent: str,
        hbm_region: Sequence[str],
    ) -> None:
        self._buffer = buffer
        self._transport = transport
        self._device = device
        self._counters = counters
        self._agent = agent
        self._hbm_region = hbm_region

    def post(
        self, chunk: PrefillChunk, step: Step, layer: int
    ) -> tuple[Transfer, DeviceEvent | None]:
        """Post a step; with the event of its end if the device does it.

        Raises ``TransportError``.  Everything the step depends on must be over: a copy of the
        device waits for nothing.
        """
        posted = self._post(chunk, step, layer)
        self._counters.add(_COUNTER_OF[step.source], step.bytes)
        if (part := _PART_OF.get(step.label)) is not None:
            self._counters.add(part, step.bytes)
        if layer == 0 and step.destination is Place.PE_HBM:
            self._counters.add(Counter.LOADED_BLOCKS, step.blocks.count)
        return posted

    def _post(
        self, chunk: PrefillChunk, step: Step, layer: int
    ) -> tuple[Transfer, DeviceEvent | None]:
        operands: _Operands
        hbm = self._hbm_region[layer]
        hbm_blocks = chunk.hbm_blocks[step.blocks.first : step.blocks.end]
        if step.source is Place.PE_BUFFER:
            local = self._buffer.pieces(_hit_slots(chunk, step.blocks), layer)
            if self._device.copier is not None:
                copy = self._device.copier.copy(BUFFER_REGION, local, hbm, hbm_blocks, PASSED)
                return copy, copy.event
            operands = (Direction.WRITE, BUFFER_REGION, local, self._agent, hbm, hbm_blocks)
        else:
            de_slots = chunk.prefill_transfer.de_slots[step.blocks.first : step.blocks.end]
            remote = self._buffer.pieces(de_slots, layer)
            direction = Direction.READ if step.source is Place.DE_BUFFER else Direction.WRITE
            agent = chunk.decode_agent
            operands = (direction, hbm, hbm_blocks, agent, BUFFER_REGION, remote)
        transfer = self._transport.post(*operands, traffic_class=step.traffic_class.value)
        return transfer, None


def _hit_slots(chunk: PrefillChunk, blocks: BlockRun) -> tuple[int, ...]:
    for run in chunk.prefill_transfer.hits:
        if run.blocks == blocks:
            return run.slots
    raise TransportError(
        f"request {chunk.prefill_transfer.request_id}: hit blocks {blocks.first}..{blocks.end} "
        "are in no buffer; the plan and the hand-over disagree"
    )
