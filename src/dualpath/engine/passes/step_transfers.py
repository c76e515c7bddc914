"""From a step of the plan to a posted transfer: its regions, pieces and direction.

These follow from the source and destination of the step.  With both ends in this engine it is a
copy, by the device's copier or, without one, by a transport to itself (§5.2).  With one end in this
engine it is a write to the other engine or a read from it; the prefill engine starts these, and a
decode engine reads Full Blocks from another one's buffer.

Each part of a layer is a transfer of the transport; together they count as one transfer.
"""

import functools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.modes import Handover
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import PrefillTransfer
from dualpath.engine.buffer.block_buffer import BUFFER_REGION, STAGING_REGION
from dualpath.engine.counters import Counters
from dualpath.engine.passes.device import PASSED, Device, DeviceCopier, DeviceCopy, DeviceEvent
from dualpath.engine.passes.hbm_layout import HBM_REGION, HbmLayout, view_name
from dualpath.plan.movements import Place
from dualpath.plan.steps import PromptLayout, Step
from dualpath.transport.contract import Direction, PieceIndices, Transfer, Transport, post_together

_DRAM_REGIONS = {
    Place.PE_BUFFER: BUFFER_REGION,
    Place.DE_BUFFER: BUFFER_REGION,
    Place.THIRD_BUFFER: BUFFER_REGION,
    Place.DE_STAGING: STAGING_REGION,
}


class PrefillChunk(msgspec.Struct, frozen=True):
    """One request's part in a forward pass: the ``chunk`` of its prompt that the pass computes.

    ``hbm_blocks`` are the engine's block ids, at least of prompt blocks ``0 … chunk.end - 1``;
    ``decode_agents`` are the transport agents of the DE that this rank is connected to, and
    ``third_agents`` those of each third DE, by its id; none before ``connected``.
    """

    transfer: PrefillTransfer
    chunk: BlockRun
    hbm_blocks: tuple[int, ...]
    decode_agents: tuple[str, ...] = ()
    third_agents: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def without_peers(self) -> "PrefillChunk":
        """Return the chunk for a rank that moves nothing of it."""
        return PrefillChunk(self.transfer, self.chunk, self.hbm_blocks[: self.chunk.end])

    def connected(self, agents_of: Callable[[str, str], tuple[str, ...]]) -> "PrefillChunk":
        """Return the chunk to be moved by a rank that is connected to its DE and third DEs.

        ``agents_of`` returns the agents of an engine, by its id and its epoch, or raises.
        """
        transfer = self.transfer
        decode_agents = agents_of(transfer.decode_engine, transfer.decode_epoch)
        third_agents = tuple(
            (third.engine_id, agents_of(third.engine_id, third.epoch)) for third in transfer.thirds
        )
        return msgspec.structs.replace(
            self.without_peers(), decode_agents=decode_agents, third_agents=third_agents
        )

    def agents_at(self, step: Step) -> tuple[str, ...]:
        """Return the agents of the engine at the other end of a step, if it has one there."""
        return dict(self.third_agents)[step.third] if step.third else self.decode_agents

    @property
    def peers(self) -> tuple[tuple[str, ...], ...]:
        """The agents of each engine that its steps need."""
        return (self.decode_agents, *(agents for _, agents in self.third_agents))

    def layout(self, geometry: BlockGeometry) -> PromptLayout:
        """Return the plan's view of the prompt."""
        transfer = self.transfer
        if transfer.de_hbm_blocks:
            there, handover = transfer.de_hbm_blocks, Handover.HBM
        else:
            there, handover = transfer.de_slots, Handover.BUFFER
        return PromptLayout(geometry, transfer.prompt_tokens, transfer.hits, there, handover)


class Replica(msgspec.Struct, frozen=True):
    """Replica ``index`` of ``count`` ranks that have the same bytes in HBM.

    Sends out of HBM are divided among replicas, block by block in turn; every replica loads all
    blocks, or at a PE with ``shared_loads`` one block in turn, which it gives to the others.
    """

    index: int = 0
    count: int = 1

    def turn(self, step: Step, position: int) -> int:
        """Return the replica that moves block ``position`` of a step that is divided among them.

        Generated blocks have no position in a prompt: their slot is used instead.
        """
        if step.destination is Place.DE_STAGING:
            return step.slots[position] % self.count
        return (step.blocks.first + position) % self.count


#: A rank without replicas.
ONLY = Replica()
_HBM = (Place.PE_HBM, Place.DE_HBM)


class _End(msgspec.Struct, frozen=True):
    """The pieces at one end of a step, with one region for each part of its layer."""

    regions: tuple[str, ...]
    pieces: PieceIndices


