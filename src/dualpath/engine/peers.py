"""The engines of the other role, as one engine knows them."""

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.control import EngineAddress, PeerDown
from dualpath.core.errors import TransportError
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.transport.contract import AgentInfo, RegionInfo, Transport


class Peers:
    """Connects and disconnects; remembers which requests' slots a lost writer may still touch.

    The PE starts all transfers between engines, so only PEs connect.
    """

    def __init__(self, role: Role, transport: Transport, threads: Threads = OS_THREADS) -> None:
        self._connects = role is Role.PREFILL
        self._transport = transport
        self._lock = threads.lock()
        self._peers: dict[str, EngineAddress] = {}
        self._doubts: dict[str, set[str]] = {}

    def up(self, peer: EngineAddress) -> None:
        """A peer joined; raises ``PeerLostError`` if it cannot be reached."""
        if self._connects:
            regions = tuple(RegionInfo(**msgspec.structs.asdict(r)) for r in peer.regions)
            self._transport.connect(
                AgentInfo(agent=peer.agent, metadata=peer.agent_metadata, regions=regions)
            )
        with self._lock:
            self._peers[peer.engine_id] = peer

    def down(self, message: PeerDown) -> set[str]:
        """A peer is lost; return requests whose slots it can no longer write to."""
        with self._lock:
            peer = self._peers.get(message.engine_id)
            if peer is not None and peer.epoch == message.epoch:
                del self._peers[message.engine_id]
            else:
                peer = None
            cleared = self._doubts.pop(message.engine_id, set()) if message.certain else set()
        if peer is not None and self._connects:
            self._transport.disconnect(peer.agent)
        return cleared

    def doubt(self, writer_engine: str, request_id: str) -> None:
        """A lost engine may still write into this request's slots."""
        with self._lock:
            self._doubts.setdefault(writer_engine, set()).add(request_id)

    def agent_of(self, engine_id: str, epoch: str) -> str:
        """Return a peer's transport agent.

        Raises ``TransportError`` if that engine, in that epoch, is not connected.
        """
        with self._lock:
            peer = self._peers.get(engine_id)
        if peer is None or peer.epoch != epoch:
            raise TransportError(
                f"engine {engine_id} (epoch {epoch}) is not connected; it is lost or restarted"
            )
        return peer.agent
