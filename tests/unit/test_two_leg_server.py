"""An engine's HTTP server behind another proxy, around an application that stands for vLLM's."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.guard import GUARD_S

from dualpath.core.cluster import HostProcess, Role
from dualpath.core.errors import DeadlineError, EngineLostError, TransportError
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, from_transfer_params
from dualpath.engine.settings import EngineSettings
from dualpath.router.asgi import Message, Receive, Send, json_answer
from dualpath.router.engine_calls import Job
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduling import HandedOver
from dualpath.router.token_api.client import TokenApiClient
from dualpath.router.token_api.wire import GenerateRequest
from dualpath.router.two_legs import PASSED_ON_HEADER, LegParameters, Prompt
from dualpath.vllm.two_leg_server import PREFILL_HEADER, TwoLegServer

PREFILL = PrefillTransfer("leg-1", 5, 0, b"", (), "d0", "e", (3, 4))
DECODE = DecodeTransfer("leg-1", 5, (3, 4))
FIRST = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}
SECOND = {"do_remote_prefill": True, "remote_request_id": "r"}
TOKENS = [11, 12, 13, 14, 15]
FOR_SECOND = {"do_remote_prefill": True, "remote_request_id": "r"}


class Vllm:
    """vLLM's application: it renders and completes, and notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.statuses: list[int] = []
        self.rendered: dict[str, Any] = {"token_ids": TOKENS, "cache_salt": None, "features": None}
        self.answer: dict[str, Any] = {"choices": [{"text": "x"}], "usage": {}}
        self.gate: asyncio.Event | None = None
        #: Whether an answer begins before the gate.
        self.begins = False
        self.entered, self.aborted = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        message = await receive()
        path, body = scope["path"], msgspec.json.decode(message["body"])
        headers = dict(scope["headers"])
        assert int(headers[b"content-length"]) == len(message["body"])
        assert headers[b"content-type"] == b"application/json"
        self.calls.append((path, body))
        if path.endswith("/render"):
            chat = path.startswith("/v1/chat")
            answer: Any = self.rendered if chat else [self.rendered]
        else:
            if self.gate is not None:
                if self.begins:
                    await send({"type": "http.response.start", "status": 200, "headers": []})
                    event = {"type": "http.response.body", "body": b"data: 1\n\n"}
                    await send({**event, "more_body": True})
                self.entered.set()
                await self._abort_or(self.gate, receive)
            answer = self.answer
        status = self.statuses.pop(0) if self.statuses else 200
        for one in json_answer(status, msgspec.json.encode(answer)):
            await send(one)

    async def _abort_or(self, gate: asyncio.Event, receive: Receive) -> None:
        left, opened = asyncio.ensure_future(receive()), asyncio.ensure_future(gate.wait())
        await asyncio.wait({left, opened}, return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            assert left.result()["type"] == "http.disconnect"
            self.aborted.set()
        left.cancel()
        opened.cancel()

    @property
    def completed(self) -> list[dict[str, Any]]:
        """The bodies of the calls that compute."""
        return [body for path, body in self.calls if not path.endswith("/render")]


class Taken:
    """An attempt for its second leg."""

    def __init__(self, origin: str, hit_tokens: int | None) -> None:
        self.transfer = DECODE
        self.origin, self.hit_tokens = origin, hit_tokens
        self.calls: list[str] = []
        self.lost = asyncio.Event()

    def decoding_started(self) -> None:
        self.calls.append("decoding")

    async def stalls(self) -> None:
        await self.lost.wait()
        raise EngineLostError("engine e is lost: its core hangs")

    def close(self, reason: str) -> None:
        self.calls.append(reason)


class Legs:
    """The scheduler's side; ``elsewhere`` is the error of a prefill by another engine."""

    def __init__(self) -> None:
        self.elsewhere: Exception | None = None
        self.prompts: list[tuple[Prompt, LegParameters, str]] = []
        self.named: list[tuple[LegParameters, str]] = []
        self.taken: list[Taken] = []
        self.error: Exception | None = None
        self.waits: asyncio.Event | None = None
        self.cancelled = asyncio.Event()
        #: The engine that has the KV of a second leg, and whether it is lost.
        self.other: HandedOver | None = None
        self.lost = asyncio.Event()
        self.withdrawn: list[HandedOver] = []
        self.released: asyncio.Queue[LegParameters] = asyncio.Queue()
        self.aborts = False
        #: Whether the engine hangs in what it serves without an attempt.
        self.hangs = asyncio.Event()

    @contextlib.contextmanager
    def own_call(self) -> Iterator["Legs"]:
        yield self

    def heard(self) -> None:
        """A part of the answer has arrived."""

    async def stalls(self, call: "Legs") -> None:
        await self.hangs.wait()
        raise EngineLostError("engine e is lost: its core hangs")

    async def until_lost(self, engine: EngineInfo) -> None:
        await self.lost.wait()

    async def stop(self) -> None:
        """There is no link."""

    def withdraw(self, handed: HandedOver, reason: str) -> None:
        self.withdrawn.append(handed)

    async def release(self, params: LegParameters, request_id: str, reason: str) -> None:
        self.released.put_nowait(params)

    async def ends_aborted(self) -> bool:
        return self.aborts

    async def prefill(
        self,
        prompt: Prompt,
        params: LegParameters,
        request_id: str,
        compute: Callable[[PrefillTransfer], Any],
    ) -> dict[str, Any] | None:
        self.prompts.append((prompt, params, request_id))
        if self.error is not None:
            raise self.error
        await self._wait()
        return dict(FOR_SECOND) if await compute(PREFILL) else None

    async def take(self, params: LegParameters, request_id: str) -> Taken | HandedOver:
        self.named.append((params, request_id))
        if self.error is not None:
            raise self.error
        await self._wait()
        if self.other is not None:
            return self.other
        self.taken.append(Taken("transferred; leg-1", params.remote_prefill_cached_tokens))
        return self.taken[-1]

    async def prefill_elsewhere(
        self,
        prompt: Prompt,
        params: LegParameters,
        compute: Callable[[Any, PrefillTransfer], Any],
    ) -> Taken:
        self.prompts.append((prompt, params, ""))
        if self.elsewhere is not None:
            raise self.elsewhere
        await compute("p0", PREFILL)
        self.taken.append(Taken("prefilled by p0 again", 64))
        return self.taken[-1]

    async def _wait(self) -> None:
        if self.waits is None:
            return
        self.waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


class Api:
    """Calls of other engines."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, GenerateRequest[Any]]] = []

    async def generate(self, engine: str, job: Job, request: GenerateRequest[Any]) -> None:
        self.calls.append((engine, request))

    async def aclose(self) -> None:
        """Nothing is open."""


class Engine:
    """One engine's server, and a client of it."""

    def __init__(self, role: Role) -> None:
        self.settings = settings = EngineSettings(
            role=role,
            engine_id="e",
            router="tcp://127.0.0.1:1",
            two_leg_scheduler="tcp://127.0.0.1:2",
            api_url="http://127.0.0.1:3",
            storage="unused",
            lora_modules={"adapter": "/lora"},
        )
        self.vllm, self.legs, self.api = Vllm(), Legs(), Api()
        self.server = TwoLegServer(
            self.vllm,
            settings,
            self.legs,  # type: ignore[arg-type]
            self.api,  # type: ignore[arg-type]
        )

    async def app(self, scope: Message, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await self.server.serve(scope, body, receive, send)

    async def post(
        self, body: dict[str, Any], path: str = "/v1/completions", **headers: str
    ) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
            return await client.post(path, json=body, headers=headers)

    @contextlib.asynccontextmanager
    async def leaving(self, body: dict[str, Any]) -> AsyncIterator[Callable[[], None]]:
        """Send a request as a client that leaves when the result is called."""
        content, gone = msgspec.json.encode(body), asyncio.Event()
        sent: list[Message] = []

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
        call = asyncio.create_task(self.server.serve(scope, content, receive, send))
        async with asyncio.timeout(GUARD_S):
            yield gone.set
            await call
        assert sent == []


async def test_a_first_leg_is_one_token_of_the_tokens_that_vllm_has_rendered() -> None:
    engine = Engine(Role.PREFILL)
    engine.vllm.rendered["cache_salt"] = "tenant"
    body = {
        "model": "m", "prompt": "text", "max_tokens": 50, "n": 3, "stream": True, "echo": True,
        "stream_options": {"include_usage": True}, "min_tokens": 7, "prompt_logprobs": 1,
        "temperature": 0.5, "kv_transfer_params": FIRST,
    }  # fmt: skip
    answer = await engine.post(body, **{"X-Request-Id": "req"})
    assert answer.json()["kv_transfer_params"] == FOR_SECOND
    assert answer.json()["choices"] == [{"text": "x"}]
    ((prompt, params, request_id),) = engine.legs.prompts
    assert (prompt.token_ids, prompt.cache_salt, request_id) == (TOKENS, "tenant", "req")
    assert params.do_remote_decode
    (rendering, asked), (path, sent) = engine.vllm.calls
    assert (rendering, path) == ("/v1/completions/render", "/v1/completions")
    assert (asked["prompt"], "kv_transfer_params" in asked) == ("text", False)
    assert sent == {
        "model": "m", "prompt": TOKENS, "max_tokens": 1, "n": 1, "stream": False,
        "temperature": 0.5, "kv_transfer_params": sent["kv_transfer_params"],
    }  # fmt: skip
    assert from_transfer_params(sent["kv_transfer_params"]) == PREFILL


async def test_a_first_leg_of_a_chat_takes_the_rendered_tokens_along() -> None:
    engine = Engine(Role.PREFILL)
    body = {
        "model": "m", "messages": [{"role": "user", "content": "text"}],
        "max_completion_tokens": 9, "kv_transfer_params": FIRST,
    }  # fmt: skip
    answer = await engine.post(body, "/v1/chat/completions")
    assert answer.json()["kv_transfer_params"] == FOR_SECOND
    (sent,) = engine.vllm.completed
    assert (sent["max_tokens"], sent["max_completion_tokens"]) == (1, 1)
    assert sent["kv_transfer_params"]["prompt_token_ids"] == TOKENS
    assert sent["messages"] == body["messages"]


@pytest.mark.parametrize(
    ("change", "status", "why"),
    [
        ({"kv_transfer_params": None}, 421, "decode engine"),
        ({"kv_transfer_params": SECOND}, 421, "decode engine"),
        ({"kv_transfer_params": {"do_remote_decode": "yes"}}, 400, "kv_transfer_params"),
        ({"model": "adapter"}, 400, "adapter"),
        ({"prompt": ["a", "b"]}, 400, "several prompts"),
        ({"prompt_embeds": "AAAA"}, 400, "prompt_embeds"),
    ],
)
async def test_a_prefill_engine_refuses_what_it_cannot_compute(
    change: dict[str, Any], status: int, why: str
) -> None:
    engine = Engine(Role.PREFILL)
    body = {"model": "m", "prompt": "text", "kv_transfer_params": FIRST, **change}
    answer = await engine.post(body)
    assert (answer.status_code, why in answer.json()["error"]["message"]) == (status, True)
    assert engine.vllm.completed == []


async def test_images_are_refused_and_vllms_own_refusals_are_passed_on() -> None:
    engine = Engine(Role.PREFILL)
    body = {"model": "m", "prompt": "text", "kv_transfer_params": FIRST}
    engine.vllm.rendered["features"] = {"mm_hashes": {"image": ["h"]}}
    assert "images" in (await engine.post(body)).json()["error"]["message"]
    engine.vllm.rendered["features"] = None
    engine.vllm.statuses = [404]
    assert (await engine.post(body)).status_code == 404
    assert engine.legs.prompts == [], "the scheduler has not heard of them"
    engine.vllm.statuses = [200, 500]
    assert (await engine.post(body)).status_code == 500


async def test_an_error_of_the_scheduler_is_the_answer_of_a_first_leg() -> None:
    engine = Engine(Role.PREFILL)
    engine.legs.error = EngineLostError("d0 is lost")
    answer = await engine.post({"model": "m", "prompt": "text", "kv_transfer_params": FIRST})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "d0 is lost")


async def test_the_work_of_a_first_leg_ends_when_its_client_leaves() -> None:
    engine = Engine(Role.PREFILL)
    body = {"model": "m", "prompt": "text", "kv_transfer_params": FIRST}
    engine.legs.waits = asyncio.Event()
    async with engine.leaving(body) as leave:
        await engine.legs.waits.wait()
        leave()
        await engine.legs.cancelled.wait()
    engine.legs.waits, engine.vllm.gate = None, asyncio.Event()
    async with engine.leaving(body) as leave:
        await engine.vllm.entered.wait()
        leave()
        await engine.vllm.aborted.wait()


async def test_a_second_leg_gets_the_transfer_of_its_attempt() -> None:
    engine = Engine(Role.DECODE)
    params = {**SECOND, "remote_prefill_cached_tokens": 64, "prompt_token_ids": TOKENS}
    body = {"model": "m", "prompt": "text", "max_tokens": 50, "kv_transfer_params": params}
    answer = await engine.post(body, **{"X-Request-Id": "req"})
    assert answer.headers[PREFILL_HEADER] == "transferred; leg-1"
    (sent,) = engine.vllm.completed
    assert from_transfer_params(sent["kv_transfer_params"]) == DECODE
    assert sent["kv_transfer_params"]["remote_prefill_cached_tokens"] == 64
    assert sent["kv_transfer_params"]["prompt_token_ids"] == TOKENS
    assert (sent["prompt"], sent["max_tokens"]) == ("text", 50)
    assert engine.legs.taken[0].calls == ["decoding", "finished"]
    assert engine.legs.named == [(engine.legs.named[0][0], "req")]


@pytest.mark.parametrize(
    "error", [DeadlineError("no first leg"), TransportError("the KV is at d1")]
)
async def test_without_an_attempt_and_a_prefill_engine_the_decode_engine_computes_the_prompt(
    error: Exception,
) -> None:
    engine = Engine(Role.DECODE)
    engine.legs.error, engine.legs.elsewhere = error, EngineLostError("no room")
    body = {"model": "m", "prompt": "text", "kv_transfer_params": SECOND}
    answer = await engine.post(body)
    why = f"here; {error}; and no prefill engine could help: no room"
    assert (answer.status_code, answer.headers[PREFILL_HEADER]) == (200, why)
    assert engine.vllm.completed == [{"model": "m", "prompt": "text"}]


async def test_without_an_attempt_a_prefill_engine_is_called_as_by_a_router() -> None:
    engine = Engine(Role.DECODE)
    engine.legs.error = TransportError("the KV is at d1")
    engine.vllm.rendered["cache_salt"] = "tenant"
    body = {"model": "m", "prompt": "text", "max_tokens": 9, "kv_transfer_params": SECOND}
    answer = await engine.post(body)
    assert answer.headers[PREFILL_HEADER] == "prefilled by p0 again"
    ((name, call),) = engine.api.calls
    assert (name, call.token_ids, call.cache_salt) == ("p0", TOKENS, "tenant")
    assert call.sampling_params["max_tokens"] == 1
    assert from_transfer_params(call.kv_transfer_params) == PREFILL
    (sent,) = engine.vllm.completed
    assert from_transfer_params(sent["kv_transfer_params"]) == DECODE
    assert sent["kv_transfer_params"]["remote_prefill_cached_tokens"] == 64
    assert engine.legs.taken[0].calls == ["decoding", "finished"]


async def test_a_second_leg_that_vllm_refuses_is_answered_by_vllm() -> None:
    engine = Engine(Role.DECODE)
    engine.legs.error = TransportError("the KV is at d1")
    engine.vllm.statuses = [404, 404]
    answer = await engine.post({"model": "x", "prompt": "t", "kv_transfer_params": SECOND})
    assert answer.status_code == 404
    assert engine.api.calls == []


async def test_a_request_without_parameters_is_the_decode_engines_own() -> None:
    engine = Engine(Role.DECODE)
    forged: dict[str, Any] = {"dualpath": {"decode_transfer": {}}}
    forms: list[dict[str, Any] | None] = [None, {}, FIRST, forged]
    for params in forms:
        answer = await engine.post({"model": "m", "prompt": "t", "kv_transfer_params": params})
        assert answer.headers[PREFILL_HEADER].startswith("here;")
        assert engine.vllm.completed[-1] == {"model": "m", "prompt": "t"}, "nothing is forged"
    assert engine.legs.named == []


async def test_what_cannot_use_a_transfer_of_text_gets_none() -> None:
    engine = Engine(Role.DECODE)
    answer = await engine.post({"model": "m", "prompt": "t", "n": 2, "kv_transfer_params": SECOND})
    assert "n is 2" in answer.headers[PREFILL_HEADER]
    for change, why in (
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"model": "adapter"}, "an adapter"),
    ):
        body = {"model": "m", "prompt": "t", "kv_transfer_params": SECOND, **change}
        answer = await engine.post(body)
        assert why in answer.headers[PREFILL_HEADER]
    assert engine.legs.named == []


