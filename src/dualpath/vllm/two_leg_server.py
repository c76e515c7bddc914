"""An engine's HTTP server behind another proxy: its requests are legs (``router.two_legs``).

It stands before vLLM's application, inside the guard (``engine_guard``), and speaks OpenAI's API on
both sides.  The body of a leg is passed on with other ``kv_transfer_params``:

- *Leg 1* at a PE: vLLM's own render route makes the tokens, for the block keys.  vLLM then gets
  exactly these tokens, one token to generate, and a prefill transfer.  Its answer gets the
  ``kv_transfer_params`` for leg 2.
- *Leg 2* at a DE: vLLM gets the request with a decode transfer.  If the KV is in the buffer of
  another DE, it is moved into this one's; if it cannot be, the other DE gets the request, and this
  server passes its answer on.  If no DE has the KV,
  a prefill engine of the scheduler's choice fills this DE's buffer, with what is stored by then.
  If that fails, and for requests without parameters, the DE computes the prompt itself.  The
  header ``PREFILL_HEADER`` of its answer gives the reason.

A PE computes nothing else: its layers share memory.  ``TransferChecks`` compares the prompt that
vLLM has tokenised with the prompt of the KV that is used.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, DualPathError, EngineLostError, TransportError
from dualpath.core.names import in_one_line
from dualpath.core.transfers import PrefillTransfer, to_transfer_params
from dualpath.engine.settings import EngineSettings
from dualpath.router.api_keys import engine_headers
from dualpath.router.asgi import (
    App,
    Message,
    Receive,
    Send,
    adding_headers,
    json_answer,
    own_path,
    send_all,
)
from dualpath.router.engines import EngineInfo
from dualpath.router.requests.limits import refusal
from dualpath.router.scheduling import FINISHED, HandedOver
from dualpath.router.token_api.client import TokenApiClient
from dualpath.router.token_api.statuses import status_of
from dualpath.router.token_api.wire import STREAM_END, server_event
from dualpath.router.two_legs import (
    PARAMETERS,
    PASSED_ON_HEADER,
    REQUEST_ID_HEADER,
    LegParameters,
    Prompt,
    SecondLeg,
    TwoLegs,
    leg_of,
    prefill_at,
)
from dualpath.router.waits import run_until_broken

logger = logging.getLogger(__name__)

CHAT_PATH = "/v1/chat/completions"
#: Routes that take legs.
LEG_PATHS = frozenset({"/v1/completions", CHAT_PATH})
#: Of an answer of a DE: where the prompt's KV comes from.
PREFILL_HEADER = "X-DualPath-Prefill"
#: Misdirected Request: clients should send it to the router, proxies to a decode engine.
MISDIRECTED = 421
#: vLLM ends an aborted call in far less.
ABORT_S = 5.0
#: Where proxies for Mooncake ask which engine a prefill server has.
QUERY_PATH = "/query"
_TOKEN_IDS = "prompt_token_ids"
#: vLLM's finish reason of a request that was ended before its last token.
ABORTED = "abort"
#: Of a request or an answer: what concerns one connection, or is made for each connection.
_PER_CONNECTION = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "date",
        "host",
        "keep-alive",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


class _Answer:
    """Receives the whole answer of an application."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    @property
    def messages(self) -> tuple[Message, Message]:
        """The answer, to be sent to the client."""
        start = {"type": "http.response.start", "status": self.status, "headers": self.headers}
        return start, {"type": "http.response.body", "body": self.body}


