"""Agents that send requests without pause, in conversations of which every token is known."""

import asyncio
import random
import time
from collections.abc import Sequence

import aiohttp
import msgspec

from dualpath.laboratory.chaos.ask import Answer, Outcome, send_request
from dualpath.laboratory.chaos.kinds import EnginesUnderTest
from dualpath.laboratory.chaos.settings import LoadSettings
from dualpath.laboratory.workload.replay.client import RealClock
from dualpath.laboratory.workload.replay.stream import CompletionBody, complete, completion_body

#: Pause after a failed request.
_PAUSE_S = 0.5
#: After its deadline: until then a router may report that it has passed.
_GIVE_UP_S = 20.0
_MOST_LEAVE_S = 0.6


class Turn(msgspec.Struct, frozen=True):
    """One request and its result; times are of the monotonic clock."""

    agent: int
    begin_s: float
    end_s: float
    prompt_tokens: int
    answer: Answer


class Agent:
    """Sends turns of a conversation, and starts a new one once the context is long enough.

    A turn that failed is sent again.  ``context`` are its tokens so far, ``salt`` separates its
    blocks from those of other agents and other conversations.
    """

    def __init__(
        self, number: int, settings: LoadSettings, engines: EnginesUnderTest, seed: int
    ) -> None:
        self.number = number
        self._settings = settings
        self._engines = engines
        self._seed = seed
        self._leaves = random.Random(f"{seed} {number} leaves")
        self._conversation = -1
        self._begin()

    async def turn(self, http: aiohttp.ClientSession, url: str) -> Turn:
        """Send the next request."""
        leaves_s = None
        if self._leaves.random() < self._settings.leave_share:
            leaves_s = self._leaves.uniform(0, _MOST_LEAVE_S)
        prompt_tokens, begin_s = len(self._prompt), time.monotonic()
        answer = await self._ask(http, url, leaves_s)
        if answer.outcome is Outcome.WELL:
            self._append(answer.token_ids)
        return Turn(self.number, begin_s, time.monotonic(), prompt_tokens, answer)

    async def rehearse(self, http: aiohttp.ClientSession, url: str) -> None:
        """Record the answers of all conversations, while there are no faults."""
        assert self._engines.conversations is not None
        while self._conversation < self._engines.conversations:
            answer = await complete(http, url, self._body("rehearsal"), RealClock())
            self._engines.record_answer(self._prompt, answer.token_ids)
            self._append(answer.token_ids)
        self._conversation = -1
        self._begin()

    def _begin(self) -> None:
        self._conversation += 1
        self.salt = f"agent-{self.number}-{self._conversation}"
        self.context: list[int] = []
        which = self._conversation % (self._engines.conversations or self._conversation + 1)
        self._chance = random.Random(f"{self._seed} {self.number} {which}")
        self._draw()

    def _append(self, token_ids: Sequence[int]) -> None:
        self.context = self._prompt + list(token_ids)
        if len(self.context) > self._settings.context_tokens:
            self._begin()
        else:
            self._draw()

    def _draw(self) -> None:
        chance, settings = self._chance, self._settings
        appended = chance.randint(1, settings.append_tokens)
        vocab_size = self._engines.vocab_size
        self._prompt = self.context + [chance.randrange(vocab_size) for _ in range(appended)]
        self._tokens = chance.randint(1, settings.generate_tokens)

    def _body(self, salt: str) -> CompletionBody:
        return completion_body(self._engines.model, self._prompt, self._tokens, salt)

    async def _ask(self, http: aiohttp.ClientSession, url: str, leaves_s: float | None) -> Answer:
        patience_s = self._settings.request_deadline_s + _GIVE_UP_S
        expected = self._engines.expected_tokens(self._prompt)
        try:
            async with asyncio.timeout(patience_s if leaves_s is None else leaves_s):
                body = self._body(self.salt)
                return await send_request(http, url, body, expected, time.monotonic)
        except TimeoutError:
            if leaves_s is not None:
                return Answer(Outcome.LEFT)
            return Answer(Outcome.LATE, f"no end after {patience_s:g} s")


class Load:
    """All agents, running within ``async with``; belongs to one event loop."""

    def __init__(
        self, url: str, settings: LoadSettings, engines: EnginesUnderTest, seed: int
    ) -> None:
        self.turns: list[Turn] = []
        self.agents = [Agent(number, settings, engines, seed) for number in range(settings.agents)]
        self._url = f"{url}/v1/completions"
        self._rehearsed = engines.conversations is not None
        self._in_flight = 0
        self._running = asyncio.Event()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "Load":
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        if self._rehearsed:
            try:
                await asyncio.gather(*(a.rehearse(self._http, self._url) for a in self.agents))
            except BaseException:
                await self._http.close()
                raise
        self._running.set()
        self._tasks = [asyncio.create_task(self._run(agent)) for agent in self.agents]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    async def pause(self) -> None:
        """Send no new requests; return once every request has ended."""
        self._running.clear()
        while self._in_flight:
            self._changed.clear()
            await self._changed.wait()

    def resume(self) -> None:
        """Let all agents send requests again."""
        self._running.set()

    def check(self) -> None:
        """Raise the exception of an agent that has failed, if one has."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _run(self, agent: Agent) -> None:
        while True:
            await self._running.wait()
            self._in_flight += 1
            try:
                turn = await agent.turn(self._http, self._url)
            finally:
                self._in_flight -= 1
                self._changed.set()
            self.turns.append(turn)
            if turn.answer.outcome not in (Outcome.WELL, Outcome.LEFT):
                await asyncio.sleep(_PAUSE_S)
