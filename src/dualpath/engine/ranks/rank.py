"""The resources of one rank of an engine, leader or follower, for moving its slice of every block.

The leader's traffic manager is built on a ``Rank``; a follower adds little to it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dualpath.core.blocks import BlockGeometry, PartSlice
from dualpath.core.cluster import AgentAddress, EngineAddress, HostProcess, Role
from dualpath.engine.buffer.block_buffer import BUFFER_REGION, STAGING_REGION, buffer_region
from dualpath.engine.buffer.engine_memory import EngineMemory, open_memory
from dualpath.engine.control.peers import Peers, agent_address
from dualpath.engine.counters import Counters
from dualpath.engine.passes.device import Device
from dualpath.engine.passes.hbm_copy import HbmCopier
from dualpath.engine.passes.hbm_layout import HbmLayout, PartViews
from dualpath.engine.passes.pass_transfers import BlockHolder
from dualpath.engine.passes.pump import MAX_DEADLINES, open_movers
from dualpath.engine.passes.step_transfers import ONLY, PrefillChunk, Replica
from dualpath.engine.ranks.group import (
    ONE_RANK,
    LoadExchange,
    RankGroup,
    RankWork,
    SharedLoads,
    TimedGroup,
)
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import Health, Threads, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.node.host_process import this_process
from dualpath.transport.contract import Transport

#: Allowed delay of one rank behind another, in addition to the longest forward pass.
_RANK_DELAY_S = 30.0


class RankPlace(NamedTuple):
    """The group of a rank, and its index among the ranks that replicate the same bytes.

    Ranks replicate KV if there are fewer KV heads than ranks, or if KV is latent.  ``this_process``
    identifies the process of the rank.  With an ``exchange`` each replica loads a part of the KV
    (``shared_loads``).  ``memory`` is that of the process's former data plane, None for new one.
    """

    group: RankGroup = ONE_RANK
    replica: Replica = ONLY
    this_process: Callable[[], HostProcess] = this_process
    exchange: LoadExchange | None = None
    memory: EngineMemory | None = None


#: The place of an engine's only rank.
ALONE = RankPlace()


def rank_place(group: RankGroup, slices: int) -> tuple[RankPlace, PartSlice]:
    """Return the place of a rank in a group that divides KV into ``slices``, and its slice.

    Neighbouring ranks hold the same slice, as in vLLM.
    """
    replicas = group.size // slices
    place = RankPlace(group, Replica(group.rank % replicas, replicas))
    return place, PartSlice(group.rank // replicas, slices)


def _hbm_refusal(settings: EngineSettings, hbm: HbmLayout, ranks: int, *, reserves: bool) -> str:
    """Return why an engine with this HBM takes no part in hand-overs in HBM, empty if it does."""
    if ranks > 1:
        return f"it has {ranks} ranks, and KV is handed over in HBM between engines of one rank"
    if settings.role is Role.PREFILL:
        return ""
    if not reserves:
        return "no part of its HBM receives prompts; set receive_hbm_share"
    if settings.transport == "memory" and (hbm.owner is None or hbm.owner.file is None):
        return (
            "its transport is memory, and its HBM is not in a memory file that other processes can "
            "map (CUDA IPC is not used); set transport to auto or nixl"
        )
    return ""


class Rank:
    """Memory, transport, threads and peers of one rank.

    ``reserves_hbm``: a DE can reserve HBM for prompts that PEs send there.
    Every rank of an engine creates one.  Raises ``ConfigError`` if memory or the network is not
    available.
    """

    def __init__(
        self,
        settings: EngineSettings,
        geometry: BlockGeometry,
        transport: Transport,
        hbm: HbmLayout,
        device: Device,
        holder: BlockHolder,
        threads: Threads,
        place: RankPlace,
        *,
        reserves_hbm: bool = False,
    ) -> None:
        self.geometry = geometry
        self.health = Health(threads)
        self.counters = Counters(threads)
        leads = place.group.rank == 0
        trace_out = settings.trace_out if leads else ""
        self.trace = TraceRecorder(trace_out or None, settings.engine_id, threads)
        limit_s = MAX_DEADLINES * settings.transfer_deadline_s + _RANK_DELAY_S
        self.group = TimedGroup(place.group, self.health, limit_s)
        self.memory = memory = place.memory or open_memory(settings, geometry, self.group)
        self.work = RankWork(self.memory.board, threads)
        views = PartViews(geometry, hbm)
        own_views = views if settings.role is Role.PREFILL else None
        self.peers = Peers(transport, own_views, threads, self.group.rank, self.group.size)
        self.movers = open_movers(
            settings,
            transport,
            device,
            (
                (buffer_region(BUFFER_REGION, geometry, memory.buffer), memory.buffer),
                (buffer_region(STAGING_REGION, geometry, memory.staging), memory.staging),
            ),
            hbm,
            views,
            self.counters,
            self.trace,
            self.health,
            place.replica,
            self._fail_unsettled if self.group.rank else lambda: None,
            shares_loads=place.exchange is not None,
        )
        self.copier = HbmCopier(self.movers, holder)
        self._place = place
        #: Why prefill engines may not write into this engine's HBM, empty if they may.
        self.hbm_refusal = _hbm_refusal(settings, hbm, self.group.size, reserves=reserves_hbm)
        offered = hbm.remote_views if settings.role is Role.DECODE and not self.hbm_refusal else ()
        address = agent_address(transport.info(), offered)
        ranks = self.group.gather((address, place.this_process()))
        #: The addresses of all ranks, and the processes of all ranks except the first.
        self.agents: tuple[AgentAddress, ...] = tuple(agent for agent, _ in ranks)
        self.other_processes: tuple[HostProcess, ...] = tuple(process for _, process in ranks[1:])

    def shared_loads(self, chunks: Sequence[PrefillChunk], buffers: int) -> SharedLoads | None:
        """Return the shared loads of a pass of these chunks; None if each rank loads everything.

        ``buffers`` is the number of layer regions in HBM.
        """
        replica, exchange = self._place.replica, self._place.exchange
        if exchange is None:
            return None
        resident = buffers >= self.geometry.layers
        return SharedLoads(exchange, replica, chunks, self.geometry, resident=resident)

    def _fail_unsettled(self) -> None:
        """Fail this follower, as the leader would wait forever for it."""
        self.health.fail("a transfer cannot be polled and may still write")

    def peer_up(self, peer: EngineAddress) -> None:
        """A peer joined, perhaps after a restart: its agents do not count as stalled."""
        for agent in peer.agents:
            self.movers.stalled.discard(agent.agent)
        self.peers.up(peer)

    def poll(self) -> None:
        """Check time limits and run callbacks that waited for other ranks."""
        self.group.poll()
        self.work.poll()

    def problem(self) -> str | None:
        """Return why this rank should get no new work now, None if it is healthy."""
        if self.movers.stalled.is_avoided(self.movers.transfers.own_agent):
            return "copies within this engine stall"
        return self.health.problem()

    def close(self, limit: TimeLimit) -> bool:
        """Stop the threads that move bytes, within the limit; return whether they have ended."""
        self.health.close()
        posted = self.movers.after.close(limit)
        return self.movers.pump.close(limit) and posted