async def test_a_transfer_that_fails_in_vllm_is_followed_by_a_computation() -> None:
    engine = Engine(Role.DECODE)
    engine.vllm.statuses = [500]
    answer = await engine.post({"model": "m", "prompt": "t", "kv_transfer_params": SECOND})
    assert (answer.status_code, "500" in answer.headers[PREFILL_HEADER]) == (200, True)
    assert engine.legs.taken[0].calls == ["failed"]
    with_transfer, alone = engine.vllm.completed
    assert "kv_transfer_params" in with_transfer
    assert "kv_transfer_params" not in alone


async def test_a_client_that_leaves_a_second_leg_frees_its_attempt() -> None:
    engine = Engine(Role.DECODE)
    body = {"model": "m", "prompt": "text", "kv_transfer_params": SECOND}
    engine.legs.waits = asyncio.Event()
    async with engine.leaving(body) as leave:
        await engine.legs.waits.wait()
        leave()
        await engine.legs.cancelled.wait()
    assert engine.vllm.calls == []


async def test_a_body_that_is_no_request_is_refused() -> None:
    for role in Role:
        engine = Engine(role)
        sent: list[Message] = []

        async def send(message: Message, sent: list[Message] = sent) -> None:
            sent.append(message)

        async def receive() -> Message:
            await asyncio.Event().wait()
            return {}

        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
        await engine.server.serve(scope, b"[1, 2", receive, send)
        assert sent[0]["status"] == 400


