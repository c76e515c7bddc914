"""A proxy in front of an OpenAI endpoint that records completions.

Requests and answers pass unchanged: any method and path, status, headers, bodies, redirects,
comments and errors in streams.  A client that leaves ends its request at the endpoint.  There are
two exceptions:

- A completion is sent with vLLM's ``return_token_ids``; in its answer the token ids are null again,
  as vLLM answers clients that did not ask for them.  vLLM sends further chunks without content for
  such requests, which are left out.  A client's ``echo`` is not recorded, because vLLM answers it
  differently with token ids.  If the endpoint refuses the field, the request is sent without it.
- Headers of one connection are this proxy's own, and so is ``Host``.  Completions are asked for
  without compression.

Requests to the paths of completions that cannot be recorded are counted.
"""

import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from dualpath.core.addresses import checked_http_url
from dualpath.core.blocks import BlockKey, block_keys
from dualpath.node.http_client import client_session, sent
from dualpath.policy.session_warmth import SessionMemory
from dualpath.router.http.server import SHUTDOWN_GRACE_S, http_listener, log_no_bad_requests
from dualpath.workload.conversation.block_session import BlockSession, BlockTurn
from dualpath.workload.conversation.text_session import (
    Message,
    RawMessage,
    TextSession,
    TextTurn,
    flatten,
)

# ---------------------------------------------------------------------------------------- recorder
# Groups served requests into sessions, which contain neither tokens nor hashes.
#
# A session is known by the name its client gives it, or by its tokens: a prompt that begins with
# all full blocks of an earlier prompt, or of an earlier one and its answer, goes on after it
# (``policy.session_warmth``).  Clients' names may identify a person, so sessions are numbered.
# Block ids are numbered by appearance.  Keys, which could be guessed from known text, stay here.

