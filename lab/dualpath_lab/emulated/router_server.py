"""A light router: the router's service with an HTTP server for emulated engines.

`dualpath router` serves emulated engines as well, with vLLM's whole front end and the tokenizer of
a model.  This server needs neither vLLM nor a model:

    POST /v1/completions        token ids or text in, token ids or text out
    POST /v1/chat/completions   messages in, text out
    POST /tokenize, /detokenize   tokens of a text, and back
    GET  /v1/models             the one model, by the name that the first engine registered
    GET  /dualpath/v1/status    as in `dualpath router`
    POST, DELETE /dualpath/v1/sessions/SESSION   as in `dualpath router`
    GET, POST /dualpath/v1/roles   as in `dualpath router`
    GET  /dashboard             as in `dualpath router`
    GET  /health, /metrics      as in `dualpath router`, without vLLM's own metrics
"""

import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from dualpath.core.addresses import http_url
from dualpath.core.blocks import KeyExtras, tenant_tag, token_array
from dualpath.core.errors import (
    BadRequestError,
    DualPathError,
)
from dualpath.core.key_cache import KeyCache
from dualpath.core.kv_hints import kv_request_hints
from dualpath.core.session_hints import session_hints
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.router.api_keys import (
    ApiKeys,
    engine_headers,
    router_keys,
    server_hosts,
    warn_if_open,
)
from dualpath.router.asgi import collect_seldom
from dualpath.router.connections import Connections
from dualpath.router.engine_calls import Job, OpenCalls, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.http.cluster_calls import ClusterCalls
from dualpath.router.http.server import (
    api_key_guard,
    body_refused,
    error_answer,
    json_answer,
    read_body,
    refusal_count,
    serving_app,
    until_client_leaves,
    until_signal,
)
from dualpath.router.http.shared_port import SharedPort
from dualpath.router.linked_front_end import LinkedFrontEnd
from dualpath.router.observe.loop_lag import measure_loop_lag
from dualpath.router.requests.limits import (
    ArrivingBodies,
    BodyRefusedError,
    allow_many_streams,
    connection_limits,
)
from dualpath.router.requests.request import check_prompt, check_salt, check_token_ids
from dualpath.router.requests.session_calls import session_call
from dualpath.router.scheduler.leadership import STANDS_BY, bound, open_leadership, stop_when_lost
from dualpath.router.scheduler.session_orders import SESSION_PATH
from dualpath.router.service import RouterService
from dualpath.router.settings import LinkSettings, RouterSettings
from dualpath.router.token_api.client import TokenApi, TokenApiClient, token_event
from dualpath.router.token_api.statuses import UNAVAILABLE, api_error
from dualpath.router.token_api.wire import STREAM_END, GenerateRequest, decode_body, server_event
from dualpath_lab.emulated.openai_api import (
    CHAT_TOKENS,
    Answer,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Request,
    TokenizeRequest,
)
from dualpath_lab.emulated.requests import Sampling
from dualpath_lab.emulated.words import VOCAB_SIZE, Words

# ----------------------------------------------------------------------------------- engine client
# The emulated router's calls to engines, for jobs of token ids without sampling parameters.


class EngineClient:
    """See ``router.engine_calls.EngineCalls``; call ``aclose`` at the end.

    A job's payload is its cache salt.  Raises what ``TokenApiClient`` raises.
    """

    def __init__(self, api: TokenApi) -> None:
        self._api = api

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: PrefillTransfer
    ) -> TokenEvent:
        """Run the prompt on a PE; return the first token."""
        request = _request(job, prefill_transfer, job.prompt_token_ids, 1)
        answer = await self._api.generate(engine, job, request)
        if not job.first_token_from_pe:
            return TokenEvent(token_ids=(), finish_reason="length")
        return token_event(answer.choices[0])

    async def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: DecodeTransfer,
        prior_tokens: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        """Continue after ``prior_tokens`` on a DE."""
        tokens = job.prompt_token_ids + tuple(prior_tokens)
        request = _request(job, decode_transfer, tokens, job.max_new_tokens - len(prior_tokens))
        async with aclosing(self._api.stream(engine, job, request)) as choices:
            async for choice in choices:
                yield token_event(choice)

    async def answers(self, engine: EngineInfo) -> None:
        """Return if the engine's server answers that it is healthy."""
        await self._api.answers(engine)

    async def open_calls(self, engine: EngineInfo) -> OpenCalls | None:
        """Return the calls that the engine's server has; None if it does not report them."""
        return await self._api.open_calls(engine)

    async def aclose(self) -> None:
        """Close all connections; engines abort the requests that still run on them."""
        await self._api.aclose()