class Holder:
    """The server of another decode engine; it streams in two pieces, the second one at a gate."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.status = 200
        #: Whether whole answers wait at the gate as well.
        self.waits = False
        self.gate = asyncio.Event()
        self.entered, self.left = asyncio.Event(), asyncio.Event()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((body, headers))
        origin = {PREFILL_HEADER: "transferred; leg-7"}
        if not body.get("stream"):
            self.entered.set()
            if self.waits:
                await self.gate.wait()
            return web.json_response({"choices": []}, status=self.status, headers=origin)
        answer = web.StreamResponse(headers={**origin, "Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        self.entered.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        await answer.write(b"data: [DONE]\n\n")
        return answer

    @contextlib.asynccontextmanager
    async def beside(self, engine: Engine) -> AsyncIterator[None]:
        """Serve, and let the engine's scheduler know that the KV is here."""
        app = web.Application()
        app.router.add_post("/v1/completions", self.serve)
        calls = engine.api

        class Api(TokenApiClient):
            """Passes requests on over HTTP; prefills are only noted."""

            generate = calls.generate  # type: ignore[assignment]

        engine.server = TwoLegServer(
            engine.vllm,
            engine.settings,
            engine.legs,  # type: ignore[arg-type]
            Api(),
        )
        async with TestServer(app, handler_cancellation=True) as server:
            url = str(server.make_url("")).rstrip("/")
            d1 = EngineInfo(
                "d1", "epoch", Role.DECODE, "node", "group", url, HostProcess(), 1, 100, 100
            )
            engine.legs.other = HandedOver("r", d1, DECODE, "e has no room now")
            yield
        await engine.server.stop()


