"""Control connections in memory: the ``ControlSocket`` of a router, and engines' ends of it.

Frames of one connection arrive in order, each way after a delay that the test chooses; on a
``VirtualTimeLoop`` every run of a test sees the same interleaving.  Frames to a connection that is
closed are dropped.  ``Arrivals`` lets a test wait for what engines send, over any connection.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import zmq
import zmq.asyncio

from dualpath.core.control import EngineMessage, Message
from dualpath.node.cluster_secret import ClusterSecret
from dualpath.router.engines import EngineInfo
from dualpath.router.refusals import ControlRefusals
from dualpath.router.service import RouterService

T = TypeVar("T")

ADDRESS = "memory"
#: How often ``Arrivals`` looks again when nothing arrives.
LOOK_S = 0.05


class ControlNetwork:
    """All connections of one router, and the router's end of them; ``delay`` in seconds."""

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.delay = delay
        self._to_router: asyncio.Queue[tuple[bytes, Sequence[bytes]]] = asyncio.Queue()
        self._connections: dict[bytes, Connection] = {}
        self._numbers = itertools.count(1)

    def connect(self) -> "Connection":
        """Open an engine's end."""
        identity = b"connection %d" % next(self._numbers)
        self._connections[identity] = Connection(self, identity, self._to_router)
        return self._connections[identity]

    def renew(self, connection: "Connection") -> bytes:
        """Return another identity for a connection that was reset."""
        identity = b"connection %d" % next(self._numbers)
        self._connections[identity] = connection
        return identity

    def disconnect(self, identity: bytes) -> None:
        """Drop messages in flight to an engine's end."""
        self._connections.pop(identity, None)

    # ------------------------------------------------------------------ the router's ControlSocket

    async def open(
        self, host: str, port: int, secret: ClusterSecret | None, refusals: ControlRefusals
    ) -> str:
        return ADDRESS

    async def receive(self) -> tuple[bytes, Sequence[bytes]]:
        return await self._to_router.get()

    def send(self, identity: bytes, frame: bytes) -> None:
        if (connection := self._connections.get(identity)) is not None:
            connection.from_router.put(frame)

    async def close(self) -> None:
        pass


class Connection:
    """An engine's end of a control connection."""

    def __init__(
        self,
        network: ControlNetwork,
        identity: bytes,
        to_router: "asyncio.Queue[tuple[bytes, Sequence[bytes]]]",
    ) -> None:
        self._network = network
        self._identity = identity
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._to_router = _Wire[Sequence[bytes]](
            network, lambda frames: to_router.put_nowait((self._identity, frames))
        )
        self.from_router = _Wire[bytes](network, self._received.put_nowait)

    def send(self, *frames: bytes) -> None:
        """Send one message to the router; valid messages have one frame."""
        self._to_router.put(frames)

    async def receive(self) -> bytes:
        """Return the router's next message."""
        return await self._received.get()

    def reset(self) -> None:
        """Drop messages in flight, both ways; the connection continues with another identity."""
        self._to_router.lose()
        self.from_router.lose()
        self._network.disconnect(self._identity)
        self._identity = self._network.renew(self)

    def close(self) -> None:
        """Receive no more messages; sent ones still arrive."""
        self._network.disconnect(self._identity)


class ZmqNetwork:
    """Connections to a router's ``ZmqControlSocket``, used in the same way."""

    def __init__(self, address: str) -> None:
        self._address = address

    def connect(self) -> "ZmqConnection":
        return ZmqConnection(self._address)


class ZmqConnection:
    """As ``Connection``."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def reset(self) -> None:
        raise NotImplementedError("real connections are reset in tests/e2e/test_control_reset.py")

    async def receive(self) -> bytes:
        return await self._socket.recv()

    def close(self) -> None:
        self._context.destroy(linger=0)


Network = ControlNetwork | ZmqNetwork


class _Wire(Generic[T]):
    """One direction of a connection."""

    def __init__(self, network: ControlNetwork, arrived: Callable[[T], None]) -> None:
        self._network = network
        self._arrived = arrived
        self._under_way: deque[T] = deque()

    def put(self, message: T) -> None:
        self._under_way.append(message)
        asyncio.get_running_loop().call_later(self._network.delay(), self._arrive)

    def lose(self) -> None:
        """Drop messages in flight."""
        self._under_way.clear()

    def _arrive(self) -> None:
        # Whichever delay is over first: the message that was sent first is the one to arrive.
        if self._under_way:
            self._arrived(self._under_way.popleft())


class Arrivals:
    """Messages that reach a router's service from its engines, and lost engines."""

    def __init__(self, service: RouterService) -> None:
        self.messages: list[Message] = []
        self._changed = asyncio.Event()
        scheduler = service.scheduler
        self._on_message, self._on_lost = scheduler.on_message, scheduler.on_lost
        scheduler.on_message = self._message  # type: ignore[method-assign]
        scheduler.on_lost = self._lost  # type: ignore[method-assign]

    async def until(self, true: Callable[[], bool], limit_s: float) -> None:
        """Return when it is true: at once with a message or a loss, soon without either.

        Threads of engines and timers of the router change state without sending a message.
        """
        async with asyncio.timeout(limit_s):
            while not true():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), LOOK_S)

    def _message(self, info: EngineInfo, message: EngineMessage, received: int) -> None:
        self._on_message(info, message, received)
        self.messages.append(message)
        self._changed.set()

    def _lost(self, lost: Sequence[EngineInfo], reason: str) -> None:
        self._on_lost(lost, reason)
        self._changed.set()
