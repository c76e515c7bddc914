"""Sends one streamed ``POST /v1/completions``, with token ids in and out.

The request uses vLLM's extensions ``ignore_eos`` (exactly ``max_tokens`` are generated) and
``return_token_ids`` (each chunk has ``choices[0].token_ids``), and the final usage chunk.
``min_tokens`` is not used: it would mask the logit of the end token and so change the output.
"""

from collections.abc import Sequence
from typing import Protocol

import aiohttp
import msgspec

from dualpath.core.errors import (
    BadRequestError,
    DeadlineError,
    DualPathError,
    EngineLostError,
)
from dualpath.router.token_api.wire import EventLines

_ERROR_TEXT_CHARS = 500


class Clock(Protocol):
    """A monotonic clock in seconds from any origin."""

    def now(self) -> float:
        """Return the current time in seconds."""

    async def sleep(self, delay_s: float) -> None:
        """Wait for ``delay_s`` seconds."""


class Completion(msgspec.Struct, frozen=True):
    """The answer: ``arrivals_s[i]`` is the clock time at which ``token_ids[i]`` arrived."""

    token_ids: list[int]
    arrivals_s: list[float]
    cached_tokens: int | None


class CompletionBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request; field names are vLLM's (``entrypoints/openai/completion/protocol.py``)."""

    model: str
    prompt: list[int]
    max_tokens: int
    cache_salt: str | None = None
    session_id: str | None = None
    temperature: float | None = None
    ignore_eos: bool = False
    stream: bool = False
    return_token_ids: bool = False
    stream_options: dict[str, bool] | None = None


def completion_body(
    model: str,
    prompt: Sequence[int],
    tokens: int,
    cache_salt: str | None,
    session_id: str | None = None,
) -> CompletionBody:
    """Return a greedy, streamed request for exactly ``tokens`` tokens."""
    return CompletionBody(
        model=model,
        prompt=list(prompt),
        max_tokens=tokens,
        cache_salt=cache_salt,
        session_id=session_id,
        temperature=0.0,
        ignore_eos=True,
        stream=True,
        return_token_ids=True,
        stream_options={"include_usage": True},
    )


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    text: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = "no message"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


async def complete(
    http: aiohttp.ClientSession, url: str, body: CompletionBody, clock: Clock
) -> Completion:
    """Send ``body`` and collect the stream.

    Raises ``BadRequestError`` (HTTP 4xx), ``EngineLostError`` (no or broken connection),
    ``DeadlineError`` (the session's read timeout passed without a byte) and ``DualPathError``
    (other errors of the server, and a stream with a different number of tokens than requested).
    """
    headers = {"Content-Type": "application/json"}
    try:
        async with http.post(url, data=msgspec.json.encode(body), headers=headers) as response:
            if response.status != 200:
                raise _refusal(url, response.status, await response.text())
            completion = await _collect(response, clock)
    except TimeoutError:
        raise DeadlineError(
            f"{url}: no answer within the read timeout; raise {{read_timeout_s}} or check the "
            "server"
        ) from None
    except aiohttp.ClientError as error:
        raise EngineLostError(
            f"{url}: the connection failed ({error}); check that the server is running"
        ) from error
    if len(completion.token_ids) != body.max_tokens:
        raise DualPathError(
            f"{url}: {len(completion.token_ids)} of {body.max_tokens} tokens were generated; the "
            "server must support ignore_eos and the whole context ({max_context_tokens})"
        )
    return completion


async def _collect(response: aiohttp.ClientResponse, clock: Clock) -> Completion:
    lines = EventLines()
    token_ids: list[int] = []
    arrivals_s: list[float] = []
    cached_tokens: int | None = None
    async for received in response.content.iter_any():
        for payload in lines.feed(received):
            chunk = _parsed(response, payload)
            for choice in chunk.choices:
                if choice.token_ids is None and choice.text:
                    raise DualPathError(
                        f"{response.url}: a chunk has text but no token_ids; the server must "
                        "support return_token_ids, as vLLM does"
                    )
                if choice.token_ids:
                    token_ids += choice.token_ids
                    arrivals_s += [clock.now()] * len(choice.token_ids)
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        if lines.ended:
            return Completion(token_ids, arrivals_s, cached_tokens)
    raise EngineLostError(
        f"{response.url}: the stream ended after {len(token_ids)} tokens without [DONE]"
    )


def _parsed(response: aiohttp.ClientResponse, payload: bytes) -> _Chunk:
    try:
        chunk = msgspec.json.decode(payload, type=_Chunk)
    except msgspec.DecodeError as error:
        raise DualPathError(f"{response.url}: sent an unreadable chunk ({error})") from error
    if chunk.error is not None:
        message = chunk.error if isinstance(chunk.error, str) else chunk.error.message
        raise DualPathError(f"{response.url}: {message[:_ERROR_TEXT_CHARS]}")
    return chunk


def _refusal(url: str, status: int, text: str) -> DualPathError:
    try:
        error = msgspec.json.decode(text, type=_Chunk).error
        message = error.message if isinstance(error, _Error) else (error or text)
    except msgspec.DecodeError:
        message = text
    kind = BadRequestError if 400 <= status < 500 else DualPathError
    return kind(f"{url}: HTTP {status}: {message[:_ERROR_TEXT_CHARS]}")
