"""The engines' ends of the control connections of a simulated cluster."""

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
        self._anew = False
        super().__init__(network, threads.process)

    def send(self, frame: bytes) -> bool:
        """Queue a frame, for when there is a router."""
        self._send(frame)
        return True

    def receive(self) -> bytes | None:
        """Return what has arrived first."""
        return self._inbox.popleft() if self._inbox else None

    def wait(self, timeout_s: float) -> bool:
        """Let the thread wait."""
        if not self._inbox and not self._woken:
            self._threads.wait(self._waiting, timeout_s)
        anew, self._anew = self._anew, False
        self._woken = False
        return anew

    def wake(self) -> None:
        """Wake the thread that waits."""
        self._woken = True
        while self._waiting:
            self._waiting.pop(0).wake()

    def reconnect(self) -> None:
        """Connect anew."""
        self.reset()

    def _came(self, frame: bytes) -> None:
        self._inbox.append(frame)
        self.wake()

    def _connected(self) -> None:
        self._anew = True
        self.wake()

    def _said(self, frame: bytes, *, to_router: bool) -> object:
        return decode_engine_message(frame) if to_router else decode_router_message(frame)