async def test_a_second_leg_is_passed_on_to_the_decode_engine_that_has_its_kv() -> None:
    engine, holder = Engine(Role.DECODE), Holder()
    async with holder.beside(engine):
        body = {"model": "m", "prompt": "text", "kv_transfer_params": SECOND}
        answer = await engine.post(body, **{"X-Request-Id": "req", "Authorization": "Bearer k"})
        assert (answer.status_code, answer.json()) == (200, {"choices": []})
        assert answer.headers[PREFILL_HEADER] == "transferred; leg-7; at d1: e has no room now"
        ((sent, headers),) = holder.requests
        assert (sent, headers["x-request-id"], headers["authorization"]) == (
            body,
            "req",
            "Bearer k",
        )
        assert headers[PASSED_ON_HEADER.lower()] == "e"
        assert engine.vllm.calls == []
        # An engine to which it was passed on does not pass it on.
        answer = await engine.post(body, **{PASSED_ON_HEADER: "d2"})
        assert answer.headers[PREFILL_HEADER] == "prefilled by p0 again"
        assert len(holder.requests) == 1
        assert engine.legs.withdrawn == [], "the second leg of that KV may still come"


async def test_a_second_leg_is_served_here_if_the_engine_that_has_its_kv_fails() -> None:
    engine, holder = Engine(Role.DECODE), Holder()
    body = {"model": "m", "prompt": "text", "kv_transfer_params": SECOND}
    async with holder.beside(engine):
        holder.status = 503
        answer = await engine.post(body)
        assert answer.headers[PREFILL_HEADER] == "prefilled by p0 again"
        assert engine.legs.withdrawn == [engine.legs.other]
        holder.status = 404
        assert (await engine.post(body)).status_code == 404, "a refusal is an answer"
        assert len(holder.requests) == 2
    # Its server has ended, and the scheduler does not know that yet.
    answer = await engine.post(body)
    await engine.server.stop()
    assert answer.headers[PREFILL_HEADER] == "prefilled by p0 again"
    assert len(engine.legs.taken) == 2


