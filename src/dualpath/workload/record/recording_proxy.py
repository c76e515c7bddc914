"""A proxy in front of an OpenAI endpoint that records completions.

The proxy requests token ids from the endpoint (vLLM's ``return_token_ids``) and removes them for
clients that did not request them.  Everything else is forwarded unchanged.  Requests that cannot be
recorded are also forwarded, and counted: requests for several answers, refused requests, broken
streams, and answers of endpoints that send no token ids.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from dualpath.core.blocks import BlockKey, block_keys
from dualpath.policy.session_warmth import SessionMemory
from dualpath.router.token_api.wire import STREAM_END, EventLines, server_event
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
MAX_BODY_BYTES = 256 << 20
#: Timeout for connecting to the endpoint; there is no timeout for answers.
_CONNECT_S = 10.0
_TOKEN_IDS = ("prompt_token_ids", "token_ids")
_SESSION_HEADER = "X-Session-ID"
#: Headers that apply to one connection only, or that are set again.
_NOT_FORWARDED = frozenset(
    {
        *("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"),
        *("host", "content-length", "accept-encoding", "content-encoding"),
    }
)

OnExchange = Callable[[Exchange], None]


class _Answer:
    """Token ids and text of an answer, collected from whole bodies or chunks."""

    def __init__(self) -> None:
        self.prompt: list[int] | None = None
        self.generated: list[int] = []
        self.text = ""
        self.answers: set[int] = set()

    def add(self, body: dict[str, Any], strip: bool) -> None:
        """Add the tokens and text of a body; with ``strip`` remove its token ids."""
        prompt = body.get("prompt_token_ids")
        for choice in body.get("choices") or ():
            prompt = choice.get("prompt_token_ids") or prompt
            self.generated += choice.get("token_ids") or ()
            self.answers.add(choice.get("index", 0))
            message = choice.get("delta") or choice.get("message") or choice
            self.text += message.get("content") or message.get("text") or ""
        self.prompt = self.prompt or prompt
        if strip:
            for holder in (body, *(body.get("choices") or ())):
                for name in _TOKEN_IDS:
                    holder.pop(name, None)

    def add_event(self, payload: bytes, strip: bool) -> bytes:
        """Add an event of a stream; return the event to forward."""
        try:
            event = msgspec.json.decode(payload)
        except msgspec.DecodeError:
            event = None
        if not isinstance(event, dict):
            return b"data: " + payload + b"\n\n"
        self.add(event, strip)
        return server_event(event)


class RecordingProxy:
    """Forwards requests to ``endpoint`` and calls ``on_exchange`` with completed ones."""

    def __init__(
        self,
        endpoint: str,
        on_exchange: OnExchange,
        clock: Callable[[], float],
        *,
        texts: bool = False,
    ) -> None:
        """Create a proxy; ``clock`` returns seconds, and with ``texts`` texts are recorded."""
        self._endpoint = endpoint.rstrip("/")
        self._on_exchange = on_exchange
        self._clock = clock
        self._texts = texts
        self.recorded = 0
        self.not_recorded = 0

    def app(self) -> web.Application:
        """Return the application; it owns the connections to the endpoint."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._connected)
        app.router.add_route("*", "/{path:.*}", self._pass)
        return app

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        # Bodies are not decompressed; recorded ones are requested without compression.
        async with aiohttp.ClientSession(
            timeout=timeout, auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)
        ) as self._http:
            yield

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        completion = self._completion_body(request, body)
        start_s = self._clock()
        headers = {name: value for name, value in request.headers.items() if _forwarded(name)} | {
            "Accept-Encoding": "identity"
        }
        data = (
            body
            if completion is None
            else msgspec.json.encode(completion | {"return_token_ids": True})
        )
        async with AsyncExitStack() as stack:
            sending = self._http.request(
                request.method, self._endpoint + request.path_qs, data=data, headers=headers
            )
            try:
                response = await stack.enter_async_context(sending)
            except (aiohttp.ClientError, OSError) as error:
                return _unreachable(self._endpoint, error)
            if completion is None or response.status != 200:
                self.not_recorded += request.path in RECORDED_PATHS
                return (await _passed(request, response))[0]
            answer = _Answer()
            strip = not completion.get("return_token_ids")
            if "text/event-stream" in response.headers.get("Content-Type", ""):
                made, whole = await _streamed(request, response, answer, strip)
            else:
                made, whole = await _at_once(request, response, answer, strip)
        self._note(request, completion, answer, start_s, whole)
        return made

    def _completion_body(self, request: web.Request, body: bytes) -> dict[str, Any] | None:
        """Return the body of a completion request, None for other requests."""
        if request.method != "POST" or request.path not in RECORDED_PATHS:
            return None
        try:
            completion = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return None
        return completion if isinstance(completion, dict) else None

    def _note(
        self,
        request: web.Request,
        completion: dict[str, Any],
        answer: _Answer,
        start_s: float,
        whole: bool,
    ) -> None:
        prompt = answer.prompt or _listed_tokens(completion.get("prompt"))
        messages = _messages(completion) if self._texts else ()
        if not (whole and len(answer.answers) == 1 and prompt and answer.generated) or (
            messages is None
        ):
            self.not_recorded += 1
            return
        self.recorded += 1
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


