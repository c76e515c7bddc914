"""API keys and limits around vLLM's application, added as `dualpath router` does."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest

pytest.importorskip("vllm")

import httpx
import uvicorn
from fastapi import FastAPI, Request
from starlette._utils import get_route_path
from tests.guard import GUARD_S
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from dualpath.core.errors import (
    BadRequestError,
    ConfigError,
    OverloadedError,
    PromptTooLongError,
)
from dualpath.router.api_keys import OPEN_PATHS as OPEN
from dualpath.router.api_keys import ROUTER_BY_ANY_NAME, ApiKeyGuard, ApiKeys, router_keys
from dualpath.router.connections import ConnectionLimits, Connections
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.refusals import HttpRefusal
from dualpath.router.scheduler.registry import Registry
from dualpath.router.settings import RouterSettings
from dualpath.vllm import app as app_module
from dualpath.vllm.app import answer_400_for_validator_errors, limited_protocol, middleware_names
from dualpath.vllm.engine_config import parse_front_end_arguments
from dualpath.vllm.front_end_settings import FrontEndSettings
from dualpath.vllm.frontend import http_error
from dualpath.vllm.router_process import (
    limit_samples,
    refuse_guessable_request_ids,
    set_api_keys,
)
from dualpath_lab.models.random_models import make_tiny_model


class Service:
    settings = RouterSettings(max_body_bytes=100, api_keys=("first", "second"))
    full: str | None = None

    def __init__(self) -> None:
        self.metrics = RouterMetrics(Registry(), dict)

    def turned_away(self) -> OverloadedError | None:
        return OverloadedError(self.full) if self.full else None

    def retry_after_s(self):
        return 7


def with_state(app: FastAPI, service: Service, *keys: str) -> None:
    """The arguments that `make_app` passes to the middleware."""
    app.state.dualpath_service, app.state.dualpath_registry = service, Registry()
    app.state.dualpath_api_keys = router_keys(keys, open_metrics=False)


@pytest.fixture
async def guarded():
    """An application with vLLM's and our middleware; returns (client, service)."""
    app, service = FastAPI(), Service()

    @app.post("/v1/completions")
    async def complete(request: Request) -> dict[str, int]:
        body = await request.json()
        if body == "full later":
            raise http_error(OverloadedError("8192 requests are under way"))
        if body == "long":
            raise http_error(PromptTooLongError("the prompt has 41 tokens"))
        if body == "odd":
            raise http_error(BadRequestError("n is 2"))
        return {"bytes": len(await request.body())}

    @app.get("/health")
    async def health() -> None:
        return None

    args = parse_front_end_arguments(FrontEndSettings(model="m"))
    set_api_keys(args, service.settings)
    args.middleware = middleware_names()
    init_exception_handler(app)
    init_entrypoints_middleware(args, app, ())
    with_state(app, service, "first", "second")
    app.state.args = args
    transport = httpx.ASGITransport(app)
    headers = {"Authorization": "Bearer second", "Content-Type": "application/json"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://router", headers=headers
    ) as client:
        yield client, service


