"""Agents of a simulated cluster: their requests, the expected and the received tokens."""

import asyncio
import functools
from collections.abc import Sequence
from random import Random

from dualpath.core.blocks import BlockKey, block_keys, tenant_tag
from dualpath.core.errors import DrainingError, DualPathError, EngineLostError
from dualpath.core.session_hints import NO_HINTS, SessionHints
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath_lab.emulated.checkable_kv import KvFunction, TokenPrefix
from dualpath_lab.faults.simulation.cluster import Cluster
from dualpath_lab.faults.simulation.event_loop import ProcessLoop
from dualpath_lab.faults.simulation.router import Exchange, Reply
from dualpath_lab.faults.simulation.settings import BLOCK_TOKENS, VOCABULARY
from dualpath_lab.faults.simulation.world import Process, World

#: Pause of an agent before it retries a request.
_AGAIN_S = 0.3

#: Hints of clients about their sessions, which may be wrong.
_HINTS = (
    *(NO_HINTS, NO_HINTS),
    SessionHints(retain_s=2.0),
    SessionHints(next_turn_s=0.05),
    SessionHints(session_id="agent", retain_s=0.1, next_turn_s=0.0),
    SessionHints(session_id="agent", done=True),
)


class SimRequest:
    """One request and its result; ``outcome`` is None while it is in flight."""

    def __init__(
        self, name: str, prompt: tuple[int, ...], count: int, salt: str | None, now_s: float
    ) -> None:
        self.name = name
        self.prompt = prompt
        self.salt = salt
        self._prefix = _prefix(prompt, count, salt)
        self._count = count
        self.expected = []
        for _ in range(count):
            self.expected.append(self._prefix.next_token)
            self._prefix.append(self.expected[-1])
        self.got: list[int] = []
        self.outcome: str | None = None
        self.error: DualPathError | None = None
        self.sent_s = now_s
        self.ended_s: float | None = None
        self.exchange: Exchange | None = None
        self.arrived: asyncio.Queue[Reply] = asyncio.Queue()

    @property
    def must_retry(self) -> bool:
        """Whether its error means that the process it was sent to is ending."""
        return isinstance(self.error, DrainingError) or (
            isinstance(self.error, EngineLostError)
            and self.exchange is not None
            and self.exchange.endpoint.lost_leadership
        )

    @property
    def keys(self) -> Sequence[BlockKey]:
        """The keys of all full blocks of the prompt and its answer."""
        return self._prefix.keys

    def blocks(self, kv: KvFunction, weights: str) -> dict[BlockKey, bytes]:
        """Return the right content of all blocks of the prompt and its answer."""
        prefix = _prefix(self.prompt, self._count, self.salt, weights)
        for token in self.expected:
            prefix.append(token)
        return {
            key: kv.full_block(prefix.seeds[block]).tobytes()
            for block, key in enumerate(prefix.keys)
        }


def _prefix(prompt: Sequence[int], count: int, salt: str | None, weights: str = "") -> TokenPrefix:
    return TokenPrefix(
        prompt,
        BLOCK_TOKENS,
        cache_salt=salt,
        vocab_size=VOCABULARY,
        capacity_tokens=len(prompt) + count,
        weights=weights,
    )


