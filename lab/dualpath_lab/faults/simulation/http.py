"""Simulated HTTP from routers and front ends to engines: one request and response per call.

A call to a stopped process waits, a call to a dead process is refused.  One end of a call notices
the death of the other end, or a reset, after a short delay.

The network may drop the packets of one server in one direction or in both for a while, as a broken
link or a server that hangs: what is sent then arrives afterwards, since TCP sends it again.  It may
also drop those of one call for ever, as a firewall that has lost a connection: nothing more of it
arrives in that direction, and neither end notices.
"""

import asyncio
import enum
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
from multidict import CIMultiDict

from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.router.asgi import Message
from dualpath.router.engine_calls import Job, OpenCalls
from dualpath.router.engines import EngineInfo
from dualpath.router.token_api.statuses import BAD_REQUEST, UNPROCESSABLE, engine_error
from dualpath.router.token_api.wire import (
    GENERATE_PATH,
    Choice,
    GenerateAnswer,
    GenerateRequest,
)
from dualpath_lab.emulated.requests import Answer
from dualpath_lab.faults.simulation.event_loop import ProcessLoop
from dualpath_lab.faults.simulation.world import World

_DELAYS_S = (0.0001, 0.0005, 0.002, 0.04)


class Direction(enum.Enum):
    """Where a packet goes."""

    TO_SERVER = enum.auto()
    TO_CALLER = enum.auto()


class Server(Protocol):
    """An engine's HTTP server."""

    @property
    def serves(self) -> bool:
        """Whether it accepts connections."""
        ...

    def serve(self, body: bytes, call: "Call") -> None:
        """Accept a request, once the process runs."""
        ...

    def ask(self, reply: Callable[[Mapping[str, float | None]], None]) -> None:
        """Reply with the open calls, once the process runs."""
        ...

    def aborted(self, abort: Callable[[], None]) -> None:
        """The client has disconnected."""
        ...


class HttpNetwork:
    """All calls in flight."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.servers: dict[str, Server] = {}
        self.calls: dict[Call, None] = {}
        #: Directions in which packets of a server are dropped, and what they would have done.
        self._dropped: dict[tuple[Server, Direction], list[Callable[[], None]]] = {}

    def open(
        self,
        url: str,
        body: bytes,
        loop: ProcessLoop,
        path: str = GENERATE_PATH,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> "Call":
        """Begin a call."""
        call = Call(self, self.servers[url], loop, path, tuple(headers))
        self.calls[call] = None
        connect = functools.partial(call.connect, body)
        self.world.after(self.delay_s(), lambda: call.arrive(Direction.TO_SERVER, connect))
        return call

    def ask(self, url: str, loop: ProcessLoop) -> "asyncio.Future[OpenCalls]":
        """Return the future of a server's answer to a question for its open calls."""
        answer: asyncio.Future[OpenCalls] = loop.create_future()
        server = self.servers[url]

        def settle(calls: OpenCalls) -> None:
            if not answer.done():
                answer.set_result(calls)

        def refuse() -> None:
            if not answer.done():
                answer.set_exception(EngineLostError(f"{url} does not answer; restart it"))

        def back(then: Callable[[], None]) -> None:
            step = functools.partial(loop.process.step, then)
            self.world.after(self.delay_s(), lambda: self.arrive(server, Direction.TO_CALLER, step))

        def there() -> None:
            if server.serves:
                server.ask(lambda calls: back(lambda: settle(calls)))
            else:
                back(refuse)

        self.world.after(self.delay_s(), lambda: self.arrive(server, Direction.TO_SERVER, there))
        return answer

    def arrive(self, server: Server, direction: Direction, call: Callable[[], None]) -> None:
        """Run ``call`` at the arrival of its packet, later if packets are dropped now."""
        dropped = self._dropped.get((server, direction))
        if dropped is None:
            call()
        else:
            dropped.append(call)

    def drop(self, server: Server, directions: Collection[Direction]) -> Callable[[], None]:
        """Drop the packets of a server; return the function that ends it."""
        for direction in directions:
            self._dropped.setdefault((server, direction), [])

        def end() -> None:
            for direction in directions:
                for call in self._dropped.pop((server, direction), ()):
                    self.world.after(0.0, call)

        return end

    def server_died(self, server: Server) -> None:
        """Break all calls to a server."""
        for call in [call for call in self.calls if call.server is server]:
            call.break_off("connection reset by peer")

    def caller_died(self, loop: ProcessLoop) -> None:
        """Break all calls of a process."""
        for call in [call for call in self.calls if call.caller is loop]:
            call.close()

    def delay_s(self) -> float:
        """Return the delay to the other end."""
        return self.world.pick(_DELAYS_S)


#: What arrives of a response: an answer of the token API, its error, a part of another response, or
#: why the connection broke.
Part = Answer | DualPathError | Message | str


