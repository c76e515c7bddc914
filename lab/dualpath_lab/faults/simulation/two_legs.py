"""Simulated proxies of others before the engines, and the engines' servers of their legs.

The server of legs (``vllm.two_leg_server``), its link and the scheduler's side are the real code.
``SimVllm`` stands for vLLM's application: it renders, and computes with the emulated engine.  A
decode engine that computes a prompt itself needs no KV of others, so that only its time is
simulated.

The proxy sends a request's legs in one of several ways, some of which are no proxy's: without one
of the legs, twice, or with the name of another request's KV.  It sends a request again if a leg
fails, until the client has all tokens.
"""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import DrainingError, DualPathError, EngineLostError
from dualpath.router.asgi import Message, Receive, Send, json_answer, send_all
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.stages import RequestRecord
from dualpath.router.token_api.wire import STREAM_END, EventLines, GenerateRequest, server_event
from dualpath.router.two_legs import PARAMETERS, REQUEST_ID_HEADER, ROOM, TwoLegs
from dualpath.vllm.two_leg_server import PREFILL_HEADER, TwoLegServer
from dualpath_lab.emulated.checkable_kv import TokenPrefix
from dualpath_lab.emulated.requests import Answer, Sampling
from dualpath_lab.faults.simulation.connections import Network
from dualpath_lab.faults.simulation.event_loop import ProcessLoop
from dualpath_lab.faults.simulation.http import Call, SimResponse, SimTokenApi, respond
from dualpath_lab.faults.simulation.router import ClientEndpoint, SimLink
from dualpath_lab.faults.simulation.settings import BLOCK_TOKENS, VOCABULARY

if TYPE_CHECKING:
    from dualpath_lab.faults.simulation.cluster_resources import ClusterResources
    from dualpath_lab.faults.simulation.engine import SimEngine

# ----------------------------------------------------------------------------------- engine's legs

PATH = "/v1/completions"


class SimLegs:
    """The server of legs of one engine's process, with its link to the scheduler."""

    def __init__(self, engine: "SimEngine", links: Network) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self.loop = ProcessLoop(engine.process)  # type: ignore[abstract]
        api = SimTokenApi(engine.shared.http, self.loop, lambda called: None)
        self.legs = TwoLegs(
            engine.settings.engine,
            SimLink(links, self.loop),
            self.loop.time,
            api,
            name=f"legs of {engine.name}",
            new_name=self._new_name,
        )
        app = SimVllm(engine, self.loop)
        settings = engine.settings.engine
        self.server = TwoLegServer(app, settings, self.legs, api)  # type: ignore[arg-type]

    def _new_name(self) -> str:
        name = f"{self._engine.name}-{next(self._numbers)}"
        self._engine.shared.leg_names.add(f"leg-{name}")
        return name

    def start(self) -> None:
        """Register with the scheduler."""
        self.loop.call_soon(self.legs.start)

    def stop(self) -> None:
        """Leave the scheduler."""
        self.loop.call_soon(lambda: self.loop.create_task(self.legs.stop()))

    def serve(self, body: bytes, call: Call) -> None:
        """Answer a leg."""
        self.loop.call_soon(lambda: self.loop.create_task(self._serve(body, call)))

    async def _serve(self, body: bytes, call: Call) -> None:
        left = asyncio.Event()

        def leaves() -> None:
            self.loop.call_soon(left.set)

        call.begun(leaves)

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            call.deliver(message)

        scope = {"type": "http", "method": "POST", "path": call.path, "headers": call.headers}
        await self.server.serve(scope, body, receive, send)

    def held_when_idle(self) -> list[str]:
        """Return descriptions of what is still held without requests."""
        link = self.legs._link
        attempts, calls = link.pending
        found = {"attempts": attempts, "calls": calls, "orphans": len(link.orphans)}
        name = self._engine.name
        missing = [] if link.session else [f"the legs of {name} have no session"]
        return missing + [f"{name}: {what} of legs {n}" for what, n in found.items() if n]


