"""The HTTP server of an emulated engine, with the token API of a vLLM engine.

POST /inference/v1/generate   one prefill or decode, of a router or of another proxy (a leg, see
                              router.two_legs); closing the stream aborts it
GET  /health                  200
GET  /dualpath/v1/calls       the generate calls that are open, for the router's inquiries
GET  /metrics                 verified Layer Blocks by place, bytes moved, CPU time by thread
"""

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from dualpath.core.blocks import are_tokens
from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, DualPathError
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.engine.control.transfer_checks import TransferChecks, check_prompt, with_own_hits
from dualpath.router.api_keys import engine_headers, engine_keys, server_hosts
from dualpath.router.engines import EngineInfo
from dualpath.router.http.server import (
    api_key_guard,
    body_refused,
    json_answer,
    read_body,
    until_client_leaves,
)
from dualpath.router.requests.limits import ArrivingBodies, BodyRefusedError
from dualpath.router.scheduling import FINISHED, HandedOver
from dualpath.router.token_api.client import TokenApiClient
from dualpath.router.token_api.open_calls import (
    CALL_HEADER,
    OPEN_CALLS_PATH,
    OpenCallList,
    named_call,
)
from dualpath.router.token_api.statuses import (
    BAD_REQUEST,
    UNPROCESSABLE,
    api_error,
    status_of,
)
from dualpath.router.token_api.wire import (
    GENERATE_PATH,
    STREAM_END,
    ApiError,
    Choice,
    GenerateAnswer,
    GenerateRequest,
    decode_body,
    server_event,
)
from dualpath.router.two_legs import (
    PASSED_ON_HEADER,
    REQUEST_ID_HEADER,
    LegParameters,
    Prompt,
    TwoLegs,
    leg_parameters,
    prefill_at,
)
from dualpath_lab.emulated.checkable_kv import TokenPrefix
from dualpath_lab.emulated.data_plane import DataPlane
from dualpath_lab.emulated.decode import DecodeEngine
from dualpath_lab.emulated.metrics import EngineMetrics
from dualpath_lab.emulated.prefill import PrefillEngine
from dualpath_lab.emulated.requests import Answer, DecodeRequest, Deliver, PrefillRequest, Sampling

# --------------------------------------------------------------------------------------- admission
# Validates requests to an emulated engine and submits them to it.


