"""A transport between agents of one process: the reference of the contract tests."""

import ctypes
import threading
from collections import deque
from collections.abc import Collection

import msgspec

from dualpath.core.errors import ConfigError, PeerLostError
from dualpath.transport.contract import AgentInfo
from dualpath.transport.copy_transport import CopyTransfer, CopyTransport


class _InjectedFailure(msgspec.Struct, frozen=True):
    agent: str | None
    reason: str


class InProcessFabric:
    """The network between the agents of one process, with injectable faults; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: set[str] = set()
        self._failures: deque[_InjectedFailure] = deque()
        self._stalled: set[str] = set()

    def kill(self, agent: str) -> None:
        """Remove an agent as if its process had died: transfers with it fail from now on."""
        with self._lock:
            self._alive.discard(agent)

    def fail_next(self, reason: str = "injected", *, agent: str | None = None) -> None:
        """Let the next transfer polled (of initiator ``agent``, if given) fail before it copies."""
        with self._lock:
            self._failures.append(_InjectedFailure(agent, reason))

    def stall(self, agent: str) -> None:
        """Stop the progress of transfers with an agent's memory until ``wake``."""
        with self._lock:
            self._stalled.add(agent)

    def wake(self, agent: str) -> None:
        """End a stall: transfers posted meanwhile make progress again."""
        with self._lock:
            self._stalled.discard(agent)

    def is_alive(self, agent: str) -> bool:
        """Whether the agent has joined and was neither killed nor closed."""
        with self._lock:
            return agent in self._alive

    def stalls(self, agent: str) -> bool:
        """Whether its transfers wait for ``wake``."""
        with self._lock:
            return agent in self._stalled and agent in self._alive

    def join(self, agent: str) -> bytes:
        """Add an agent; raises ``ConfigError`` if its name exists."""
        with self._lock:
            if agent in self._alive:
                raise ConfigError(f"agent {agent!r} exists already; agent names must be unique")
            self._alive.add(agent)
        return b"in-process"

    def reach(self, peer: AgentInfo) -> None:
        """Raise ``PeerLostError`` if a peer is not alive."""
        if not self.is_alive(peer.agent):
            raise PeerLostError(f"agent {peer.agent!r} cannot be reached; is its engine running?")

    def copy(self, transfer: CopyTransfer) -> str | None:
        """Copy, unless one of the agents is dead or a fault was injected."""
        if (obstacle := self._obstacle(transfer)) is not None:
            return obstacle
        pairs = zip(transfer.destinations.tolist(), transfer.sources.tolist(), strict=True)
        for destination, source in pairs:
            ctypes.memmove(destination, source, transfer.piece_bytes)
        return None

    def _next_failure(self, agent: str) -> str | None:
        with self._lock:
            for failure in self._failures:
                if failure.agent in (None, agent):
                    self._failures.remove(failure)
                    return failure.reason
        return None

    def _obstacle(self, transfer: CopyTransfer) -> str | None:
        for agent in (transfer.agent, transfer.peer):
            if not self.is_alive(agent):
                return f"agent {agent!r} is dead"
        return self._next_failure(transfer.agent)


class InProcessTransport(CopyTransport):
    """One agent on an ``InProcessFabric``."""

    def __init__(
        self, agent: str, fabric: InProcessFabric, *, traffic_classes: Collection[str] = ("kv",)
    ) -> None:
        super().__init__(agent, fabric, traffic_classes=traffic_classes)