async def test_idle_connections_have_the_limit_of_vllms_server(guarded, monkeypatch):
    """It is vLLM's variable, at uvicorn and at our own limit of silent connections."""
    _, service = guarded
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75")
    served: dict[str, Any] = {}
    limits: list[ConnectionLimits] = []

    async def serve_http(app: FastAPI, **options: Any) -> Any:
        served.update(options)
        return asyncio.sleep(0)

    def made_for(connections: Connections) -> Any:
        limits.append(connections._limits)
        return asyncio.Protocol

    monkeypatch.setattr(app_module, "serve_http", serve_http)
    monkeypatch.setattr(app_module, "drain_on_sigterm", lambda drain: None)
    monkeypatch.setattr(app_module, "collect_seldom", lambda: None)
    monkeypatch.setattr(app_module, "limited_protocol", made_for)

    app = FastAPI()
    app.state.dualpath_service = service
    args = parse_front_end_arguments(
        FrontEndSettings(model=str(make_tiny_model("qwen2")), dtype="float32", max_model_len=64)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await app_module.serve_app(app, args, listener)
    assert served["timeout_keep_alive"] == 75
    assert [each.idle_s for each in limits] == [75]


async def test_clients_must_send_one_of_the_keys(guarded):
    client, _ = guarded
    assert (await client.post("/v1/completions", content=b"{}")).status_code == 200
    for wrong in ("", "Bearer third", "Bearer secon"):
        answer = await client.post(
            "/v1/completions", content=b"{}", headers={"Authorization": wrong}
        )
        assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
    assert (await client.get("/health", headers={"Authorization": ""})).status_code == 200


async def test_a_body_beyond_the_limit_is_413_in_any_encoding(guarded):
    client, _ = guarded

    async def chunks():
        for _ in range(20):
            yield b" " * 10

    for content in (b" " * 101, chunks()):
        answer = await client.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert "more than 100 bytes" in answer.json()["error"]["message"]
    answer = await client.post("/v1/completions", content=b" " * 98 + b"{}")
    assert answer.json() == {"bytes": 100}


async def test_large_bodies_are_not_read_without_a_key(guarded):
    client, _ = guarded
    read = []

    async def chunks():
        for number in range(20):
            read.append(number)
            yield b" " * 10

    answer = await client.post("/v1/completions", content=chunks(), headers={"Authorization": ""})
    assert answer.status_code == 401
    assert not read


async def test_a_full_router_is_429_with_retry_after(guarded):
    client, service = guarded
    late = await client.post("/v1/completions", content=b'"full later"')
    service.full = "8192 requests are under way"
    early = await client.post("/v1/completions", content=b"{}")
    for answer in (early, late):
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert "8192 requests" in answer.json()["error"]["message"]
    assert (await client.get("/health")).status_code == 200


async def test_one_of_each_refusal_is_counted_also_by_layers_that_are_vllms(guarded):
    client, service = guarded

    async def status(path: str, body: bytes, **headers: str) -> int:
        return int((await client.post(path, content=body, headers=headers)).status_code)

    completions = "/v1/completions"
    assert await status(completions, b"{}") == 200
    assert await status(completions, b"{}", Authorization="Bearer third") == 401
    assert await status(completions, b" " * 101) == 413
    assert await status(completions, b'"long"') == 400
    assert await status(completions, b'"odd"') == 400
    assert await status("/v1/no-such-path", b"{}") == 404
    assert await status("/health", b"{}") == 405
    assert await status(completions, b'"full later"') == 429
    service.full = "8192 requests are under way"
    assert await status(completions, b"{}") == 429
    samples = [
        sample
        for family in service.metrics.families()
        for sample in family.samples
        if sample.name == "dualpath:http_refusals_total"
    ]
    counted = {sample.labels["reason"]: sample.value for sample in samples}
    assert counted == {
        **dict.fromkeys(HttpRefusal, 1),
        HttpRefusal.OVERLOADED: 2,
        HttpRefusal.FOREIGN_PAGE: 0,  # no page has the key
    }


async def test_every_route_of_vllms_server_requires_a_key():
    """Also paths that vLLM's own check leaves open, and routes of plugins or later versions."""
    args = parse_front_end_arguments(FrontEndSettings(model="m"))
    args.middleware = middleware_names()
    app = build_app(args, ("generate",))
    with_state(app, Service(), "first")
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")
    asked = [
        (method, getattr(route, "path", ""))
        for route in app.routes
        for method in getattr(route, "methods", None) or ("GET", "POST")
    ]
    paths = {path for _, path in asked}
    assert {"/invocations", "/tokenize", "/version", "/openapi.json", "/docs", "/metrics"} <= paths
    answers = {(m, p): (await client.request(m, p)).status_code for m, p in asked if p not in OPEN}
    assert {status for status in answers.values()} == {401}
    assert (await client.get("/no-such-path")).status_code == 401


async def test_no_route_of_vllms_server_serves_a_foreign_page():
    args = parse_front_end_arguments(FrontEndSettings(model="m"))
    args.middleware = middleware_names()
    app = build_app(args, ("generate",))
    with_state(app, Service())
    transport = httpx.ASGITransport(app)
    attacks = (
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        for route in app.routes:
            path = getattr(route, "path", "")
            for method in getattr(route, "methods", None) or ("GET", "POST"):
                # A page whose name resolves to a router is one site with it.
                these = attacks[1:] if path in ROUTER_BY_ANY_NAME else attacks
                for headers in these if path not in OPEN else ():
                    answer = await client.request(method, path, headers=headers)
                    assert answer.status_code == 403, (method, path, headers)
        # A browser asks before it sends JSON from elsewhere; CORS of vLLM would allow it.
        asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        assert (await client.options("/v1/completions", headers=asked)).status_code == 403


@pytest.mark.parametrize("field", ["structured_outputs", "response_format", "stream_options"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations"])
async def test_a_body_that_breaks_a_validator_is_a_client_error(path, field, caplog):
    app = build_app(parse_front_end_arguments(FrontEndSettings(model="m")), ("generate",))
    answer_400_for_validator_errors(app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://router")
    whole = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    values: tuple[object, ...] = (5, "x", [1], [[]], {"a": 1}, True)
    for value in values:
        answer = await client.post(path, json={**whole, field: value})
        assert answer.status_code in (400, 422) or _misses_the_server(answer), (value, answer.text)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/invocations"])
async def test_a_body_nested_too_deep_is_a_client_error(path):
    app = build_app(parse_front_end_arguments(FrontEndSettings(model="m")), ("generate",))
    answer_400_for_validator_errors(app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://router")
    headers = {"Content-Type": "application/json"}
    answer = await client.post(path, content=b'{"a":' * 50_000, headers=headers)
    assert answer.status_code in (400, 422), answer.text


def _misses_the_server(answer: httpx.Response) -> bool:
    """The body passed; the application of this test has no implementation behind its routes."""
    return answer.status_code == 500 and "State" in answer.text


async def test_the_same_error_outside_of_body_parsing_is_a_server_error():
    app = FastAPI()

    @app.get("/")
    async def broken() -> None:
        raise AttributeError("defect")

    answer_400_for_validator_errors(app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://router")
    assert (await client.get("/")).status_code == 500


async def _receive_nothing() -> Any:
    raise AssertionError("nothing is read of a refused call")


@pytest.mark.parametrize(
    ("root", "path", "admitted"),
    [
        ("", "/health", True),
        ("/proxy", "/proxy/health", True),
        ("/proxy", "/health", True),
        ("/proxy", "/proxyhealth", False),
        ("/v1", "/v1/tokenize", False),
        ("", "/v1/health", False),
    ],
)
async def test_the_guard_sees_the_path_that_routes_see(root, path, admitted):
    async def inside(scope, receive, send):
        called.append(get_route_path(scope))

    async def send(message):
        sent.append(message)

    called: list[str] = []
    sent: list[dict[str, Any]] = []
    scope = {"type": "http", "method": "GET", "path": path, "root_path": root, "headers": []}
    await ApiKeyGuard(inside, ApiKeys(["k"]))(scope, _receive_nothing, send)
    assert called == (["/health"] if admitted else [])
    assert [m["status"] for m in sent if "status" in m] == ([] if admitted else [401])


async def test_a_web_socket_without_a_key_is_closed():
    async def inside(scope, receive, send):
        called.append(scope["type"])

    async def send(message):
        sent.append(message["type"])

    called: list[str] = []
    sent: list[str] = []
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    guard = ApiKeyGuard(inside, ApiKeys(["k"]))
    await guard(scope, _receive_nothing, send)
    assert (called, sent) == ([], ["websocket.close"])
    await guard({**scope, "headers": [(b"authorization", b"Bearer k")]}, _receive_nothing, send)
    await guard({"type": "lifespan"}, _receive_nothing, send)
    assert called == ["websocket", "lifespan"]


def test_vllm_refuses_more_samples_than_the_settings_allow(monkeypatch):
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "5")
    limit_samples(3)
    assert SamplingParams(n=5).n == 5  # an operator's own variable wins
    monkeypatch.delenv("VLLM_MAX_N_SEQUENCES")
    limit_samples(3)
    assert SamplingParams(n=3).n == 3
    with pytest.raises(VLLMValidationError, match="at most 3, got 4"):
        SamplingParams(n=4)
    monkeypatch.delenv("VLLM_MAX_N_SEQUENCES")


def test_clients_cannot_choose_equal_request_ids(monkeypatch):
    refuse_guessable_request_ids()
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    with pytest.raises(ConfigError, match="another client's request; unset it"):
        refuse_guessable_request_ids()


async def sent(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(GUARD_S):
            return await reader.read()
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def uvicorn_with(limits: ConnectionLimits):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guarded_by = limited_protocol(Connections(limits, Service().metrics))
    config = uvicorn.Config(
        app,
        http=guarded_by,  # type: ignore[arg-type]  # any factory of protocols will do
        ws="none",
        lifespan="off",
        log_config=None,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def test_connections_without_a_request_end_at_vllms_server():
    """uvicorn alone never closes idle connections, and accepts headers of any size."""
    async with uvicorn_with(ConnectionLimits(quiet_s=0.2)) as port:
        answer = await sent(port, HEAD + b"Connection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert await sent(port, b"") == b""
        assert await sent(port, HEAD) == b""
        with contextlib.suppress(ConnectionResetError):  # more was on its way
            answer = await sent(port, HEAD + b"x: " + b"y" * (1 << 19))
            assert b"200" not in answer


async def test_connections_to_vllms_server_are_bounded():
    async with uvicorn_with(ConnectionLimits(most=1)) as port:
        _, first = await asyncio.open_connection("127.0.0.1", port)
        assert (await sent(port, b"")).startswith(b"HTTP/1.1 429")
        first.close()
