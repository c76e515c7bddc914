"""Limits on HTTP requests as they arrive, before anything is parsed; ASGI, of no framework.

Bodies are bounded as they arrive (``bodies``), whether their length is declared or not.  While the
service is full, requests that bring work get 429, while it drains 503, and with either the time
after which to try again.  Limits on
what a body says (prompt, ``n``) belong to whoever reads it.  All refusals are counted here, also
those of the layers inside, which ask for API keys and read bodies.

A server process may have as many streams as files: one each at an engine, two at a router.
"""

import logging
import resource
from typing import Protocol

import msgspec

from dualpath.core.errors import TurnedAwayError
from dualpath.router.asgi import App, Message, Receive, Send, own_path
from dualpath.router.connections import ConnectionLimits
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.requests.bodies import (
    ArrivingBodies,
    ArrivingBody,
    BodyRefusedError,
    too_large,
)
from dualpath.router.settings import RouterSettings
from dualpath.router.token_api.statuses import LATER, TOO_LARGE, TOO_MANY, UNAVAILABLE, status_of

#: When a client may try again that came while the service was full or about to end: requests end
#: all the time, and the next router is soon there.
RETRY_AFTER_S = 1

#: Paths of the router's own, for who runs it.
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
    """Counts what arrives, since a chunked body declares no length, and looks at the answer."""

    def __init__(
        self, receive: Receive, send: Send, service: LimitedService, body: ArrivingBody
    ) -> None:
        self._receive = receive
        self._send = send
        self._metrics = service.metrics
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
        start, body = refusal(status, reason)
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
            return  # What the application says of a body cut off; ours follows.
        if message["type"] == "http.response.start":
            self._answering = True
            self._uncounted_status = message["status"]
            if message["status"] in LATER:
                message["headers"] = [*message.get("headers", ()), _RETRY_AFTER]
        elif self._uncounted_status:
            self._metrics.answered(self._uncounted_status, message.get("body", b""))
            self._uncounted_status = 0
        await self._send(message)


def _body_bytes(message: Message) -> int:
    return len(message.get("body", b""))


#: What clients tell errors by; that of 503 is vLLM's for what may be tried again.
_ERROR_TYPES = {TOO_MANY: "rate_limit_exceeded", UNAVAILABLE: "ServiceUnavailableError"}
_RETRY_AFTER = (b"retry-after", str(RETRY_AFTER_S).encode())


def _brings_work(scope: Message) -> bool:
    """Whether a call wants tokens, and not to look at the router or to run it."""
    return scope["method"] == "POST" and not own_path(scope).startswith(OPERATORS_PREFIX)


def _declared_bytes(scope: Message) -> int:
    length = next((v for name, v in scope["headers"] if name == b"content-length"), b"0")
    return int(length) if length.isdigit() else 0


def refusal(status: int, reason: str) -> tuple[Message, Message]:
    """Return the messages of an answer that refuses a call, in the form of the OpenAI API."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    error = {"message": reason, "type": kind, "param": None, "code": status}
    body = msgspec.json.encode({"error": error})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status in LATER:
        headers.append(_RETRY_AFTER)
    if status != TOO_MANY:
        headers.append((b"connection", b"close"))  # The rest is not waited for; the router goes.
    start = {"type": "http.response.start", "status": status, "headers": headers}
    return start, {"type": "http.response.body", "body": body}


def allow_many_streams() -> None:
    """Raise this process's soft limit on open files to ``WANTED_OPEN_FILES`` or the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised_limit(soft, hard), hard))
    logging.getLogger("asyncio").addFilter(_NO_FILES)


class NoFilesFilter(logging.Filter):
    """For asyncio's log: a process without files says so with a traceback every second."""

    def __init__(self) -> None:
        super().__init__()
        self._said_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """Let one line pass in ``NO_FILES_GAP_S``, and say what to do."""
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


def connection_limits(settings: RouterSettings) -> ConnectionLimits:
    """Return the limits of a router's server: a stream may need two more files, at its engines."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = settings.max_connections if files == resource.RLIM_INFINITY else files // 3
    return ConnectionLimits(min(settings.max_connections, allowed), settings.quiet_timeout_s)


def raised_limit(soft: int, hard: int) -> int:
    """Return the soft limit to set, never below ``soft``; either may be without limit."""
    if soft == resource.RLIM_INFINITY:
        return soft
    allowed = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    return max(soft, allowed)
