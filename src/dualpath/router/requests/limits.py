"""Limits on HTTP requests as they arrive, before anything is parsed; ASGI, of no framework.

Bodies are bounded as they arrive (``ArrivingBodies``), whether their length is declared or not.
While no request can be taken, requests for tokens get 429, while it drains 503, and with either
the time after which to retry.  Limits on the fields of a body (prompt, ``n``) are checked by its
parser.  All refusals are counted here, also those of the layers inside, which check API keys and
read bodies.

A server process may have as many streams as files: one each at an engine, two at a router.
"""

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec

from dualpath.core.errors import TurnedAwayError
from dualpath.router.asgi import App, Message, Receive, Send, json_answer, own_path
from dualpath.router.connections import ConnectionLimits
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.settings import RouterSettings
from dualpath.router.token_api.statuses import (
    LATER,
    TIMED_OUT_BODY,
    TOO_LARGE,
    TOO_MANY,
    UNAVAILABLE,
    status_of,
)

_T = TypeVar("_T")


class BodyRefusedError(Exception):
    """Ends the reading of a body: the answer is ``status``, whatever the application returns."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyLimits(Protocol):
    """``RouterSettings``, as far as they speak of bodies."""

    @property
    def max_body_bytes(self) -> int:
        """Of one."""
        ...

    @property
    def max_arriving_bytes(self) -> int:
        """Of all that are not whole."""
        ...

    @property
    def body_timeout_s(self) -> float:
        """Until one has to be whole."""
        ...


class ArrivingBodies:
    """All bodies of one server that have begun to arrive and are not whole.

    A body is held until it is whole.  So all unfinished bodies together have one bound; a body that
    would exceed it is refused, and the others go on.
    """

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self.held_bytes = 0

    @contextmanager
    def one(self) -> "Iterator[ArrivingBody]":
        """A body, until the end of the block at the latest."""
        body = ArrivingBody(self)
        try:
            yield body
        finally:
            body.end()


class ArrivingBody:
    """One body; ``read`` pieces until it is whole, then ``end``."""

    def __init__(self, bodies: ArrivingBodies) -> None:
        self._bodies = bodies
        self._bytes = 0
        self._whole = False
        self._deadline_s: float | None = None

    @property
    def arriving(self) -> bool:
        """Whether more of it is to come."""
        return not self._whole

    async def read(self, piece: Callable[[], Awaitable[_T]], size: Callable[[_T], int]) -> _T:
        """Return the next piece.  Raises ``BodyRefusedError`` if it is one too many, or late."""
        limit_s = self._bodies.limits.body_timeout_s
        if self._deadline_s is None:
            self._deadline_s = asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(self._deadline_s):
                found = await piece()
        except TimeoutError as error:
            raise BodyRefusedError(
                TIMED_OUT_BODY,
                f"the body did not arrive within {limit_s:g} s; send it faster or raise "
                "--body-timeout-s",
            ) from error
        self._took(size(found))
        return found

    def _took(self, count: int) -> None:
        limits = self._bodies.limits
        self._bytes += count
        self._bodies.held_bytes += count
        if self._bytes > limits.max_body_bytes:
            raise BodyRefusedError(TOO_LARGE, too_large(limits.max_body_bytes))
        if self._bodies.held_bytes > max(limits.max_arriving_bytes, limits.max_body_bytes):
            raise BodyRefusedError(
                TOO_MANY,
                f"bodies of {self._bodies.held_bytes} bytes are arriving, at most "
                f"{limits.max_arriving_bytes} do at once; try again or raise "
                "--max-arriving-bytes",
            )

    def end(self) -> None:
        """It is whole, or no longer needed; idempotent."""
        if not self._whole:
            self._whole = True
            self._bodies.held_bytes -= self._bytes


def too_large(limit_bytes: int) -> str:
    """Return the message for a body that is too large."""
    return (
        f"the body has more than {limit_bytes} bytes, the most this router takes; send less or "
        "raise --max-body-bytes"
    )


#: When a client may try again, unless the length of a queue gives another time: requests end all
#: the time, and the next router is soon there.
RETRY_AFTER_S = 1

#: Paths of the router's own, for operators.
OPERATORS_PREFIX = "/dualpath/"

#: A line about files that ran out is written once in that time.
NO_FILES_GAP_S = 60.0

#: What vLLM's server asks for as well, which gives up where the hard limit is lower; processes
#: usually start with 1024.
WANTED_OPEN_FILES = 65535


class LimitedService(Protocol):
    """The router's service as far as its limits go."""

    @property
    def settings(self) -> RouterSettings:
        """What an operator has chosen."""
        ...

    @property
    def metrics(self) -> RouterMetrics:
        """What counts the refused requests."""
        ...

    def turned_away(self) -> TurnedAwayError | None:
        """Return why no further request is taken, None if one is."""
        ...

    def retry_after_s(self) -> int:
        """Return after how many seconds a client that got 429 should try again."""
        ...