#: Blocks of sessions that can be continued; older sessions are removed, and start again as new.
_MAX_REMEMBERED_BLOCKS = 10_000_000


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer in tokens; times are in seconds of one clock.

    ``tenant`` is vLLM's ``cache_salt``; ``session_id`` is the client's name for the session, "" for
    none.  ``messages`` and ``answer_text`` are empty unless texts are recorded.
    """

    tenant: str = ""
    session_id: str = ""
    prompt_token_ids: Sequence[int]
    generated_token_ids: Sequence[int]
    start_s: float
    end_s: float
    messages: tuple[Message, ...] = ()
    answer_text: str = ""


class _Turn(msgspec.Struct):
    start_s: float
    end_s: float
    prompt_tokens: int
    generated_tokens: int
    block_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    answer_text: str


class Recorder:
    """Records the served requests; not thread-safe, and reads no clock."""

    def __init__(self, block_tokens: int) -> None:
        """Start without requests; ``block_tokens`` is the size of a block in the trace."""
        self._block_tokens = block_tokens
        self._memory = SessionMemory(_MAX_REMEMBERED_BLOCKS)
        self._ids: dict[tuple[str, BlockKey], int] = {}
        self._sessions: dict[tuple[str, str], list[_Turn]] = {}

    def add(self, exchange: Exchange) -> None:
        """Add an answered request; requests must be added in the order of their answers."""
        prompt = list(exchange.prompt_token_ids)
        # The last token of an answer has no KV.
        served = [*prompt, *exchange.generated_token_ids][:-1]
        keys = tuple(block_keys(served, self._block_tokens))
        own = tuple(block_keys(prompt, self._block_tokens))
        session = self._memory.find(exchange.tenant, exchange.session_id, own)
        self._memory.remember(session, keys, len(own))
        while (oldest := self._memory.over_capacity()) is not None:
            self._memory.remove(oldest)
        ids = tuple(self._ids.setdefault((exchange.tenant, key), len(self._ids)) for key in own)
        self._sessions.setdefault(session.name, []).append(
            _Turn(
                exchange.start_s,
                exchange.end_s,
                len(prompt),
                max(len(exchange.generated_token_ids), 1),
                ids,
                exchange.messages,
                exchange.answer_text,
            )
        )

    def block_sessions(self) -> list[BlockSession]:
        """Return the sessions with their block ids, in order of their first request."""
        begun_s = min((t.start_s for turns in self._sessions.values() for t in turns), default=0.0)
        return [
            BlockSession(
                name,
                self._block_tokens,
                tuple(
                    BlockTurn(
                        prompt_tokens=turn.prompt_tokens,
                        generate_tokens=turn.generated_tokens,
                        id_ranges=_runs(turn.block_ids),
                        delay_s=delay_s,
                        start_s=turn.start_s - begun_s,
                    )
                    for turn, delay_s in turns
                ),
            )
            for name, turns in self._ordered()
        ]

    def text_sessions(self) -> list[TextSession]:
        """Return the sessions with their texts, in the same order."""
        return [
            TextSession(
                name,
                tuple(
                    TextTurn(turn.messages, turn.answer_text, turn.generated_tokens, delay_s)
                    for turn, delay_s in turns
                ),
            )
            for name, turns in self._ordered()
        ]

    def _ordered(self) -> list[tuple[str, list[tuple[_Turn, float]]]]:
        """Return numbered sessions, with turns in order of time and the delay before each."""
        sessions = [sorted(turns, key=lambda t: t.start_s) for turns in self._sessions.values()]
        sessions.sort(key=lambda turns: turns[0].start_s)
        ordered = []
        for number, turns in enumerate(sessions, start=1):
            ends_s = [turns[0].start_s, *(turn.end_s for turn in turns[:-1])]
            delays_s = (max(t.start_s - end_s, 0.0) for t, end_s in zip(turns, ends_s, strict=True))
            ordered.append((f"session-{number}", list(zip(turns, delays_s, strict=True))))
        return ordered


def _runs(block_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for block_id in block_ids:
        if runs and block_id == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], block_id)
        else:
            runs.append((block_id, block_id))
    return tuple(runs)


RECORDED_PATHS = ("/v1/completions", "/v1/chat/completions")
#: Larger bodies of requests pass piece by piece, and are not recorded.
MAX_BODY_BYTES = 256 << 20
#: Timeout for connecting to the endpoint; there is no timeout for answers.
_CONNECT_S = 10.0
#: Longest line of a head, of clients and of the endpoint.
_LINE_BYTES = 64 << 10
_SESSION_HEADER = "X-Session-ID"
#: Headers of one connection, and those that are set again.
_NOT_FORWARDED = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "transfer-encoding", "te", "trailer"),
        *("upgrade", "expect", "host", "content-length"),
    }
)
#: Headers that aiohttp adds on its own, to requests and to answers.
_ADDED_TO_REQUESTS = (hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)
_ADDED_TO_ANSWERS = (hdrs.DATE, hdrs.SERVER, hdrs.CONTENT_TYPE)
#: Statuses of endpoints that do not know a field of the body.
_UNKNOWN_FIELD = (400, 422)
_TOKEN_IDS = ("prompt_token_ids", "token_ids")
_NULL = msgspec.Raw(b"null")
_ASKS_FOR_IDS = b'"return_token_ids":true}'

OnExchange = Callable[[Exchange], None]


# ------------------------------------------------------------------------------------------ answers
# What is recorded of an answer, and the answer without the token ids.


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    error: msgspec.Raw | None = None


class _Answer:
    """Token ids and text of an answer, collected from a whole body or from a stream's events.

    ``strip``: the client gets no token ids.
    """

    def __init__(self, *, strip: bool) -> None:
        self._strip = strip
        self.prompt: list[int] | None = None
        self.generated: list[int] = []
        self.text = ""
        self.answers: set[int] = set()
        #: False for an answer that cannot be read, or is an error.
        self.readable = True

    def pass_on(self, payload: bytes) -> bytes | None:
        """Add a JSON object of the endpoint; return it for the client, None to leave it out."""
        try:
            body = msgspec.json.decode(payload, type=_Body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.readable = False
            return payload
        self.readable = self.readable and body.error is None
        self.prompt = self.prompt or body.prompt_token_ids
        for choice in body.choices:
            self.prompt = self.prompt or choice.prompt_token_ids
            self.generated += choice.token_ids or ()
            self.answers.add(choice.index)
            message = choice.delta or choice.message or _Message()
            self.text += choice.text or message.content or ""
        return _without_ids(payload) if self._strip else payload


def _without_ids(payload: bytes) -> bytes | None:
    """Return a JSON object with null for token ids; None for a chunk that has only these.

    All other values stay as they were written.
    """
    fields = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    changed = _nullify(fields)
    if "choices" in fields:
        choices = msgspec.json.decode(fields["choices"], type=list[dict[str, msgspec.Raw]])
        if choices and all(map(_has_ids_only, choices)):
            return None
        if any([_nullify(choice) for choice in choices]):
            fields["choices"] = msgspec.Raw(msgspec.json.encode(choices))
            changed = True
    return msgspec.json.encode(fields) if changed else payload


def _nullify(holder: dict[str, msgspec.Raw]) -> bool:
    found = [name for name in _TOKEN_IDS if name in holder]
    holder.update(dict.fromkeys(found, _NULL))
    return bool(found)


def _has_ids_only(choice: dict[str, msgspec.Raw]) -> bool:
    """Whether vLLM sends this choice of a chat's chunk only because of ``return_token_ids``."""
    return bytes(choice.get("delta", b"")) == b"{}" and all(
        bytes(choice.get(name, b"null")) == b"null" for name in ("finish_reason", "logprobs")
    )


