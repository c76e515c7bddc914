"""Engines without a data plane: control protocol and token API of many engines in one process.

Messages, sockets and HTTP are real; slots are numbers, and nothing is read, transferred or
computed.  96 emulated engines would be 96 processes with a thousand threads, too many for two
cores.  Stub engines send the same messages as other engines, and as often: ``Report`` on change and
as heartbeat, with as many counters.  Their addresses are as long as those of NIXL agents.
"""

import argparse
import asyncio
import itertools
import time
from collections import Counter as Counted
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import zmq
from aiohttp import web

from dualpath.core import control
from dualpath.core import control as envelopes
from dualpath.core import control as request_messages
from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.cluster import (
    AgentAddress,
    EngineAddress,
    GroupRank,
    RegionAddress,
    Role,
    parse_nodes,
    rank_name,
)
from dualpath.core.modes import Mode
from dualpath.core.rates import Rate, RateOrigin, Rates
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, from_transfer_params
from dualpath.engine.control.link import (
    LINGER_MS,
    TICK_S,
    RouterSession,
    connect_dealer,
    has_events,
    prepare_dealer,
)
from dualpath.engine.counters import Counter
from dualpath.router.http.server import json_answer, serving_app, until_client_leaves
from dualpath.router.requests.limits import allow_many_streams
from dualpath.router.scheduler.control_socket import LoopSocket
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
METADATA_BYTES = 1024
_REGIONS = tuple(
    RegionAddress(name, 1 << 46, 1 << 20, 1 << 20, 1) for name in ("buffer", "staging")
)
#: Interval of reports with counters, as ``engine.control.membership`` has it.
COUNTERS_GAP_S = 0.5
#: Engines take turns in so many parts of a tick, as heartbeats of a cluster do not come at once.
_SLICES = 10


def namespace() -> StoreNamespace:
    """Return the namespace of the stub engines."""
    geometry = BlockGeometry.uniform(4, BLOCK_TOKENS, 64 * BLOCK_TOKENS)
    return StoreNamespace("stub", "words", "stub-1", geometry)


class StubEngine:
    """One engine; ``hit_share`` of a prompt's blocks are stored.  Counts messages by type.

    ``unit`` names the engine, or the data-parallel group in which it is ``rank`` of ``ranks``; the
    engines of a group are on one node.  ``epoch`` is that of the start of its unit.
    """

    def __init__(
        self,
        role: Role,
        unit: str,
        rank: int,
        ranks: int,
        epoch: str,
        *,
        context: "zmq.Context[zmq.Socket[bytes]]",
        router: str,
        hit_share: float,
        max_model_len: int,
        message_counts: Counted[str],
    ) -> None:
        self.engine_id = rank_name(unit, rank, ranks)
        self._role, self._unit = role, unit
        self._dp = GroupRank(unit, epoch, rank, ranks) if ranks > 1 else None
        self._hit_share = hit_share
        self._max_model_len = max_model_len
        self._message_counts = message_counts
        self._api_url = ""
        self._epoch = f"{self.engine_id}-{epoch}"
        self._context, self._router = context, router
        self._session: RouterSession[control.EngineMessage, control.RouterMessage] = RouterSession(
            self._hello, self._report, self._take, lambda reason: self._end(), has_events
        )
        self._events: list[control.KvInHbm | control.RequestOver] = []
        self._counters_due_s = 0.0
        self._counted: dict[str, int] = {}
        #: Keys of the prompts that a DE serves, and the chains that it has stored since the last
        #: report.
        self._keys: dict[str, tuple[bytes, ...]] = {}
        self._chains: list[control.StoredChain] = []
        self._reports = itertools.count(1)

    def connect(self, api_url: str) -> None:
        """Connect to the router; ``receive`` and ``tick`` must be called from now on."""
        self._api_url = api_url
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        prepare_dealer(self._socket, None)
        connect_dealer(self._socket, self._router, "router")
        self._in_loop = LoopSocket(self._socket)

    def leave(self) -> None:
        """Deregister and close the connection."""
        self._post(self._session.leave(control.Deregister("the end"), time.monotonic()))
        self._in_loop.close()
        self._socket.close(linger=LINGER_MS)

    async def receive(self) -> None:
        """Handle the router's messages until it is cancelled."""
        while True:
            frames = await self._in_loop.receive(lambda: self._socket.recv_multipart(zmq.NOBLOCK))
            now_s = time.monotonic()
            self._post(self._session.receive(envelopes.decode_router_message(frames[-1]), now_s))
            self._post(self._session.due(now_s))

    def tick(self) -> None:
        """Register or report if that is due."""
        self._post(self._session.due(time.monotonic()))

    def send(self, message: control.EngineMessage) -> None:
        """Send it, and report the load soon unless it only answers a query."""
        if isinstance(message, control.KvInHbm | control.RequestOver):
            self._events.append(message)
            self._session.load_changed = True
            return
        if not isinstance(message, control.LookupDone | control.Synced):
            self._session.load_changed = True
        self._post(self._session.send(message, time.monotonic()))

    def released(self, request_id: str) -> None:
        """A request counts no longer."""
        self._counted.pop(request_id, None)
        self._keys.pop(request_id, None)

    def decoded(self, transfer: DecodeTransfer) -> None:
        """A request has been decoded, and its prompt is stored."""
        self.send(request_messages.KvInHbm(transfer.request_id, 0.0))
        if keys := self._keys.get(transfer.request_id):
            new_blocks = len(keys) - (transfer.persist_from or 0)
            self._chains.append(control.StoredChain(keys[-1], (), new_blocks))
        self.released(transfer.request_id)
        self.send(request_messages.RequestOver(transfer.request_id))

    def _hello(self, registration: int) -> control.Register:
        agents = (AgentAddress(self._epoch, bytes(METADATA_BYTES), _REGIONS),)
        return control.Register(
            version=control.PROTOCOL_VERSION,
            address=EngineAddress(self.engine_id, self._epoch, self._role, agents),
            namespace=namespace(),
            api_url=self._api_url,
            node=f"node of {self._unit}",
            group=self._unit if self._dp else f"{self._role.value} group",
            mode=Mode.DUALPATH.value,
            hbm_tokens=_TOKENS,
            buffer_tokens=_TOKENS,
            limits={"max_model_len": self._max_model_len, "vocab_size": VOCABULARY_TOKENS},
            rates=_RATES,
            registration=registration,
            dp=self._dp,
        )

    def _end(self) -> None:
        self._counted.clear()
        self._events.clear()
        self._keys.clear()
        self._chains.clear()

    def _report(self) -> control.Report:
        now_s = time.monotonic()
        counters: dict[str, float] = {}
        if now_s >= self._counters_due_s:
            self._counters_due_s = now_s + COUNTERS_GAP_S
            counters |= dict.fromkeys(Counter, 1.0)
        events, self._events = tuple(self._events), []
        chains, self._chains = tuple(self._chains), []
        return control.Report(
            report_seq=next(self._reports),
            load=control.Load(
                unfinished_requests=len(self._counted),
                unfinished_tokens=sum(self._counted.values()),
                read_queue_tokens=0,
                free_hbm_tokens=_TOKENS,
                free_buffer_tokens=_TOKENS,
            ),
            counters=counters,
            events=events,
            stored=chains,
        )

    def _take(self, message: control.RouterMessage) -> None:
        self._message_counts[f"→ engine {type(message).__name__}"] += 1
        match message:
            case control.Lookup():
                stored = int(len(message.keys) * self._hit_share)
                self.send(control.LookupDone(message.call_id, stored))
            case control.Sync():
                self.send(control.Synced(message.call_id))
            case control.PeerUp() if message.call_id:
                self.send(control.Synced(message.call_id))
            case request_messages.Assign():
                self._counted[message.request_id] = message.tokens
                self._keys[message.request_id] = message.keys
                slots = tuple(range(message.reserve_blocks))
                if slots and (message.read is None or message.read.announced):
                    self.send(request_messages.Reserved(message.request_id, slots, 0.0))
                if message.read is not None:
                    good = message.read.run.blocks.count
                    self.send(
                        request_messages.ReadDone(
                            message.request_id, good, None, 0, 0.0, 0.0, slots
                        )
                    )
            case request_messages.Read():
                run = message.run
                self.send(
                    request_messages.ReadDone(
                        message.request_id, run.blocks.count, None, 0, 0.0, 0.0, run.slots
                    )
                )
            case request_messages.Release():
                self.released(message.request_id)
                self.send(request_messages.Released(message.request_id))

    def _post(self, envelopes_out: Sequence[envelopes.FromEngine]) -> None:
        for envelope in envelopes_out:
            self._message_counts[f"engine → {type(envelope.message).__name__}"] += 1
            with suppress(zmq.Again):
                self._in_loop.send((envelopes.encode(envelope),))


