"""A transport between agents of one process: the reference the contract tests compare with.

A posted transfer moves nothing until it is polled for the first time.  A caller that reads its
destination, or reuses its source, before it has seen ``DONE`` therefore fails every time instead
of once in a thousand runs on real hardware.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError, PeerLostError, TransportError
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


class _InjectedFailure(msgspec.Struct, frozen=True):
    agent: str | None
    reason: str


class InProcessFabric:
    """The network between the agents of one process, with faults on demand.

    The one owner of who is alive; all methods may be called from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: set[str] = set()
        self._failures: deque[_InjectedFailure] = deque()
        self._stalled: set[str] = set()

    def kill(self, agent: str) -> None:
        """Lose an agent as if its process had died: transfers with it fail from now on."""
        with self._lock:
            self._alive.discard(agent)

    def fail_next(self, reason: str = "injected", *, agent: str | None = None) -> None:
        """Let the next transfer polled (of initiator ``agent``, if given) fail before it copies."""
        with self._lock:
            self._failures.append(_InjectedFailure(agent, reason))

    def stall(self, agent: str) -> None:
        """Let transfers with another agent's memory neither move nor end until ``wake``."""
        with self._lock:
            self._stalled.add(agent)

    def wake(self, agent: str) -> None:
        """End a stall: what was posted meanwhile moves now."""
        with self._lock:
            self._stalled.discard(agent)

    def is_alive(self, agent: str) -> bool:
        """Whether the agent was opened and neither killed nor closed."""
        with self._lock:
            return agent in self._alive

    def _stalls(self, agent: str) -> bool:
        with self._lock:
            return agent in self._stalled and agent in self._alive

    def _join(self, agent: str) -> None:
        with self._lock:
            if agent in self._alive:
                raise ConfigError(f"agent {agent!r} exists already; agent names must be unique")
            self._alive.add(agent)

    def _next_failure(self, agent: str) -> str | None:
        with self._lock:
            for failure in self._failures:
                if failure.agent in (None, agent):
                    self._failures.remove(failure)
                    return failure.reason
        return None


class InProcessTransfer:
    """One posted copy; see ``dualpath.transport.contract.Transfer``."""

    def __init__(
        self,
        transport: "InProcessTransport",
        peer: str,
        sources: NDArray[np.int64],
        destinations: NDArray[np.int64],
        piece_bytes: int,
    ) -> None:
        self.bytes = int(sources.size) * piece_bytes
        self._transport = transport
        self._peer = peer
        self._sources = sources
        self._destinations = destinations
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._state = TransferState.MOVING
        self._error: str | None = None

    def poll(self) -> TransferState:
        """Copy on the first call, unless a peer is gone or a fault was injected."""
        with self._lock:
            if self._state is TransferState.MOVING and not self._transport._stalls(self._peer):
                self._error = self._transport._obstacle(self._peer)
                if self._error is None:
                    self._copy()
                    self._state = TransferState.DONE
                else:
                    self._state = TransferState.FAILED
            return self._state

    def error(self) -> str | None:
        """Return why the transfer failed, or None."""
        return self._error

    def release(self) -> None:
        """Return the handle; raises ``TransportError`` while the transfer is moving."""
        if self._state is TransferState.MOVING:
            raise TransportError("transfer released while moving; poll it to DONE or FAILED first")
        self._transport._forget(self)

    def _copy(self) -> None:
        pairs = zip(self._destinations.tolist(), self._sources.tolist(), strict=True)
        for destination, source in pairs:
            ctypes.memmove(destination, source, self._piece_bytes)

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._state is TransferState.MOVING:
                self._state = TransferState.FAILED
                self._error = reason


class InProcessTransport:
    """One agent on an ``InProcessFabric``; see ``dualpath.transport.contract.Transport``."""

    def __init__(
        self, agent: str, fabric: InProcessFabric, *, traffic_classes: Collection[str] = ("kv",)
    ) -> None:
        fabric._join(agent)
        self.agent = agent
        self._fabric = fabric
        self._traffic_classes = frozenset(traffic_classes)
        self._lock = threading.Lock()
        self._registered: list[RegionInfo] = []
        self._regions: dict[str, RegionInfo] = {}
        self._keep_alive: list[object] = []
        self._peers: dict[str, dict[str, RegionInfo]] = {}
        self._unfinished: dict[InProcessTransfer, str] = {}
        self._closed = False

    def register(self, region: RegionInfo, keep_alive: object) -> None:
        """Register memory; see the contract."""
        with self._lock:
            check_region(region, self._regions)
            self._registered.append(region)
            self._regions[region.name] = region
            self._keep_alive.append(keep_alive)

    def view(self, view: RegionInfo) -> None:
        """Make a view of a registered region known; see the contract."""
        with self._lock:
            check_view(view, self._registered, self._regions)
            self._regions[view.name] = view

    def info(self) -> AgentInfo:
        """Return this agent's address book entry."""
        with self._lock:
            return AgentInfo(self.agent, b"in-process", tuple(self._registered))

    def connect(self, peer: AgentInfo, views: Sequence[RegionInfo] = ()) -> None:
        """Make a peer reachable; raises ``PeerLostError`` if it is not alive."""
        if not self._fabric.is_alive(peer.agent):
            raise PeerLostError(f"agent {peer.agent!r} cannot be reached; is its engine running?")
        regions = named_regions(peer.regions, views)
        with self._lock:
            self._peers[peer.agent] = regions

    def disconnect(self, agent: str) -> None:
        """Forget a peer and fail its unfinished transfers."""
        with self._lock:
            self._peers.pop(agent, None)
            lost = [t for t, peer in self._unfinished.items() if peer == agent]
        for transfer in lost:
            transfer._fail(f"agent {agent!r} was disconnected")

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
    ) -> InProcessTransfer:
        """Post one transfer; see the contract."""
        check_traffic_class(traffic_class, self._traffic_classes)
        local = find_region(self._regions_of(self.agent), local_region, self.agent)
        remote = find_region(self._regions_of(agent), remote_region, agent)
        local_indices, remote_indices = check_pair(local, local_pieces, remote, remote_pieces)
        here = piece_addresses(local, local_indices)
        there = piece_addresses(remote, remote_indices)
        sources, destinations = (here, there) if direction is Direction.WRITE else (there, here)
        transfer = InProcessTransfer(self, agent, sources, destinations, local.piece_bytes)
        with self._lock:
            self._unfinished[transfer] = agent
        return transfer

    def close(self) -> None:
        """Leave the fabric; unfinished transfers turn FAILED.  Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lost = list(self._unfinished)
            self._unfinished.clear()
        for transfer in lost:
            transfer._fail(f"transport {self.agent!r} was closed")
        self._fabric.kill(self.agent)
        self._keep_alive.clear()

    def _regions_of(self, agent: str) -> Mapping[str, RegionInfo]:
        if self._closed:
            raise TransportError(f"transport {self.agent!r} is closed; open a new one")
        if agent == self.agent:
            return self._regions
        with self._lock:
            regions = self._peers.get(agent)
        if regions is None or not self._fabric.is_alive(agent):
            raise PeerLostError(f"agent {agent!r} is not connected; connect to it again")
        return regions

    def _stalls(self, peer: str) -> bool:
        return self._fabric._stalls(peer)

    def _obstacle(self, peer: str) -> str | None:
        for agent in (self.agent, peer):
            if not self._fabric.is_alive(agent):
                return f"agent {agent!r} is gone"
        return self._fabric._next_failure(self.agent)

    def _forget(self, transfer: InProcessTransfer) -> None:
        with self._lock:
            self._unfinished.pop(transfer, None)
