"""Control connections of a simulated cluster, as ZMQ's over TCP behave.

What one end sends arrives in order, after a delay that chance decides.  A connection that is reset
loses what is under way, both ways; the engine's end connects again by itself, under another
identity, and what it could not send meanwhile goes out then, be it to the next router.
"""

import asyncio
import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from dualpath.core.envelopes import decode_engine_message, decode_router_message
from dualpath.laboratory.chaos.simulation.loop import ProcessLoop
from dualpath.laboratory.chaos.simulation.threads import SimThreads, Waiting
from dualpath.laboratory.chaos.simulation.world import World
from dualpath.router.refusals import ControlRefusals
from dualpath.transport.cluster_secret import ClusterSecret

ADDRESS = "tcp://127.0.0.1:5700"

_DELAYS_S = (0.0001, 0.0002, 0.0005, 0.002, 0.02)
_RECONNECT_S = 0.1


class ControlNetwork:
    """All control connections, and the router that listens, if one does.

    ``duplicated`` is how often a frame comes twice.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.router: RouterSocket | None = None
        self.duplicated = 0.0
        self.connections: list[EngineConnection] = []
        self._numbers = itertools.count(1)

    def listen(self, loop: ProcessLoop) -> "RouterSocket":
        """Return the socket of a new router, which listens once it is open."""
        return RouterSocket(self, loop)

    def connect(self, threads: SimThreads) -> "EngineConnection":
        """Return an engine's end of a new connection."""
        connection = EngineConnection(self, threads)
        self.connections.append(connection)
        return connection

    def router_died(self) -> None:
        """Reset all connections; they come back with the next router."""
        self.router = None
        for connection in self.connections:
            connection.reset()

    def identity(self) -> bytes:
        """Return a new name of a connection."""
        return b"connection %d" % next(self._numbers)


class RouterSocket:
    """The router's end: ``router.control.control_socket.ControlSocket``."""

    def __init__(self, network: ControlNetwork, loop: ProcessLoop) -> None:
        self._network = network
        self._loop = loop
        self._arrived: asyncio.Queue[tuple[bytes, Sequence[bytes]]] = asyncio.Queue()
        self.by_identity: dict[bytes, EngineConnection] = {}

    async def open(
        self, host: str, port: int, secret: ClusterSecret | None, refusals: ControlRefusals
    ) -> str:
        """Let engines connect from now on."""
        self._network.router = self
        return ADDRESS

    async def receive(self) -> tuple[bytes, Sequence[bytes]]:
        """Return the next message."""
        return await self._arrived.get()

    async def send(self, identity: bytes, frame: bytes) -> None:
        """Send to a connection that is not reset."""
        connection = self.by_identity.get(identity)
        if connection is not None and self._loop.process.alive:
            connection.from_router.put(frame)

    async def close(self) -> None:
        """Let nothing arrive any more."""

    def arrive(self, identity: bytes, frame: bytes) -> None:
        """A frame comes from an engine."""
        self._loop.process.step(functools.partial(self._arrived.put_nowait, (identity, (frame,))))


class EngineConnection:
    """An engine's end: ``engine.router_connection.RouterConnection``."""

    router = ADDRESS

    def __init__(self, network: ControlNetwork, threads: SimThreads) -> None:
        self._network = network
        self._threads = threads
        self._world = network.world
        self._identity: bytes | None = None
        self._outbox: deque[bytes] = deque()
        self._inbox: deque[bytes] = deque()
        self._waiting: list[Waiting] = []
        self._woken = False
        self._anew = False
        self._closed = False
        self.stalled_until_s = 0.0
        self._to_router = Wire(self, self._reach_router)
        self.from_router = Wire(self, self._arrive)
        self._connect()

    # ------------------------------------------------------------------ for the engine's thread

    def send(self, frame: bytes) -> bool:
        """Queue a frame, for when there is a router."""
        if self._threads.process.alive:
            self._outbox.append(frame)
            self._flush()
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

    def close(self) -> None:
        """Send what is queued, then nothing."""
        self._closed = True

    # ------------------------------------------------------------------ for the adversary

    @property
    def engine(self) -> str:
        """The process at this end."""
        return self._threads.process.name

    @property
    def is_open(self) -> bool:
        """Whether an engine is at this end."""
        return not self._closed and self._threads.process.alive

    def reset(self) -> None:
        """Lose what is under way."""
        if self._identity is not None and self._network.router is not None:
            self._network.router.by_identity.pop(self._identity, None)
        self._identity = None
        self._to_router.cut()
        self.from_router.cut()
        self._world.after(_RECONNECT_S, self._connect)

    # ------------------------------------------------------------------ inside

    def _connect(self) -> None:
        if self._identity is not None or not self.is_open:
            return
        router = self._network.router
        if router is None:
            self._world.after(_RECONNECT_S, self._connect)
            return
        self._identity = self._network.identity()
        router.by_identity[self._identity] = self
        self._flush()
        self._anew = True
        self.wake()

    def _flush(self) -> None:
        if self._identity is not None:
            while self._outbox:
                self._to_router.put(self._outbox.popleft())

    def _reach_router(self, frame: bytes) -> None:
        if self._identity is not None and self._network.router is not None:
            if self._world.telling:
                self._world.detail(self.engine, lambda: f"→ router {_said(frame, engine=True)}")
            self._network.router.arrive(self._identity, frame)

    def _arrive(self, frame: bytes) -> None:
        if self._threads.process.alive:
            if self._world.telling:
                self._world.detail(self.engine, lambda: f"← router {_said(frame, engine=False)}")
            self._inbox.append(frame)
            self.wake()

    def delay_s(self) -> float:
        """Return how long the next frame takes."""
        delay_s = self._world.pick(_DELAYS_S)
        return max(delay_s, self.stalled_until_s - self._world.now_s)

    def times(self) -> int:
        """Return how often the next frame comes."""
        duplicated = self._network.duplicated
        return 2 if duplicated and self._world.chance.random() < duplicated else 1


class Wire:
    """One direction of a connection: frames in order, none of those under way when it is cut."""

    def __init__(self, connection: EngineConnection, arrived: Callable[[bytes], None]) -> None:
        self._connection = connection
        self._arrived = arrived
        self._free_s = 0.0
        self._cuts = 0

    def put(self, frame: bytes) -> None:
        """Send a frame."""
        world = self._connection._world
        cuts = self._cuts
        self._free_s = max(world.now_s + self._connection.delay_s(), self._free_s)

        def arrive() -> None:
            if cuts == self._cuts:
                world.moment()
                self._arrived(frame)

        for _ in range(self._connection.times()):
            world.at(self._free_s, arrive)

    def cut(self) -> None:
        """Lose what is under way."""
        self._cuts += 1


def _said(frame: bytes, *, engine: bool) -> str:
    decoded = decode_engine_message(frame) if engine else decode_router_message(frame)
    return str(decoded)[:300]