class _Client:
    """The client of one call after its body has been received: it can only leave."""

    def __init__(self, receive: Receive) -> None:
        self._leaves = asyncio.create_task(self._until_it_leaves(receive))
        self._aborted = asyncio.Event()

    @staticmethod
    async def _until_it_leaves(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def abort(self) -> None:
        """Let the applications that were called for this client see that it has left."""
        self._aborted.set()

    def sends(self, body: bytes) -> Receive:
        """Return an application's ``receive`` for a call with this body."""
        arrived: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if arrived:
                return arrived.pop()
            aborted = asyncio.ensure_future(self._aborted.wait())
            try:
                await asyncio.wait({self._leaves, aborted}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                aborted.cancel()
            return {"type": "http.disconnect"}

        return receive

    async def while_here(self, work: Awaitable[None]) -> None:
        """Wait for ``work``, and cancel it if the client leaves."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({self._leaves, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    def close(self) -> None:
        """Stop watching."""
        self._leaves.cancel()


class TwoLegServer:
    """The legs of one engine's HTTP server, on its event loop; ``app`` is vLLM's application."""

    def __init__(
        self,
        app: App,
        settings: EngineSettings,
        legs: TwoLegs | None = None,
        api: TokenApiClient | None = None,
    ) -> None:
        self._app = app
        self._engine_id = settings.engine_id
        self._api = api or TokenApiClient(engine_headers())
        self._role = settings.role
        self._adapters = frozenset(settings.lora_modules)
        self._legs = legs or TwoLegs(settings, api=self._api)
        self._releasing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Register with the scheduler."""
        self._legs.start()

    async def stop(self) -> None:
        """Leave the scheduler."""
        for task in self._releasing:
            task.cancel()
        await self._legs.stop()
        await self._api.aclose()

    async def serve(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        """Answer a call of ``LEG_PATHS``."""
        client = _Client(receive)
        try:
            request = _decoded(body)
            params = leg_of(request, self._role)
            if self._role is Role.PREFILL:
                await client.while_here(self._first(scope, request, params, client, send))
            else:
                await self._second(scope, request, params, client, send)
        except DualPathError as error:
            await send_all(send, refusal(status_of(error), str(error)))
        finally:
            client.close()

    async def answer_query(self, send: Send) -> None:
        """Answer a ``GET`` of ``QUERY_PATH`` as Mooncake's bootstrap server does."""
        found = {"0": {"engine_id": self._engine_id, "worker_addr": {}}}
        await send_all(send, json_answer(HTTPStatus.OK, msgspec.json.encode(found)))

    # ------------------------------------------------------------------ leg 1, at a PE

    async def _first(
        self,
        scope: Message,
        request: dict[str, Any],
        params: LegParameters,
        client: _Client,
        send: Send,
    ) -> None:
        if not params.do_remote_decode:
            reason = (
                "this prefill engine computes first legs only, which have do_remote_decode in "
                "kv_transfer_params: set your proxy to send it, and send other requests to a "
                "decode engine"
            )
            await send_all(send, refusal(MISDIRECTED, reason))
            return
        self._refuse_unsupported(request)
        rendered = await self._rendered(scope, request, client)
        if isinstance(rendered, _Answer):
            await send_all(send, rendered.messages)
            return
        answer = _Answer()
        path = own_path(scope)

        async def compute(transfer: PrefillTransfer) -> bool:
            leg = first_leg_body(request, path, rendered.token_ids, transfer)
            await self._call(scope, path, leg, client, answer)
            return answer.status == HTTPStatus.OK and not _is_aborted(answer)

        header = _header(scope, REQUEST_ID_HEADER)
        failed: DualPathError | None = None
        for_second: dict[str, Any] | None = None
        try:
            for_second = await self._legs.prefill(rendered, params, header, compute)
        except (EngineLostError, TransportError) as error:
            failed = error
        if failed is None and _is_aborted(answer):
            failed = EngineLostError(
                f"vLLM of engine {self._engine_id} has aborted the first leg; send it again"
            )
        if failed is not None:
            if not await self._legs.ends_aborted():
                raise failed
            await send_all(send, _aborted_answer(path, request, first=True))
            return
        if for_second is None:
            if not answer.status:
                return  # The client has left.
            await send_all(send, answer.messages)
            return
        whole = {**_decoded(answer.body), PARAMETERS: for_second}
        await send_all(send, json_answer(HTTPStatus.OK, msgspec.json.encode(whole)))

    def _refuse_unsupported(self, request: Mapping[str, Any]) -> None:
        prompt = request.get("prompt")
        problems = {
            f"model {request.get('model')!r} is an adapter": request.get("model") in self._adapters,
            "there are several prompts": isinstance(prompt, list)
            and any(isinstance(one, str | list) for one in prompt)
            and len(prompt) > 1,
            "prompt_embeds are given": request.get("prompt_embeds") is not None,
        }
        if found := [problem for problem, there in problems.items() if there]:
            raise BadRequestError(
                f"{' and '.join(found)}: not supported in two legs; send the request to a decode "
                "engine without kv_transfer_params, or through dualpath's router"
            )

    async def _rendered(
        self, scope: Message, request: dict[str, Any], client: _Client
    ) -> Prompt | _Answer:
        """Return the prompt as vLLM renders and tokenises it, or vLLM's refusal."""
        asked = of_one_token(request)
        asked.pop(PARAMETERS, None)
        answer = _Answer()
        await self._call(scope, f"{own_path(scope)}/render", asked, client, answer)
        if answer.status != HTTPStatus.OK:
            return answer
        try:
            rendered = msgspec.json.decode(answer.body, type=_Rendered | list[_Rendered])
        except msgspec.MsgspecError as error:
            raise BadRequestError(
                f"vLLM's render route answered {answer.body[:80]!r}: {error}; run the vLLM version "
                "dualpath was made for"
            ) from error
        (one,) = rendered if isinstance(rendered, list) else (rendered,)
        if one.features is not None:
            raise BadRequestError(
                "the request has images: not supported in two legs; send it to a decode engine "
                "without kv_transfer_params, or through dualpath's router"
            )
        return Prompt(one.token_ids, one.cache_salt)

    async def _call(
        self, scope: Message, path: str, body: dict[str, Any], client: _Client, answer: _Answer
    ) -> None:
        """Call vLLM's application; if this is cancelled, vLLM aborts the call first."""
        content = msgspec.json.encode(body)
        inner = _with_body(scope, path, content)
        call = asyncio.ensure_future(self._app(inner, client.sends(content), answer.send))
        try:
            await asyncio.shield(call)
        finally:
            if not call.done():
                client.abort()
                with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                    await asyncio.wait_for(call, ABORT_S)

    # ------------------------------------------------------------------ leg 2, at a DE

    async def _second(
        self,
        scope: Message,
        request: dict[str, Any],
        params: LegParameters,
        client: _Client,
        send: Send,
    ) -> None:
        if not params.do_remote_prefill:
            await self._alone(scope, request, client, send, "here; the request is no second leg")
            return
        found: list[SecondLeg] = []

        async def find(missing: str) -> None:
            found.append(await self._again(scope, request, params, client, missing))

        async def take() -> None:
            try:
                attempt = await self._legs.take(params, _header(scope, REQUEST_ID_HEADER))
            except DualPathError as error:
                await find(str(error))
                return
            if not isinstance(attempt, HandedOver):
                found.append(attempt)
            elif passed_on_by := _header(scope, PASSED_ON_HEADER):
                await find(f"{passed_on_by} has passed the leg on, but its KV is elsewhere")
            elif not await self._at_holder(scope, request, attempt, send):
                await find(f"the KV is at {attempt.decode.engine_id}, which does not answer")

        several = _several(request)
        try:
            self._refuse_unsupported(request)
            if several:
                self._release(params, _header(scope, REQUEST_ID_HEADER), several)
                raise BadRequestError(several)
            await client.while_here(take())
        except DualPathError as error:
            if not several and await self._legs.ends_aborted():
                logger.info("a second leg ends, its prefill was aborted: %s", error)
                await send_all(send, _aborted_answer(own_path(scope), request, first=False))
                return
            logger.warning("a second leg's prompt is computed here: %s", error)
            await self._alone(scope, request, client, send, f"here; {error}")
            return
        if not found:
            return  # The client has left, or another engine has answered.
        (leg,) = found
        body = {**request, PARAMETERS: second_leg_parameters(request, leg)}
        held = await _run(leg, lambda passing: self._forward(scope, body, client, passing), send)
        if held is not None:
            await self._alone(scope, request, client, send, f"here; vLLM answered {held}")

    async def _at_holder(
        self, scope: Message, request: dict[str, Any], handed: HandedOver, send: Send
    ) -> bool:
        """Pass a second leg on to the DE that has its KV; return whether the client has an answer.

        It has none if that engine does not answer, or answers with a status of 500 or more.  Then
        the KV is released, as it is if the client leaves.
        """
        began, holder = False, handed.decode

        async def sending(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        lost: asyncio.Future[None] = asyncio.ensure_future(self._lost(holder))
        logger.info(
            "a second leg is passed on to engine %s, which has its KV: %s",
            *(holder.engine_id, handed.note or "it is not moved"),
        )
        try:
            await run_until_broken(self._pass_on(scope, request, handed, sending), lost)
        except DualPathError as error:
            logger.warning("a second leg was passed on in vain: %s", error)
            if began:
                await send({"type": "http.response.body", "body": _last_event(error)})
        finally:
            lost.cancel()
            if not began:
                reason = f"its second leg was passed on by {self._engine_id} in vain"
                self._legs.withdraw(handed, reason)
        return began

    def _release(self, params: LegParameters, request_id: str, reason: str) -> None:
        """Release the KV of a leg that this engine computes itself, in the background."""
        task = asyncio.create_task(self._legs.release(params, request_id, reason))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _lost(self, engine: EngineInfo) -> None:
        """Raise ``EngineLostError`` when the engine is lost."""
        await self._legs.until_lost(engine)
        raise EngineLostError(f"engine {engine.engine_id} is lost; check that it runs, and its log")

    async def _pass_on(
        self, scope: Message, request: dict[str, Any], handed: HandedOver, send: Send
    ) -> None:
        """Pass a request and its answer on.

        Raises an error of ``core.errors`` without an answer below 500, and if a stream breaks off.
        """
        holder = handed.decode
        headers = {name.decode(): value.decode() for name, value in _passed(scope["headers"])}
        headers[PASSED_ON_HEADER] = self._engine_id
        body = msgspec.json.encode(request)
        async with self._api.pass_on(holder, own_path(scope), body, headers) as answer:
            if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                text = (await answer.read()).decode("utf-8", "replace")
                raise EngineLostError(
                    f"engine {holder.engine_id} answered {answer.status}: {in_one_line(text)}; "
                    "see its log"
                )
            streams = answer.content_type == "text/event-stream"
            # A whole answer is sent when all of it is here: until then another engine can answer.
            whole = b"" if streams else await answer.read()
            shown = [*_passed(answer.raw_headers, PREFILL_HEADER.lower())]
            origin = f"{answer.headers.get(PREFILL_HEADER, '')}; at {holder.engine_id}"
            if handed.note:
                origin += f": {handed.note}"
            await _with_header(send, origin)(
                {"type": "http.response.start", "status": answer.status, "headers": shown}
            )
            if streams:
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": whole})

    async def _again(
        self,
        scope: Message,
        request: dict[str, Any],
        params: LegParameters,
        client: _Client,
        missing: str,
    ) -> SecondLeg:
        """Return a new attempt of a second leg; ``missing`` is why it has none of its first leg."""
        logger.warning("the prompt of a second leg is prefilled again: %s", missing)
        try:
            prompt = await self._rendered(scope, request, client)
            if isinstance(prompt, _Answer):
                raise BadRequestError(f"vLLM's render route answered {prompt.status}")
            return await self._legs.prefill_elsewhere(
                prompt, params, partial(prefill_at, self._api, prompt)
            )
        except DualPathError as error:
            raise TransportError(f"{missing}; and no prefill engine could help: {error}") from error

    async def _alone(
        self,
        scope: Message,
        request: dict[str, Any],
        client: _Client,
        send: Send,
        reason: str,
    ) -> None:
        """Let this engine compute the prompt itself."""
        given = request.get(PARAMETERS)
        own = {key: value for key, value in request.items() if key != PARAMETERS}
        if isinstance(given, dict) and _TOKEN_IDS in given:
            own[PARAMETERS] = {_TOKEN_IDS: given[_TOKEN_IDS]}
        sending, began = _with_header(send, reason), False
        with self._legs.own_call() as call:
            if call is None:
                await self._forward(scope, own, client, sending)
                return

            async def passing(message: Message) -> None:
                nonlocal began
                began = True
                call.heard()
                await sending(message)

            stalls = asyncio.ensure_future(self._legs.stalls(call))
            try:
                await run_until_broken(self._forward(scope, own, client, passing), stalls)
            except DualPathError as error:
                logger.warning("a request that this engine computes itself: %s", error)
                if began:
                    await send({"type": "http.response.body", "body": _last_event(error)})
                else:
                    await send_all(send, refusal(status_of(error), str(error)))
            finally:
                stalls.cancel()

    async def _forward(
        self, scope: Message, request: dict[str, Any], client: _Client, send: Send
    ) -> None:
        content = msgspec.json.encode(request)
        await self._app(_with_body(scope, own_path(scope), content), client.sends(content), send)


def _passed(headers: Iterable[tuple[bytes, bytes]], *but: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers of a request or an answer that is passed on; those in ASCII."""
    for name, value in headers:
        passes = name.lower().decode("latin-1") not in {*_PER_CONNECTION, *but}
        if passes and name.isascii() and value.isascii():
            yield name.lower(), value


def _last_event(error: DualPathError) -> bytes:
    """Return the event that ends a stream with an error."""
    answer = refusal(status_of(error), str(error))[1]
    return b"data: " + bytes(answer["body"]) + b"\n\n"


async def _run(
    leg: SecondLeg, forward: Callable[[Send], Awaitable[None]], send: Send
) -> int | None:
    """Run the decode; return the status of an answer that was not sent, as vLLM has failed.

    Raises ``EngineLostError`` if the engine is lost before its answer has begun.
    """
    reason, began, ended = "failed", False, False
    failed: int | None = None
    sending = _with_header(send, leg.origin)

    async def passing(message: Message) -> None:
        nonlocal failed, began, ended
        failed = failed or _server_error(message)
        if failed is None:
            if message.get("body"):
                leg.decoding_started()
            began = True
            await sending(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body")

    stalls: asyncio.Future[None] = asyncio.ensure_future(leg.stalls())
    try:
        await run_until_broken(forward(passing), stalls)
        if ended:
            reason = FINISHED
    except DualPathError as error:
        # If it has ended, the client has its answer.
        logger.warning("request %s: %s", leg.transfer.request_id, error)
        if not began:
            raise
        if not ended:
            await send({"type": "http.response.body", "body": _last_event(error)})
    finally:
        stalls.cancel()
        leg.close(reason)
    return failed


def _server_error(message: Message) -> int | None:
    """Return the status of an answer that begins with one of 500 or more."""
    if message["type"] != "http.response.start":
        return None
    status = int(message["status"])
    return status if status >= HTTPStatus.INTERNAL_SERVER_ERROR else None


class _Rendered(msgspec.Struct):
    """The fields of vLLM's rendered request that matter here."""

    token_ids: list[int]
    cache_salt: str | None = None
    features: dict[str, Any] | None = None


def first_leg_body(
    request: Mapping[str, Any], path: str, token_ids: Sequence[int], transfer: PrefillTransfer
) -> dict[str, Any]:
    """Return the body of a first leg for vLLM: these tokens, and one to generate."""
    leg = of_one_token(request)
    leg[PARAMETERS] = to_transfer_params(transfer)
    if path == CHAT_PATH:
        leg[PARAMETERS][_TOKEN_IDS] = token_ids
    else:
        leg["prompt"] = token_ids
    return leg


def of_one_token(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request for one token, in one answer; a proxy may have left the client's limits.

    What the answer would show of the prompt is left out, as the proxy discards it and vLLM would
    compute hits again for it.
    """
    dropped = ("stream_options", "min_tokens", "prompt_logprobs", "echo")
    made = {key: value for key, value in request.items() if key not in dropped}
    made |= {"n": 1, "stream": False, "max_tokens": 1}
    if "max_completion_tokens" in made:
        made["max_completion_tokens"] = 1
    return made


def second_leg_parameters(request: Mapping[str, Any], leg: SecondLeg) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of a second leg for vLLM."""
    made = to_transfer_params(leg.transfer)
    if leg.hit_tokens is not None:
        # vLLM reports them as the prompt's cached tokens; its own hit is the whole prompt.
        made["do_remote_prefill"] = True
        made["remote_prefill_cached_tokens"] = leg.hit_tokens
    if (token_ids := (request.get(PARAMETERS) or {}).get(_TOKEN_IDS)) is not None:
        made[_TOKEN_IDS] = token_ids
    return made


def _is_aborted(answer: _Answer) -> bool:
    """Return whether vLLM has aborted a request, which it answers with status 200."""
    if answer.status != HTTPStatus.OK:
        return False
    choices = _decoded(answer.body).get("choices")
    return isinstance(choices, list) and any(c.get("finish_reason") == ABORTED for c in choices)


def _aborted_answer(
    path: str, request: Mapping[str, Any], *, first: bool
) -> tuple[Message, Message]:
    """Return vLLM's answer to a request that was aborted before its first token.

    That to a first leg has a name for the second leg, which then ends in the same way.
    """
    streams, name = bool(request.get("stream")) and not first, f"aborted-{uuid.uuid4().hex}"
    nothing = {"role": "assistant", "content": ""}
    kind = "text_completion"
    choice: dict[str, Any] = {"index": 0, "finish_reason": ABORTED}
    if path == CHAT_PATH:
        kind = "chat.completion.chunk" if streams else "chat.completion"
        choice["delta" if streams else "message"] = nothing
    else:
        choice["text"] = ""
    whole = {"id": name, "object": kind, "created": int(time.time()), "choices": [choice]}
    whole["model"] = request.get("model")
    if first:
        whole[PARAMETERS] = {"do_remote_prefill": True, "remote_request_id": name}
    if not streams:
        whole["usage"] = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return json_answer(HTTPStatus.OK, msgspec.json.encode(whole))
    headers = [(b"content-type", b"text/event-stream")]
    start = {"type": "http.response.start", "status": 200, "headers": headers}
    return start, {"type": "http.response.body", "body": server_event(whole) + STREAM_END}


def _several(request: Mapping[str, Any]) -> str:
    """Return why there is no transfer for several answers, whose requests would share it."""
    if request.get("n") in (None, 1):
        return ""
    return f"n is {request['n']}: KV is transferred for one answer; send n=1"


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequestError(
            f"body of {len(body)} bytes: {error}; send a valid request"
        ) from error


def _header(scope: Message, name: str) -> str:
    """Return a header's value, empty without one."""
    value = dict(scope["headers"]).get(name.lower().encode(), b"")
    return str(value.decode("latin-1"))


def _with_body(scope: Message, path: str, body: bytes) -> Message:
    """Return the scope of a call of another path with another body, by the same client."""
    root = str(scope.get("root_path", ""))
    whole = f"{root}{path}" if str(scope["path"]) != own_path(scope) else path
    skipped = (b"content-length", b"transfer-encoding", b"content-type")
    headers = [pair for pair in scope["headers"] if pair[0] not in skipped]
    headers += [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    return {**scope, "path": whole, "raw_path": whole.encode(), "headers": headers}


def _with_header(send: Send, value: str) -> Send:
    """Return a ``send`` that adds ``PREFILL_HEADER`` to an answer."""
    text = in_one_line(value).encode("ascii", "replace")
    return adding_headers(send, lambda: [(PREFILL_HEADER.lower().encode(), text)])