class _Events:
    """Passes on a stream of server-sent events; ``ended`` after ``[DONE]``."""

    def __init__(self, answer: _Answer) -> None:
        self.ended = False
        self._answer = answer
        self._line = b""
        self._event: list[bytes] = []

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Take bytes as they arrive; yield those to pass on."""
        *lines, self._line = (self._line + received).split(b"\n")
        for line in lines:
            self._event.append(line + b"\n")
            ends = not line.strip()
            comment = len(self._event) == 1 and line.startswith(b":")
            if ends or comment:
                yield self._taken()

    def rest(self) -> bytes:
        """Return what came after the last whole event."""
        self._event.append(self._line)
        return self._taken()

    def _taken(self) -> bytes:
        event, self._event = self._event, []
        places = [place for place, line in enumerate(event) if line.startswith(b"data:")]
        if len(places) == 1:
            payload = event[places[0]].removeprefix(b"data:").strip()
            if payload == b"[DONE]":
                self.ended = True
            elif (passed := self._answer.pass_on(payload)) is None:
                return b""
            elif passed is not payload:
                event[places[0]] = event[places[0]].replace(payload, passed, 1)
        elif places:
            self._answer.readable = False
        return b"".join(event)


# -------------------------------------------------------------------------------------------- proxy


class _Passed(web.StreamResponse):
    """An answer with the endpoint's status and headers, and no others."""

    def __init__(self, response: aiohttp.ClientResponse, length: str | None) -> None:
        super().__init__(status=response.status, reason=response.reason)
        for name, value in response.headers.items():
            if _forwarded(name):
                self.headers.add(name, value)
            elif name.lower() == "content-length" and length is not None:
                self.headers[name] = length
        if length is not None:
            self.headers.setdefault(hdrs.CONTENT_LENGTH, length)
        self._given = {name.lower() for name in self.headers}

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        for name in _ADDED_TO_ANSWERS:
            if name.lower() not in self._given:
                self.headers.popall(name, None)