class StepTransfers:
    """Posts the steps of an engine of one side, between Full Blocks and its ``hbm``.

    ``shares_loads``: blocks that this rank does not load come from another replica.
    """

    def __init__(
        self,
        side: Role,
        transport: Transport,
        device: Device,
        counters: Counters,
        agent: str,
        hbm: HbmLayout,
        replica: Replica = ONLY,
        *,
        shares_loads: bool = False,
    ) -> None:
        self._side = side
        self._transport = transport
        self._device = device
        self._counters = counters
        self._agent = agent
        self._replica = replica
        self._shares_loads = shares_loads
        #: See ``HbmLayout``.
        self.group_of_layer = hbm.group_of_layer
        self.layer_name = hbm.name_of
        self._hbm_regions = [tuple(part.region.name for part in parts) for parts in hbm.layers]
        self._view_names = {
            region: [
                tuple(view_name(region, layer, part) for part in range(len(parts)))
                for layer, parts in enumerate(hbm.layers)
            ]
            for region in (BUFFER_REGION, STAGING_REGION, HBM_REGION)
        }

    @property
    def own_agent(self) -> str:
        """This engine's transport agent: the other end of copies within it."""
        return self._agent

    def agent_of(self, step: Step, peers: Sequence[str]) -> str:
        """Return the agent at the other end of a step: this rank's own, or one of ``peers``.

        Layers are assigned to ``peers`` in turn, so that the load is spread over their NICs.
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
    ) -> tuple[Transfer, tuple[DeviceEvent, ...]]:
        """Post a step of one layer; return also the events of its end if the device copies it.

        ``hbm_blocks`` are the engine's block ids of the request's blocks from 0 on, ``peers`` are
        transport agents of the other engine, if the step has an end there.  All dependencies of the
        step must be over, except that a copy by the device waits for ``earlier``.  Raises
        ``TransportError`` if nothing was posted.
        """
        source = self._end(step.source, step, hbm_blocks)
        destination = self._end(step.destination, step, hbm_blocks)
        within = step.source.side is step.destination.side
        events: list[DeviceEvent] = []
        if within and self._device.copier is not None:
            posts = _copies(self._device.copier, source, destination, earlier, events)
        elif step.source.side is self._side:
            posts = self._posts(Direction.WRITE, source, destination, step, peers)
        else:
            posts = self._posts(Direction.READ, destination, source, step, peers)
        transfer = post_together(posts)
        self._counters.moved(step, step.bytes * self._copies_of(step))
        return transfer, tuple(events)

    def fetch(self, step: Step, source_slot: int, agent: str) -> Transfer:
        """Post the move of one Full Block from a slot of another DE's buffer into this DE's.

        Raises ``TransportError`` if nothing was posted.
        """
        transfer = self._transport.post(
            Direction.READ,
            *(BUFFER_REGION, step.slots, agent, BUFFER_REGION, (source_slot,)),
            traffic_class=step.traffic_class.value,
        )
        self._counters.moved(step)
        return transfer

    def _copies_of(self, step: Step) -> int:
        """Return the number of ranks that move each byte of a step; rank 0 counts for all."""
        return 1 if self._divided(step) else self._replica.count

    def _divided(self, step: Step) -> bool:
        """Whether the blocks of a step are divided among the replicas."""
        loads = self._shares_loads and step.destination is Place.PE_HBM
        return self._replica.count > 1 and (loads or step.source in _HBM)

    def _posts(
        self, direction: Direction, here: _End, there: _End, step: Step, peers: Sequence[str]
    ) -> list[Callable[[], Transfer]]:
        agent = self.agent_of(step, peers)
        return [
            functools.partial(
                self._transport.post,
                direction,
                *(region, here.pieces),
                agent,
                *(other_region, there.pieces),
                traffic_class=step.traffic_class.value,
            )
            for region, other_region in zip(here.regions, there.regions, strict=True)
        ]

    def _end(self, place: Place, step: Step, hbm_blocks: Sequence[int]) -> _End:
        """Return the regions and pieces of this rank at one end of a step."""
        assert step.layer is not None, "Full Blocks are moved by storage"
        region = _DRAM_REGIONS.get(place, HBM_REGION)
        if place in _HBM and place.side is self._side:
            regions = self._hbm_regions[step.layer]
            pieces = tuple(hbm_blocks[step.blocks.first : step.blocks.end])
        else:
            regions, pieces = self._view_names[region][step.layer], step.slots
        if self._divided(step):
            replica = self._replica
            mine = (p for i, p in enumerate(pieces) if replica.turn(step, i) == replica.index)
            pieces = tuple(mine)
        return _End(regions, _indices(pieces))


@functools.lru_cache(maxsize=256)
def _indices(pieces: tuple[int, ...]) -> PieceIndices:
    """Return pieces in the form of transports, cached for all layers of a prompt."""
    indices = np.array(pieces, dtype=np.int64)
    indices.setflags(write=False)
    return indices


def _copies(
    copier: DeviceCopier,
    source: _End,
    destination: _End,
    earlier: DeviceEvent,
    events: list[DeviceEvent],
) -> list[Callable[[], Transfer]]:
    """Return a callable per part that queues its copy and adds the event of its end."""

    def copy(source_region: str, destination_region: str) -> DeviceCopy:
        queued = copier.copy(
            source_region, source.pieces, destination_region, destination.pieces, earlier
        )
        events.append(queued.event)
        return queued

    pairs = zip(source.regions, destination.regions, strict=True)
    return [functools.partial(copy, *pair) for pair in pairs]
