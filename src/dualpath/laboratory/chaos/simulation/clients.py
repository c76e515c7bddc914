"""Agents of a simulated cluster: what they ask, what they must be answered, what they were."""

import asyncio
import functools
from collections.abc import Sequence

from dualpath.core.blocks import BlockKey, block_keys
from dualpath.core.errors import DrainingError, DualPathError, EngineLostError
from dualpath.core.session_hints import NO_HINTS, SessionHints
from dualpath.laboratory.chaos.simulation.cluster import Cluster
from dualpath.laboratory.chaos.simulation.cluster_settings import BLOCK_TOKENS, VOCABULARY
from dualpath.laboratory.chaos.simulation.entrance import Exchange, Reply
from dualpath.laboratory.chaos.simulation.loop import ProcessLoop
from dualpath.laboratory.chaos.simulation.world import Process, World
from dualpath.laboratory.emulated.kv_bytes import KvFunction
from dualpath.laboratory.emulated.prefix import TokenPrefix
from dualpath.router.engine_calls import Job, TokenEvent

#: How long an agent waits before it asks again where nobody answered.
_AGAIN_S = 0.3

#: What clients say of their sessions, which may be wrong.
_HINTS = (
    *(NO_HINTS, NO_HINTS),
    SessionHints(retain_s=2.0),
    SessionHints(next_turn_s=0.05),
    SessionHints(session_id="agent", retain_s=0.1, next_turn_s=0.0),
    SessionHints(session_id="agent", done=True),
)


class Asked:
    """One request and what came of it; ``outcome`` is None as long as it is under way."""

    def __init__(self, name: str, prompt: tuple[int, ...], count: int, now_s: float) -> None:
        self.name = name
        self.prompt = prompt
        self._prefix = _prefix(prompt, count)
        self.expected = []
        for _ in range(count):
            self.expected.append(self._prefix.next_token)
            self._prefix.append(self.expected[-1])
        self.got: list[int] = []
        self.outcome: str | None = None
        self.error: DualPathError | None = None
        self.asked_s = now_s
        self.ended_s: float | None = None
        self.exchange: Exchange | None = None
        self.arrived: asyncio.Queue[Reply] = asyncio.Queue()

    @property
    def is_to_ask_again(self) -> bool:
        """Whether it has heard that it came to an entrance that ends."""
        return isinstance(self.error, DrainingError) or (
            isinstance(self.error, EngineLostError)
            and self.exchange is not None
            and self.exchange.entrance.lost_turn
        )

    def blocks(self, kv: KvFunction) -> dict[BlockKey, bytes]:
        """Return the right content of all blocks of the prompt and its answer."""
        prefix = self._prefix
        return {
            key: kv.full_block(prefix.seeds[block]).tobytes()
            for block, key in enumerate(prefix.keys)
        }


def _prefix(prompt: Sequence[int], count: int) -> TokenPrefix:
    return TokenPrefix(
        prompt,
        BLOCK_TOKENS,
        cache_salt=None,
        vocab_size=VOCABULARY,
        room_tokens=len(prompt) + count,
    )


class Clients:
    """Agents that take their turns; what they are answered is checked as it comes."""

    def __init__(self, world: World, cluster: Cluster, agents: int, turns: int) -> None:
        self._world = world
        self._cluster = cluster
        self.asked: list[Asked] = []
        self._loop = ProcessLoop(Process(world, "clients"))  # type: ignore[abstract]
        shared = tuple(world.chance.randrange(VOCABULARY) for _ in range(8))
        self._under_way = agents
        for index in range(agents):
            agent = self._agent(f"agent{index}", shared, turns)
            self._loop.call_soon(functools.partial(self._loop.create_task, agent))

    @property
    def over(self) -> bool:
        """Whether all agents are through."""
        return self._under_way == 0

    def under_way(self) -> list[Asked]:
        """Return the requests that have not ended."""
        return [asked for asked in self.asked if asked.outcome is None]

    def leave(self, asked: Asked) -> None:
        """Let the client of a request go."""
        if asked.exchange is not None and asked.outcome is None:
            self._world.note(asked.name, "its client leaves")
            asked.exchange.leave()
            self._end(asked, "left")
            asked.arrived.put_nowait("left")

    async def _agent(self, name: str, shared: tuple[int, ...], turns: int) -> None:
        chance = self._world.chance
        await asyncio.sleep(chance.uniform(0.01, 0.3))
        context = shared
        for turn in range(turns):
            context += tuple(chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 14)))
            asked = await self._turn(f"{name}.{turn}", context, chance.randrange(1, 13))
            if asked.outcome != "answered":
                break
            context += tuple(asked.expected)
            await asyncio.sleep(chance.choice(self._cluster.settings.pauses_s))
        self._under_way -= 1

    async def _turn(self, name: str, prompt: tuple[int, ...], count: int) -> Asked:
        """Ask until somebody answers."""
        tries = 0
        while True:
            asked = await self._ask(f"{name}.{tries}", prompt, count)
            if asked.outcome != "reset" and not asked.is_to_ask_again:
                return asked
            tries += 1
            await asyncio.sleep(_AGAIN_S)

    async def _ask(self, name: str, prompt: tuple[int, ...], count: int) -> Asked:
        asked = Asked(name, prompt, count, self._world.now_s)
        self.asked.append(asked)
        entrance = self._cluster.entrance()
        if not entrance.serves:
            self._end(asked, "reset")
            return asked
        self._world.note(name, f"asks with {len(prompt)} tokens for {count}")
        job = _job(asked, count, self._world.chance.choice(_HINTS))
        asked.exchange = entrance.ask(job, functools.partial(self._reply, asked))
        while asked.outcome is None:
            self._take(asked, await asked.arrived.get())
        return asked

    def _reply(self, asked: Asked, reply: Reply) -> None:
        self._loop.call_soon(asked.arrived.put_nowait, reply)

    def _take(self, asked: Asked, reply: Reply) -> None:
        if asked.outcome is not None:
            return
        if isinstance(reply, TokenEvent):
            asked.got += reply.token_ids
            if asked.got != asked.expected[: len(asked.got)]:
                self._world.problem(
                    f"{asked.name} got tokens {asked.got}, right is {asked.expected}"
                )
        elif reply is None:
            self._end(asked, "answered")
            if asked.got != asked.expected:
                self._world.problem(
                    f"{asked.name} ended with {asked.got}, right is {asked.expected}"
                )
        elif isinstance(reply, DualPathError):
            asked.error = reply
            self._end(asked, f"{type(reply).__name__}: {reply}")
        else:
            self._end(asked, reply)

    def _end(self, asked: Asked, outcome: str) -> None:
        asked.outcome = outcome
        asked.ended_s = self._world.now_s
        self._world.note(asked.name, f"ends: {outcome}")


def _job(asked: Asked, count: int, hints: SessionHints) -> Job:
    def keys_for(token_ids: Sequence[int]) -> Sequence[bytes]:
        return block_keys(token_ids, BLOCK_TOKENS)

    return Job(
        request_id=asked.name,
        prompt_token_ids=asked.prompt,
        max_new_tokens=count,
        keys=tuple(keys_for(asked.prompt)),
        keys_for=keys_for,
        hints=hints,
    )