class RecordingProxy:
    """Forwards requests to ``endpoint`` and calls ``on_exchange`` with completed ones.

    Raises ``ConfigError`` for an endpoint that is no URL of a server.
    """

    def __init__(
        self,
        endpoint: str,
        on_exchange: OnExchange,
        clock: Callable[[], float],
        *,
        texts: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create a proxy; ``clock`` returns seconds, and with ``texts`` texts are recorded.

        ``tls`` checks the certificate of an ``https://`` endpoint, None: by the system's
        authorities.
        """
        self._endpoint = checked_http_url(endpoint, "endpoint").removesuffix("/v1")
        self._on_exchange = on_exchange
        self._clock = clock
        self._texts = texts
        self._tls = tls
        self._endpoint_has_ids = True
        self.recorded = 0
        self.not_recorded = 0

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve clients in the block; yields the port.

        Raises ``ConfigError`` if the address cannot be listened on.
        """
        listener = http_listener(host, port)
        log_no_bad_requests()
        # Bodies stay as they are encoded.
        server = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            max_line_size=_LINE_BYTES,
            max_field_size=_LINE_BYTES,
        )
        runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_GRACE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        async with client_session(
            timeout=timeout, tls=self._tls, auto_decompress=False, line_bytes=_LINE_BYTES
        ) as self._http:
            await runner.setup()
            try:
                await web.SockSite(runner, listener).start()
                yield int(listener.getsockname()[1])
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        recorded = False
        try:
            made, recorded = await self._pass(request)
            return made
        except (aiohttp.ClientError, web.RequestPayloadError, OSError):
            # The endpoint broke off, or the client has left or sends a body that is none.
            return _broken_off(request)
        finally:
            if _path(request) in RECORDED_PATHS:
                self.recorded += recorded
                self.not_recorded += not recorded

    async def _pass(self, request: web.BaseRequest) -> tuple[web.StreamResponse, bool]:
        """Return the answer, and whether the request was recorded."""
        body = await _whole_body(request)
        completion = _completion(request, body)
        start_s = self._clock()
        asks = completion is not None and not completion.get("return_token_ids")
        async with AsyncExitStack() as stack:
            data = body
            if completion is None or not self._endpoint_has_ids:
                asks = False
            elif asks and isinstance(body, bytes):
                data = _asking_for_ids(body)
            try:
                response = await self._send(stack, request, data, plain=completion is not None)
                if asks and response.status in _UNKNOWN_FIELD:
                    # Nothing was generated.  What the client gets is the answer to its own request.
                    response = await self._send(stack, request, body, plain=False)
                    self._endpoint_has_ids = response.status in _UNKNOWN_FIELD
                    completion = None
            except (aiohttp.ClientError, OSError) as error:
                return _unreachable(self._endpoint, error), False
            encoded = response.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity"
            if completion is None or response.status != 200 or encoded:
                return await _copied(request, response), False
            answer = _Answer(strip=asks)
            if response.content_type == "text/event-stream":
                made, whole = await _streamed(request, response, answer)
            else:
                made, whole = await _at_once(request, response, answer), True
        return made, whole and self._record(request, completion, answer, start_s)

    async def _send(
        self,
        stack: AsyncExitStack,
        request: web.BaseRequest,
        data: "bytes | AsyncIterator[bytes] | None",
        *,
        plain: bool,
    ) -> aiohttp.ClientResponse:
        """Send a request to the endpoint; ``plain``: its answer must not be compressed."""
        headers = CIMultiDict(
            (name, value) for name, value in request.headers.items() if _forwarded(name)
        )
        if plain:
            headers[hdrs.ACCEPT_ENCODING] = "identity"
        url = URL(self._endpoint + _target(request), encoded=True)
        more: dict[str, Any] = {
            "data": data,
            "headers": headers,
            "skip_auto_headers": _ADDED_TO_REQUESTS,
            "allow_redirects": False,
        }
        if data is None or isinstance(data, bytes):
            return await stack.enter_async_context(sent(self._http, request.method, url, **more))
        if (length := request.headers.get(hdrs.CONTENT_LENGTH)) is not None:
            headers[hdrs.CONTENT_LENGTH] = length
        return await stack.enter_async_context(self._http.request(request.method, url, **more))

    def _record(
        self,
        request: web.BaseRequest,
        completion: dict[str, Any],
        answer: _Answer,
        start_s: float,
    ) -> bool:
        """Record an exchange; return whether it could be."""
        prompt = answer.prompt or _listed_tokens(completion.get("prompt"))
        messages = _messages(completion) if self._texts else ()
        one = answer.readable and len(answer.answers) == 1
        if not (one and prompt and answer.generated) or messages is None:
            return False
        self._on_exchange(
            Exchange(
                tenant=str(completion.get("cache_salt") or ""),
                session_id=str(
                    completion.get("session_id") or request.headers.get(_SESSION_HEADER) or ""
                ),
                prompt_token_ids=prompt,
                generated_token_ids=answer.generated,
                start_s=start_s,
                end_s=self._clock(),
                messages=messages,
                answer_text=answer.text if self._texts else "",
            )
        )
        return True