class StubEngines:
    """The engines of a cluster of ``nodes`` such as 48P48D.

    Each node has one engine, or a data-parallel group of ``ranks`` engines.  ``epoch`` ends the
    epoch of each engine.
    """

    def __init__(
        self,
        router: str,
        nodes: str,
        *,
        hit_share: float,
        max_model_len: int,
        ranks: int = 1,
        message_counts: Counted[str] | None = None,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.epoch = epoch = f"{time.time_ns()}"
        message_counts = Counted() if message_counts is None else message_counts
        engines = [
            StubEngine(
                role, f"{role.value}-{number}", rank, ranks, epoch, context=self._context,
                router=router, hit_share=hit_share, max_model_len=max_model_len,
                message_counts=message_counts,
            )
            for role, count in zip(Role, parse_nodes(nodes), strict=True)
            for number in range(count)
            for rank in range(ranks)
        ]  # fmt: skip
        self._context.set(zmq.MAX_SOCKETS, 2 * len(engines) + 1024)
        self._engines = {engine.engine_id: engine for engine in engines}

    @asynccontextmanager
    async def running(self, api_url: Callable[[str], str]) -> AsyncIterator[None]:
        """Run all engines in the block; ``api_url`` returns the URL of each."""
        engines = self._engines.values()
        for engine in engines:
            engine.connect(api_url(engine.engine_id))
        tasks = [asyncio.create_task(engine.receive()) for engine in engines]
        tasks.append(asyncio.create_task(self._tick()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for engine in engines:
                engine.leave()
            self._context.destroy(linger=LINGER_MS)

    async def _tick(self) -> None:
        engines = list(self._engines.values())
        share = -(-len(engines) // _SLICES)
        for first in itertools.cycle(range(0, len(engines), share)):
            for engine in engines[first : first + share]:
                engine.tick()
            await asyncio.sleep(TICK_S / _SLICES)

    def computed(self, engine_id: str, transfer: PrefillTransfer | DecodeTransfer) -> None:
        """Report that a PE has computed its prefill, or that a DE has the KV in HBM."""
        engine, name = self._engines[engine_id], transfer.request_id
        if isinstance(transfer, PrefillTransfer):
            engine.released(name)
            engine.send(request_messages.PrefillDone(name))
        else:
            engine.decoded(transfer)


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
