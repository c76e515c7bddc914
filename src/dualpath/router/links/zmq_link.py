"""A front end's end of its connection to the scheduler: a ZMQ DEALER socket in its event loop."""

import contextlib

import zmq

from dualpath.engine.control.link import LINGER_MS, connect_dealer, prepare_dealer
from dualpath.node.cluster_secret import ClusterSecret, check_control_url
from dualpath.router.loop_socket import LoopSocket


class ZmqLinkConnection:
    """The ``LinkConnection`` of a live front end, made in its event loop.

    Raises ``ConfigError`` for an address ZMQ cannot connect to, and for one of another machine
    without a secret.
    """

    def __init__(self, scheduler: str, secret: ClusterSecret | None = None) -> None:
        check_control_url(scheduler, secret)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        prepare_dealer(self._socket, secret)
        connect_dealer(self._socket, scheduler, "scheduler")
        self._in_loop = LoopSocket(self._socket)

    def send(self, frame: bytes) -> None:
        """Hand a frame to ZMQ, which keeps it until it is connected."""
        with contextlib.suppress(zmq.Again):
            self._in_loop.send((frame,))

    async def receive(self) -> bytes:
        """Return the next frame."""
        frames = await self._in_loop.receive(lambda: self._socket.recv_multipart(zmq.NOBLOCK))
        return frames[-1]

    def close(self) -> None:
        """Close; frames have ``LINGER_MS`` to go out."""
        self._in_loop.close()
        self._socket.close()
        self._context.destroy(linger=LINGER_MS)
