"""Answers of an engine's own server, with vLLM's middleware around vLLM's paths."""

import asyncio
import contextlib
import importlib
import json
import socket
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import httpx
import uvicorn
from fastapi import FastAPI, Request
from tests.guard import GUARD_S
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from dualpath.core.cluster import Role
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.router import connections
from dualpath.router.api_keys import engine_keys
from dualpath.router.connections import ConnectionLimits
from dualpath.router.token_api.open_calls import OPEN_CALLS_PATH, call_header
from dualpath.router.token_api.wire import GENERATE_PATH
from dualpath.vllm import engine_guard
from dualpath.vllm.engine_arguments import CONNECTOR, GUARD_CLASS
from dualpath.vllm.engine_config import parse_front_end_arguments
from dualpath.vllm.engine_guard import (
    _CHANGES_ENGINE,
    _PAUSES,
    _TRAINS,
    _WITHOUT_KV,
    EngineGuard,
)
from dualpath.vllm.front_end_settings import FrontEndSettings

ENGINE_SETTINGS = {
    "engine_id": "e-0",
    "router": "tcp://127.0.0.1:5700",
    "api_url": "http://127.0.0.1:8100",
    "storage": "/kv",
}
KEY = {"Authorization": "Bearer engines"}
PREFILL = to_transfer_params(
    PrefillTransfer(
        request_id="r", prompt_tokens=5, hit_blocks=0, hit_key_tail=b"", hits=(),
        decode_engine="de-0", decode_epoch="e", de_slots=(0,),
    )
)  # fmt: skip
DECODE = to_transfer_params(DecodeTransfer(request_id="r", prompt_tokens=5, slots=(0,)))
GENERATING = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/invocations",
    "/generative_scoring", "/a/route/of/tomorrow",
)  # fmt: skip


