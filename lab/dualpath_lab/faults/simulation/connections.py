"""Simulated connections to the router that behave as ZMQ's over TCP.

Frames arrive in order, after a random delay.  A reset loses the frames in flight in both
directions.  The far end then reconnects with another identity and sends the frames that it has
queued meanwhile, possibly to the next router.
"""

import asyncio
import functools
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from dualpath.node.cluster_secret import ClusterSecret
from dualpath.router.refusals import ControlRefusals
from dualpath_lab.faults.simulation.event_loop import ProcessLoop
from dualpath_lab.faults.simulation.world import Process, World

ADDRESS = "tcp://127.0.0.1:5700"
#: Of the scheduler of each unit, for front ends.
FRONT_END_ADDRESSES = ("tcp://127.0.0.1:5701", "tcp://127.0.0.1:5711")

_DELAYS_S = (0.0001, 0.0002, 0.0005, 0.002, 0.02)
_RECONNECT_S = 0.1
#: A closed socket sends its queued frames within this time.
_LINGERS_S = 0.05
#: Maximum characters of a message in a log line.
_LOGGED_CHARACTERS = 300


class WireFaults:
    """``duplicated`` is the current share of frames that arrive twice."""

    def __init__(self) -> None:
        self.duplicated = 0.0


class Network:
    """All connections to one address of the router, and the sockets that listen there.

    The sockets belong to one process, or to two while an old leader has not noticed its lost lease.
    """

    def __init__(self, world: World, faults: WireFaults) -> None:
        self.world = world
        self.faults = faults
        self.listening: list[RouterSocket] = []
        self.connections: list[Connection] = []
        self._numbers = itertools.count(1)

    def listen(self, loop: ProcessLoop) -> "RouterSocket":
        """Return the socket of a new router; it listens after ``open``."""
        return RouterSocket(self, loop)

    def router_died(self, socket: "RouterSocket") -> None:
        """Reset all connections to a router; they reconnect to the next one."""
        socket.stop_listening()
        for connection in self.connections:
            if connection.socket in (socket, None):
                connection.reset()

    def accepting_socket(self) -> "RouterSocket | None":
        """Return the socket that accepts a new connection."""
        if len(self.listening) > 1:
            return self.world.chance.choice(self.listening)
        return self.listening[0] if self.listening else None

    def identity(self) -> bytes:
        """Return a new identity of a connection."""
        return b"connection %d" % next(self._numbers)


