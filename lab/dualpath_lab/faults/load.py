"""Agents that send requests without pause, in conversations of which every token is known."""

import asyncio
import enum
import random
import time
from collections.abc import Callable, Iterator, Sequence

import aiohttp
import msgspec

from dualpath.node.http_client import client_session
from dualpath.router.token_api.wire import EventLines
from dualpath.workload.replay.client import RealClock
from dualpath.workload.replay.endpoint import CompletionBody, complete, completion_body
from dualpath_lab.faults.engine_kinds import EnginesUnderTest
from dualpath_lab.faults.settings import LoadSettings

# --------------------------------------------------------------------------------------------- ask
# One request under faults: its outcome, with every token compared with the expected one.

_DETAIL_CHARACTERS = 300
#: Statuses by which a router reports that the failure is not the client's.
_CLEAR_STATUSES = frozenset({429, 503, 504})


class Outcome(enum.StrEnum):
    """How a request ended."""

    WELL = "well"
    """All tokens arrived and all are right."""
    CLEAR_ERROR = "clear error"
    """A status or an event with an error message."""
    CUT = "cut"
    """The connection was lost: what a client sees of a router that dies."""
    LEFT = "left"
    """Its client disconnected."""
    UNCLEAR = "unclear"
    """An answer that blames the client, ends without an error, or cannot be decoded."""
    LATE = "late"
    """It did not end within its deadline."""
    WRONG = "wrong"
    """A wrong token, or too few tokens."""


class Answer(msgspec.Struct, frozen=True):
    """The outcome of a request; ``cached_tokens`` of its prompt came from storage.

    ``first_token_s`` is when its first token arrived, None if none did.
    """

    outcome: Outcome
    detail: str = ""
    token_ids: tuple[int, ...] = ()
    cached_tokens: int = 0
    first_token_s: float | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()

    @property
    def has_error(self) -> bool:
        """Whether it contains an error."""
        return bytes(self.error) not in (b"", b"null")


class AnswerChecker:
    """Compares the events of one stream with ``expected``, which yields the right tokens.

    ``now_s`` is the clock.
    """

    def __init__(self, tokens: int, expected: Iterator[int], now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._first_token_s: float | None = None
        self._tokens = tokens
        self._expected = expected
        self._lines = EventLines()
        self._error = ""
        self._wrong = ""
        self._cached_tokens = 0
        self.token_ids: list[int] = []

    @property
    def ended(self) -> bool:
        """Whether the stream is complete or already wrong."""
        return self._lines.ended or bool(self._wrong)

    def feed(self, received: bytes) -> None:
        """Take bytes of the stream; raises ``msgspec.DecodeError`` for a malformed event."""
        for payload in self._lines.feed(received):
            event = msgspec.json.decode(payload, type=_Event)
            if event.has_error:
                self._error = bytes(event.error).decode(errors="replace")
            if event.usage is not None and event.usage.prompt_tokens_details is not None:
                self._cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0
            for choice in event.choices:
                self._compare(choice.token_ids)

    def answer(self) -> Answer:
        """Return the result of the request after the end of its stream."""
        if self._wrong:
            return self._as(Outcome.WRONG, self._wrong)
        if self._error:
            return self._as(Outcome.CLEAR_ERROR, self._error)
        if not self._lines.ended:
            return self._as(Outcome.CUT, "the stream ended without [DONE]")
        if len(self.token_ids) < self._tokens:
            return self._as(
                Outcome.WRONG, f"{len(self.token_ids)} of {self._tokens} tokens, and no error"
            )
        return self._as(Outcome.WELL, "")

    def broken(self, outcome: Outcome, why: str) -> Answer:
        """Return the result of the request after its connection was lost."""
        return self._as(Outcome.WRONG, self._wrong) if self._wrong else self._as(outcome, why)

    def _compare(self, token_ids: list[int]) -> None:
        for token in token_ids:
            expected = next(self._expected)
            place = len(self.token_ids)
            if self._first_token_s is None:
                self._first_token_s = self._now_s()
            if place >= self._tokens or token != expected:
                self._wrong = self._wrong or f"token {place} is {token}, not {expected}"
                return
            self.token_ids.append(token)

    def _as(self, outcome: Outcome, detail: str) -> Answer:
        tokens = tuple(self.token_ids)
        return Answer(
            outcome, detail[:_DETAIL_CHARACTERS], tokens, self._cached_tokens, self._first_token_s
        )


async def send_request(
    http: aiohttp.ClientSession,
    url: str,
    body: CompletionBody,
    expected: Iterator[int],
    now_s: Callable[[], float],
) -> Answer:
    """Send a request and return its result; no response of a server makes it raise.

    It has no deadline of its own.
    """
    checker = AnswerChecker(body.max_tokens, expected, now_s)
    headers = {"Content-Type": "application/json"}
    try:
        async with http.post(url, data=msgspec.json.encode(body), headers=headers) as response:
            if response.status != 200:
                return _refused(response.status, await response.text())
            async for received in response.content.iter_any():
                checker.feed(received)
                if checker.ended:
                    break
            return checker.answer()
    except (aiohttp.ClientError, OSError) as error:
        return checker.broken(Outcome.CUT, f"{type(error).__name__}: {error}")
    except msgspec.DecodeError as error:
        return checker.broken(Outcome.UNCLEAR, f"an event that cannot be decoded: {error}")


def _refused(status: int, text: str) -> Answer:
    try:
        has_error = msgspec.json.decode(text, type=_Event).has_error
    except msgspec.DecodeError:
        has_error = False
    clear = has_error and status in _CLEAR_STATUSES
    outcome = Outcome.CLEAR_ERROR if clear else Outcome.UNCLEAR
    return Answer(outcome, f"HTTP {status}: {text}"[:_DETAIL_CHARACTERS])


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
        self._http = client_session(timeout=aiohttp.ClientTimeout(total=None))
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
