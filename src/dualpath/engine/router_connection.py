"""An engine's connection to the router: a ZMQ DEALER socket, used by one thread.

With a cluster secret the connection is encrypted and the router must have the same secret; without
one the router must be on this machine (``transport.cluster_secret``).
"""

import contextlib
import socket
from typing import Protocol

import zmq

from dualpath.engine.dealer import LINGER_MS, connect_dealer, prepare_dealer
from dualpath.transport.cluster_secret import ClusterSecret, check_control_url


class RouterConnection(Protocol):
    """Frames to and from the router; only ``wake`` may be called from any thread."""

    router: str

    def send(self, frame: bytes) -> bool:
        """Send without waiting; False if there is no connection or its queue is full."""
        ...

    def receive(self) -> bytes | None:
        """Return the next frame, None if none has arrived."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Return when a frame has arrived, ``wake`` was called or after the timeout.

        Returns True at once after a new connection, perhaps to another router.
        """
        ...

    def wake(self) -> None:
        """End the current ``wait``, or the next one."""
        ...

    def reconnect(self) -> None:
        """Drop the connection and make a new one."""
        ...

    def close(self) -> None:
        """Flush sent frames, then close; ``wake`` has no effect afterwards."""
        ...


class ZmqRouterConnection:
    """The ``RouterConnection`` of a live engine.

    Raises ``ConfigError`` for an address that ZMQ cannot connect to, and for an address of another
    machine without a secret.
    """

    def __init__(self, router: str, secret: ClusterSecret | None = None) -> None:
        check_control_url(router, secret)
        self.router = router
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        prepare_dealer(self._socket, secret)
        self._connected = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        connect_dealer(self._socket, router, "router")
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._poller.register(self._connected, zmq.POLLIN)

    def send(self, frame: bytes) -> bool:
        """Send a frame through ZMQ."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """Receive a frame from ZMQ."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)[-1]
        except zmq.Again:
            return None

    def wait(self, timeout_s: float) -> bool:
        """Poll the socket, the socket pair of ``wake``, and the monitor of the connection."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wake_receiver.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                while self._wake_receiver.recv(4096):
                    pass
        if self._connected not in ready:
            return False
        with contextlib.suppress(zmq.Again):
            while True:
                self._connected.recv_multipart(zmq.NOBLOCK)
        return True

    def wake(self) -> None:
        """Write a byte to the socket pair."""
        # Full: the thread is about to wake anyway; closed: no thread waits any more.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_sender.send(b"\0")

    def reconnect(self) -> None:
        """Reconnect: libzmq does not retry after a failed security handshake with an old router."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self.router)
        self._socket.connect(self.router)

    def close(self) -> None:
        """Close the socket; frames have ``LINGER_MS`` to be sent."""
        self._socket.disable_monitor()
        self._connected.close(linger=0)
        self._socket.close()
        self._context.destroy(linger=LINGER_MS)
        self._wake_receiver.close()
        self._wake_sender.close()
