"""From a step of the plan to a posted transfer: which regions, which pieces, which way.

Where a step begins and ends says all of it.  Both ends in this engine: a copy, by the device where
it has a copier, else by the transport to itself (§5.2).  One end here: a write to the other engine
or a read from it; the prefill engine starts all of these.
"""

from collections.abc import Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import PrefillTransfer
from dualpath.engine.buffer import BUFFER_REGION, STAGING_REGION, layer_pieces
from dualpath.engine.counters import Counters
from dualpath.engine.device import PASSED, Device, DeviceEvent
from dualpath.plan.movements import Place
from dualpath.plan.steps import PromptLayout, Step
from dualpath.transport.contract import Direction, PieceIndices, Transfer, Transport

_DRAM_REGIONS = {
    Place.PE_BUFFER: BUFFER_REGION,
    Place.DE_BUFFER: BUFFER_REGION,
    Place.DE_STAGING: STAGING_REGION,
}


class PrefillChunk(msgspec.Struct, frozen=True):
    """One request's part in a forward pass.

    ``hbm_blocks`` are the engine's block ids for prompt blocks ``0 … chunk.end - 1``;
    ``decode_agents`` are the transport agents of the DE that this rank speaks with.
    """

    prefill_transfer: PrefillTransfer
    chunk: BlockRun
    hbm_blocks: tuple[int, ...]
    decode_agents: tuple[str, ...]

    def layout(self, geometry: BlockGeometry) -> PromptLayout:
        """Return the plan's view of the prompt."""
        transfer = self.prefill_transfer
        return PromptLayout(geometry, transfer.prompt_tokens, transfer.hits, transfer.de_slots)


class StepTransfers:
    """Posts the steps of an engine of one side; ``hbm_region[l]`` holds layer ``l``."""

    def __init__(
        self,
        side: Role,
        geometry: BlockGeometry,
        transport: Transport,
        device: Device,
        counters: Counters,
        agent: str,
        hbm_region: Sequence[str],
    ) -> None:
        self._side = side
        self._geometry = geometry
        self._transport = transport
        self._device = device
        self._counters = counters
        self._agent = agent
        self._hbm_region = hbm_region

    @property
    def own_agent(self) -> str:
        """This engine's transport agent: the other end of copies within it."""
        return self._agent

    def agent_of(self, step: Step, peers: Sequence[str]) -> str:
        """Return the agent at the other end of a step: this rank's own, or one of ``peers``.

        Those have the layers in turn, so that their NICs carry about as much each.
        """
        if step.source.side is step.destination.side:
            return self._agent
        assert step.layer is not None, "Full Blocks are moved by storage"
        return peers[step.layer % len(peers)]

    def post(
        self,
        step: Step,
        hbm_blocks: Sequence[int],
        peers: Sequence[str] = (),
        earlier: DeviceEvent = PASSED,
    ) -> tuple[Transfer, DeviceEvent | None]:
        """Post a step of one layer; with the event of its end if the device does it.

        ``hbm_blocks`` are the engine's block ids of the request's blocks 0 and following, ``peers``
        are transport agents of the other engine, if the step has an end there.  Everything the
        step depends on must be over, except that a copy of the device waits for ``earlier``.
        Raises ``TransportError``.
        """
        posted = self._post(step, hbm_blocks, peers, earlier)
        self._counters.moved(step)
        return posted

    def _post(
        self, step: Step, hbm_blocks: Sequence[int], peers: Sequence[str], earlier: DeviceEvent
    ) -> tuple[Transfer, DeviceEvent | None]:
        source = self._pieces(step.source, step, hbm_blocks)
        destination = self._pieces(step.destination, step, hbm_blocks)
        within = step.source.side is step.destination.side
        if within and self._device.copier is not None:
            copy = self._device.copier.copy(*source, *destination, earlier)
            return copy, copy.event
        if step.source.side is self._side:
            direction, here, there = Direction.WRITE, source, destination
        else:
            direction, here, there = Direction.READ, destination, source
        agent = self.agent_of(step, peers)
        transfer = self._transport.post(
            direction, *here, agent, *there, traffic_class=step.traffic_class.value
        )
        return transfer, None

    def _pieces(
        self, place: Place, step: Step, hbm_blocks: Sequence[int]
    ) -> tuple[str, PieceIndices]:
        """Return the region and the pieces of it that a step reads or writes at one end."""
        assert step.layer is not None, "Full Blocks are moved by storage"
        if (region := _DRAM_REGIONS.get(place)) is None:
            return self._hbm_region[step.layer], hbm_blocks[step.blocks.first : step.blocks.end]
        return region, layer_pieces(self._geometry, step.slots, step.layer)
