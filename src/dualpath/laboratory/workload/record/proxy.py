"""A proxy before an OpenAI endpoint that notes completions as they pass.

The endpoint is asked for token ids (vLLM's ``return_token_ids``); a client that did not ask for
them does not get them.  Everything else passes as it is.  What cannot be recorded is passed on all
the same, and counted: requests for several answers, refusals, streams that broke off, endpoints
that send no token ids.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from dualpath.laboratory.workload.conversation.text_session import Message
from dualpath.laboratory.workload.formats.messages import RawMessage, flatten
from dualpath.laboratory.workload.record.recorder import Exchange
from dualpath.router.token_api.wire import STREAM_END, EventLines, server_event

RECORDED_PATHS = ("/v1/completions", "/v1/chat/completions")
MOST_BODY_BYTES = 256 << 20
#: Of the connection to the endpoint; answers may take as long as they like.
_CONNECT_S = 10.0
_TOKEN_IDS = ("prompt_token_ids", "token_ids")
_SESSION_HEADER = "X-Session-ID"
#: Between two hosts only, or said anew.
_NOT_FORWARDED = frozenset(
    {
        *("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"),
        *("host", "content-length", "accept-encoding", "content-encoding"),
    }
)

OnExchange = Callable[[Exchange], None]


class _Answer:
    """Token ids and text of an answer, gathered from whole bodies or chunks."""

    def __init__(self) -> None:
        self.prompt: list[int] | None = None
        self.generated: list[int] = []
        self.text = ""
        self.answers: set[int] = set()

    def take(self, body: dict[str, Any], strip: bool) -> None:
        """Take what a body says, and with ``strip`` its token ids out of it."""
        prompt = body.get("prompt_token_ids")
        for choice in body.get("choices") or ():
            prompt = choice.get("prompt_token_ids") or prompt
            self.generated += choice.get("token_ids") or ()
            self.answers.add(choice.get("index", 0))
            said = choice.get("delta") or choice.get("message") or choice
            self.text += said.get("content") or said.get("text") or ""
        self.prompt = self.prompt or prompt
        if strip:
            for holder in (body, *(body.get("choices") or ())):
                for name in _TOKEN_IDS:
                    holder.pop(name, None)

    def taken(self, payload: bytes, strip: bool) -> bytes:
        """Take an event of a stream and return it as it goes on."""
        try:
            event = msgspec.json.decode(payload)
        except msgspec.DecodeError:
            event = None
        if not isinstance(event, dict):
            return b"data: " + payload + b"\n\n"
        self.take(event, strip)
        return server_event(event)


class RecordingProxy:
    """Passes requests on to ``endpoint`` and hands completed ones to ``on_exchange``."""

    def __init__(
        self,
        endpoint: str,
        on_exchange: OnExchange,
        clock: Callable[[], float],
        *,
        texts: bool = False,
    ) -> None:
        """Connect to nobody yet; ``clock`` gives seconds, with ``texts`` texts are kept."""
        self._endpoint = endpoint.rstrip("/")
        self._on_exchange = on_exchange
        self._clock = clock
        self._texts = texts
        self.recorded = 0
        self.not_recorded = 0

    def app(self) -> web.Application:
        """Return the application; it owns the connections to the endpoint."""
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        app.cleanup_ctx.append(self._connected)
        app.router.add_route("*", "/{path:.*}", self._pass)
        return app

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        # Bodies stay as they are: compressed ones could not be looked at.
        async with aiohttp.ClientSession(
            timeout=timeout, auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)
        ) as self._http:
            yield

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = self._asked(request, body)
        start_s = self._clock()
        headers = {name: value for name, value in request.headers.items() if _forwarded(name)} | {
            "Accept-Encoding": "identity"
        }
        data = body if asked is None else msgspec.json.encode(asked | {"return_token_ids": True})
        async with AsyncExitStack() as stack:
            asking = self._http.request(
                request.method, self._endpoint + request.path_qs, data=data, headers=headers
            )
            try:
                response = await stack.enter_async_context(asking)
            except (aiohttp.ClientError, OSError) as error:
                return _unreachable(self._endpoint, error)
            if asked is None or response.status != 200:
                self.not_recorded += request.path in RECORDED_PATHS
                return (await _passed(request, response))[0]
            answer = _Answer()
            strip = not asked.get("return_token_ids")
            if "text/event-stream" in response.headers.get("Content-Type", ""):
                made, whole = await _streamed(request, response, answer, strip)
            else:
                made, whole = await _at_once(request, response, answer, strip)
        self._note(request, asked, answer, start_s, whole)
        return made

    def _asked(self, request: web.Request, body: bytes) -> dict[str, Any] | None:
        """Return the body of a completion, None for anything else."""
        if request.method != "POST" or request.path not in RECORDED_PATHS:
            return None
        try:
            asked = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return None
        return asked if isinstance(asked, dict) else None

    def _note(
        self,
        request: web.Request,
        asked: dict[str, Any],
        answer: _Answer,
        start_s: float,
        whole: bool,
    ) -> None:
        prompt = answer.prompt or _listed_tokens(asked.get("prompt"))
        messages = _messages(asked) if self._texts else ()
        if not (whole and len(answer.answers) == 1 and prompt and answer.generated) or (
            messages is None
        ):
            self.not_recorded += 1
            return
        self.recorded += 1
        self._on_exchange(
            Exchange(
                tenant=str(asked.get("cache_salt") or ""),
                session_id=str(
                    asked.get("session_id") or request.headers.get(_SESSION_HEADER) or ""
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
    message = f"{endpoint}: no answer ({error}); is the server up there?"
    return web.json_response({"error": {"message": message, "code": 502}}, status=502)


def _like(response: aiohttp.ClientResponse) -> web.StreamResponse:
    """Return an answer with the endpoint's status and headers, without a body."""
    made = web.StreamResponse(status=response.status, reason=response.reason)
    for name, value in response.headers.items():
        if _forwarded(name) or name.lower() == "content-encoding":
            made.headers.add(name, value)
    return made


