"""A client that keeps streams open and notes when each piece of an answer arrives.

It looks into as little as it can of what it gets, since it shares the machine's cores.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from dualpath.core.errors import DualPathError
from dualpath.laboratory.models.tiny import TRAINING_TEXT, VOCABULARY_TOKENS

#: Under which every server of a run serves its model.
NAME = "tiny"

_REQUEST_S = 300.0
#: Ids below are special tokens.
_FIRST_TEXT_ID = 3
_EVENT = b"data: {"
#: Events after which a stream's beginning is over.
_STEADY = 4


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """``streams`` at the same time, each ``requests`` one after the other.

    Prompts of ``prompt`` random words (or tokens), no two alike.  Answers have ``tokens`` tokens,
    with ``spread`` uniformly between 1 - spread and 1 + spread of that.  A stream waits ``pause_s``
    between its requests; the first ones start within ``ramp_s``.
    """

    streams: int
    requests: int
    prompt: int
    tokens: int
    spread: float = 0.0
    pause_s: float = 0.0
    ramp_s: float = 0.0


class Answer(NamedTuple):
    """Times on the client's clock: of each event with a token, and of the first event of any kind.

    Tokens that were ready together may share an event.
    """

    start_s: float
    first_s: float
    event_s: list[float]
    prompt_tokens: int
    tokens: int

    @property
    def ttft_s(self) -> float:
        """Time from sending the request to the first event, which comes with the first token."""
        return self.first_s - self.start_s

    @property
    def ttst_s(self) -> float:
        """Time between the events of the first and the second token."""
        return self.event_s[1] - self.event_s[0]


class Chat:
    """``/v1/chat/completions``: words in, text out; the first event brings the role."""

    path = "/v1/chat/completions"
    role_events = 1
    _words: Sequence[str] = " ".join(TRAINING_TEXT).split()

    def body(self, rng: random.Random, length: int) -> dict[str, Any]:
        """Return what is asked, of ``length`` words."""
        text = " ".join(rng.choices(self._words, k=length))
        return {"messages": [{"role": "user", "content": text}], "temperature": 0}


class TokenIds:
    """``/v1/completions`` of the light router: token ids in and out."""

    path = "/v1/completions"
    role_events = 0

    def body(self, rng: random.Random, length: int) -> dict[str, Any]:
        """Return what is asked, of ``length`` tokens."""
        return {"prompt": rng.choices(range(_FIRST_TEXT_ID, VOCABULARY_TOKENS), k=length)}


Api = Chat | TokenIds


class Window:
    """The time in which all streams stream: from the last one's first few events to a first end.

    ``read`` is asked at both ends; it grows by ``spent`` while ``events`` tokens arrive, none if
    one stream ends before another is that far.
    """

    def __init__(self, streams: int, read: Callable[[], float]) -> None:
        self._read = read
        self._waiting = streams
        self._events = 0
        self._from: tuple[float, int, float] | None = None
        self.events = 0
        self.spent = 0.0
        self.wall_s = 0.0

    def arrived(self, before: int, now: int) -> None:
        """A stream that had ``before`` token events has ``now`` of them."""
        self._events += now - before
        if before < _STEADY <= now:
            self._waiting -= 1
            if self._waiting == 0:
                self._from = (self._read(), self._events, time.perf_counter())

    def ended(self) -> None:
        """A stream has its last token; only the first one's end counts."""
        if self._from is not None and self.events == 0:
            spent, events, start_s = self._from
            self.spent = self._read() - spent
            self.events = self._events - events
            self.wall_s = time.perf_counter() - start_s


async def play(
    url: str, api: Api, load: Load, seed: str, window: Window | None = None
) -> list[Answer]:
    """Return all answers.  Raises ``DualPathError`` for the first that is none, or is too short."""
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as http:
        streams = [
            _stream(http, api, load, random.Random(f"{seed}/{i}"), window)
            for i in range(load.streams)
        ]
        return [answer for answers in await asyncio.gather(*streams) for answer in answers]


async def _stream(
    http: aiohttp.ClientSession, api: Api, load: Load, rng: random.Random, window: Window | None
) -> list[Answer]:
    answers = []
    await asyncio.sleep(rng.random() * load.ramp_s)
    for _ in range(load.requests):
        tokens = max(round(load.tokens * (1 + rng.uniform(-load.spread, load.spread))), 2)
        body = {
            "model": NAME,
            **api.body(rng, load.prompt),
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answers.append(await _ask(http, api, json.dumps(body).encode(), tokens, window))
        await asyncio.sleep(load.pause_s)
    return answers


async def _ask(
    http: aiohttp.ClientSession, api: Api, body: bytes, tokens: int, window: Window | None
) -> Answer:
    headers = {"Content-Type": "application/json"}
    start_s = time.perf_counter()
    event_s: list[float] = []
    rest = last = b""
    try:
        async with http.post(api.path, data=body, headers=headers) as response:
            if response.status != 200:
                raise DualPathError(f"{api.path}: HTTP {response.status}: {await response.text()}")
            async for received in response.content.iter_any():
                now_s = time.perf_counter()
                complete, _, rest = (rest + received).rpartition(b"\n\n")
                before = len(event_s)
                event_s += [now_s] * complete.count(_EVENT)
                if window is not None:
                    window.arrived(before, len(event_s))
                last = complete if _EVENT in complete else last
    except (aiohttp.ClientError, TimeoutError) as error:
        raise DualPathError(f"{api.path}: {type(error).__name__}: {error}") from error
    if window is not None:
        window.ended()
    if not last:
        raise DualPathError(f"{api.path}: an answer without events")
    said = json.loads(last[last.rindex(_EVENT) + len(_EVENT) - 1 :].split(b"\n", 1)[0])
    usage = said.get("usage") or {}
    if usage.get("completion_tokens") != tokens:
        raise DualPathError(f"{api.path}: {tokens} tokens were asked for; the last event: {said}")
    token_events = event_s[api.role_events : -1]  # The last one brings the usage.
    return Answer(start_s, event_s[0], token_events, usage["prompt_tokens"], tokens)
