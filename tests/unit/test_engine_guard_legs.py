"""The guard of an engine behind another proxy: which calls are legs, and the life of its link."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm")

import httpx
from fastapi import FastAPI, Request
from tests.guard import GUARD_S
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from dualpath.engine.settings import EngineSettings
from dualpath.router.asgi import App, Message, Receive, Send, json_answer
from dualpath.router.token_api.wire import GENERATE_PATH
from dualpath.vllm import engine_guard
from dualpath.vllm.engine_arguments import CONNECTOR, GUARD_CLASS
from dualpath.vllm.engine_config import parse_front_end_arguments
from dualpath.vllm.front_end_settings import FrontEndSettings

KEY = {"Authorization": "Bearer engines"}


class Legs:
    """Stands for ``TwoLegServer``."""

    made: ClassVar[list["Legs"]] = []

    def __init__(self, app: App, settings: EngineSettings) -> None:
        self.settings = settings
        self.bodies: list[bytes] = []
        self.state = "made"
        self.made.append(self)

    def start(self) -> None:
        asyncio.get_running_loop()
        self.state = "registered"

    async def stop(self) -> None:
        self.state = "left"

    async def answer_query(self, send: Send) -> None:
        for message in json_answer(200, b'{"query": true}'):
            await send(message)

    async def serve(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        self.bodies.append(body)
        for message in json_answer(200, b'{"leg": true}'):
            await send(message)


@contextlib.asynccontextmanager
async def engine(
    monkeypatch: pytest.MonkeyPatch, role: str, scheduler: str, keys: tuple[str, ...] = ()
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an engine whose server has started; its routes return the request's length."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def any_route(path: str, request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    args = parse_front_end_arguments(FrontEndSettings(model="m"))
    args.api_key = list(keys)
    args.middleware = [GUARD_CLASS]
    extra = {
        "role": role, "engine_id": "e-0", "router": "tcp://127.0.0.1:5700", "storage": "/kv",
        "api_url": "http://127.0.0.1:8100", "two_leg_scheduler": scheduler,
    }  # fmt: skip
    args.kv_transfer_config = SimpleNamespace(
        kv_connector=CONNECTOR, kv_connector_extra_config=extra
    )
    init_entrypoints_middleware(args, app, ())
    app.state.args = args
    monkeypatch.setattr(engine_guard, "TwoLegServer", Legs)
    monkeypatch.setattr(engine_guard, "drain_on_sigterm", lambda drain: None)
    monkeypatch.setattr(Legs, "made", [])
    asked, answered = asyncio.Queue[Message](), asyncio.Queue[Message]()
    scope: Message = {"type": "lifespan", "app": app, "asgi": {"version": "3.0"}, "state": {}}
    life = asyncio.create_task(app(scope, asked.get, answered.put))
    async with asyncio.timeout(GUARD_S):
        asked.put_nowait({"type": "lifespan.startup"})
        assert (await answered.get())["type"] == "lifespan.startup.complete"
        transport = httpx.ASGITransport(app)
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://engine", headers=headers
        ) as client:
            yield client
        asked.put_nowait({"type": "lifespan.shutdown"})
        await life


async def post(client: httpx.AsyncClient, path: str, **headers: str) -> tuple[int, Any]:
    answer = await client.post(path, json={"prompt": "hi"}, headers=headers)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_with_a_scheduler_takes_legs(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(monkeypatch, role, "tcp://127.0.0.1:5701") as client:
        (legs,) = Legs.made
        assert (legs.state, legs.settings.engine_id) == ("registered", "e-0")
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert await post(client, path) == (200, {"leg": True})
        assert legs.bodies == [b'{"prompt":"hi"}'] * 2
        other, _ = await post(client, "/v1/responses")
        assert other == (421 if role == "prefill" else 200)
        token_api, _ = await post(client, GENERATE_PATH)
        assert token_api == (421 if role == "prefill" else 200), "the router's calls are as before"
        assert (await client.get("/v1/completions")).json() == {"bytes": 0}
        assert (await client.get("/query")).json() == {"query": True}
        assert len(legs.bodies) == 2
    assert legs.state == "left"


async def test_an_engine_without_a_scheduler_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(monkeypatch, "prefill", "") as client:
        assert (await post(client, "/v1/completions"))[0] == 421
        assert (await client.get("/query")).json() == {"bytes": 0}, "the route is vLLM's"
        assert Legs.made == []


async def test_legs_need_the_engines_key(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "tcp://127.0.0.1:5701"
    async with engine(monkeypatch, "prefill", address, keys=("engines",)) as client:
        assert (await post(client, "/v1/completions"))[0] == 401
        assert (await client.get("/query")).status_code == 401
        assert Legs.made[0].bodies == []
        assert (await post(client, "/v1/completions", **KEY))[0] == 200
