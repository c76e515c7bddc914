"""An HTTP connection with a deadline on every step."""

import http.client
import socket
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from dualpath.storage.s3_location import S3Location

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts and retries of requests; all times are seconds above 0.

    ``connect_s``: to connect.  ``stall_s``: without a byte.  ``request_s``: for one request with
    all its ``attempts`` (at least 1).  ``pause_s``: before the second attempt, doubled before each
    further one.
    """

    connect_s: float = 5.0
    stall_s: float = 10.0
    request_s: float = 60.0
    attempts: int = 3
    pause_s: float = 0.1


class _TimedSocket(socket.socket):
    """A socket that times out when no byte moves for ``stall_s``, and at ``deadline_s``."""

    deadline_s: float
    stall_s: float

    def recv_into(self, buffer: "WriteableBuffer", nbytes: int = 0, flags: int = 0) -> int:
        _arm(self)
        return super().recv_into(buffer, nbytes, flags)

    def sendall(self, data: "ReadableBuffer", flags: int = 0) -> None:
        _send_all(self, data)


class _TimedTlsSocket(ssl.SSLSocket):
    """The same over TLS."""

    deadline_s: float
    stall_s: float

    def recv_into(
        self, buffer: "WriteableBuffer", nbytes: int | None = None, flags: int = 0
    ) -> int:
        _arm(self)
        return super().recv_into(buffer, nbytes, flags)

    def sendall(self, data: "ReadableBuffer", flags: int = 0) -> None:
        _send_all(self, data)


def _send_all(timed: _TimedSocket | _TimedTlsSocket, data: "ReadableBuffer") -> None:
    # In pieces: the timeout of socket.sendall applies to all of the data.
    left = memoryview(data).cast("B")
    while left:
        _arm(timed)
        left = left[timed.send(left) :]


def _arm(timed: _TimedSocket | _TimedTlsSocket) -> None:
    left_s = timed.deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("deadline of the request passed")
    timed.settimeout(min(left_s, timed.stall_s))


class Connection(http.client.HTTPConnection):
    """A connection to ``location``; it is opened by the first request.

    ``deadline_s`` (of ``time.monotonic``) is set before each request.
    """

    deadline_s: float
    sock: _TimedSocket | _TimedTlsSocket

    def __init__(
        self, location: S3Location, retry_policy: RetryPolicy, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(location.host, location.port)
        self._retry_policy = retry_policy
        self._tls = tls

    @property
    def is_open(self) -> bool:
        """Whether it is open, as far as this side knows."""
        return self.sock is not None

    def connect(self) -> None:
        """Open the connection; raises ``OSError``."""
        left_s = max(self.deadline_s - time.monotonic(), 0.001)
        plain = socket.create_connection(
            (self.host, self.port), min(left_s, self._retry_policy.connect_s)
        )
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                self.sock = _TimedSocket(
                    plain.family, plain.type, plain.proto, fileno=plain.detach()
                )
            else:
                wrapped = self._tls.wrap_socket(plain, server_hostname=self.host)
                assert isinstance(wrapped, _TimedTlsSocket)
                self.sock = wrapped
        except BaseException:
            plain.close()
            raise
        self.sock.stall_s = self._retry_policy.stall_s
        self.set_deadline(self.deadline_s)

    def set_deadline(self, deadline_s: float) -> None:
        """Set the deadline of all following steps."""
        self.deadline_s = deadline_s
        if self.is_open:
            self.sock.deadline_s = deadline_s


def tls_context(scheme: str) -> ssl.SSLContext | None:
    """Return the TLS context of https, with the system's certificates; None for http."""
    if scheme != "https":
        return None
    context = ssl.create_default_context()
    context.sslsocket_class = _TimedTlsSocket
    return context


def fill(receive: Callable[[memoryview], int], parts: list[memoryview], wanted: int) -> int:
    """Receive up to ``wanted`` bytes into ``parts``, one after the other; return how many."""
    done = 0
    for part in parts:
        place = part[: wanted - done]
        while place:
            received = receive(place)
            if not received:
                return done
            done += received
            place = place[received:]
    return done
