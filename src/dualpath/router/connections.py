"""Connections to an HTTP server before there is a request: how many, how long, how much.

Web servers bound requests.  A connection that sends no request, or half a head, costs a file and
memory all the same, and uvicorn never closes it.  A ``GuardedConnection`` is between the
transport and the protocol of whichever server it is:

- a connection beyond ``most`` takes the place of one without a whole request for ``CROWDED_S``, so
  that half heads and half bodies do not keep others out; without such a one it is answered with 429
  and closed;
- one that begins no request for ``quiet_s``, since it was made or since its last answer, is closed;
  after an answer it has ``idle_s`` if that is longer, the server's own limit of idle connections;
- between two requests at most ``LARGEST_HEAD_BYTES`` arrive: the head of the next, and the
  rest of an unread body.  This needs a protocol that knows of a request as soon as its head
  is there, as uvicorn's does; aiohttp's does not, and bounds heads itself.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from dualpath.router.token_api.statuses import TOO_MANY

#: Servers allow heads of 8 to 64 KiB; the rest is for bodies that come after their refusal.
LARGEST_HEAD_BYTES = 256 << 10
_HEAD_TOO_LARGE = 431
#: Of a full server, a connection without a request for this long may be closed for another one.
CROWDED_S = 1.0
#: Share of the connections that are closed at once, as looking for them takes time.
_CLOSED_AT_ONCE = 1 / 16


class Progress(NamedTuple):
    """State of a connection's protocol: its latest request, and whether that is being served.

    ``arriving``: the request's body is not whole yet.
    """

    latest: object
    under_way: bool
    arriving: bool = False


class ConnectionLimits(msgspec.Struct, frozen=True):
    """``most`` connections at once; ``quiet_s`` and ``idle_s`` without a request."""

    most: int = 16384
    quiet_s: float = 30.0
    idle_s: float = 0.0


class Answered(Protocol):
    """Whoever counts refusals (``RouterMetrics``)."""

    def answered(self, status: int, body: bytes) -> object:
        """Note an answer."""


class Connections:
    """All connections of one server; to be used on its event loop."""

    def __init__(self, limits: ConnectionLimits, refusals: Answered | None = None) -> None:
        self._limits = limits
        self._refusals = refusals
        self._open: dict[GuardedConnection, None] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._crowded_until_s = float("-inf")

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
        if len(self._open) >= self._limits.most and not self._made_room():
            return False
        self._open[connection] = None
        self._empty.clear()
        self._watch()
        return True

    def remove(self, connection: "GuardedConnection") -> None:
        """A connection is closed."""
        self._open.pop(connection, None)
        if not self._open:
            self._empty.set()

    def _made_room(self) -> bool:
        """Close connections without a request, first those that never had one; False if none."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._crowded_until_s:
            return False
        quiet = [one for one in self._open if one.waits_since_s(now_s) <= now_s - CROWDED_S]
        quiet.sort(key=lambda one: (one.has_asked, one.waits_since_s(now_s)))
        for one in quiet[: max(int(self._limits.most * _CLOSED_AT_ONCE), 1)]:
            one.abort()
            self.remove(one)
        if not quiet:
            self._crowded_until_s = now_s + CROWDED_S  # Others are refused without looking again.
        return bool(quiet)

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
        quiet_s = self._limits.quiet_s
        idle_s = max(self._limits.idle_s, quiet_s)
        for connection in list(self._open):
            limit_s = idle_s if connection.has_asked else quiet_s
            connection.close_if_quiet(now_s - limit_s, now_s)
        if self._open:
            self._watch()

    def _watch(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limits.quiet_s / 4, self.sweep)


def uvicorn_protocol(
    connections: Connections, make: Callable[..., asyncio.Protocol]
) -> Callable[..., asyncio.Protocol]:
    """Return the factory for uvicorn's connections: its own protocol, ``make``, with limits."""

    def protocol(**given: Any) -> asyncio.Protocol:  # noqa: ANN401 - uvicorn's own
        return connections.guarded(lambda: make(**given), uvicorn_progress)

    return protocol


def uvicorn_progress(protocol: asyncio.Protocol) -> Progress:
    """Return the current request of a uvicorn connection (None before the first) and its state."""
    cycle = protocol.cycle  # type: ignore[attr-defined]
    under_way = cycle is not None and not cycle.response_complete
    return Progress(cycle, under_way, under_way and cycle.more_body)


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
        self._is_arriving: Callable[[], bool] = bool
        self.inner: asyncio.Protocol | None = None

    @contextlib.contextmanager
    def request(self, is_arriving: Callable[[], bool] = bool) -> Iterator[None]:
        """In the block a request is under way; ``is_arriving``: whether its body is incomplete."""
        number = object()
        self._requests, self._is_arriving = Progress(number, under_way=True), is_arriving
        self._moved()
        try:
            yield
        finally:
            self._requests, self._is_arriving = Progress(number, under_way=False), bool
            self._moved()

    def _told(self, inner: asyncio.Protocol) -> Progress:
        return self._requests._replace(arriving=self._is_arriving())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hand the connection on, or refuse it."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._owner.admit(self):
            self._transport.write(self._owner.refusal(TOO_MANY))
            self._transport.close()
            return
        self._quiet_since_s = self._moved_s = asyncio.get_running_loop().time()
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
        if self.quiet_since_s(now_s) <= since_s:
            self.abort()

    @property
    def has_asked(self) -> bool:
        """Whether there was a request."""
        return self._seen.latest is not None

    def quiet_since_s(self, now_s: float) -> float:
        """Return since when there is no request, ``now_s`` while there is one."""
        if self._moved() or self._seen.under_way:
            self._quiet_since_s = now_s
        return self._quiet_since_s

    def waits_since_s(self, now_s: float) -> float:
        """Return since when this side waits for a whole request, ``now_s`` if it has one."""
        self.quiet_since_s(now_s)
        return now_s if self._seen.under_way and not self._seen.arriving else self._moved_s

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _moved(self) -> bool:
        """Whether a request has begun or ended since the last check."""
        assert self.inner is not None
        seen = self._progress(self.inner)
        if seen == self._seen:
            return False
        self._seen = seen
        self._arrived_bytes = 0
        self._quiet_since_s = self._moved_s = asyncio.get_running_loop().time()
        return True