class Clients:
    """All agents; the tokens that they receive are checked on arrival."""

    def __init__(self, world: World, cluster: Cluster, agents: int, turns: int) -> None:
        self._world = world
        self._cluster = cluster
        self.requests: list[SimRequest] = []
        self._loop = ProcessLoop(Process(world, "clients"))  # type: ignore[abstract]
        shared = tuple(world.chance.randrange(VOCABULARY) for _ in range(8))
        self._running = agents
        salts = cluster.settings.salts
        for index in range(agents):
            salt = salts[index % len(salts)]
            prompts = self._prompts(index) if len(salts) > 1 else world.chance
            agent = self._agent(f"agent{index}", salt, prompts, shared, turns)
            self._loop.call_soon(functools.partial(self._loop.create_task, agent))

    @property
    def done(self) -> bool:
        """Whether all agents have ended."""
        return self._running == 0

    def in_flight(self) -> list[SimRequest]:
        """Return the requests that have not ended."""
        return [request for request in self.requests if request.outcome is None]

    def leave(self, request: SimRequest) -> None:
        """Disconnect the client of a request."""
        if request.exchange is not None and request.outcome is None:
            self._world.note(request.name, "its client leaves")
            request.exchange.leave()
            self._end(request, "left")
            request.arrived.put_nowait("left")

    def _prompts(self, agent: int) -> Random:
        """Return the random source of an agent's prompts, equal for every two agents."""
        return Random(f"prompts of agents {agent // 2} of {self._world.seed}")

    async def _agent(
        self, name: str, salt: str | None, prompts: Random, shared: tuple[int, ...], turns: int
    ) -> None:
        chance = self._world.chance
        await asyncio.sleep(chance.uniform(0.01, 0.3))
        context = shared
        for turn in range(turns):
            new = range(prompts.randrange(1, 14))
            context += tuple(prompts.randrange(VOCABULARY) for _ in new)
            count = prompts.randrange(1, 13)
            request = await self._turn(f"{name}.{turn}", context, count, salt)
            if request.outcome != "answered":
                break
            context += tuple(request.expected)
            await asyncio.sleep(chance.choice(self._cluster.settings.pauses_s))
        self._running -= 1

    async def _turn(
        self, name: str, prompt: tuple[int, ...], count: int, salt: str | None
    ) -> SimRequest:
        """Send a request, and retry it until it is answered."""
        tries = 0
        while True:
            request = await self._send(f"{name}.{tries}", prompt, count, salt)
            if request.outcome != "reset" and not request.must_retry:
                return request
            tries += 1
            await asyncio.sleep(_AGAIN_S)

    async def _send(
        self, name: str, prompt: tuple[int, ...], count: int, salt: str | None
    ) -> SimRequest:
        request = SimRequest(name, prompt, count, salt, self._world.now_s)
        self.requests.append(request)
        endpoint = self._cluster.endpoint()
        if not endpoint.serves:
            self._end(request, "reset")
            return request
        self._world.note(name, f"sends a prompt of {len(prompt)} tokens for {count} tokens")
        job = _job(request, count, self._world.chance.choice(_HINTS))
        request.exchange = endpoint.request(job, functools.partial(self._reply, request))
        while request.outcome is None:
            self._take(request, await request.arrived.get())
        return request

    def _reply(self, request: SimRequest, reply: Reply) -> None:
        self._loop.call_soon(request.arrived.put_nowait, reply)

    def _take(self, request: SimRequest, reply: Reply) -> None:
        if request.outcome is not None:
            return
        if isinstance(reply, TokenEvent):
            request.got += reply.token_ids
            if request.got != request.expected[: len(request.got)]:
                self._world.problem(
                    f"{request.name} got tokens {request.got}, expected {request.expected}"
                )
        elif reply is None:
            self._end(request, "answered")
            if request.got != request.expected:
                self._world.problem(
                    f"{request.name} ended with {request.got}, expected {request.expected}"
                )
        elif isinstance(reply, DualPathError):
            request.error = reply
            self._end(request, f"{type(reply).__name__}: {reply}")
        else:
            self._end(request, reply)

    def _end(self, request: SimRequest, outcome: str) -> None:
        request.outcome = outcome
        request.ended_s = self._world.now_s
        self._world.note(request.name, f"ends: {outcome}")


def _job(request: SimRequest, count: int, hints: SessionHints) -> Job:
    def keys_for(token_ids: Sequence[int]) -> Sequence[bytes]:
        return block_keys(token_ids, BLOCK_TOKENS, cache_salt=request.salt)

    return Job(
        request_id=request.name,
        prompt_token_ids=request.prompt,
        max_new_tokens=count,
        keys=tuple(keys_for(request.prompt)),
        keys_for=keys_for,
        payload=request.salt,
        tenant=tenant_tag(request.salt),
        hints=hints,
    )