class RouterSocket:
    """The router's end: ``router.scheduler.control_socket.ControlSocket``."""

    def __init__(self, network: Network, loop: ProcessLoop) -> None:
        self._network = network
        self._loop = loop
        self._arrived: asyncio.Queue[tuple[bytes, Sequence[bytes]]] = asyncio.Queue()
        self.by_identity: dict[bytes, Connection] = {}

    async def open(
        self, host: str, port: int, secret: ClusterSecret | None, refusals: ControlRefusals
    ) -> str:
        """Accept connections from now on."""
        self._network.listening.append(self)
        return ADDRESS

    async def receive(self) -> tuple[bytes, Sequence[bytes]]:
        """Return the next message."""
        return await self._arrived.get()

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send a frame, unless the connection was reset."""
        connection = self.by_identity.get(identity)
        if connection is not None and self._loop.process.alive:
            connection.from_router.put(frame)

    async def close(self) -> None:
        """Stop listening; open connections end after their frames in flight have arrived."""
        self.stop_listening()
        self._network.world.after(_LINGERS_S, functools.partial(self._network.router_died, self))

    def stop_listening(self) -> None:
        """Accept no more connections; idempotent."""
        if self in self._network.listening:
            self._network.listening.remove(self)

    def arrive(self, identity: bytes, frame: bytes) -> None:
        """A frame arrives from the far end."""
        self._loop.process.step(functools.partial(self._arrived.put_nowait, (identity, (frame,))))


class Connection(ABC):
    """The far end of a connection to the router; it exists as long as ``process``."""

    def __init__(self, network: Network, process: Process) -> None:
        self.process = process
        #: The router's socket; None while it is not connected.
        self.socket: RouterSocket | None = None
        self.from_router = Wire(self, self._arrive)
        self._network = network
        self._world = network.world
        self._identity: bytes | None = None
        self._outbox: deque[bytes] = deque()
        self.to_router = Wire(self, self._reach_router)
        self._closed = False
        network.connections.append(self)
        self._connect()

    @property
    def is_open(self) -> bool:
        """Whether this end is open and its process alive."""
        return not self._closed and self.process.alive

    def reset(self) -> None:
        """Reset the connection: frames in flight are lost, and it reconnects later."""
        if self._identity is not None and self.socket is not None:
            self.socket.by_identity.pop(self._identity, None)
        self._identity = self.socket = None
        for wire in (self.to_router, self.from_router):
            wire.cut()
            wire.loses = False
        self._world.after(_RECONNECT_S, self._connect)

    def reset_one_way(self, for_s: float, *, to_router: bool) -> None:
        """Lose all frames in one direction; after a while both ends notice it and reconnect."""
        if self._identity is None:
            return
        identity, wire = self._identity, self.to_router if to_router else self.from_router
        wire.cut()
        wire.loses = True

        def notice() -> None:
            if self._identity == identity:
                self.reset()

        self._world.after(for_s, notice)

    def close(self) -> None:
        """Send the queued frames and no others."""
        self._closed = True

    def delay_s(self) -> float:
        """Return the delay of the next frame."""
        return self._world.pick(_DELAYS_S)

    def copies(self) -> int:
        """Return how often the next frame arrives."""
        duplicated = self._network.faults.duplicated
        return 2 if duplicated and self._world.chance.random() < duplicated else 1

    def _send(self, frame: bytes) -> None:
        """Send a frame, once connected."""
        if self.process.alive:
            self._outbox.append(frame)
            self._flush()

    @abstractmethod
    def _on_frame(self, frame: bytes) -> None:
        """Receive a frame."""

    @abstractmethod
    def _connected(self) -> None:
        """The connection has been established, perhaps to another router."""

    @abstractmethod
    def _decoded(self, frame: bytes, *, to_router: bool) -> object:
        """Return a frame's message for the log."""

    def _connect(self) -> None:
        if self._identity is not None or not self.is_open:
            return
        self.socket = self._network.accepting_socket()
        if self.socket is None:
            self._world.after(_RECONNECT_S, self._connect)
            return
        self._identity = self._network.identity()
        self.socket.by_identity[self._identity] = self
        self._flush()
        self._connected()

    def _flush(self) -> None:
        if self._identity is not None:
            while self._outbox:
                self.to_router.put(self._outbox.popleft())

    def _reach_router(self, frame: bytes) -> None:
        if self._identity is not None and self.socket is not None:
            self._log("→", frame, to_router=True)
            self.socket.arrive(self._identity, frame)

    def _arrive(self, frame: bytes) -> None:
        if self.process.alive:
            self._log("←", frame, to_router=False)
            self._on_frame(frame)

    def _log(self, arrow: str, frame: bytes, *, to_router: bool) -> None:
        if self._world.verbose:
            message = str(self._decoded(frame, to_router=to_router))[:_LOGGED_CHARACTERS]
            self._world.detail(self.process.name, lambda: f"{arrow} router {message}")


class Wire:
    """One direction of a connection: frames arrive in order; a cut loses those in flight."""

    def __init__(self, connection: Connection, arrived: Callable[[bytes], None]) -> None:
        self._connection = connection
        self._arrived = arrived
        #: Frames sent before this time arrive after it.
        self.stalled_until_s = 0.0
        self._free_s = 0.0
        self._cuts = 0
        #: Whether frames that are sent now are lost, until the connection is reset.
        self.loses = False

    def put(self, frame: bytes) -> None:
        """Send a frame."""
        if self.loses:
            return
        world = self._connection._world
        cuts = self._cuts
        earliest_s = world.now_s + self._connection.delay_s()
        self._free_s = max(earliest_s, self.stalled_until_s, self._free_s)

        def arrive() -> None:
            if cuts == self._cuts:
                world.maybe_fault()
                self._arrived(frame)

        for _ in range(self._connection.copies()):
            world.at(self._free_s, arrive)

    def cut(self) -> None:
        """Lose the frames in flight."""
        self._cuts += 1