async def test_a_stream_that_is_passed_on_ends_with_an_error_when_its_engine_is_lost() -> None:
    engine, holder = Engine(Role.DECODE), Holder()
    body = {"model": "m", "prompt": "t", "stream": True, "kv_transfer_params": SECOND}
    async with holder.beside(engine), asyncio.timeout(GUARD_S):
        holder.gate.set()
        assert (await engine.post(body)).text == "data: 1\n\ndata: [DONE]\n\n"
        holder.gate.clear()
        holder.entered.clear()
        call = asyncio.create_task(engine.post(body))
        await holder.entered.wait()
        engine.legs.lost.set()
        text = (await call).text
        assert "engine d1 is lost" in text.removeprefix("data: 1\n\ndata: ")
        assert engine.legs.taken == []
        await holder.left.wait()


async def test_a_client_that_leaves_a_leg_that_was_passed_on_ends_it_at_the_other_engine() -> None:
    engine, holder = Engine(Role.DECODE), Holder()
    body = {"model": "m", "prompt": "t", "stream": True, "kv_transfer_params": SECOND}
    async with holder.beside(engine), asyncio.timeout(GUARD_S):
        content, gone = msgspec.json.encode(body), asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            """Nobody reads it."""

        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
        call = asyncio.create_task(engine.server.serve(scope, content, receive, send))
        await holder.entered.wait()
        gone.set()
        await call
        await holder.left.wait()
        assert engine.legs.taken == []