def _request(
    job: Job, transfer: PrefillTransfer | DecodeTransfer, tokens: Sequence[int], max_tokens: int
) -> GenerateRequest[Sampling]:
    assert job.payload is None or isinstance(job.payload, str)
    return GenerateRequest(
        request_id=transfer.request_id,
        token_ids=tokens,
        sampling_params=Sampling(max_tokens=max_tokens),
        cache_salt=job.payload,
        kv_transfer_params=to_transfer_params(transfer),
    )


#: Headers of the W3C trace context, which are forwarded to engines.
TRACE_HEADERS = ("traceparent", "tracestate")
#: vLLM's header for the name of a session.
SESSION_HEADER = "X-Session-ID"


class RouterServer:
    """HTTP application for a service; both belong to the same event loop.

    With a ``RouterService`` it also serves the routes about the cluster.  ``host`` is where it
    listens.
    """

    def __init__(self, service: RouterService | LinkedFrontEnd, host: str = "") -> None:
        self._service = service
        self._host = host
        self._bodies = ArrivingBodies(service.settings)
        self._memory: KeyCache | None = None
        self._words = Words()
        self._model = ""

    def app(self) -> web.Application:
        """Return the application."""
        settings = self._service.settings
        keys = router_keys(
            settings.api_keys,
            open_metrics=settings.open_metrics,
            hosts=server_hosts(settings.allowed_hosts, self._host),
        )
        app = web.Application(
            middlewares=[
                refusal_count(self._service.metrics),
                until_client_leaves,
                api_key_guard(keys),
            ],
        )
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/dualpath/v1/status", self._status)
        app.router.add_post(SESSION_PATH, self._session)
        app.router.add_delete(SESSION_PATH, self._session)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        if not isinstance(self._service, LinkedFrontEnd):
            ClusterCalls(self._service.scheduler, self._bodies).add_to(app)
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionRequest)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatRequest)

    async def _answer(self, request: web.Request, kind: type[Request]) -> web.StreamResponse:
        try:
            # Checked before the body is read, because a full router must not buffer bodies.
            if (refusal := self._service.turned_away()) is not None:
                raise refusal
            body = await read_body(request, self._bodies)
            asked = decode_body(body, kind)
            job = await self._job(asked, request.headers)
        except BodyRefusedError as error:
            return body_refused(error)
        except DualPathError as error:
            return error_answer(error)
        answer, streams = (
            Answer(asked, job.request_id, job.prompt_tokens, self._model),
            asked.stream,
        )
        # The job has the tokens of the prompt: the collector of garbage visits each one in a list.
        del asked
        events = self._service.submit(job)
        try:
            # An error before the first token becomes an HTTP status, not an event of a stream.
            first = await anext(events)
            if streams:
                return await self._stream(request, answer, first, events)
            return json_answer(answer.whole([first, *[event async for event in events]]))
        except DualPathError as error:
            return error_answer(error)
        finally:
            # Aborts the request if its client has disconnected.
            if (close := getattr(events, "aclose", None)) is not None:
                await close()

    async def _stream(
        self,
        request: web.Request,
        answer: Answer,
        first: TokenEvent,
        rest: AsyncIterator[TokenEvent],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(server_event(answer.chunk(first)))
        try:
            async for event in rest:
                await response.write(server_event(answer.chunk(event)))
        except DualPathError as error:
            await response.write(server_event({"error": api_error(error)}))
        else:
            if (usage := answer.last_chunk()) is not None:
                await response.write(server_event(usage))
        await response.write(STREAM_END)
        return response

    async def _job(self, asked: Request, headers: Mapping[str, str]) -> Job:
        """Return the router's job.

        Raises ``BadRequestError`` for invalid requests, ``DeadlineError`` if no engine has
        registered, so that the block size is unknown.
        """
        registry = self._service.registry
        memory = await self._model_facts()
        if asked.n not in (None, 1):
            raise BadRequestError(f"n is {asked.n}, but this endpoint supports only 1; set n to 1")
        prompt = asked.prompt_tokens(self._words)
        numbers = token_array(prompt)
        check_prompt(len(prompt), self._service.settings, registry)
        check_token_ids(numbers, registry)
        check_salt(asked.cache_salt)

        extras = KeyExtras(cache_salt=asked.cache_salt)
        keys = tuple(memory.keys(numbers, extras))

        def keys_for(token_ids: Sequence[int]) -> Sequence[bytes]:
            return memory.continued(keys, token_ids, extras)

        limit_tokens = asked.limit_tokens
        if limit_tokens is None:
            context_tokens = registry.limit("max_model_len")
            free_tokens = (context_tokens or len(prompt) + CHAT_TOKENS) - len(prompt)
            limit_tokens = asked.default_tokens(free_tokens)
        kind = "chatcmpl" if isinstance(asked, ChatRequest) else "cmpl"
        return Job(
            request_id=f"{kind}-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(prompt),
            max_new_tokens=limit_tokens,
            keys=keys,
            keys_for=keys_for,
            payload=asked.cache_salt,
            trace_headers={n: headers[n] for n in TRACE_HEADERS if n in headers},
            tenant=tenant_tag(asked.cache_salt),
            kv_hints=kv_request_hints(asked.kv_transfer_params),
            hints=session_hints(
                asked.vllm_xargs or {}, asked.session_id or headers.get(SESSION_HEADER)
            ),
            priority=asked.priority,
        )

    async def _model_facts(self) -> KeyCache:
        """Wait until engines have registered, and read their model; raises ``DeadlineError``."""
        if self._memory is None:
            registry = self._service.registry
            if registry.namespace is None:
                await self._service.wait_ready(1, 1, self._service.settings.engine_wait_s)
            assert registry.namespace is not None
            self._memory = KeyCache(registry.namespace.geometry.block_tokens)
            self._words = Words(registry.limit("vocab_size") or VOCAB_SIZE)
            self._model = self._model_name()
        return self._memory

    async def _tokenize(self, request: web.Request) -> web.Response:
        async def answer(body: bytes) -> object:
            asked = decode_body(body, TokenizeRequest)
            await self._model_facts()
            tokens = asked.prompt_tokens(self._words)
            context_tokens = self._service.registry.limit("max_model_len")
            return {"count": len(tokens), "max_model_len": context_tokens, "tokens": tokens}

        return await self._converted(request, answer)

    async def _detokenize(self, request: web.Request) -> web.Response:
        async def answer(body: bytes) -> object:
            return {"prompt": Words.decode(decode_body(body, DetokenizeRequest).tokens)}

        return await self._converted(request, answer)

    async def _converted(
        self, request: web.Request, answer: Callable[[bytes], Awaitable[object]]
    ) -> web.Response:
        try:
            return json_answer(await answer(await read_body(request, self._bodies)))
        except BodyRefusedError as error:
            return body_refused(error)
        except DualPathError as error:
            return error_answer(error)

    def _model_name(self) -> str:
        return str(self._service.status()["model"] or "emulated")

    async def _models(self, request: web.Request) -> web.Response:
        name = self._model_name()
        model = {"id": name, "object": "model", "created": 0, "owned_by": "dualpath", "root": name}
        context_tokens = self._service.registry.limit("max_model_len")
        return json_answer({"object": "list", "data": [{**model, "max_model_len": context_tokens}]})

    async def _status(self, request: web.Request) -> web.Response:
        return json_answer(self._service.status())

    async def _session(self, request: web.Request) -> web.Response:
        try:
            body = await read_body(request, self._bodies)
        except BodyRefusedError as error:
            return body_refused(error)
        except DualPathError as error:
            return error_answer(error)
        session_id, over = request.match_info["session_id"], request.method == "DELETE"
        status, answer = await session_call(self._service, session_id, body, over=over)
        return json_answer(answer, status)

    async def _health(self, request: web.Request) -> web.Response:
        if (reason := self._service.unready()) is None:
            return json_answer({})
        return json_answer({"status": "unavailable", "reason": reason}, UNAVAILABLE)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=await self._service.scrape(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


@asynccontextmanager
async def emulated_router(
    settings: RouterSettings, host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, RouterService]]:
    """Serve in the block, as soon as this router is the leader; yields endpoint and service.

    Raises ``ConfigError`` for an address in use.
    """
    warn_if_open(host, ApiKeys(settings.api_keys))
    async with AsyncExitStack() as stack:
        turn = open_leadership(settings)
        stack.push_async_callback(turn.release)
        calls = EngineClient(TokenApiClient(engine_headers(), settings.engine_ca_file))
        stack.push_async_callback(calls.aclose)
        service = RouterService(settings, calls)
        if turn.contended:
            print(STANDS_BY, flush=True)
        await turn.acquired()
        service.scheduler.is_leader = lambda: turn.held
        await stop_when_lost(turn, stack, service.stop)
        stack.push_async_callback(service.stop)
        await bound(turn, service.start)

        async def serve() -> str:
            return await served(service, host, port, stack, tls=tls)

        yield await bound(turn, serve), service


async def served(
    service: RouterService | LinkedFrontEnd,
    host: str,
    port: int,
    stack: AsyncExitStack,
    shared: SharedPort | None = None,
    tls: ssl.SSLContext | None = None,
) -> str:
    """Serve clients until the stack is closed; return the endpoint."""
    connections = Connections(connection_limits(service.settings), service.metrics)
    app = RouterServer(service, host).app()
    server = serving_app(app, host, port, connections, shared, tls)
    at = await stack.enter_async_context(server)
    return http_url(host, at, tls=tls is not None)


# ----------------------------------------------------------------------------- http server process
# Runs the light router as a process, or a light front end linked to a remote scheduler.


@asynccontextmanager
async def emulated_front_end(
    settings: RouterSettings,
    link: LinkSettings,
    host: str,
    port: int,
    shared: SharedPort | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[str, LinkedFrontEnd]]:
    """Serve in the block, linked to a remote scheduler; yields the endpoint and the service.

    Raises ``ConfigError`` for an address that is in use or invalid.
    """
    warn_if_open(host, ApiKeys(settings.api_keys))
    async with AsyncExitStack() as stack:
        calls = EngineClient(TokenApiClient(engine_headers(), settings.engine_ca_file))
        stack.push_async_callback(calls.aclose)
        service = LinkedFrontEnd(settings, link, calls)
        stack.push_async_callback(service.stop)
        await service.start()
        endpoint = await served(service, host, port, stack, shared, tls)
        yield endpoint, service


async def run_emulated_router(
    settings: RouterSettings, host: str, port: int, tls: ssl.SSLContext | None = None
) -> None:
    """Run a light router until SIGINT, or until it has drained after SIGTERM.

    Raises ``ConfigError`` for an address in use.
    """
    allow_many_streams()
    async with emulated_router(settings, host, port, tls) as (endpoint, service):
        collect_seldom()
        measure_loop_lag(service.metrics.loop_lagged)
        print(
            f"dualpath emulated router: requests at {endpoint}/v1, engines register at "
            f"{service.scheduler.server.address}{_front_ends(service)}",
            flush=True,
        )
        await until_signal(service.drain)


async def run_emulated_front_end(
    settings: RouterSettings,
    link: LinkSettings,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Run a light front end, linked to a remote scheduler, until SIGINT or until drained."""
    allow_many_streams()
    shared = SharedPort() if link.share_port else None
    async with emulated_front_end(settings, link, host, port, shared, tls) as (endpoint, service):
        collect_seldom()
        measure_loop_lag(service.metrics.loop_lagged)
        print(
            f"dualpath emulated front end: requests at {endpoint}/v1, scheduler at "
            f"{service.scheduler_address}",
            flush=True,
        )
        await until_signal(lambda: shared.leave(service) if shared else service.drain())


def _front_ends(service: RouterService) -> str:
    address = service.scheduler.front_ends.address
    return f", front ends at {address}" if address else ""
