"""A front end's end of its connection to the scheduler: a ZMQ DEALER socket in its event loop."""

import contextlib

import zmq
import zmq.asyncio

from dualpath.core.errors import ConfigError
from dualpath.transport.cluster_secret import ClusterSecret, check_control_url

_LINGER_MS = 500
#: Between two tries to connect: the first, doubled each time up to the last.
_FIRST_RETRY_MS, _LAST_RETRY_MS = 20, 250


class ZmqLinkConnection:
    """The ``LinkConnection`` of a live front end.

    Raises ``ConfigError`` for an address ZMQ cannot connect to, and for one of another machine
    without a secret.
    """

    def __init__(self, scheduler: str, secret: ClusterSecret | None = None) -> None:
        check_control_url(scheduler, secret)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _FIRST_RETRY_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LAST_RETRY_MS)
        if secret is not None:
            secret.guard_connection(self._socket)
        try:
            self._socket.connect(scheduler)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"scheduler address {scheduler!r}: {error}; use the form tcp://host:port"
            ) from error

    def send(self, frame: bytes) -> None:
        """Hand a frame to ZMQ, which keeps it until it is connected."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)

    async def receive(self) -> bytes:
        """Return the next frame."""
        return (await self._socket.recv_multipart())[-1]

    def close(self) -> None:
        """Close; frames have ``_LINGER_MS`` to go out."""
        self._socket.close()
        self._context.destroy(linger=_LINGER_MS)