async def test_kv_at_another_engine_is_released_when_the_client_leaves_before_an_answer() -> None:
    engine, holder = Engine(Role.DECODE), Holder()
    holder.waits = True
    body = {"model": "m", "prompt": "t", "kv_transfer_params": SECOND}
    async with holder.beside(engine), asyncio.timeout(GUARD_S):
        async with engine.leaving(body) as leave:
            await holder.entered.wait()
            leave()
        assert engine.legs.withdrawn == [engine.legs.other]


ABORTED = {"choices": [{"text": "x", "finish_reason": "abort"}]}


async def test_a_first_leg_that_vllm_aborts_for_a_trainer_is_answered_as_aborted() -> None:
    for path, text in (("/v1/completions", "text"), ("/v1/chat/completions", "message")):
        engine = Engine(Role.PREFILL)
        engine.vllm.answer = ABORTED
        body = {"model": "m", "prompt": "t", "messages": [], "kv_transfer_params": FIRST}
        failed = await engine.post(body, path)
        assert (failed.status_code, "send it again" in failed.text) == (503, True)
        engine.legs.aborts = True
        answer = (await engine.post(body, path)).json()
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], text in choice) == ("abort", True)
        # Its second leg, whose name is unknown, ends in the same way.
        decode = Engine(Role.DECODE)
        decode.legs.error = decode.legs.elsewhere = DeadlineError("no first leg")
        decode.legs.aborts = True
        body["kv_transfer_params"] = answer["kv_transfer_params"]
        (choice,) = (await decode.post(body, path)).json()["choices"]
        assert (choice["finish_reason"], text in choice) == ("abort", True)
        streamed = await decode.post({**body, "stream": True}, path)
        event, end, _ = streamed.text.split("\n\n")
        (choice,) = msgspec.json.decode(event.removeprefix("data: "))["choices"]
        assert (choice["finish_reason"], end) == ("abort", "data: [DONE]")
        assert decode.vllm.completed == []