class RequestSubmitter:
    """Validates and submits requests of one engine; methods may be called from any thread."""

    def __init__(self, plane: DataPlane, engine: PrefillEngine | DecodeEngine) -> None:
        self._plane = plane
        self._engine = engine
        self._settings = plane.settings
        self._checks = TransferChecks(plane.settings.engine, plane.geometry)

    def transfer(self, request: GenerateRequest[Sampling]) -> PrefillTransfer | DecodeTransfer:
        """Return the request's transfer; raises ``BadRequestError`` for invalid requests."""
        transfer = self._checks.carried(request.kv_transfer_params)
        if transfer is None:
            raise BadRequestError(
                f"request {request.request_id} has no kv_transfer_params; send it through the "
                "router"
            )
        vocab_size = self._settings.vocab_size
        if not are_tokens(request.token_ids, vocab_size):
            raise BadRequestError(
                f"request {request.request_id} has token ids from {min(request.token_ids)} to "
                f"{max(request.token_ids)}, but the vocabulary has 0 to {vocab_size - 1}; correct "
                "them"
            )
        tokens, most = self._tokens(request), self._settings.max_model_len
        if max_tokens(request) < 1:
            raise BadRequestError(
                f"request {request.request_id}: max_tokens is {max_tokens(request)}; it must be at "
                "least 1"
            )
        if tokens > min(most, self._plane.manager.hbm_tokens):
            raise BadRequestError(
                f"request {request.request_id} needs {tokens} tokens, but the longest context is "
                f"{most} and the HBM holds {self._plane.manager.hbm_tokens}; shorten it or raise "
                "the engine's HBM"
            )
        self._checks.check(transfer, len(request.token_ids))
        return transfer

    def _tokens(self, request: GenerateRequest[Sampling]) -> int:
        """Return the number of tokens that need HBM at this engine."""
        if self._settings.engine.role is Role.PREFILL:
            return len(request.token_ids)
        return len(request.token_ids) + max_tokens(request)

    def prefix(
        self, request: GenerateRequest[Sampling], transfer: PrefillTransfer | DecodeTransfer
    ) -> TokenPrefix:
        """Return the prompt's keys and seeds, which takes long for a long prompt."""
        return TokenPrefix(
            request.token_ids[: transfer.prompt_tokens],
            self._settings.geometry.block_tokens,
            cache_salt=request.cache_salt,
            vocab_size=self._settings.vocab_size,
            capacity_tokens=self._tokens(request),
            weights=self._settings.weights,
        )

    def check_prompt(
        self,
        request: GenerateRequest[Sampling],
        transfer: PrefillTransfer | DecodeTransfer,
        prefix: TokenPrefix,
    ) -> None:
        """Raise ``BadRequestError`` if the transfer is for another prompt."""
        block_tokens = self._settings.geometry.block_tokens
        check_prompt(transfer, prefix.keys, request.token_ids, block_tokens)

    def submit(
        self,
        request: GenerateRequest[Sampling],
        transfer: PrefillTransfer | DecodeTransfer,
        prefix: TokenPrefix,
        deliver: Deliver,
    ) -> Callable[[], None]:
        """Submit the request to the engine; return a function that aborts it, even if it ended."""
        if isinstance(transfer, PrefillTransfer):
            assert isinstance(self._engine, PrefillEngine)
            prompt = PrefillRequest(prefix, with_own_hits(transfer, prefix.keys), deliver)
            self._engine.submit(prompt)
            return functools.partial(self._engine.abort, prompt)
        assert isinstance(self._engine, DecodeEngine)
        prior = tuple(request.token_ids[transfer.prompt_tokens :])
        decode = DecodeRequest(prefix, transfer, prior, max_tokens(request), deliver)
        self._engine.submit(decode)
        return functools.partial(self._engine.abort, decode)


def max_tokens(request: GenerateRequest[Sampling]) -> int:
    """Return how many tokens the request may generate."""
    return request.sampling_params.max_tokens


#: Keys and seeds of a prompt of at most so many tokens take no longer than the wake-ups of another
#: thread and of the event loop.
SHORT_PROMPT_TOKENS = 4096


class EngineBodies(msgspec.Struct, frozen=True):
    """``BodyLimits`` of an engine, for prompts of a few million tokens as JSON."""

    max_body_bytes: int = 1 << 28
    max_arriving_bytes: int = 1 << 30
    body_timeout_s: float = 60.0