async def _passed(
    request: web.Request, response: aiohttp.ClientResponse
) -> tuple[web.StreamResponse, bool]:
    """Pass an answer on, byte for byte as it comes."""
    made = _like(response)
    await made.prepare(request)
    return made, await _until_broken(request, _copied(response, made))


async def _streamed(
    request: web.Request, response: aiohttp.ClientResponse, answer: _Answer, strip: bool
) -> tuple[web.StreamResponse, bool]:
    """Pass a stream on, event by event; return it and whether it came to its end."""
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
            await made.write(answer.taken(payload, strip))
        if lines.ended:
            await made.write(STREAM_END)
            return True
    return False


async def _until_broken(request: web.Request, passing: Coroutine[Any, Any, bool]) -> bool:
    """Return whether all of an answer was passed on; a client sees that a part is missing."""
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
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        said = None
    if isinstance(said, dict):
        answer.take(said, strip)
        body = msgspec.json.encode(said)
    made = _like(response)
    await made.prepare(request)
    await made.write(body)
    return made, True


def _listed_tokens(prompt: object) -> list[int]:
    """Return a prompt that was sent as token ids, and of any other nothing."""
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    return []


def _messages(asked: dict[str, Any]) -> tuple[Message, ...] | None:
    """Return what was asked as texts; None where that is no text."""
    if "messages" not in asked:
        prompt = asked.get("prompt")
        return (Message("user", prompt),) if isinstance(prompt, str) else None
    try:
        raw = msgspec.convert(asked["messages"], list[RawMessage])
    except msgspec.ValidationError:
        return None
    tools = asked.get("tools")
    return tuple(flatten(one, tools if place == 0 else None) for place, one in enumerate(raw))


async def serve(proxy: RecordingProxy, host: str, port: int, stop: asyncio.Event) -> None:
    """Listen at ``host:port`` until ``stop``; raises ``OSError`` where that cannot be had."""
    runner = web.AppRunner(proxy.app())
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        await stop.wait()
    finally:
        await runner.cleanup()
