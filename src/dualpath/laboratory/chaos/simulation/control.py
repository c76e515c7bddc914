"""The engines' ends of simulated control connections."""

from collections import deque

from dualpath.core.envelopes import decode_engine_message, decode_router_message
from dualpath.laboratory.chaos.simulation.threads import SimThreads, Waiting
from dualpath.laboratory.chaos.simulation.wires import ADDRESS, Connection, Network


class EngineConnection(Connection):
    """An engine's end: ``engine.router_connection.RouterConnection``."""

    router = ADDRESS

    def __init__(self, network: Network, threads: SimThreads) -> None:
        self._threads = threads
        self._inbox: deque[bytes] = deque()
        self._waiting: list[Waiting] = []
        self._woken = False
        self._reconnected = False
        super().__init__(network, threads.process)

    def send(self, frame: bytes) -> bool:
        """Send a frame, once connected."""
        self._send(frame)
        return True

    def receive(self) -> bytes | None:
        """Return the oldest frame that has arrived, None if there is none."""
        return self._inbox.popleft() if self._inbox else None

    def wait(self, timeout_s: float) -> bool:
        """Wait for a frame, a wake-up or a reconnect; return whether it has reconnected."""
        if not self._inbox and not self._woken:
            self._threads.wait(self._waiting, timeout_s)
        reconnected, self._reconnected = self._reconnected, False
        self._woken = False
        return reconnected

    def wake(self) -> None:
        """Wake the waiting thread."""
        self._woken = True
        while self._waiting:
            self._waiting.pop(0).wake()

    def reconnect(self) -> None:
        """Reset the connection and connect again."""
        self.reset()

    def _on_frame(self, frame: bytes) -> None:
        self._inbox.append(frame)
        self.wake()

    def _connected(self) -> None:
        self._reconnected = True
        self.wake()

    def _decoded(self, frame: bytes, *, to_router: bool) -> object:
        return decode_engine_message(frame) if to_router else decode_router_message(frame)
