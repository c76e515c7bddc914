"""What one rank of an engine needs to move its slice of every block, be it the leader or not.

The leader's traffic manager stands on one; a follower is little more.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dualpath.core.addresses import AgentAddress, EngineAddress
from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import HostProcess
from dualpath.core.parts import PartSlice
from dualpath.engine.buffer import BUFFER_REGION, STAGING_REGION, buffer_region
from dualpath.engine.chunk_transfers import BlockHolder
from dualpath.engine.counters import Counters
from dualpath.engine.device import Device
from dualpath.engine.engine_memory import open_memory
from dualpath.engine.hbm_copy import HbmCopier
from dualpath.engine.hbm_layout import HbmLayout, PartViews
from dualpath.engine.health import Health
from dualpath.engine.movers import open_movers
from dualpath.engine.peers import Peers, agent_address
from dualpath.engine.rank_work import RankWork
from dualpath.engine.ranks import ONE_RANK, RankGroup, TimedGroup
from dualpath.engine.settings import EngineSettings
from dualpath.engine.shared_loads import LoadExchange, SharedLoads
from dualpath.engine.stalls import MOST_TIMES
from dualpath.engine.step_transfers import ONLY, PrefillChunk, Replica
from dualpath.engine.threads import Threads, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.storage.host_process import this_process
from dualpath.transport.contract import Transport

#: How much longer than the longest forward pass one rank may be behind another.
_BEHIND_S = 30.0


class RankPlace(NamedTuple):
    """Whom a rank works with, and which of those that hold the same bytes it is.

    Ranks hold the same where there are fewer KV heads than ranks, or where KV is latent.
    ``this_process`` names the process that the rank is.  With an ``exchange`` between replicas each
    loads a part of what comes in (``shared_loads``).
    """

    group: RankGroup = ONE_RANK
    replica: Replica = ONLY
    this_process: Callable[[], HostProcess] = this_process
    exchange: LoadExchange | None = None


#: The place of an engine's only rank.
ALONE = RankPlace()


def rank_place(group: RankGroup, slices: int) -> tuple[RankPlace, PartSlice]:
    """Return the place of a rank whose group cuts KV into ``slices``, and the slice it holds.

    Neighbours hold the same one, as vLLM gives out heads.
    """
    replicas = group.size // slices
    place = RankPlace(group, Replica(group.rank % replicas, replicas))
    return place, PartSlice(group.rank // replicas, slices)


class Rank:
    """Memory, transport, threads and peers of one rank.

    Every rank of an engine makes one.  Raises ``ConfigError`` for memory or a network that cannot
    be had.
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
    ) -> None:
        self.geometry = geometry
        self.health = Health(threads)
        self.counters = Counters(threads)
        leads = place.group.rank == 0
        trace_out = settings.trace_out if leads else ""
        self.trace = TraceRecorder(trace_out or None, settings.engine_id, threads)
        limit_s = MOST_TIMES * settings.transfer_deadline_s + _BEHIND_S
        self.group = TimedGroup(place.group, self.health, limit_s)
        self.memory = memory = open_memory(settings, geometry, self.group)
        self.work = RankWork(self.memory.board, threads)
        views = PartViews(geometry, hbm)
        self.peers = Peers(
            *(settings.role, transport, views, threads), self.group.rank, self.group.size
        )
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
            self._nobody_knows if self.group.rank else lambda: None,
            shares_loads=place.exchange is not None,
        )
        self.copier = HbmCopier(self.movers, holder)
        self._place = place
        told = self.group.gather((agent_address(transport.info()), place.this_process()))
        #: How others reach the engine's ranks, and the processes of those but the first.
        self.agents: tuple[AgentAddress, ...] = tuple(agent for agent, _ in told)
        self.other_processes: tuple[HostProcess, ...] = tuple(process for _, process in told[1:])

    def shared_loads(self, chunks: Sequence[PrefillChunk], buffers: int) -> SharedLoads | None:
        """Return what ranks load for each other in a pass of these chunks; None if each loads all.

        ``buffers`` of layers in HBM.
        """
        replica, exchange = self._place.replica, self._place.exchange
        if exchange is None:
            return None
        resident = buffers >= self.geometry.layers
        return SharedLoads(exchange, replica, chunks, self.geometry, resident=resident)

    def _nobody_knows(self) -> None:
        """The leader would wait for this follower for ever."""
        self.health.fail("a transfer cannot be asked whether it still writes")

    def peer_up(self, peer: EngineAddress) -> None:
        """A peer joined, or another one: it is tried again."""
        for agent in peer.agents:
            self.movers.stalled.discard(agent.agent)
        self.peers.up(peer)

    def look(self) -> None:
        """Let time pass: go on with what has waited for other ranks."""
        self.group.look()
        self.work.look()

    def complaint(self) -> str | None:
        """Return why this rank should get no new work now, None if all is well."""
        if self.movers.stalled.is_shut(self.movers.transfers.own_agent):
            return "copies within this engine stall"
        return self.health.complaint()

    def close(self, limit: TimeLimit) -> None:
        """Stop what moves bytes, within the limit."""
        self.health.close()
        self.movers.after.close(limit)
        self.movers.pump.close(limit)