class Call:
    """One request; the parts of its response arrive in order."""

    def __init__(
        self,
        network: HttpNetwork,
        server: Server,
        loop: ProcessLoop,
        path: str,
        headers: tuple[tuple[bytes, bytes], ...],
    ) -> None:
        self.server = server
        self.path, self.headers = path, headers
        self.arrived: asyncio.Queue[Part] = asyncio.Queue()
        self._network = network
        self.caller = loop
        self._abort: Callable[[], None] | None = None
        self._open = True
        #: The directions in which nothing arrives any more.
        self.cut: set[Direction] = set()
        self._free_s = 0.0

    def arrive(self, direction: Direction, call: Callable[[], None]) -> None:
        """Run ``call`` at the arrival of its packet, if it arrives."""
        if direction not in self.cut:
            self._network.arrive(self.server, direction, call)

    def connect(self, body: bytes) -> None:
        """The request reaches the engine, perhaps after its caller has closed the connection."""
        self._network.world.maybe_fault()
        if not self.server.serves:
            self.break_off("connection refused")
            return
        self.server.serve(body, self)

    def begun(self, abort: Callable[[], None]) -> None:
        """The engine has accepted the request; ``abort`` ends it."""
        self._abort = abort
        if not self._open:
            self._network.world.after(
                self._network.delay_s(), functools.partial(self.server.aborted, abort)
            )

    def deliver(self, answer: Answer | DualPathError | Message) -> None:
        """Send a part of the engine's response."""
        self._send(answer)

    def break_off(self, reason: str) -> None:
        """Break the connection for both ends."""
        self._send(reason)
        self.close()

    def close(self) -> None:
        """Close the caller's end; the engine notices it later."""
        if not self._open:
            return
        self._open = False
        self._network.calls.pop(self, None)
        if self._abort is not None:
            abort = functools.partial(self.server.aborted, self._abort)
            self._network.world.after(self._network.delay_s(), abort)

    def _send(self, item: Part) -> None:
        if self._open:
            world = self._network.world
            self._free_s = max(self._free_s, world.now_s + self._network.delay_s())
            put = functools.partial(
                self.caller.process.step, functools.partial(self.arrived.put_nowait, item)
            )
            world.at(self._free_s, lambda: self.arrive(Direction.TO_CALLER, put))


class SimTokenApi:
    """The calls of one process: ``router.token_api.client.TokenApi``."""

    def __init__(
        self, network: HttpNetwork, loop: ProcessLoop, called: Callable[[EngineInfo], None]
    ) -> None:
        """``called`` is called with the engine before each call."""
        self._network = network
        self._loop = loop
        self._called = called

    async def generate(
        self, engine: EngineInfo, job: Job, request: GenerateRequest[Any]
    ) -> GenerateAnswer:
        """Return the whole response."""
        token_ids: list[int] = []
        finish_reason = None
        stream = self.stream(engine, job, request)
        try:
            async for choice in stream:
                token_ids += choice.token_ids or ()
                finish_reason = choice.finish_reason
        finally:
            await stream.aclose()
        return GenerateAnswer(request.request_id, [Choice(token_ids, finish_reason)])

    async def stream(
        self, engine: EngineInfo, job: Job, request: GenerateRequest[Any]
    ) -> AsyncGenerator[Choice, None]:
        """Yield the response as it arrives."""
        self._called(engine)
        call = self._network.open(engine.api_url, msgspec.json.encode(request), self._loop)
        named = f"engine {engine.engine_id} at {engine.api_url}"
        try:
            while True:
                answer = await call.arrived.get()
                if isinstance(answer, str):
                    raise EngineLostError(f"{named} does not answer: {answer}; restart it")
                if isinstance(answer, DualPathError):
                    raise engine_error(named, BAD_REQUEST, str(answer))
                assert isinstance(answer, Answer), "the token API answers"
                if answer.error is not None:
                    raise engine_error(named, UNPROCESSABLE, answer.error)
                yield Choice(list(answer.token_ids), answer.finish_reason)
                if answer.finish_reason is not None:
                    return
        finally:
            call.close()

    @asynccontextmanager
    async def pass_on(
        self, engine: EngineInfo, path: str, body: bytes, headers: Mapping[str, str]
    ) -> "AsyncIterator[SimResponse]":
        """Send a client's request to an engine; the head of its answer, of any status, is there."""
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        async with respond(self._network, engine.api_url, self._loop, path, body, raw) as response:
            yield response

    async def answers(self, engine: EngineInfo) -> None:
        """Return if the engine's server answers."""
        await self._network.ask(engine.api_url, self._loop)

    async def open_calls(self, engine: EngineInfo) -> OpenCalls | None:
        """Return the calls that the engine's server has."""
        return await self._network.ask(engine.api_url, self._loop)

    async def aclose(self) -> None:
        """Nothing to close: each call closes itself."""


class SimResponse:
    """The part of ``aiohttp.ClientResponse`` that is used; ``call`` receives what follows."""

    def __init__(self, url: str, head: Message, call: Call) -> None:
        self.status = int(head["status"])
        self.raw_headers = tuple(head.get("headers", ()))
        self.headers = CIMultiDict((n.decode(), v.decode()) for n, v in self.raw_headers)
        self.content_type = self.headers.get("content-type", "")
        self.content = self
        self._url, self._call = url, call

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; raises ``EngineLostError`` if the connection breaks."""
        more = True
        while more:
            part = await _next(self._url, self._call)
            more = part.get("more_body", False)
            if body := part.get("body"):
                yield body

    async def read(self) -> bytes:
        """Return the rest of the body; raises as ``iter_any``."""
        return b"".join([piece async for piece in self.iter_any()])


@asynccontextmanager
async def respond(
    network: HttpNetwork,
    url: str,
    loop: ProcessLoop,
    path: str,
    body: bytes,
    headers: Iterable[tuple[bytes, bytes]],
) -> AsyncIterator[SimResponse]:
    """Call a server, and close the connection at the end; the head of the response is there.

    Raises ``EngineLostError`` if the server does not answer.
    """
    call = network.open(url, body, loop, path, headers)
    try:
        yield SimResponse(url, await _next(url, call), call)
    finally:
        call.close()


async def _next(url: str, call: Call) -> Message:
    part = await call.arrived.get()
    if isinstance(part, str):
        raise EngineLostError(f"{url} does not answer: {part}; restart it")
    assert not isinstance(part, Answer | DualPathError), "another path than the token API's"
    return part