class RequestLimits:
    """Middleware; finds the service as ``scope["app"].state.dualpath_service``."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._bodies: ArrivingBodies | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass the call on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service: LimitedService = scope["app"].state.dualpath_service
        if self._bodies is None:
            self._bodies = ArrivingBodies(service.settings)
        with self._bodies.one() as body:
            call = _Call(receive, send, service, body)
            if _declared_bytes(scope) > (most := service.settings.max_body_bytes):
                await call.refuse(TOO_LARGE, too_large(most))
            elif _brings_work(scope) and (error := service.turned_away()) is not None:
                await call.refuse(status_of(error), str(error))
            else:
                await call.passed_to(self._app, scope)


class _Call:
    """Counts arriving bytes, since a chunked body declares no length, and checks the answer."""

    def __init__(
        self, receive: Receive, send: Send, service: LimitedService, body: ArrivingBody
    ) -> None:
        self._receive = receive
        self._send = send
        self._metrics = service.metrics
        self._service = service
        self._body = body
        self._cut: BodyRefusedError | None = None
        self._answering = False
        self._uncounted_status = 0

    async def passed_to(self, app: App, scope: Message) -> None:
        try:
            await app(scope, self._counted, self._answer)
        except Exception:
            if self._cut is None:
                raise
        if self._cut is not None and not self._answering:
            await self.refuse(self._cut.status, str(self._cut))

    async def refuse(self, status: int, reason: str) -> None:
        start, body = refusal(status, reason, self._service.retry_after_s)
        self._metrics.answered(status, body["body"])
        await self._send(start)
        await self._send(body)

    async def _counted(self) -> Message:
        if self._cut is not None:
            raise self._cut
        if not self._body.arriving:
            return await self._receive()
        try:
            message = await self._body.read(self._receive, _body_bytes)
        except BodyRefusedError as error:
            self._cut = error
            raise
        if not message.get("more_body", False):
            self._body.end()
        return message

    async def _answer(self, message: Message) -> None:
        if self._cut is not None and not self._answering:
            return  # The application's answer to a body that was cut off; ours follows.
        if message["type"] == "http.response.start":
            self._answering = True
            self._uncounted_status = message["status"]
            later = _retry_after(message["status"], self._service.retry_after_s)
            message["headers"] = [*message.get("headers", ()), *later]
        elif self._uncounted_status:
            self._metrics.answered(self._uncounted_status, message.get("body", b""))
            self._uncounted_status = 0
        await self._send(message)


def _body_bytes(message: Message) -> int:
    return len(message.get("body", b""))


#: Error types for clients; that of 503 is vLLM's for requests that may be retried.
_ERROR_TYPES = {TOO_MANY: "rate_limit_exceeded", UNAVAILABLE: "ServiceUnavailableError"}


def _retry_after(status: int, when_full_s: Callable[[], int]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the header with the time to retry, where an answer of this status has one."""
    if status not in LATER:
        return ()
    after_s = when_full_s() if status == TOO_MANY else RETRY_AFTER_S
    return ((b"retry-after", b"%d" % after_s),)


def _brings_work(scope: Message) -> bool:
    """Whether a call generates tokens, unlike calls for observation and operation."""
    return scope["method"] == "POST" and not own_path(scope).startswith(OPERATORS_PREFIX)


def _declared_bytes(scope: Message) -> int:
    length = next((v for name, v in scope["headers"] if name == b"content-length"), b"0")
    return int(length) if length.isdigit() else 0


def refusal(
    status: int, reason: str, when_full_s: Callable[[], int] = lambda: RETRY_AFTER_S
) -> tuple[Message, Message]:
    """Return the messages of an answer that refuses a call, in the form of the OpenAI API.

    ``when_full_s`` returns the time after which to retry what got 429.
    """
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    error = {"message": reason, "type": kind, "param": None, "code": status}
    body = msgspec.json.encode({"error": error})
    more = [*_retry_after(status, when_full_s)]
    if status != TOO_MANY:
        more.append((b"connection", b"close"))  # The rest is not waited for; the router goes.
    return json_answer(status, body, *more)


def allow_many_streams() -> None:
    """Raise this process's soft limit on open files to ``WANTED_OPEN_FILES`` or the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised_limit(soft, hard), hard))
    logging.getLogger("asyncio").addFilter(_NO_FILES)


class NoFilesFilter(logging.Filter):
    """For asyncio's log: a process without free files logs a traceback every second."""

    def __init__(self) -> None:
        super().__init__()
        self._said_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass one line in ``NO_FILES_GAP_S``, with the remedy."""
        if not record.getMessage().startswith("socket.accept() out of system resource"):
            return True
        if record.created - self._said_s < NO_FILES_GAP_S:
            return False
        self._said_s = record.created
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.args, record.exc_info = _NO_FILES_LEFT, (), None
        return True


_NO_FILES_LEFT = (
    "no file is left for another connection; raise the limit (ulimit -n) or lower "
    "--max-connections and --max-concurrent-requests"
)
_NO_FILES = NoFilesFilter()


def connection_limits(settings: RouterSettings, idle_s: float = 0.0) -> ConnectionLimits:
    """Return the limits of a router's server: a stream may need two more files, at its engines.

    ``idle_s`` is the time after which the server itself closes a connection between two requests.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = settings.max_connections if files == resource.RLIM_INFINITY else files // 3
    most = min(settings.max_connections, allowed)
    return ConnectionLimits(most, settings.quiet_timeout_s, idle_s)


def server_limits() -> ConnectionLimits:
    """Return the limits of a server of which each request takes one file, such as an engine's.

    Half of the files are for what the process itself opens: blocks, devices, other connections.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ConnectionLimits().most
    return ConnectionLimits(most if files == resource.RLIM_INFINITY else min(most, files // 2))


def raised_limit(soft: int, hard: int) -> int:
    """Return the soft limit to set, never below ``soft``; either may be without limit."""
    if soft == resource.RLIM_INFINITY:
        return soft
    allowed = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    return max(soft, allowed)