class SimVllm:
    """Stands for the application of a vLLM server: completions of token ids, and their rendering.

    As with vLLM a decode engine computes the prompt itself if the request has no transfer or one
    that is not for its prompt, and a prefill engine fails such a request.
    """

    def __init__(self, engine: "SimEngine", loop: ProcessLoop) -> None:
        self._engine = engine
        self._loop = loop

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a call."""
        request = msgspec.json.decode((await receive())["body"])
        if scope["path"].endswith("/render"):
            rendered = {"token_ids": request["prompt"], "cache_salt": request.get("cache_salt")}
            body = msgspec.json.encode([{**rendered, "features": None}])
            await send_all(send, json_answer(HTTPStatus.OK, body))
            return
        computation = _Computation(self._engine, self._loop, request)
        leaves = asyncio.ensure_future(receive())
        leaves.add_done_callback(lambda done: computation.abort())
        answering = self._stream if request.get("stream") else self._whole
        try:
            await answering(computation, send)
        finally:
            leaves.cancel()
            computation.abort()

    async def _whole(self, computation: "_Computation", send: Send) -> None:
        tokens: list[int] = []
        async for answer in computation.answers():
            tokens += answer.token_ids
            if answer.finish_reason == "error":
                await send_all(send, _failed())
                return
        choice = {"token_ids": tokens, "finish_reason": answer.finish_reason}
        body = msgspec.json.encode({"choices": [choice]})
        await send_all(send, json_answer(HTTPStatus.OK, body))

    async def _stream(self, computation: "_Computation", send: Send) -> None:
        began = False
        async for answer in computation.answers():
            if not began and answer.finish_reason == "error":
                await send_all(send, _failed())
                return
            if not began:
                headers = [(b"content-type", b"text/event-stream")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                began = True
            event: dict[str, Any] = {"error": {"message": "the engine has failed"}}
            if answer.finish_reason != "error":
                choice = {"token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
                event = {"choices": [choice]}
            piece = server_event(event)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": STREAM_END})


def _failed() -> tuple[Message, Message]:
    body = {"error": {"message": "the engine has failed", "code": 500}}
    return json_answer(HTTPStatus.INTERNAL_SERVER_ERROR, msgspec.json.encode(body))


class _Computation:
    """A request at the emulated engine, or one that a decode engine computes itself."""

    def __init__(self, engine: "SimEngine", loop: ProcessLoop, request: dict[str, Any]) -> None:
        self._engine = engine
        self._loop = loop
        self._request = request
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._aborted = asyncio.Event()
        self._abort: Callable[[], None] | None = None
        # The name of a thread that computes: it hangs with the engine's core.
        name = engine.settings.engine.role.value
        engine.threads.start(name, self._compute)

    async def answers(self) -> AsyncIterator[Answer]:
        """Yield the answers to the last one."""
        while True:
            answer = await self._answers.get()
            if answer.error is not None:
                # A proxy would send it again, and hide it.
                self._engine.shared.world.problem(f"{self._engine.name}: {answer.error}")
            yield answer
            if answer.finish_reason is not None:
                return

    def abort(self) -> None:
        """Abort it, even if it has ended."""
        if not self._aborted.is_set():
            self._aborted.set()
            if self._abort is not None:
                self._engine.threads.start("abort", self._abort)

    def _deliver(self, answer: Answer) -> None:
        if answer.error is not None and answer.finish_reason is None:
            answer = Answer(finish_reason="error", error=answer.error)
        self._loop.call_soon(self._answers.put_nowait, answer)

    def _compute(self) -> None:
        admission = self._engine.admission
        if admission is None or self._aborted.is_set():
            self._deliver(Answer(finish_reason="abort"))
            return
        given = self._request
        request = GenerateRequest(
            request_id="",
            token_ids=given["prompt"],
            sampling_params=Sampling(max_tokens=given["max_tokens"]),
            cache_salt=given.get("cache_salt"),
            kv_transfer_params=given.get(PARAMETERS),
        )
        try:
            transfer = admission.transfer(request)
            prefix = admission.prefix(request, transfer)
            admission.check_prompt(request, transfer, prefix)
        except DualPathError as error:
            self._engine.shared.world.note(self._engine.name, f"uses no transfer: {error}")
            if self._engine.settings.engine.role is Role.PREFILL:
                self._deliver(Answer(finish_reason="error"))
            else:
                self._compute_alone(request)
            return
        self._abort = admission.submit(request, transfer, prefix, self._deliver)
        if self._aborted.is_set():
            self._abort()

    def _compute_alone(self, request: GenerateRequest[Sampling]) -> None:
        costs, count = self._engine.settings.costs, request.sampling_params.max_tokens
        prefix = TokenPrefix(
            request.token_ids,
            BLOCK_TOKENS,
            cache_salt=request.cache_salt,
            vocab_size=VOCABULARY,
            capacity_tokens=len(request.token_ids) + count,
        )
        self._engine.threads.sleep(costs.prefill.batch_s)
        for left in reversed(range(count)):
            self._engine.threads.sleep(costs.decode.step_s)
            if self._aborted.is_set():
                return
            token = prefix.next_token
            prefix.append(token)
            self._deliver(Answer((token,), None if left else "length"))


# ------------------------------------------------------------------------------------------- proxy


class Way(NamedTuple):
    """How the proxy sends the legs of a request.

    ``named_by`` is what both legs have in common if they are sent at once, or if the first one is
    sent twice; otherwise the second leg has what the first one's answer names.  ``names_decode`` is
    how the first leg names the decode engine.  ``follows`` the answer: the second leg goes to the
    engine that it names, else to one in turn.  ``crossed``: the second leg has the parameters of
    another request whose second leg was never sent.  ``leaves``: the proxy closes the connections
    after a while.  ``late``: the second leg waits at the proxy for a while.
    """

    name: str
    firsts: int = 1
    seconds: int = 1
    at_once: bool = False
    second_first: bool = False
    named_by: str = ""
    names_decode: str = ""
    follows: bool = False
    crossed: bool = False
    leaves: bool = False
    late: bool = False


_USUAL = (
    Way("in turn"),
    Way("in turn, as leg 1 answers", follows=True),
    Way("leg 1 names the decode engine", names_decode="id"),
    Way("leg 1 names the address of the decode engine", names_decode="address"),
    Way("both legs at once", at_once=True, named_by="transfer_id"),
    Way("both legs at once with an id", at_once=True, named_by=REQUEST_ID_HEADER),
    Way("both legs at once in a room", at_once=True, named_by=ROOM),
    Way("leg 2 comes first", at_once=True, second_first=True, named_by="transfer_id"),
)
_UNUSUAL = (
    Way("leg 1 is sent twice", firsts=2, named_by="transfer_id"),
    Way("both legs are sent twice at once", 2, 2, at_once=True, named_by="transfer_id"),
    Way("leg 2 is sent twice", seconds=2),
    Way("leg 2 is sent alone", firsts=0, named_by="transfer_id"),
    Way("leg 2 is never sent", seconds=0),
    Way("leg 2 names the KV of another request", firsts=0, crossed=True),
    Way("the proxy leaves", leaves=True),
    Way("the proxy leaves both legs", at_once=True, named_by="transfer_id", leaves=True),
)
#: Further usual ways where KV is moved: engines may end before the second leg comes.
_WITH_MOVES = (Way("in turn, leg 2 comes late", late=True),)
#: Share of requests that are sent in an unusual way at first.
_UNUSUAL_SHARE = 0.4
#: Delay of the first leg if the second one comes first, and until a proxy leaves.
_LATER_S = (0.0, 0.01, 0.1, 1.0)
_LEAVES_S = (0.001, 0.01, 0.02, 0.05, 0.2)
#: Delay of a second leg that waits at the proxy.
_LATE_S = (0.3, 1.0, 2.0)
#: Limit of the proxy for both legs: connections may be silent for ever.
_LEGS_S = 60.0
_AGAIN_S = (0.05, 0.3, 1.0)
#: Limit of the wait for engines before a request, and how often it looks for them.
_READY_S = 5.0
_POLL_S = 0.05
#: Tries of a request, and those more for each fault of a run.
_TRIES = 4
_TRIES_FOR_FAULT = 4


class _AbandonedError(Exception):
    """The proxy has sent what it does of this way, and starts again."""


class _NoEngineError(EngineLostError):
    """No engine of a role serves."""


class SimProxy(ClientEndpoint):
    """A proxy from the start of its process to its end, after which ``ended`` is called.

    ``engines`` returns the URLs of the engines of a role that serve, by name, ``ready`` whether the
    scheduler knows all engines, ``faults`` is the number of faults of the run, and ``moves`` is
    whether KV is moved between decode engines.
    """

    records: Sequence[RequestRecord] = ()

    def __init__(
        self,
        shared: "ClusterResources",
        name: str,
        host: str,
        engines: Callable[[Role], Mapping[str, str]],
        ready: Callable[[], bool],
        faults: int,
        moves: bool,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(shared, name, host)
        self._usual = (*_USUAL, *_WITH_MOVES) if moves else _USUAL
        self.serves = True
        self._ended = ended
        self._engines, self._ready = engines, ready
        self._world = shared.world
        self._tries = _TRIES + faults * _TRIES_FOR_FAULT
        self._turns = itertools.count()
        self._names = itertools.count()
        #: Parameters of first legs whose second legs were never sent.
        self._never_sent: list[dict[str, Any]] = []
        #: Failures of legs that no way explains.
        self.failures: list[str] = []

    @property
    def service(self) -> "SimProxy":
        """The proxy itself."""
        return self

    async def drain(self) -> None:
        """End at once: a proxy that is killed is the harder case."""

    async def _stop(self) -> None:
        """There is nothing to stop."""

    def _died(self) -> None:
        self._ended()

    def held_when_idle(self) -> list[str]:
        """Return descriptions of what the process still holds without requests."""
        return [f"{self.name}: clients {self.clients}"] if self.clients else []

    # ------------------------------------------------------------------ requests

    async def submit(self, job: Job) -> AsyncGenerator[TokenEvent, None]:
        """Yield the tokens of a request, which is sent again until all are there.

        A try that finds no engine does not count: it takes its time until one is started again.
        """
        sent: list[int] = []
        await self._until_ready()
        left, first = self._tries, True
        while left:
            if self._ending:
                raise DrainingError(f"{self.name} is about to end")
            chance = self._world.chance
            unusual = first and chance.random() < _UNUSUAL_SHARE
            first = False
            way = chance.choice(_UNUSUAL if unusual else self._usual)
            self._world.note(job.request_id, f"its legs: {way.name}")
            got = 0
            legs = self._legs(job, way)
            try:
                async for token in legs:
                    got += 1
                    if got <= len(sent):
                        if token != sent[got - 1]:
                            was = sent[got - 1]
                            self._world.problem(f"{job.request_id}: {token}, {was} before")
                        continue
                    sent.append(token)
                    yield TokenEvent((token,))
                yield TokenEvent((), finish_reason="length")
                return
            except _AbandonedError:
                left -= 1
            except (EngineLostError, TimeoutError) as error:
                if not isinstance(error, _NoEngineError):
                    left -= 1
                why = str(error) or f"no answer within {_LEGS_S:g} s"
                if isinstance(error, TimeoutError) and not self._shared.silenced:
                    self._world.problem(f"{job.request_id}, {way.name}: {why}")
                self._world.note(job.request_id, f"a leg has failed: {why}")
                self.failures.append(f"{job.request_id}, {way.name}: {why}")
            finally:
                await legs.aclose()
            await asyncio.sleep(chance.choice(_AGAIN_S))
        raise EngineLostError(f"{job.request_id}: none of {self._tries} tries has succeeded")

    async def _until_ready(self) -> None:
        """Wait until engines can take legs, as an operator does before clients may come."""
        end_s = self.loop.time() + _READY_S
        while not self._ready() and self.loop.time() < end_s:
            await asyncio.sleep(_POLL_S)

    async def _legs(self, job: Job, way: Way) -> AsyncGenerator[int, None]:
        """Yield the tokens of the second leg.

        Raises ``EngineLostError`` if a leg fails, ``TimeoutError`` after ``_LEGS_S`` and
        ``_AbandonedError`` if the way ends before all tokens are there.
        """
        limit_s = self._world.chance.choice(_LEAVES_S) if way.leaves else _LEGS_S
        end_s = self.loop.time() + limit_s
        running: list[asyncio.Task[Any]] = []
        decode = self._in_turn(Role.DECODE)
        name = f"{job.request_id}-{next(self._names)}"

        def start(leg: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
            running.append(self.loop.create_task(leg))
            return running[-1]

        try:
            firsts, params = await self._first_legs(job, way, name, decode, start, end_s)
            if way.follows and firsts:
                decode = params[PARAMETERS]["remote_engine_id"]
            self._world.maybe_fault()
            if way.late:
                await asyncio.sleep(self._world.pick(_LATE_S))
            if not way.seconds:
                self._never_sent.append(params)
                raise _AbandonedError
            for _ in range(way.seconds - 1):
                other = self._in_turn(Role.DECODE)
                start(self._compared(job, other, params, name, way))
            tokens = self._second(job, decode, params, name, way)
            token: int | None = 0
            try:
                while token is not None:
                    async with asyncio.timeout_at(end_s):
                        token = await anext(tokens, None)
                    if token is not None:
                        yield token
            finally:
                await tokens.aclose()
            async with asyncio.timeout_at(end_s):
                await asyncio.gather(*running, return_exceptions=True)
        except TimeoutError as error:
            if way.leaves:
                raise _AbandonedError from error
            raise
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    async def _first_legs(
        self,
        job: Job,
        way: Way,
        name: str,
        decode: str,
        start: Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"],
        end_s: float,
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Send the first legs; return their answers, and what the second leg has besides."""
        if way.crossed and self._never_sent:
            return (), self._never_sent.pop(0)
        if way.at_once or not way.firsts:
            delay_s = self._world.pick(_LATER_S) if way.second_first else 0.0
            for _ in range(way.firsts):
                start(self._first(job, way, name, decode, delay_s))
            return (), _shared(way, name, second=True)
        async with asyncio.timeout_at(end_s):
            answers = [await self._first(job, way, name, decode, 0.0) for _ in range(way.firsts)]
        return answers, {PARAMETERS: answers[-1]}

    async def _first(
        self, job: Job, way: Way, name: str, decode: str, delay_s: float
    ) -> dict[str, Any]:
        """Return the parameters for the second leg; raises ``EngineLostError`` if it fails."""
        await asyncio.sleep(delay_s)
        engine = self._in_turn(Role.PREFILL)
        body = _body(job) | _shared(way, name, second=False)
        headers = _headers(way, name)
        if way.names_decode == "id":
            body[PARAMETERS]["remote_engine_id"] = decode
        elif way.names_decode == "address":
            number = f"{next(self._names):032x}"
            host = self._url(Role.DECODE, decode).partition("//")[2]
            value = f"___prefill_addr_{engine}___decode_addr_{host}_{number}"
            headers = [(REQUEST_ID_HEADER.lower().encode(), value.encode())]
        async with self._respond(Role.PREFILL, engine, body, headers) as response:
            answer = msgspec.json.decode(await self._ok(response))
        found: dict[str, Any] = answer[PARAMETERS]
        return found

    async def _second(
        self, job: Job, engine: str, params: dict[str, Any], name: str, way: Way
    ) -> AsyncGenerator[int, None]:
        """Yield the tokens of a second leg; raises ``EngineLostError`` if it fails."""
        streams = self._world.chance.random() < 1 / 2
        body = _body(job) | params | {"stream": streams}
        async with self._respond(Role.DECODE, engine, body, _headers(way, name)) as response:
            if not streams:
                answer = msgspec.json.decode(await self._ok(response))
                self._note_origin(job, engine, response)
                for token in answer["choices"][0]["token_ids"]:
                    yield token
                return
            if response.status != HTTPStatus.OK:
                await self._ok(response)
            self._note_origin(job, engine, response)
            lines = EventLines()
            async for piece in response.iter_any():
                for payload in lines.feed(piece):
                    event = msgspec.json.decode(payload)
                    if "error" in event or event["choices"][0]["finish_reason"] == "abort":
                        raise EngineLostError(f"the stream of {engine} ends with {event}")
                    for token in event["choices"][0]["token_ids"]:
                        yield token
            if not lines.ended:
                raise EngineLostError(f"the stream of {engine} ends without its last event")

    async def _compared(
        self, job: Job, engine: str, params: dict[str, Any], name: str, way: Way
    ) -> None:
        """Send a second leg once more, and check its tokens."""
        tokens = [t async for t in self._second(job, engine, params, name, way)]
        if tokens != (right := _right_tokens(job)):
            self._world.problem(f"{job.request_id}: leg 2 again got {tokens}, expected {right}")

    def _note_origin(self, job: Job, engine: str, response: SimResponse) -> None:
        origin = response.headers.get(PREFILL_HEADER, "")
        self._world.note(job.request_id, f"leg 2 at {engine}: {origin}")

    @staticmethod
    async def _ok(response: SimResponse) -> bytes:
        """Return the body of an answer; raises ``EngineLostError`` for another status than 200."""
        body = await response.read()
        if response.status != HTTPStatus.OK:
            raise EngineLostError(f"a leg was answered with {response.status}: {body[:400]!r}")
        return body

    def _respond(
        self, role: Role, engine: str, body: dict[str, Any], headers: list[tuple[bytes, bytes]]
    ) -> Any:  # noqa: ANN401 - a context of a response
        content = msgspec.json.encode(body)
        url = self._url(role, engine)
        return respond(self._shared.http, url, self.loop, PATH, content, headers)

    def _in_turn(self, role: Role) -> str:
        """Return the name of an engine; raises ``EngineLostError`` without any."""
        names = sorted(self._engines(role))
        if not names:
            raise _NoEngineError(f"there is no {role.value} engine")
        return names[next(self._turns) % len(names)]

    def _url(self, role: Role, engine: str) -> str:
        try:
            return self._engines(role)[engine]
        except KeyError:
            raise EngineLostError(f"{engine} is gone") from None


