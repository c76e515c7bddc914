"""Engines without a data plane: control protocol and token API of many engines in one process.

Messages, sockets and HTTP are real; slots are numbers, and nothing is read, transferred or
computed.  96 emulated engines would be 96 processes with a thousand threads, too many for two
cores.  Stub engines send the same messages as other engines, and as often: ``Report`` on change and
as heartbeat, with as many counters.
"""

import argparse
import asyncio
import itertools
import time
from collections import Counter as Counted
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from dualpath.core import control
from dualpath.core import control as envelopes
from dualpath.core import control as request_messages
from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.cluster import AgentAddress, EngineAddress, Role, parse_nodes
from dualpath.core.modes import Mode
from dualpath.core.rates import Rate, RateOrigin, Rates
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, from_transfer_params
from dualpath.engine.control.link import TICK_S, RouterSession
from dualpath.engine.counters import Counter
from dualpath.router.http.server import json_answer, serving_app, until_client_leaves
from dualpath.router.requests.limits import allow_many_streams
from dualpath.router.scheduler.remote import ZmqLinkConnection
from dualpath.router.token_api.wire import (
    GENERATE_PATH,
    STREAM_END,
    Choice,
    GenerateAnswer,
    server_event,
)
from dualpath_lab.models.random_models import VOCABULARY_TOKENS

BLOCK_TOKENS = 64
_TOKENS = 1 << 40
#: Rates of a PE, so that thresholds are those of a real engine and not unlimited.
_RATES = Rates(read_bytes=Rate(50e9, RateOrigin.SET), prefill_tokens=Rate(50_000.0, RateOrigin.SET))
#: About as long as the metadata of a NIXL agent.
_METADATA = bytes(1024)


def namespace() -> StoreNamespace:
    """Return the namespace of the stub engines."""
    geometry = BlockGeometry.uniform(4, BLOCK_TOKENS, 64 * BLOCK_TOKENS)
    return StoreNamespace("stub", "words", "stub-1", geometry)


class StubEngine:
    """One engine; ``hit_share`` of a prompt's blocks are stored.  Counts messages by type."""

    def __init__(
        self,
        role: Role,
        number: int,
        *,
        router: str,
        hit_share: float,
        max_model_len: int,
        message_counts: Counted[str],
    ) -> None:
        self.engine_id = f"{role.value}-{number}"
        self._role = role
        self._hit_share = hit_share
        self._max_model_len = max_model_len
        self._message_counts = message_counts
        self._api_url = ""
        self._epoch = f"{self.engine_id}-{time.time_ns()}"
        self._connection = ZmqLinkConnection(router)
        self._session: RouterSession[control.EngineMessage, control.RouterMessage] = RouterSession(
            self._hello, self._report, self._take, lambda reason: self._counted.clear()
        )
        self._counted: dict[str, int] = {}
        self._reports = itertools.count(1)

    @asynccontextmanager
    async def running(self, api_url: str) -> AsyncIterator[None]:
        """Register with the router and handle its messages in the block."""
        self._api_url = api_url
        tasks = [asyncio.create_task(loop()) for loop in (self._receive, self._tick)]
        try:
            yield
        finally:
            self._post(self._session.leave(control.Deregister("the end"), time.monotonic()))
            for task in tasks:
                task.cancel()
            self._connection.close()

    def send(self, message: control.EngineMessage) -> None:
        """Send it, and report the load soon unless it only answers a query."""
        if not isinstance(message, control.LookupDone | control.Synced):
            self._session.load_changed = True
        self._post(self._session.send(message, time.monotonic()))

    def _hello(self, registration: int) -> control.Register:
        agents = (AgentAddress(self._epoch, _METADATA, ()),)
        return control.Register(
            version=control.PROTOCOL_VERSION,
            address=EngineAddress(self.engine_id, self._epoch, self._role, agents),
            namespace=namespace(),
            api_url=self._api_url,
            node=f"node of {self.engine_id}",
            group=f"{self._role.value} group",
            mode=Mode.DUALPATH.value,
            hbm_tokens=_TOKENS,
            buffer_tokens=_TOKENS,
            limits={"max_model_len": self._max_model_len, "vocab_size": VOCABULARY_TOKENS},
            rates=_RATES,
            registration=registration,
        )

    def _report(self) -> control.Report:
        return control.Report(
            report_seq=next(self._reports),
            load=control.Load(
                unfinished_requests=len(self._counted),
                unfinished_tokens=sum(self._counted.values()),
                read_queue_tokens=0,
                free_hbm_tokens=_TOKENS,
                free_buffer_tokens=_TOKENS,
            ),
            counters=dict.fromkeys(Counter, 1.0),
        )

    def _take(self, message: control.RouterMessage) -> None:
        self._message_counts[f"→ engine {type(message).__name__}"] += 1
        match message:
            case control.Lookup():
                stored = int(len(message.keys) * self._hit_share)
                self.send(control.LookupDone(message.call_id, stored))
            case control.Sync():
                self.send(control.Synced(message.call_id))
            case request_messages.Assign():
                self._counted[message.request_id] = message.tokens
                if message.reserve_blocks:
                    slots = tuple(range(message.reserve_blocks))
                    self.send(request_messages.Reserved(message.request_id, slots, 0.0))
            case request_messages.Read():
                run = message.run
                self.send(
                    request_messages.ReadDone(
                        message.request_id, run.blocks.count, None, 0, 0.0, 0.0, run.slots
                    )
                )
            case request_messages.Release():
                self._counted.pop(message.request_id, None)
                self.send(request_messages.Released(message.request_id))

    async def _receive(self) -> None:
        while True:
            envelope = envelopes.decode_router_message(await self._connection.receive())
            now_s = time.monotonic()
            self._post(self._session.receive(envelope, now_s))
            self._post(self._session.due(now_s))

    async def _tick(self) -> None:
        while True:
            self._post(self._session.due(time.monotonic()))
            await asyncio.sleep(TICK_S)

    def _post(self, envelopes_out: Sequence[envelopes.FromEngine]) -> None:
        for envelope in envelopes_out:
            self._message_counts[f"engine → {type(envelope.message).__name__}"] += 1
            self._connection.send(envelopes.encode(envelope))


