"""HTTP calls to an engine's token API, for engines of any kind.

Cancelling a call or closing a stream closes its HTTP response, on which the engine aborts the
request.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp
import msgspec

from dualpath.core.errors import (
    BadRequestError,
    DualPathError,
    EngineLostError,
    IncompatibleError,
)
from dualpath.node.certificates import trusting
from dualpath.node.http_client import client_session, sent
from dualpath.router.engine_calls import Job, OpenCalls, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.token_api.open_calls import OPEN_CALLS_PATH, OpenCallsAnswer, call_header
from dualpath.router.token_api.statuses import engine_error
from dualpath.router.token_api.wire import (
    GENERATE_PATH,
    Choice,
    EventLines,
    GenerateAnswer,
    GenerateRequest,
    decode_body,
)

#: An engine on a cluster network answers a connection attempt in far less.
CONNECT_TIMEOUT_S = 5.0

_ERROR_TEXT_BYTES = 300


HEALTH_PATH = "/health"
#: Statuses of a proxy that does not reach the engine, or of an engine that is not healthy.
_UNREACHABLE = (502, 503, 504)
#: vLLM's, for a server of several data-parallel ranks.
RANK_HEADER = "X-data-parallel-rank"


class TokenApi(Protocol):
    """What ``TokenApiClient`` does, and raises, over whatever network."""

    async def generate(
        self, engine: EngineInfo, job: Job, request: GenerateRequest[Any]
    ) -> GenerateAnswer:
        """Return the whole answer, which has one choice."""
        ...

    def stream(
        self, engine: EngineInfo, job: Job, request: GenerateRequest[Any]
    ) -> AsyncGenerator[Choice, None]:
        """Yield what comes; ends after the choice with a ``finish_reason``."""
        ...

    async def answers(self, engine: EngineInfo) -> None:
        """Return if the engine's server is healthy."""
        ...

    async def open_calls(self, engine: EngineInfo) -> OpenCalls | None:
        """Return the calls that the engine's server has; None if it does not report them."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class TokenApiClient:
    """Calls engines; used on one event loop, ``aclose`` at the end.

    ``headers`` go with every call, a job's trace headers with its own.  ``ca_file`` has the
    authorities of engines with HTTPS, empty for the system's; raises ``ConfigError`` for a file
    without certificates.  All calls raise
    ``EngineLostError`` for an engine that does not answer, ``BadRequestError`` if it refuses the
    request itself, and ``IncompatibleError`` if it is not set up for this API.
    """

    def __init__(self, headers: Mapping[str, str] | None = None, ca_file: str = "") -> None:
        self._headers = dict(headers or {})
        self._tls = trusting(ca_file, "engine_ca_file")
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self, engine: EngineInfo, job: Job, request: GenerateRequest[Any]
    ) -> GenerateAnswer:
        """Return the whole answer, which has one choice."""
        async with self._post(engine, job, request) as response:
            return checked_answer(engine, await response.read())

    async def stream(
        self, engine: EngineInfo, job: Job, request: GenerateRequest[Any]
    ) -> AsyncGenerator[Choice, None]:
        """Yield what comes, ``joined``; ends after the choice with a ``finish_reason``."""
        request.stream = True
        lines = EventLines()
        async with self._post(engine, job, request) as response:
            async for received in response.content.iter_any():
                payloads = lines.feed(received)
                for choice in joined(checked_answer(engine, one).choices[0] for one in payloads):
                    yield choice
                    if choice.finish_reason is not None:
                        return
                if lines.ended:
                    break
        raise EngineLostError(
            f"{_named(engine)} broke off its token stream; the request has to be taken up by "
            "another engine"
        )

    async def answers(self, engine: EngineInfo) -> None:
        """Return if the engine's server is healthy."""
        status, _ = await self._get(engine, HEALTH_PATH)
        if status != 200:
            raise engine_error(_named(engine), status, HEALTH_PATH)

    async def open_calls(self, engine: EngineInfo) -> OpenCalls | None:
        """Return the calls that the engine's server has; None if it does not report them.

        A server without this route is alive, and so is one that refuses the call or answers
        something else; a proxy that does not reach it is no sign of its life.
        """
        status, body = await self._get(engine, OPEN_CALLS_PATH)
        if status in _UNREACHABLE:
            raise engine_error(_named(engine), status, OPEN_CALLS_PATH)
        try:
            return decode_body(body, OpenCallsAnswer).calls if status == 200 else None
        except BadRequestError:
            return None

    async def _get(self, engine: EngineInfo, path: str) -> tuple[int, bytes]:
        """Return status and body; raises ``EngineLostError`` without an answer."""
        url = engine.api_url.rstrip("/") + path
        try:
            async with self._open_session().get(url, headers=self._headers) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _silent(engine, error) from error

    async def aclose(self) -> None:
        """Close all connections; engines abort what is still running on them."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def pass_on(
        self, engine: EngineInfo, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a client's request to an engine; the head of its answer, of any status, is there.

        ``headers`` are the client's; the engines' key replaces the client's key.
        """
        url = engine.api_url.rstrip("/") + path
        own = {name.lower() for name in self._headers}
        passed = {name: value for name, value in headers.items() if name.lower() not in own}
        try:
            async with sent(
                self._open_session(),
                *("POST", url),
                data=body,
                headers={**passed, **self._headers, **_to_rank(engine)},
            ) as response:
                try:
                    yield response
                finally:
                    if not response.content.at_eof():
                        response.close()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _silent(engine, error) from error

    @asynccontextmanager
    async def _post(
        self, engine: EngineInfo, job: Job, request: GenerateRequest[Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {
            **(job.trace_headers or {}),
            **call_header(request.request_id),
            "Content-Type": "application/json",
        }
        body = msgspec.json.encode(request)
        async with self.pass_on(engine, GENERATE_PATH, body, headers) as response:
            if response.status != 200:
                message = _error_text(await response.read())
                raise engine_error(_named(engine), response.status, message)
            yield response

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session, made on first use because it belongs to the running loop."""
        if self._session is None:
            self._session = client_session(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                tls=self._tls,
            )
        return self._session


def joined(choices: Iterable[Choice]) -> Iterator[Choice]:
    """Yield tokens that are ready together as one choice, so that a late router catches up.

    A choice that ends the stream, or has logprobs, stays alone.  An error that ``choices`` raise
    comes after the tokens before it.
    """
    ready: list[int] = []
    try:
        for choice in choices:
            if choice.finish_reason is None and choice.logprobs is None:
                ready += choice.token_ids or ()
                continue
            if ready:
                yield Choice(ready)
                ready = []
            yield choice
    except DualPathError:
        if ready:
            yield Choice(ready)
        raise
    if ready:
        yield Choice(ready)


def token_event(choice: Choice, payload: object = None) -> TokenEvent:
    """Return a choice as the router knows it, with the engine's own output for the front end."""
    return TokenEvent(
        token_ids=tuple(choice.token_ids or ()),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        payload=payload,
    )


def _silent(engine: EngineInfo, error: Exception) -> EngineLostError:
    return EngineLostError(
        f"{_named(engine)} does not answer: {error or type(error).__name__}; restart it "
        "or take it out"
    )


def _to_rank(engine: EngineInfo) -> dict[str, str]:
    """Return the header that picks one of the ranks behind a server, if there are several."""
    if engine.dp is None or engine.dp.at_server is None:
        return {}
    return {RANK_HEADER: str(engine.dp.at_server)}


def _named(engine: EngineInfo) -> str:
    return f"engine {engine.engine_id} at {engine.api_url}"


def checked_answer(engine: EngineInfo, body: bytes) -> GenerateAnswer:
    """Return an answer with one choice; raises what the engine answers instead of it."""
    try:
        answer = decode_body(body, GenerateAnswer)
    except BadRequestError as error:
        raise IncompatibleError(
            f"{_named(engine)} answered {body[:120]!r}, which is not vLLM's token API: {error}; "
            "run the vLLM version dualpath was made for"
        ) from error
    if answer.error is not None:
        code = answer.error.code
        status = code if isinstance(code, int) else 500
        raise engine_error(_named(engine), status, answer.error.message)
    if len(answer.choices) != 1:
        raise IncompatibleError(
            f"{_named(engine)} answered with {len(answer.choices)} choices where 1 was asked for; "
            "run the vLLM version dualpath was made for"
        )
    return answer


def _error_text(body: bytes) -> str:
    try:
        error = decode_body(body, GenerateAnswer).error
    except BadRequestError:
        error = None
    return error.message if error else body[:_ERROR_TEXT_BYTES].decode("utf-8", "replace")
