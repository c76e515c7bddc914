"""Connections to an HTTP server before there is a request: how many, how long, how much.

Web servers bound requests.  A connection that sends no request, or half a head, costs a file and
memory all the same, and uvicorn never closes it.  A ``GuardedConnection`` is between the
transport and the protocol of whichever server it is:

- a connection beyond ``most`` is answered with 429 and closed;
- one that begins no request for ``quiet_s``, since it was made or since its last answer, is closed;
- between two requests at most ``LARGEST_HEAD_BYTES`` arrive: the head of the next, and the
  rest of an unread body.  This needs a protocol that knows of a request as soon as its head
  is there, as uvicorn's does; aiohttp's does not, and bounds heads itself.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, cast

import msgspec

from dualpath.router.token_api.statuses import TOO_MANY

#: Servers allow heads of 8 to 64 KiB; the rest is for bodies that come after their refusal.
LARGEST_HEAD_BYTES = 256 << 10
_HEAD_TOO_LARGE = 431


class Progress(NamedTuple):
    """State of a connection's protocol: its latest request, and whether that is being served."""

    latest: object
    under_way: bool


class ConnectionLimits(msgspec.Struct, frozen=True):
    """``most`` connections at once; ``quiet_s`` without a request."""

    most: int = 16384
    quiet_s: float = 30.0


class Answered(Protocol):
    """Whoever counts refusals (``RouterMetrics``)."""

    def answered(self, status: int, body: bytes) -> object:
        """Note an answer."""


class Connections:
    """All connections of one server; to be used on its event loop."""

    def __init__(self, limits: ConnectionLimits, refusals: Answered | None = None) -> None:
        self._limits = limits
        self._refusals = refusals
        self._open: set[GuardedConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)

    def guarded(
        self,
        make: Callable[[], asyncio.Protocol],
        progress: Callable[[asyncio.Protocol], Progress] | None = None,
    ) -> asyncio.Protocol:
        """Return the protocol for a new connection; ``make`` makes the server's own.

        ``progress`` looks at that; without it ``request`` has to be entered for every request, and
        bytes are not counted.
        """
        return GuardedConnection(self, make, progress)

    def admit(self, connection: "GuardedConnection") -> bool:
        """Count a connection; False if there are too many."""
        if len(self._open) >= self._limits.most:
            return False
        self._open.add(connection)
        self._empty.clear()
        self._watch()
        return True

    def remove(self, connection: "GuardedConnection") -> None:
        """A connection is closed."""
        self._open.discard(connection)
        if not self._open:
            self._empty.set()

    async def emptied(self, within_s: float) -> None:
        """Return when no connection is open, after ``within_s`` at the latest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._empty.wait()

    def refusal(self, status: int) -> bytes:
        """Return a whole answer to a client without a request, and count it."""
        message = {
            TOO_MANY: f"{self._limits.most} connections are open, the most this server takes; "
            "close some or raise --max-connections",
            _HEAD_TOO_LARGE: f"the head has more than {LARGEST_HEAD_BYTES} bytes; send less",
        }[status]
        body = msgspec.json.encode({"error": {"message": message, "code": status}})
        if self._refusals is not None:
            self._refusals.answered(status, body)
        retry = b"Retry-After: 1\r\n" if status == TOO_MANY else b""
        return (
            b"HTTP/1.1 %d Refused\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"%sContent-Length: %d\r\n\r\n%s" % (status, retry, len(body), body)
        )

    def sweep(self) -> None:
        """Close connections that have been quiet for too long."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for connection in list(self._open):
            connection.close_if_quiet(now_s - self._limits.quiet_s, now_s)
        if self._open:
            self._watch()

    def _watch(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limits.quiet_s / 4, self.sweep)


class GuardedConnection(asyncio.Protocol):
    """One connection; everything else is the server's own protocol's, ``inner``."""

    def __init__(
        self,
        owner: Connections,
        make: Callable[[], asyncio.Protocol],
        progress: Callable[[asyncio.Protocol], Progress] | None,
    ) -> None:
        self._owner = owner
        self._make = make
        self._progress = progress or self._told
        self._requests = Progress(None, under_way=False)
        self.inner: asyncio.Protocol | None = None

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """In the block a request is under way."""
        number = object()
        self._requests = Progress(number, under_way=True)
        try:
            yield
        finally:
            self._requests = Progress(number, under_way=False)

    def _told(self, inner: asyncio.Protocol) -> Progress:
        return self._requests

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hand the connection on, or refuse it."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._owner.admit(self):
            self._transport.write(self._owner.refusal(TOO_MANY))
            self._transport.close()
            return
        self._quiet_since_s = asyncio.get_running_loop().time()
        self._arrived_bytes = 0
        self.inner = self._make()
        self.inner.connection_made(transport)
        self._seen = self._progress(self.inner)

    def data_received(self, data: bytes) -> None:
        """Hand data on; too much of it without a request closes the connection."""
        if self.inner is None:
            return
        self.inner.data_received(data)
        if self._progress == self._told or self._moved() or self._seen.under_way:
            return
        self._arrived_bytes += len(data)
        if self._arrived_bytes > LARGEST_HEAD_BYTES and not self._transport.is_closing():
            if self._seen.latest is None:  # After an answer, another would be taken for the next.
                self._transport.write(self._owner.refusal(_HEAD_TOO_LARGE))
            self._transport.close()

    def eof_received(self) -> bool | None:
        """Hand it on."""
        return self.inner.eof_received() if self.inner is not None else None

    def connection_lost(self, exc: Exception | None) -> None:
        """Hand it on."""
        self._owner.remove(self)
        if self.inner is not None:
            self.inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Hand it on."""
        if self.inner is not None:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        """Hand it on."""
        if self.inner is not None:
            self.inner.resume_writing()

    def close_if_quiet(self, since_s: float, now_s: float) -> None:
        """Close the connection if no request has begun, or been answered, after ``since_s``."""
        if self._moved() or self._seen.under_way:
            self._quiet_since_s = now_s
        elif self._quiet_since_s <= since_s:
            self._transport.abort()

    def _moved(self) -> bool:
        """Whether a request has begun or ended since the last check."""
        assert self.inner is not None
        seen = self._progress(self.inner)
        if seen == self._seen:
            return False
        self._seen = seen
        self._arrived_bytes = 0
        self._quiet_since_s = asyncio.get_running_loop().time()
        return True
