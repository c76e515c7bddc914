"""Base of transports that copy synchronously when a transfer is polled.

The first poll of a transfer copies all of it.  So no byte is written after a transfer failed, and a
caller that reads the destination or reuses the source before it has seen ``DONE`` fails in every
run, instead of once in a thousand runs on real hardware.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import PeerLostError, TransportError
from dualpath.transport.contract import (
    AgentInfo,
    Direction,
    PieceIndices,
    RegionInfo,
    TransferState,
)
from dualpath.transport.regions import (
    check_pair,
    check_region,
    check_traffic_class,
    check_view,
    find_region,
    named_regions,
    piece_addresses,
)


class Fabric(Protocol):
    """Connects agents and copies between their memory; thread-safe."""

    def join(self, agent: str) -> bytes:
        """Add an agent; return the metadata that peers need, beside its regions, to reach it.

        Raises ``ConfigError`` if that is not possible.
        """
        ...

    def kill(self, agent: str) -> None:
        """Remove an agent: transfers with it fail from now on."""
        ...

    def reach(self, peer: AgentInfo) -> None:
        """Connect to a peer; raises ``PeerLostError`` if it cannot be reached."""
        ...

    def is_alive(self, agent: str) -> bool:
        """Whether transfers with an agent may be posted."""
        ...

    def stalls(self, agent: str) -> bool:
        """Whether transfers with an agent currently make no progress."""
        ...

    def copy(self, transfer: "CopyTransfer") -> str | None:
        """Copy all bytes of a transfer; return the error, None on success."""
        ...


class CopyTransfer:
    """One posted copy; see ``dualpath.transport.contract.Transfer``.

    ``here`` and ``there`` are the addresses of its pieces in the process of ``agent``, which posted
    the transfer, and in the process of ``peer``.
    """

    def __init__(
        self,
        transport: "CopyTransport",
        peer: str,
        direction: Direction,
        here: NDArray[np.int64],
        there: NDArray[np.int64],
        piece_bytes: int,
    ) -> None:
        self.bytes = int(here.size) * piece_bytes
        self.agent, self.peer = transport.agent, peer
        self.direction, self.here, self.there = direction, here, there
        self.piece_bytes = piece_bytes
        self.state = TransferState.MOVING
        self._transport = transport
        self._lock = threading.Lock()
        self._error: str | None = None

    @property
    def sources(self) -> NDArray[np.int64]:
        """Source addresses of the pieces."""
        return self.here if self.direction is Direction.WRITE else self.there

    @property
    def destinations(self) -> NDArray[np.int64]:
        """Destination addresses of the pieces."""
        return self.there if self.direction is Direction.WRITE else self.here

    def poll(self) -> TransferState:
        """Copy on the first call, unless the peer is dead or a fault was injected."""
        with self._lock:
            if self.state is TransferState.MOVING and not self._transport.fabric.stalls(self.peer):
                self._error = self._transport.fabric.copy(self)
                self.state = TransferState.DONE if self._error is None else TransferState.FAILED
            return self.state

    def error(self) -> str | None:
        """Return why the transfer failed, or None."""
        return self._error

    def release(self) -> None:
        """Release the handle; raises ``TransportError`` while the transfer is moving."""
        if self.state is TransferState.MOVING:
            raise TransportError("transfer released while moving; poll it to DONE or FAILED first")
        self._transport.remove(self)

    def fail(self, reason: str) -> None:
        """Fail unless it has ended; no more bytes are written."""
        with self._lock:
            if self.state is TransferState.MOVING:
                self.state = TransferState.FAILED
                self._error = reason


class CopyTransport:
    """One agent on a ``Fabric``; see ``dualpath.transport.contract.Transport``."""

    def __init__(
        self, agent: str, fabric: Fabric, *, traffic_classes: Collection[str] = ("kv",)
    ) -> None:
        self._metadata = fabric.join(agent)
        self.agent = agent
        self.fabric = fabric
        self._traffic_classes = frozenset(traffic_classes)
        self._lock = threading.Lock()
        self._registered: list[RegionInfo] = []
        self._regions: dict[str, RegionInfo] = {}
        self._keep_alive: list[object] = []
        self._peers: dict[str, dict[str, RegionInfo]] = {}
        self._unfinished: dict[CopyTransfer, str] = {}
        self._closed = False

    def register(self, region: RegionInfo, keep_alive: object) -> None:
        """Register memory; see the contract."""
        with self._lock:
            check_region(region, self._regions)
            self._registered.append(region)
            self._regions[region.name] = region
            self._keep_alive.append(keep_alive)

    def view(self, view: RegionInfo) -> None:
        """Add a view of a registered region; see the contract."""
        with self._lock:
            check_view(view, self._registered, self._regions)
            self._regions[view.name] = view

    def info(self) -> AgentInfo:
        """Return this agent's address and regions."""
        with self._lock:
            return AgentInfo(self.agent, self._metadata, tuple(self._registered))

    def connect(self, peer: AgentInfo, views: Sequence[RegionInfo] = ()) -> None:
        """Connect to a peer; raises ``PeerLostError`` if it is not alive."""
        regions = named_regions(peer.regions, views)
        self.fabric.reach(peer)
        with self._lock:
            self._peers[peer.agent] = regions

    def disconnect(self, agent: str) -> None:
        """Disconnect a peer and fail its unfinished transfers."""
        with self._lock:
            self._peers.pop(agent, None)
            lost = [t for t, peer in self._unfinished.items() if peer == agent]
        for transfer in lost:
            transfer.fail(f"agent {agent!r} was disconnected")

    def post(
        self,
        direction: Direction,
        local_region: str,
        local_pieces: PieceIndices,
        agent: str,
        remote_region: str,
        remote_pieces: PieceIndices,
        *,
        traffic_class: str = "kv",
    ) -> CopyTransfer:
        """Post one transfer; see the contract."""
        check_traffic_class(traffic_class, self._traffic_classes)
        local = find_region(self._regions_of(self.agent), local_region, self.agent)
        remote = find_region(self._regions_of(agent), remote_region, agent)
        local_indices, remote_indices = check_pair(local, local_pieces, remote, remote_pieces)
        here = piece_addresses(local, local_indices)
        there = piece_addresses(remote, remote_indices)
        transfer = self._transfer(agent, direction, here, there, local)
        with self._lock:
            self._unfinished[transfer] = agent
        return transfer

    def _transfer(
        self,
        agent: str,
        direction: Direction,
        here: NDArray[np.int64],
        there: NDArray[np.int64],
        local: RegionInfo,
    ) -> CopyTransfer:
        """Return the transfer between these addresses; ``local`` is the region of ``here``."""
        return CopyTransfer(self, agent, direction, here, there, local.piece_bytes)

    def close(self) -> None:
        """Leave the fabric; unfinished transfers become FAILED.  Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lost = list(self._unfinished)
            self._unfinished.clear()
        for transfer in lost:
            transfer.fail(f"transport {self.agent!r} was closed")
        self.fabric.kill(self.agent)
        self._keep_alive.clear()

    def _regions_of(self, agent: str) -> Mapping[str, RegionInfo]:
        if self._closed:
            raise TransportError(f"transport {self.agent!r} is closed; open a new one")
        if agent == self.agent:
            return self._regions
        with self._lock:
            regions = self._peers.get(agent)
        if regions is None or not self.fabric.is_alive(agent):
            raise PeerLostError(f"agent {agent!r} is not connected; connect to it again")
        return regions

    def remove(self, transfer: CopyTransfer) -> None:
        """Drop a released transfer."""
        with self._lock:
            self._unfinished.pop(transfer, None)