async def test_a_first_leg_whose_engine_has_left_for_a_trainer_is_answered_as_aborted() -> None:
    engine = Engine(Role.PREFILL)
    engine.legs.error = EngineLostError("e is paused for its trainer")
    engine.legs.aborts = True
    body = {"model": "m", "prompt": "text", "kv_transfer_params": FIRST}
    answer = await engine.post(body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_second_leg_whose_engine_hangs_ends_with_an_error(stream: bool) -> None:
    engine = Engine(Role.DECODE)
    engine.vllm.gate, engine.vllm.begins = asyncio.Event(), stream
    body = {"model": "m", "prompt": "t", "stream": stream, "kv_transfer_params": SECOND}
    async with asyncio.timeout(GUARD_S):
        call = asyncio.create_task(engine.post(body))
        await engine.vllm.entered.wait()
        (taken,) = engine.legs.taken
        taken.lost.set()
        answer = await call
    assert answer.status_code == (200 if stream else 503)
    assert "engine e is lost" in answer.text
    assert taken.calls[-1] == "failed"
    assert len(engine.vllm.completed) == 1, "its engine does not compute it once more"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_an_engine_serves_alone_ends_with_an_error_when_it_hangs(
    stream: bool,
) -> None:
    engine = Engine(Role.DECODE)
    engine.vllm.gate, engine.vllm.begins = asyncio.Event(), stream
    async with asyncio.timeout(GUARD_S):
        call = asyncio.create_task(engine.post({"model": "m", "prompt": "t", "stream": stream}))
        await engine.vllm.entered.wait()
        engine.legs.hangs.set()
        answer = await call
    assert answer.status_code == (200 if stream else 503)
    assert "engine e is lost" in answer.text


async def test_several_answers_are_computed_here_at_once_and_the_kv_of_the_leg_is_released() -> (
    None
):
    engine = Engine(Role.DECODE)
    body = {"model": "m", "prompt": "text", "n": 2, "kv_transfer_params": SECOND}
    answer = await engine.post(body)
    assert answer.headers[PREFILL_HEADER].startswith("here; n is 2")
    async with asyncio.timeout(GUARD_S):
        assert (await engine.legs.released.get()).remote_request_id == "r"
    assert engine.legs.named == []


async def test_both_legs_of_sglangs_routers_carry_a_room() -> None:
    body = {"model": "m", "prompt": "text", "max_tokens": 50, "bootstrap_room": 1 << 62}
    prefill, decode = Engine(Role.PREFILL), Engine(Role.DECODE)
    assert (await prefill.post(body)).status_code == 200
    ((_, first, _),) = prefill.legs.prompts
    (sent,) = prefill.vllm.completed
    assert (sent["max_tokens"], first.do_remote_decode) == (1, True)
    answer = await decode.post(body)
    assert answer.headers[PREFILL_HEADER] == "transferred; leg-1"
    ((second, _),) = decode.legs.named
    assert second.do_remote_prefill
    assert first.transfer_id == second.transfer_id == f"room-{1 << 62}"
    (sent,) = decode.vllm.completed
    assert sent["max_tokens"] == 50
    assert from_transfer_params(sent["kv_transfer_params"]) == DECODE


async def test_the_prompt_is_rendered_without_limits_that_contradict_one_token() -> None:
    engine = Engine(Role.PREFILL)
    body = {
        "model": "m", "messages": [{"role": "user", "content": "text"}], "min_tokens": 7,
        "max_completion_tokens": 9, "n": 2, "stream": True, "kv_transfer_params": FIRST,
    }  # fmt: skip
    assert (await engine.post(body, "/v1/chat/completions")).status_code == 200
    for _, sent in engine.vllm.calls:
        limits = [sent.get(name) for name in ("min_tokens", "max_tokens", "max_completion_tokens")]
        assert limits == [None, 1, 1]
        assert (sent["n"], sent["stream"]) == (1, False)


async def test_a_proxy_for_mooncake_learns_which_engine_a_prefill_server_has() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await Engine(Role.PREFILL).server.answer_query(send)
    assert (sent[0]["status"], msgspec.json.decode(sent[1]["body"])) == (
        200,
        {"0": {"engine_id": "e", "worker_addr": {}}},
    )
