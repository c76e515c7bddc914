"""Agents that never stop asking, each in a conversation of which every token is known."""

import asyncio
import random
import time
from collections.abc import Iterator

import aiohttp
import msgspec

from dualpath.laboratory.chaos.ask import Answer, Outcome, ask
from dualpath.laboratory.chaos.settings import LoadSettings
from dualpath.laboratory.emulated.prefix import TokenChain
from dualpath.laboratory.workload.replay.stream import completion_body

#: After an answer that was none; after a broken connection a client waits longer.
_PAUSE_S = 0.1
_CUT_PAUSE_S = 0.5
#: Beyond the deadline: until then a router may say that it has passed.
_GIVE_UP_S = 20.0
_MOST_LEAVE_S = 0.6


class Turn(msgspec.Struct, frozen=True):
    """One request and what became of it; times are those of the monotonic clock."""

    agent: int
    begin_s: float
    end_s: float
    prompt_tokens: int
    answer: Answer


class Agent:
    """Appends, asks, takes the answer as part of its context, and begins anew where that is long.

    ``context`` are its tokens so far, ``salt`` keeps its blocks from other agents'.
    """

    def __init__(self, number: int, settings: LoadSettings, vocab_size: int, seed: int) -> None:
        self.number = number
        self.salt = f"agent-{number}"
        self.context: list[int] = []
        self._settings = settings
        self._vocab_size = vocab_size
        self._chance = random.Random(f"{seed} {number}")

    async def turn(self, http: aiohttp.ClientSession, url: str) -> Turn:
        """Ask once."""
        chance, settings = self._chance, self._settings
        if len(self.context) > settings.context_tokens:
            self.context = []
        appended = chance.randint(1, settings.append_tokens)
        prompt = self.context + [chance.randrange(self._vocab_size) for _ in range(appended)]
        tokens = chance.randint(1, settings.generate_tokens)
        leaves_s = None
        if chance.random() < settings.leave_share:
            leaves_s = chance.uniform(0, _MOST_LEAVE_S)
        begin_s = time.monotonic()
        answer = await self._ask(http, url, prompt, tokens, leaves_s)
        self.context = prompt + list(answer.token_ids)
        return Turn(self.number, begin_s, time.monotonic(), len(prompt), answer)

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        url: str,
        prompt: list[int],
        tokens: int,
        leaves_s: float | None,
    ) -> Answer:
        body = completion_body("emulated", prompt, tokens, self.salt)
        patience_s = self._settings.request_deadline_s + _GIVE_UP_S
        try:
            async with asyncio.timeout(patience_s if leaves_s is None else leaves_s):
                return await ask(
                    http, url, body, following(prompt, self._vocab_size), time.monotonic
                )
        except TimeoutError:
            if leaves_s is not None:
                return Answer(Outcome.LEFT)
            return Answer(Outcome.LATE, f"no end after {patience_s:g} s")


class Load:
    """All agents at work within ``async with``; lives in one event loop."""

    def __init__(self, url: str, settings: LoadSettings, vocab_size: int, seed: int) -> None:
        self.turns: list[Turn] = []
        self.agents = [
            Agent(number, settings, vocab_size, seed) for number in range(settings.agents)
        ]
        self._url = f"{url}/v1/completions"
        self._asking = 0
        self._may_ask = asyncio.Event()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "Load":
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._may_ask.set()
        self._tasks = [asyncio.create_task(self._live(agent)) for agent in self.agents]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    async def pause(self) -> None:
        """Let nobody ask any more; return when every request has ended, as each one does."""
        self._may_ask.clear()
        while self._asking:
            self._changed.clear()
            await self._changed.wait()

    def resume(self) -> None:
        """Let all ask again."""
        self._may_ask.set()

    def check(self) -> None:
        """Raise what has ended an agent, which nothing should."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _live(self, agent: Agent) -> None:
        while True:
            await self._may_ask.wait()
            self._asking += 1
            try:
                turn = await agent.turn(self._http, self._url)
            finally:
                self._asking -= 1
                self._changed.set()
            self.turns.append(turn)
            if turn.answer.outcome is Outcome.CUT:
                await asyncio.sleep(_CUT_PAUSE_S)
            elif turn.answer.outcome not in (Outcome.WELL, Outcome.LEFT):
                await asyncio.sleep(_PAUSE_S)


def following(prompt: list[int], vocab_size: int) -> Iterator[int]:
    """Yield the tokens that emulated engines generate after a prompt."""
    chain = TokenChain(prompt, vocab_size)
    while True:
        token = chain.next_token
        chain.append(token)
        yield token
