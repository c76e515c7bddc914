"""The engines that one engine shares requests with: of the other role, and DEs at a DE."""

import logging
from collections.abc import Iterable, Sequence

import msgspec

from dualpath.core.cluster import AgentAddress, EngineAddress, RegionAddress, Role, Writer
from dualpath.core.control import PeerDown
from dualpath.core.errors import ConfigError, TransportError
from dualpath.engine.buffer.block_buffer import BUFFER_REGION
from dualpath.engine.passes.hbm_layout import PartViews
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.transport.contract import AgentInfo, RegionInfo, Transport

log = logging.getLogger(__name__)

#: How long a connection of an earlier session stays open if its peer is not announced again; no
#: forward pass takes so long.
UNANNOUNCED_S = 120.0


class Peers:
    """Connects and disconnects peers; stores the processes that may still have transfers in flight.

    All transfers between engines are with a DE's memory: PEs start those with them, and a DE reads
    from another one.  So engines connect to DEs only, and only DEs have writers, which are PEs.  A
    peer that cannot be reached when it is announced does not affect others; its connection is
    retried when it is needed.  Rank ``rank`` of ``ranks`` connects only to its share of a peer's
    agents.  ``views`` are those by which a PE addresses parts of blocks; a DE reads whole blocks of
    other DEs, and has None.

    In each session a peer is announced before the first request that needs it.  Connections of the
    session before stay, as a forward pass may still use them; those of peers that are not
    announced within ``UNANNOUNCED_S`` are closed then, since their peers may be gone.
    """

    def __init__(
        self,
        transport: Transport,
        views: PartViews | None,
        threads: Threads = OS_THREADS,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._rank, self._ranks = rank, ranks
        self._transport = transport
        self._views = views
        self._lock = threads.lock()
        self._peers: dict[str, EngineAddress] = {}
        self._connected: set[str] = set()
        self._writers: dict[tuple[str, str], Writer] = {}
        #: Peers that were not announced in this session, and when they are disconnected.
        self._unannounced: set[str] = set()
        self._unannounced_until_ns = 0

    def up(self, peer: EngineAddress) -> None:
        """A peer is announced; a connection to a former process of it is closed."""
        with self._lock:
            former = self._peers.get(peer.engine_id)
        if former is not None and former.epoch != peer.epoch:
            self.down(PeerDown(former.engine_id, former.epoch, certain=False))
        with self._lock:
            self._unannounced.discard(peer.engine_id)
            self._peers[peer.engine_id] = peer
            if peer.role is Role.PREFILL:
                self._writers[peer.writer.id] = peer.writer
        if peer.role is Role.DECODE:
            try:
                self._connect(peer)
            except TransportError as error:
                log.warning(
                    "the connection to engine %s is retried when needed: %s", peer.engine_id, error
                )

    def down(self, message: PeerDown) -> None:
        """A peer is lost; unless its process is confirmed dead, it may still write."""
        with self._lock:
            peer = self._peers.get(message.engine_id)
            if peer is not None and peer.epoch == message.epoch:
                del self._peers[message.engine_id]
            else:
                peer = None
            if message.certain:
                self._writers.pop((message.engine_id, message.epoch), None)
        if peer is not None and peer.role is Role.DECODE:
            for agent in self._of(peer):
                self._connected.discard(agent.agent)
                self._transport.disconnect(agent.agent)

    def session_begins(self, now_ns: int) -> None:
        """A session begins, in which no peer has been announced yet."""
        with self._lock:
            self._unannounced = set(self._peers)
            self._unannounced_until_ns = now_ns + int(UNANNOUNCED_S * 1e9)

    def expire(self, now_ns: int) -> None:
        """Disconnect peers that were not announced in this session within ``UNANNOUNCED_S``."""
        if not self._unannounced or now_ns < self._unannounced_until_ns:
            return
        with self._lock:
            expired = [self._peers[name] for name in self._unannounced if name in self._peers]
            self._unannounced.clear()
        for peer in expired:
            self.down(PeerDown(peer.engine_id, peer.epoch, certain=False))

    def only(self, peers: Iterable[EngineAddress]) -> None:
        """Disconnect all known peers but these."""
        present = {(peer.engine_id, peer.epoch) for peer in peers}
        with self._lock:
            known = [(peer.engine_id, peer.epoch) for peer in self._peers.values()]
        for engine_id, epoch in known:
            if (engine_id, epoch) not in present:
                self.down(PeerDown(engine_id, epoch, certain=False))

    def known(self) -> tuple[EngineAddress, ...]:
        """Return all peers."""
        with self._lock:
            return tuple(self._peers.values())

    def writers(self) -> tuple[Writer, ...]:
        """Return the prefill engines that may be writing here."""
        with self._lock:
            return tuple(self._writers.values())

    def agents_of(self, engine_id: str, epoch: str) -> tuple[str, ...]:
        """Return the transport agents of a peer that this rank is connected to.

        Raises ``TransportError`` if that engine is not a peer in that epoch or cannot be reached.
        """
        with self._lock:
            peer = self._peers.get(engine_id)
        if peer is None or peer.epoch != epoch:
            raise TransportError(
                f"engine {engine_id} (epoch {epoch}) is not connected; it is lost or restarted"
            )
        self._connect(peer)
        return tuple(agent.agent for agent in self._of(peer))

    def _of(self, peer: EngineAddress) -> tuple[AgentAddress, ...]:
        return peer.agents_for(self._rank, self._ranks)

    def _connect(self, peer: EngineAddress) -> None:
        for agent in self._of(peer):
            if agent.agent not in self._connected:
                self._connect_agent(peer.engine_id, agent)

    def _connect_agent(self, engine_id: str, address: AgentAddress) -> None:
        agent = agent_info(address)
        buffers = (region for region in agent.regions if region.name == BUFFER_REGION)
        views: list[RegionInfo] = []
        try:
            if self._views is not None:
                views += [view for buffer in buffers for view in self._views.of(buffer)]
                views += self._views.of_hbm([_region(view) for view in address.hbm])
            self._transport.connect(agent, views)
        except ConfigError as error:
            raise TransportError(f"engine {engine_id}: {error}") from error
        self._connected.add(agent.agent)


def agent_info(address: AgentAddress) -> AgentInfo:
    """Return an agent in the form of transports."""
    regions = tuple(map(_region, address.regions))
    return AgentInfo(address.agent, address.metadata, regions, address.shared)


def agent_address(info: AgentInfo, hbm: Sequence[RegionInfo] = ()) -> AgentAddress:
    """Return an agent of a transport in the wire form; ``hbm`` are the views of its KV in HBM."""
    regions = tuple(map(_region_address, info.regions))
    views = tuple(map(_region_address, hbm))
    return AgentAddress(info.agent, info.metadata, regions, info.shared, views)


def _region(address: RegionAddress) -> RegionInfo:
    return RegionInfo(**msgspec.structs.asdict(address))


def _region_address(region: RegionInfo) -> RegionAddress:
    return RegionAddress(**msgspec.structs.asdict(region))