def _body(job: Job) -> dict[str, Any]:
    salt = {"cache_salt": job.payload} if job.payload is not None else {}
    prompt = list(job.prompt_token_ids)
    return {"model": "small", "prompt": prompt, "max_tokens": job.max_new_tokens, **salt}


def _shared(way: Way, name: str, *, second: bool) -> dict[str, Any]:
    """Return the fields of a leg's body, with the name that both legs have in common."""
    if way.named_by == ROOM:
        return {ROOM: int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")}
    params: dict[str, Any] = {"do_remote_decode": not second, "do_remote_prefill": second}
    if way.named_by == "transfer_id":
        params["transfer_id"] = name
    return {PARAMETERS: params}


def _headers(way: Way, name: str) -> list[tuple[bytes, bytes]]:
    if way.named_by != REQUEST_ID_HEADER:
        return []
    return [(REQUEST_ID_HEADER.lower().encode(), name.encode())]


def _right_tokens(job: Job) -> list[int]:
    prefix = TokenPrefix(
        job.prompt_token_ids,
        BLOCK_TOKENS,
        cache_salt=None,
        vocab_size=VOCABULARY,
        capacity_tokens=job.prompt_tokens + job.max_new_tokens,
    )
    tokens = []
    for _ in range(job.max_new_tokens):
        tokens.append(prefix.next_token)
        prefix.append(tokens[-1])
    return tokens


class Proxies:
    """``count`` proxies; ``host`` returns the machine of each.  A proxy that ends is restarted."""

    _PAUSES_S = (0.05, 0.3, 1.0)

    def __init__(
        self,
        shared: "ClusterResources",
        count: int,
        host: Callable[[str], str],
        engines: Callable[[Role], Mapping[str, str]],
        ready: Callable[[], bool],
        faults: int,
        *,
        moves: bool,
    ) -> None:
        self._shared = shared
        self._host = host
        self._engines, self._ready = engines, ready
        self._faults, self._moves = faults, moves
        self._starts: dict[str, int] = {}
        self._now: dict[str, SimProxy] = {}
        #: Every process so far.
        self.all: list[SimProxy] = []
        for number in range(count):
            self._start(f"proxy-{number}")

    @property
    def alive(self) -> Sequence[SimProxy]:
        """Proxies with a live process."""
        return [one for one in self._now.values() if one.process.alive]

    def held_when_idle(self) -> list[str]:
        """Return descriptions of what proxies still hold without requests."""
        return [what for one in self._now.values() for what in one.held_when_idle()]

    def _start(self, name: str) -> None:
        self._starts[name] = start = self._starts.get(name, 0) + 1

        def ended() -> None:
            world = self._shared.world
            world.after(world.pick(self._PAUSES_S), lambda: self._start(name))

        knows = (self._engines, self._ready, self._faults, self._moves)
        proxy = SimProxy(self._shared, f"{name}#{start}", self._host(name), *knows, ended)
        self._now[name] = proxy
        self.all.append(proxy)
