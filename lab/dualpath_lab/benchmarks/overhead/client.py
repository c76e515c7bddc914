"""A client that leaves streams open and records the arrival time of each event.

It parses as little as possible, since it shares the machine's cores with the servers.
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
from dualpath_lab.models.random_models import TRAINING_TEXT, VOCABULARY_TOKENS

#: Served model name of every server.
NAME = "tiny"

_REQUEST_S = 300.0
#: Ids below are special tokens.
_FIRST_TEXT_ID = 3
_EVENT = b"data: {"
#: Number of events after which a stream is in its steady state.
_STEADY = 4


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """``streams`` concurrent streams of ``requests`` consecutive requests each.

    Prompts have ``prompt`` random words (or tokens), each its own, or with ``repeats`` one for all
    requests of a stream.  Responses have ``tokens`` tokens times a uniform factor between
    1 - ``spread`` and 1 + ``spread``.  A stream waits ``pause_s`` between its requests; the first
    requests start within ``ramp_s``.
    """

    streams: int
    requests: int
    prompt: int
    tokens: int
    spread: float = 0.0
    pause_s: float = 0.0
    ramp_s: float = 0.0
    repeats: bool = False


class Response(NamedTuple):
    """Times on the client's clock: of each event with a token, and of the first event of any kind.

    Tokens that were ready at the same time may share an event.
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
    """``/v1/chat/completions`` with text; the first event contains the role."""

    path = "/v1/chat/completions"
    role_events = 1
    _words: Sequence[str] = " ".join(TRAINING_TEXT).split()

    def body(self, rng: random.Random, length: int) -> dict[str, Any]:
        """Return the fields of a request with a prompt of ``length`` words."""
        text = " ".join(rng.choices(self._words, k=length))
        return {"messages": [{"role": "user", "content": text}], "temperature": 0}


class TokenIds:
    """``/v1/completions`` of the light router with token ids."""

    path = "/v1/completions"
    role_events = 0

    def body(self, rng: random.Random, length: int) -> dict[str, Any]:
        """Return the fields of a request with a prompt of ``length`` tokens."""
        return {"prompt": rng.choices(range(_FIRST_TEXT_ID, VOCABULARY_TOKENS), k=length)}


Api = Chat | TokenIds


class Window:
    """The period in which all streams are in their steady state.

    From the first few events of the last stream to the end of the first stream.  The value of
    ``read()`` grows by ``spent`` while ``events`` token events arrive; both are 0 if a stream ends
    before another reaches its steady state.
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
        """Count a stream's token events, which grew from ``before`` to ``now``."""
        self._events += now - before
        if before < _STEADY <= now:
            self._waiting -= 1
            if self._waiting == 0:
                self._from = (self._read(), self._events, time.perf_counter())

    def ended(self) -> None:
        """A stream has received its last token; only the first stream's end counts."""
        if self._from is not None and self.events == 0:
            spent, events, start_s = self._from
            self.spent = self._read() - spent
            self.events = self._events - events
            self.wall_s = time.perf_counter() - start_s


async def run_load(
    url: str, api: Api, load: Load, seed: str, window: Window | None = None
) -> list[Response]:
    """Return all responses; raises ``DualPathError`` for the first failed or too short one."""
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as http:
        streams = [
            _stream(http, api, load, random.Random(f"{seed}/{i}"), window)
            for i in range(load.streams)
        ]
        return [response for responses in await asyncio.gather(*streams) for response in responses]


async def _stream(
    http: aiohttp.ClientSession, api: Api, load: Load, rng: random.Random, window: Window | None
) -> list[Response]:
    responses = []
    prompt: dict[str, Any] = {}
    await asyncio.sleep(rng.random() * load.ramp_s)
    for _ in range(load.requests):
        tokens = max(round(load.tokens * (1 + rng.uniform(-load.spread, load.spread))), 2)
        if not prompt or not load.repeats:
            prompt = api.body(rng, load.prompt)
        body = {
            "model": NAME,
            **prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        responses.append(await _send(http, api, json.dumps(body).encode(), tokens, window))
        await asyncio.sleep(load.pause_s)
    return responses


async def _send(
    http: aiohttp.ClientSession, api: Api, body: bytes, tokens: int, window: Window | None
) -> Response:
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
        raise DualPathError(f"{api.path}: a response without events")
    final = json.loads(last[last.rindex(_EVENT) + len(_EVENT) - 1 :].split(b"\n", 1)[0])
    usage = final.get("usage") or {}
    if usage.get("completion_tokens") != tokens:
        raise DualPathError(f"{api.path}: {tokens} tokens were requested; the last event: {final}")
    token_events = event_s[api.role_events : -1]  # The last one contains the usage.
    return Response(start_s, event_s[0], token_events, usage["prompt_tokens"], tokens)