def _forwarded(name: str) -> bool:
    return name.lower() not in _NOT_FORWARDED


def _unreachable(endpoint: str, error: Exception) -> web.Response:
    message = f"{endpoint}: no answer ({error}); check that the server is running"
    return web.json_response({"error": {"message": message, "code": 502}}, status=502)


def _like(response: aiohttp.ClientResponse) -> web.StreamResponse:
    """Return a response with the endpoint's status and headers, without a body."""
    made = web.StreamResponse(status=response.status, reason=response.reason)
    for name, value in response.headers.items():
        if _forwarded(name) or name.lower() == "content-encoding":
            made.headers.add(name, value)
    return made


async def _passed(
    request: web.Request, response: aiohttp.ClientResponse
) -> tuple[web.StreamResponse, bool]:
    """Forward an answer unchanged."""
    made = _like(response)
    await made.prepare(request)
    return made, await _until_broken(request, _copied(response, made))


async def _streamed(
    request: web.Request, response: aiohttp.ClientResponse, answer: _Answer, strip: bool
) -> tuple[web.StreamResponse, bool]:
    """Forward a stream event by event; return the response and whether it is complete."""
    made = _like(response)
    await made.prepare(request)
    return made, await _until_broken(request, _events(response, made, answer, strip))


async def _copied(response: aiohttp.ClientResponse, made: web.StreamResponse) -> bool:
    async for received in response.content.iter_any():
        await made.write(received)
    return True


async def _events(
    response: aiohttp.ClientResponse, made: web.StreamResponse, answer: _Answer, strip: bool
) -> bool:
    lines = EventLines()
    async for received in response.content.iter_any():
        for payload in lines.feed(received):
            await made.write(answer.add_event(payload, strip))
        if lines.ended:
            await made.write(STREAM_END)
            return True
    return False


async def _until_broken(request: web.Request, passing: Coroutine[Any, Any, bool]) -> bool:
    """Return whether an answer was forwarded completely; if not, abort the client connection."""
    try:
        if await passing:
            return True
    except (aiohttp.ClientError, OSError):
        pass
    if request.transport is not None:
        request.transport.abort()
    return False


async def _at_once(
    request: web.Request, response: aiohttp.ClientResponse, answer: _Answer, strip: bool
) -> tuple[web.StreamResponse, bool]:
    body = await response.read()
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        decoded = None
    if isinstance(decoded, dict):
        answer.add(decoded, strip)
        body = msgspec.json.encode(decoded)
    made = _like(response)
    await made.prepare(request)
    await made.write(body)
    return made, True


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


async def serve(proxy: RecordingProxy, host: str, port: int, stop: asyncio.Event) -> None:
    """Listen at ``host:port`` until ``stop``; raises ``OSError`` if that fails."""
    runner = web.AppRunner(proxy.app())
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        await stop.wait()
    finally:
        await runner.cleanup()
