"""Where control messages come in and go out: a ZMQ ROUTER socket, one connection per engine.

With a cluster secret only engines that have it are heard at all (``control_guard``); without one
the address is a loopback address.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import zmq
import zmq.asyncio

from dualpath.core.errors import ConfigError
from dualpath.node.cluster_secret import ClusterSecret, check_control_host
from dualpath.router.control.control_connections import LARGEST_FRAME_BYTES, ControlConnections
from dualpath.router.control.control_guard import ControlGuard
from dualpath.router.loop_socket import AT_ONCE, LoopSocket
from dualpath.router.refusals import ControlRefusals

logger = logging.getLogger(__name__)

_LINGER_MS = 200
#: A connection that has not shown the secret by then is closed; libzmq would wait for 30 s.
_HANDSHAKE_MS = 5000


class ControlSocket(Protocol):
    """Frames to and from engines; what one engine and the router send each other keeps its order.

    ``identity`` names a connection; an engine that connects again has another one.
    """

    async def open(
        self, host: str, port: int, secret: ClusterSecret | None, refusals: ControlRefusals
    ) -> str:
        """Return the endpoint that engines connect to (port 0: any free one).

        Connections without the secret are counted in ``refusals``.  Raises ``ConfigError`` if the
        address cannot be bound, or other machines could reach it and there is no secret.
        """
        ...

    async def receive(self) -> tuple[bytes, Sequence[bytes]]:
        """Return the next message's identity and its frames; an honest message has one."""
        ...

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send a message without waiting; it is dropped if the connection is gone."""
        ...

    async def close(self) -> None:
        """Let what was sent go out, then close."""
        ...


class ZmqControlSocket:
    """The ``ControlSocket`` of a live router."""

    def __init__(self) -> None:
        self._guard: ControlGuard | None = None
        self._connections: ControlConnections | None = None
        self._in_loop: LoopSocket | None = None

    async def open(
        self, host: str, port: int, secret: ClusterSecret | None, refusals: ControlRefusals
    ) -> str:
        """Bind to ``tcp://host:port``."""
        check_control_host(host, secret)
        self._context = zmq.asyncio.Context()
        # The context is asyncio's for those who guard and watch; this socket is not.
        self._socket: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        # A restarted engine may come with its old identity before TCP notices the old one's end.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_FRAME_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if secret is not None:
            self._guard = ControlGuard(self._context, self._socket, secret, refusals)
        on_stranger = self._guard.refused if self._guard else _nobody_is_a_stranger
        self._connections = ControlConnections(self._socket, refusals, on_stranger)
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            await self._let_go()
            self._socket.close(linger=0)
            self._context.destroy(linger=0)
            raise ConfigError(
                f"control address {host}:{port} cannot be bound: {error}; choose another "
                "control port or stop what uses it"
            ) from error
        self._in_loop = LoopSocket(self._socket)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> tuple[bytes, Sequence[bytes]]:
        """Return the next message, without a frame from who sends none or several.

        Parts are taken one by one and forgotten, so that a message of a million of them costs no
        million objects here.  libzmq holds them until the last is there: ``ControlConnections``
        bounds how much.
        """
        assert self._in_loop is not None
        return await self._in_loop.receive(self._take)

    def _take(self) -> tuple[bytes, Sequence[bytes]]:
        part = self._socket.recv(AT_ONCE, copy=False)
        identity, frame, parts = part.bytes, b"", 0
        while part.more:
            part = self._socket.recv(copy=False)  # libzmq has all parts, or gives none.
            if self._connections is not None:
                self._connections.taken(part)
            frame, parts = part.bytes, parts + 1
        return identity, (frame,) if parts == 1 else ()

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send without a limit on what is queued for a slow engine; nobody hears it unless open."""
        if self._in_loop is None:
            return
        try:
            self._in_loop.send((identity, frame))
        except zmq.ZMQError:
            logger.exception("control message could not be sent")

    async def close(self) -> None:
        """Close; what was sent has ``_LINGER_MS`` to go out."""
        in_loop, self._in_loop = self._in_loop, None
        if in_loop is not None:
            in_loop.close()
        await self._let_go()
        self._socket.close(linger=_LINGER_MS)
        self._context.term()

    async def _let_go(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()


def _nobody_is_a_stranger(endpoint: str) -> None:
    """Without a secret, what ends in its handshake is no ZMQ, and is dropped uncounted."""