def engine(role="prefill", keys=(), connector=CONNECTOR, **settings):
    """A client of an engine with routes that return the request."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def any_route(path: str, request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    args = parse_front_end_arguments(FrontEndSettings(model="m"))
    args.api_key = list(keys)
    args.middleware = [GUARD_CLASS]
    extra = {"role": role, **settings}
    args.kv_transfer_config = SimpleNamespace(
        kv_connector=connector, kv_connector_extra_config=extra
    )
    init_entrypoints_middleware(args, app, ())
    app.state.args = args
    headers = {"Content-Type": "application/json"} if connector == CONNECTOR else {}
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://engine", headers=headers)


@pytest.mark.parametrize("path", GENERATING)
async def test_a_prefill_engine_serves_only_the_router(path):
    async with engine() as client:
        answer = await client.post(path, json={"prompt": "hi", "kv_transfer_params": PREFILL})
        assert answer.status_code == 421
        assert "send requests to the router" in answer.json()["error"]["message"]
        assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "no prefill transfer"),
        ({}, "no prefill transfer"),
        ({"do_remote_prefill": True}, "no prefill transfer"),
        (DECODE, "no prefill transfer"),
        ({"dualpath": {"prefill_transfer": {"request_id": 7}}}, "malformed"),
        ({"dualpath": 7}, "malformed"),
    ],
)
async def test_the_token_api_of_a_prefill_engine_requires_a_prefill_transfer(params, message):
    async with engine() as client:
        answer = await client.post(
            GENERATE_PATH, json={"token_ids": [1], "kv_transfer_params": params}
        )
        assert answer.status_code == 421
        assert message in answer.json()["error"]["message"]


async def test_a_body_in_several_chunks_reaches_vllm_complete():
    async with engine() as client:
        request = client.build_request("POST", GENERATE_PATH, json={"kv_transfer_params": PREFILL})
        body = request.content

        async def pieces():
            for start in range(0, len(body), 7):
                yield body[start : start + 7]

        answer = await client.post(GENERATE_PATH, content=pieces())
        assert answer.json() == {"bytes": len(body)}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"\xff"', b"[" * 100_000])
async def test_other_http_calls_are_left_to_vllm(body):
    async with engine() as client:
        answer = await client.post(GENERATE_PATH, content=body)
        assert answer.json() == {"bytes": len(body)}


@pytest.mark.parametrize("path", sorted(_WITHOUT_KV))
async def test_calls_that_compute_nothing_may_be_posted_to_a_prefill_engine(path):
    async with engine() as client:
        assert (await client.post(path)).status_code == 200


@pytest.mark.parametrize("path", [*GENERATING, GENERATE_PATH])
async def test_a_decode_engine_answers_directly_too(path):
    async with engine("decode") as client:
        assert (await client.post(path, json={"prompt": "hi"})).status_code == 200


@pytest.mark.parametrize("path", sorted(_CHANGES_ENGINE | _TRAINS))
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_weights_and_kv_memory_of_a_running_engine_cannot_be_changed(role, path):
    async with engine(role) as client:
        answer = await client.post(path)
        assert answer.status_code == 403
        assert "restart" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", sorted(_TRAINS | _PAUSES))
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_trainer_may_change_an_engine_of_rollouts(role, path):
    async with engine(role, rollouts=True) as client:
        body = {"method": "reload_weights"}
        answer = await client.post(path, json=body)
        assert answer.status_code == 200
        assert answer.json() == {"bytes": len(json.dumps(body, separators=(",", ":")))}
    async with engine(role, ["engines"], rollouts=True) as client:
        assert (await client.post(path, json=body)).status_code == 401
        assert (await client.post(path, json=body, headers=KEY)).status_code == 200


@pytest.mark.parametrize("path", sorted(_CHANGES_ENGINE))
async def test_adapters_cannot_be_changed_by_a_trainer_either(path):
    async with engine(rollouts=True) as client:
        assert (await client.post(path)).status_code == 403


@pytest.mark.parametrize(
    ("path", "field"),
    [("/finish_weight_update", "weight_version"), ("/update_weight_version", "new_version")],
)
async def test_weights_get_no_name_that_others_may_have(path, field):
    async with engine(rollouts=True) as client:
        answer = await client.post(path, json={field: "step-7"})
        assert answer.status_code == 400
        assert "16 hex digits" in answer.json()["error"]["message"]
        for body in ({field: "step-7-0123456789abcdef"}, {field: None}, {}):
            assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("path", [*GENERATING, GENERATE_PATH, "/tokenize", "/version", "/docs"])
async def test_every_path_requires_the_key(role, path):
    async with engine(role, ["other", "engines"]) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic engines"}):
            for answer in (
                await client.post(path, json={"kv_transfer_params": PREFILL}, headers=headers),
                await client.get(path, headers=headers),
            ):
                assert answer.status_code == 401
        assert (await client.get(path, headers=KEY)).status_code == 200


async def test_probes_and_metrics_need_no_key():
    async with engine(keys=["engines"]) as client:
        for path in ("/health", "/metrics"):
            assert (await client.get(path)).status_code == 200
        for path in ("/health/", "/metricsx", "/health/../invocations", "//health"):
            assert (await client.get(path)).status_code == 401


async def test_the_router_with_the_key_is_admitted():
    async with engine(keys=["engines"]) as client:
        body = {"token_ids": [1], "kv_transfer_params": PREFILL}
        assert (await client.post(GENERATE_PATH, json=body, headers=KEY)).status_code == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("path", [*GENERATING, GENERATE_PATH, *sorted(_WITHOUT_KV - {"/ping"})])
async def test_a_foreign_page_changes_nothing_at_an_engine_without_a_key(role, path):
    body = {"token_ids": [1], "kv_transfer_params": PREFILL}
    async with engine(role) as client:
        for headers in (
            {"Origin": "http://evil.example"},
            {"Host": "evil.example"},
            {"Origin": "null"},
        ):
            for method in ("POST", "DELETE", "GET", "OPTIONS"):
                answer = await client.request(method, path, json=body, headers=headers)
                assert answer.status_code == 403
                assert "--allowed-hosts" in answer.json()["error"]["message"]
        plain = {"Content-Type": "text/plain"}
        assert (await client.post(path, content=b"{}", headers=plain)).status_code == 415


@contextlib.asynccontextmanager
async def served(limits: ConnectionLimits, monkeypatch):
    """vLLM's server of a decode engine, as `serve_http` starts it; yields its port."""
    monkeypatch.setattr(engine_guard, "server_limits", lambda: limits)
    monkeypatch.setattr(engine_guard, "drain_on_sigterm", lambda drain: None)
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, int]:
        return {}

    @app.post("/v1/models")
    async def posted(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    args = parse_front_end_arguments(FrontEndSettings(model="m"))
    args.middleware = [GUARD_CLASS]
    extra = {**ENGINE_SETTINGS, "role": "decode"}
    args.kv_transfer_config = SimpleNamespace(
        kv_connector=CONNECTOR, kv_connector_extra_config=extra
    )
    init_entrypoints_middleware(args, app, ())
    app.state.args = args
    config = uvicorn.Config(app, log_config=None)
    config.load()
    app.state.server = server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


async def exchanged(port: int, content: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        async with asyncio.timeout(GUARD_S):
            return await reader.read()
    finally:
        writer.close()


HEAD = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"


async def test_half_heads_do_not_keep_the_router_from_an_engine(monkeypatch):
    async with served(ConnectionLimits(most=4, quiet_s=0.2), monkeypatch) as port:
        for request in (b"", HEAD, b"POST / HT"):
            assert await exchanged(port, request) == b""
        answer = await exchanged(port, HEAD + b"Connection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
    monkeypatch.setattr(connections, "CROWDED_S", 0.0)
    body = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    half_body = HEAD.replace(b"GET", b"POST") + body
    async with served(ConnectionLimits(most=4), monkeypatch) as port:
        opened = []
        for half in (HEAD, half_body):
            opened += [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
            for _, writer in opened[-50:]:
                writer.write(half)
            answer = await exchanged(port, HEAD + b"Connection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.close()


async def test_an_engine_takes_no_web_sockets_which_would_leave_its_bounds(monkeypatch):
    upgrade = b"Connection: upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    async with served(ConnectionLimits(quiet_s=0.2), monkeypatch) as port:
        assert (await exchanged(port, HEAD + upgrade + key)).startswith(b"HTTP/1.1 200")


async def test_another_server_only_checks_its_key():
    async with engine(connector="NixlConnector") as client:
        assert (await client.post("/v1/completions", json={})).status_code == 200
        assert (await client.post("/sleep")).status_code == 200


async def test_a_web_socket_to_a_prefill_engine_is_closed():
    args = SimpleNamespace(
        api_key=None,
        kv_transfer_config=SimpleNamespace(
            kv_connector=CONNECTOR, kv_connector_extra_config={"role": "prefill"}
        ),
    )
    module, name = GUARD_CLASS.rsplit(".", 1)
    sent = []

    async def nothing(*_):
        raise AssertionError

    async def send(message):
        sent.append(message["type"])

    app = SimpleNamespace(state=SimpleNamespace(args=args))
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "app": app}
    await getattr(importlib.import_module(module), name)(nothing)(scope, nothing, send)
    assert sent == ["websocket.close"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_calls_are_reported_from_the_end_of_their_body_to_the_end_of_their_answer(role):
    """The router asks for them when a call is silent."""
    params = PREFILL if role == "prefill" else DECODE
    body_s, answer_s = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await answer_s.wait()
        await send({"type": "http.response.body", "body": b"a token", "more_body": True})
        await last.wait()
        await send({"type": "http.response.body", "body": b""})

    last = asyncio.Event()
    guard = EngineGuard(app)
    guard._known = Role(role), engine_keys(())
    transport = httpx.ASGITransport(guard)

    async def body():
        await body_s.wait()
        yield json.dumps({"kv_transfer_params": params}).encode()

    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:

        async def listed():
            await asyncio.sleep(0)
            return (await client.get(OPEN_CALLS_PATH)).json()["calls"]

        headers = {**call_header("chat/ä.2"), "Content-Type": "application/json"}
        call = asyncio.create_task(client.post(GENERATE_PATH, content=body(), headers=headers))
        assert await listed() == {}
        body_s.set()
        while not (calls := await listed()):
            pass
        assert calls == {"chat/ä.2": None}
        answer_s.set()
        while (calls := await listed()) == {"chat/ä.2": None}:
            pass
        assert 0 <= calls["chat/ä.2"] < 60
        last.set()
        assert (await call).content == b"a token"
        assert await listed() == {}


async def test_a_call_that_the_core_has_lost_is_not_reported(monkeypatch):
    core, asked = object(), []
    served, over = asyncio.Event(), asyncio.Event()

    async def lost(client, calls):
        asked.append((client, *calls))
        return {"lost"}

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        served.set()
        await over.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(engine_guard, "lost_calls", lost)
    guard = EngineGuard(app)
    guard._known = Role.DECODE, engine_keys(())
    state = SimpleNamespace(state=SimpleNamespace(engine_client=core))

    async def of_vllm(scope, receive, send):
        await guard({**scope, "app": state}, receive, send)

    transport = httpx.ASGITransport(of_vllm)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        calls = []
        for name in ("lost", "waits"):
            served.clear()
            headers = {**call_header(name), "Content-Type": "application/json"}
            body = json.dumps({"kv_transfer_params": DECODE})
            post = client.post(GENERATE_PATH, content=body, headers=headers)
            calls.append(asyncio.create_task(post))
            await served.wait()
        assert (await client.get(OPEN_CALLS_PATH)).json()["calls"] == {"waits": None}
        assert asked == [(core, "lost", "waits")]
        over.set()
        await asyncio.gather(*calls)