class StubEngines:
    """The engines of a cluster of ``nodes`` such as 48P48D."""

    def __init__(self, router: str, nodes: str, *, hit_share: float, max_model_len: int) -> None:
        self.message_counts: Counted[str] = Counted()
        counts = zip(Role, parse_nodes(nodes), strict=True)
        engines = (
            StubEngine(
                role, number, router=router, hit_share=hit_share, max_model_len=max_model_len,
                message_counts=self.message_counts,
            )
            for role, count in counts
            for number in range(count)
        )  # fmt: skip
        self._engines = {engine.engine_id: engine for engine in engines}

    @asynccontextmanager
    async def running(self, api_url: Callable[[str], str]) -> AsyncIterator[None]:
        """Run all engines in the block; ``api_url`` returns the URL of each."""
        async with AsyncExitStack() as stack:
            for engine_id, engine in self._engines.items():
                await stack.enter_async_context(engine.running(api_url(engine_id)))
            yield

    def computed(self, engine_id: str, transfer: PrefillTransfer | DecodeTransfer) -> None:
        """Report that a PE has computed its prefill, or that a DE has the KV in HBM."""
        engine, name = self._engines[engine_id], transfer.request_id
        if isinstance(transfer, PrefillTransfer):
            engine.send(request_messages.PrefillDone(name))
        else:
            engine.send(request_messages.KvInHbm(name, 0.0))


# ------------------------------------------------------------------------------------- stub server
# A process with all stub engines of a cluster and the HTTP server of their token API.
#
# Prefills and decode steps take fixed times and compute nothing.

_TOKEN = 7


class _Sampling(msgspec.Struct):
    max_tokens: int = 16
    stream_interval: int = 1


class _StubRequest(msgspec.Struct):
    """The fields of a ``GenerateRequest`` that a stub needs: not its tokens."""

    request_id: str
    sampling_params: _Sampling
    kv_transfer_params: dict[str, Any]


class StubServer:
    """The token API of ``engines``, each under a path with its id; times in seconds."""

    def __init__(self, engines: StubEngines, prefill_s: float, step_s: float) -> None:
        self._engines = engines
        self._prefill_s = prefill_s
        self._step_s = step_s

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[until_client_leaves], client_max_size=1 << 28)
        app.router.add_post(f"/{{engine}}{GENERATE_PATH}", self._generate)
        app.router.add_get("/{engine}/health", self._health)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        stub_request = msgspec.json.decode(await request.read(), type=_StubRequest)
        transfer = from_transfer_params(stub_request.kv_transfer_params)
        assert transfer is not None
        engine_id = request.match_info["engine"]
        if isinstance(transfer, PrefillTransfer):
            await asyncio.sleep(self._prefill_s)
            self._engines.computed(engine_id, transfer)
            return json_answer(
                GenerateAnswer(stub_request.request_id, [Choice([_TOKEN], "length")])
            )
        self._engines.computed(engine_id, transfer)
        return await self._stream(request, stub_request)

    async def _stream(self, request: web.Request, stub_request: _StubRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        left, count = stub_request.sampling_params.max_tokens, 1
        while left:
            await asyncio.sleep(count * self._step_s)
            left -= count
            choice = Choice([_TOKEN] * count, None if left else "length")
            await response.write(server_event(GenerateAnswer(stub_request.request_id, [choice])))
            count = min(stub_request.sampling_params.stream_interval, left)
        await response.write(STREAM_END)
        return response


async def _serve(args: argparse.Namespace) -> None:
    allow_many_streams()
    engines = StubEngines(
        args.router, args.nodes, hit_share=args.hit_share, max_model_len=args.max_model_len
    )
    server = StubServer(engines, args.prefill_s, args.step_s)
    async with serving_app(server.app(), "127.0.0.1", 0) as port:
        url = f"http://127.0.0.1:{port}"
        async with engines.running(lambda engine_id: f"{url}/{engine_id}"):
            await asyncio.Event().wait()


def main(words: list[str] | None = None) -> int:
    """Run until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", required=True)
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--hit-share", type=float, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--prefill-s", type=float, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    asyncio.run(_serve(parser.parse_args(words)))
    return 0
