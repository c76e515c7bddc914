"""A transport between agents of one process: the reference the contract tests compare with."""

import ctypes
import threading
from collections import deque
from collections.abc import Collection

import msgspec

from dualpath.core.errors import ConfigError, PeerLostError
from dualpath.transport.contract import AgentInfo
from dualpath.transport.copying import CopyTransfer, CopyTransport


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

    def stalls(self, agent: str) -> bool:
        """Whether its transfers wait for ``wake``."""
        with self._lock:
            return agent in self._stalled and agent in self._alive

    def join(self, agent: str) -> bytes:
        """Let an agent in; raises ``ConfigError`` if one of its name is."""
        with self._lock:
            if agent in self._alive:
                raise ConfigError(f"agent {agent!r} exists already; agent names must be unique")
            self._alive.add(agent)
        return b"in-process"

    def meet(self, peer: AgentInfo) -> None:
        """Raise ``PeerLostError`` if a peer is not alive."""
        if not self.is_alive(peer.agent):
            raise PeerLostError(f"agent {peer.agent!r} cannot be reached; is its engine running?")

    def copy(self, transfer: CopyTransfer) -> str | None:
        """Copy, unless one of both is gone or a fault was injected."""
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
                return f"agent {agent!r} is gone"
        return self._next_failure(transfer.agent)


class InProcessTransport(CopyTransport):
    """One agent on an ``InProcessFabric``."""

    def __init__(
        self, agent: str, fabric: InProcessFabric, *, traffic_classes: Collection[str] = ("kv",)
    ) -> None:
        super().__init__(agent, fabric, traffic_classes=traffic_classes)