def _target(request: web.BaseRequest) -> str:
    """Return path and query as the client wrote them."""
    written = request.raw_path
    if written.startswith("/"):
        return written
    parts = urlsplit(written)  # The absolute form, as to any proxy.
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _path(request: web.BaseRequest) -> str:
    return _target(request).partition("?")[0]


def _forwarded(name: str) -> bool:
    return name.lower() not in _NOT_FORWARDED


async def _whole_body(request: web.BaseRequest) -> "bytes | AsyncIterator[bytes] | None":
    """Return the body, None without one; an iterator over one above ``MAX_BODY_BYTES``."""
    if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if not request.body_exists:
        return None
    pieces, received_bytes = [], 0
    while piece := await request.content.readany():
        pieces.append(piece)
        received_bytes += len(piece)
        if received_bytes > MAX_BODY_BYTES:
            return _continued(pieces, request)
    return b"".join(pieces)


async def _continued(pieces: list[bytes], request: web.BaseRequest) -> AsyncIterator[bytes]:
    while pieces:
        yield pieces.pop(0)
    async for piece in request.content.iter_any():
        yield piece


def _completion(
    request: web.BaseRequest, body: "bytes | AsyncIterator[bytes] | None"
) -> dict[str, Any] | None:
    """Return the body of a completion that may be recorded, None for other requests."""
    if request.method != "POST" or _path(request) not in RECORDED_PATHS:
        return None
    try:
        completion = msgspec.json.decode(body) if isinstance(body, bytes) else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(completion, dict) or completion.get("echo"):
        return None
    return completion


def _asking_for_ids(body: bytes) -> bytes:
    """Return a JSON object with ``return_token_ids``; the rest stays as the client wrote it.

    Of a field that occurs twice, JSON readers take the last one.
    """
    inside = body.rstrip()[:-1].rstrip()
    return inside + (b"" if inside.endswith(b"{") else b",") + _ASKS_FOR_IDS


def _unreachable(endpoint: str, error: Exception) -> web.Response:
    message = f"{endpoint}: no answer ({error}); check that the server is running"
    return web.json_response({"error": {"message": message, "code": 502}}, status=502)


def _broken_off(request: web.BaseRequest) -> web.Response:
    """Close the client's connection in the middle of an answer, as the endpoint did."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


async def _copied(request: web.BaseRequest, response: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass an answer on unchanged, piece by piece."""
    made = _Passed(response, response.headers.get(hdrs.CONTENT_LENGTH))
    await made.prepare(request)
    async for received in response.content.iter_any():
        await made.write(received)
    await made.write_eof()
    return made


async def _streamed(
    request: web.BaseRequest, response: aiohttp.ClientResponse, answer: _Answer
) -> tuple[web.StreamResponse, bool]:
    """Pass a stream on event by event; return the response and whether it is complete."""
    made = _Passed(response, None)
    await made.prepare(request)
    events = _Events(answer)
    async for received in response.content.iter_any():
        if passed := b"".join(events.feed(received)):
            await made.write(passed)
    if rest := events.rest():
        await made.write(rest)
    await made.write_eof()
    return made, events.ended


async def _at_once(
    request: web.BaseRequest, response: aiohttp.ClientResponse, answer: _Answer
) -> web.StreamResponse:
    body = await response.read()
    passed = answer.pass_on(body)
    passed = body if passed is None else passed
    made = _Passed(response, str(len(passed)))
    await made.prepare(request)
    await made.write(passed)
    await made.write_eof()
    return made


def _listed_tokens(prompt: object) -> list[int]:
    """Return a prompt that was sent as token ids, an empty list for other prompts."""
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    return []


def _messages(completion: dict[str, Any]) -> tuple[Message, ...] | None:
    """Return the prompt as messages; None if it is not text."""
    if "messages" not in completion:
        prompt = completion.get("prompt")
        return (Message("user", prompt),) if isinstance(prompt, str) else None
    try:
        raw = msgspec.convert(completion["messages"], list[RawMessage])
    except msgspec.ValidationError:
        return None
    tools = completion.get("tools")
    return tuple(flatten(one, tools if place == 0 else None) for place, one in enumerate(raw))