class LoopBridge:
    """Passes answers from the engine's threads to the event loop, batched per wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[tuple[asyncio.Queue[Answer], Answer]] = deque()
        self._called = False

    def into(self, answers: "asyncio.Queue[Answer]") -> Deliver:
        """Return the function that puts into ``answers`` from any thread."""

        def deliver(answer: Answer) -> None:
            self._pending.append((answers, answer))
            # A race only causes an extra call: ``_drain`` resets the flag before it reads.
            if not self._called and not self._loop.is_closed():
                self._called = True
                self._loop.call_soon_threadsafe(self._drain)

        return deliver

    def _drain(self) -> None:
        self._called = False
        while self._pending:
            answers, answer = self._pending.popleft()
            answers.put_nowait(answer)


class EngineServer:
    """The HTTP handlers of one engine; belongs to one event loop."""

    def __init__(self, plane: DataPlane, engine: PrefillEngine | DecodeEngine) -> None:
        settings = plane.settings
        own = (settings.host, urlsplit(settings.engine.api_url).hostname or "")
        self._keys = engine_keys(hosts=server_hosts(settings.engine.allowed_hosts, *own))
        self._admission = RequestSubmitter(plane, engine)
        self._metrics = EngineMetrics(plane)
        self._bodies = ArrivingBodies(EngineBodies())
        self._bridge = LoopBridge(asyncio.get_running_loop())
        self._calls = OpenCallList()
        takes_legs = settings.engine.two_leg_scheduler
        self._api = TokenApiClient(engine_headers())
        self._legs = TwoLegs(settings.engine, api=self._api) if takes_legs else None
        self._engine_id = settings.engine.engine_id

    async def run_legs(self, app: web.Application) -> AsyncIterator[None]:
        """Be registered with the scheduler while the server runs, if other proxies send legs."""
        if self._legs is None:
            yield
            return
        self._legs.start()
        yield
        await self._legs.stop()
        await self._api.aclose()

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[until_client_leaves, api_key_guard(self._keys)])
        app.cleanup_ctx.append(self.run_legs)
        app.router.add_post(GENERATE_PATH, self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get(OPEN_CALLS_PATH, self._open_calls)
        app.router.add_get("/metrics", self._scrape)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _open_calls(self, request: web.Request) -> web.Response:
        return web.Response(body=self._calls.body(), content_type="application/json")

    async def _scrape(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """List a call as open once its body has arrived, as ``EngineGuard`` does, and answer it."""
        try:
            body = await read_body(request, self._bodies)
        except DualPathError as error:
            return json_answer({"error": ApiError(str(error), BAD_REQUEST)}, BAD_REQUEST)
        except BodyRefusedError as error:
            return body_refused(error)
        name = request.headers.get(CALL_HEADER)
        if name is None:
            return await self._answer(request, body, lambda: None)
        with self._calls.open(named_call(name.encode("latin-1"))) as sent:
            return await self._answer(request, body, sent)

    async def _answer(
        self, request: web.Request, body: bytes, sent: Callable[[], None]
    ) -> web.StreamResponse:
        """Answer a call; ``sent`` is called at each sending of a streamed answer."""
        try:
            generate = decode_body(body, GenerateRequest[Sampling])
            params = leg_parameters(generate.kv_transfer_params)
        except DualPathError as error:
            return json_answer({"error": ApiError(str(error), BAD_REQUEST)}, BAD_REQUEST)
        if self._legs is None or not (params.do_remote_decode or params.do_remote_prefill):
            return await self._run(request, generate, sent)
        header = request.headers.get(REQUEST_ID_HEADER, "")
        try:
            if params.do_remote_decode:
                return await self._first_leg(self._legs, request, generate, params, header, sent)
            return await self._second_leg(self._legs, request, generate, params, header, sent)
        except DualPathError as error:
            return json_answer({"error": api_error(error)}, status_of(error))

    async def _first_leg(
        self,
        legs: TwoLegs,
        request: web.Request,
        generate: GenerateRequest[Sampling],
        params: LegParameters,
        header: str,
        sent: Callable[[], None],
    ) -> web.StreamResponse:
        answer: web.StreamResponse = web.Response()

        async def compute(transfer: PrefillTransfer) -> bool:
            nonlocal answer
            generate.kv_transfer_params = to_transfer_params(transfer)
            generate.stream, generate.sampling_params.max_tokens = False, 1
            answer = await self._run(request, generate, sent)
            return answer.status == HTTPStatus.OK

        prompt = Prompt(generate.token_ids, generate.cache_salt)
        for_second = await legs.prefill(prompt, params, header, compute)
        if for_second is None:
            return answer
        assert isinstance(answer, web.Response), "it was not streamed"
        assert isinstance(answer.body, bytes), "it is a whole answer in JSON"
        whole = msgspec.json.decode(answer.body, type=dict[str, object])
        return json_answer({**whole, "kv_transfer_params": for_second})

    async def _second_leg(
        self,
        legs: TwoLegs,
        request: web.Request,
        generate: GenerateRequest[Sampling],
        params: LegParameters,
        header: str,
        sent: Callable[[], None],
    ) -> web.StreamResponse:
        """Answer a second leg; unlike vLLM's, this engine cannot compute a prompt itself."""
        reason = "failed"
        prompt = Prompt(generate.token_ids, generate.cache_salt)
        compute = functools.partial(prefill_at, self._api, prompt)
        try:
            attempt = await legs.take(params, header)
        except DualPathError:
            attempt = await legs.prefill_elsewhere(prompt, params, compute)
        if isinstance(attempt, HandedOver):
            if PASSED_ON_HEADER not in request.headers:
                try:
                    return await self._pass_on(request, generate, attempt.decode, header)
                finally:
                    # Nothing is left of it to release unless the other engine did not take it.
                    legs.withdraw(attempt, f"its second leg is over at {self._engine_id}")
            attempt = await legs.prefill_elsewhere(prompt, params, compute)
        try:
            generate.kv_transfer_params = to_transfer_params(attempt.transfer)
            answer = await self._run(request, generate, sent)
            if answer.status == HTTPStatus.OK:
                attempt.decoding_started()
                reason = FINISHED
            return answer
        finally:
            attempt.close(reason)

    async def _pass_on(
        self,
        request: web.Request,
        generate: GenerateRequest[Sampling],
        holder: EngineInfo,
        header: str,
    ) -> web.StreamResponse:
        """Pass a second leg on to the engine that has its KV; unlike vLLM's, without a fallback."""
        headers = {
            "Content-Type": "application/json",
            REQUEST_ID_HEADER: header,
            PASSED_ON_HEADER: self._engine_id,
        }
        body = msgspec.json.encode(generate)
        async with self._api.pass_on(holder, GENERATE_PATH, body, headers) as passed:
            kind = {"Content-Type": passed.headers["Content-Type"]}
            answer = web.StreamResponse(status=passed.status, headers=kind)
            await answer.prepare(request)
            async for piece in passed.content.iter_any():
                await answer.write(piece)
            return answer

    async def _run(
        self,
        request: web.Request,
        generate: GenerateRequest[Sampling],
        sent: Callable[[], None],
    ) -> web.StreamResponse:
        """Answer a request that carries its transfer."""
        try:
            transfer = self._admission.transfer(generate)
            if len(generate.token_ids) <= SHORT_PROMPT_TOKENS:
                prefix = self._admission.prefix(generate, transfer)
            else:
                prefix = await asyncio.to_thread(self._admission.prefix, generate, transfer)
            self._admission.check_prompt(generate, transfer, prefix)
        except DualPathError as error:
            return json_answer({"error": ApiError(str(error), BAD_REQUEST)}, BAD_REQUEST)
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        abort = self._admission.submit(generate, transfer, prefix, self._bridge.into(answers))
        try:
            if generate.stream:
                return await self._stream(request, generate, answers, sent)
            return await self._whole(generate.request_id, answers)
        finally:
            abort()

    async def _whole(self, request_id: str, answers: "asyncio.Queue[Answer]") -> web.Response:
        token_ids: list[int] = []
        while True:
            answer = await answers.get()
            if answer.error is not None:
                return json_answer(_event(request_id, answer), UNPROCESSABLE)
            token_ids += answer.token_ids
            if answer.finish_reason is not None:
                choice = Choice(token_ids, answer.finish_reason)
                return json_answer(GenerateAnswer(request_id, [choice]))

    async def _stream(
        self,
        request: web.Request,
        generate: GenerateRequest[Sampling],
        answers: "asyncio.Queue[Answer]",
        sent: Callable[[], None],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        held: tuple[int, ...] = ()
        least_tokens = 1  # The first token is sent at once.
        while True:
            answer = await answers.get()
            held += answer.token_ids
            ended = answer.error is not None or answer.finish_reason is not None
            if not ended and len(held) < least_tokens:
                continue
            ready = Answer(held, answer.finish_reason, answer.error)
            await response.write(server_event(_event(generate.request_id, ready)))
            sent()
            if ended:
                await response.write(STREAM_END)
                return response
            held, least_tokens = (), generate.sampling_params.stream_interval


def _event(request_id: str, answer: Answer) -> GenerateAnswer:
    if answer.error is not None:
        return GenerateAnswer(request_id, error=ApiError(answer.error, UNPROCESSABLE))
    return GenerateAnswer(request_id, [Choice(list(answer.token_ids), answer.finish_reason)])
