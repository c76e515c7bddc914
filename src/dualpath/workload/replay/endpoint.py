"""Sends one streamed ``POST /v1/completions``, with token ids in and out.

The request uses vLLM's extensions ``ignore_eos`` (exactly ``max_tokens`` are generated) and
``return_token_ids`` (each chunk has ``choices[0].token_ids``), and the final usage chunk.
``min_tokens`` is not used: it would mask the logit of the end token and so change the output.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec

from dualpath.core.errors import (
    BadRequestError,
    ConfigError,
    DeadlineError,
    DualPathError,
    EngineLostError,
)
from dualpath.node.http_client import sent
from dualpath.router.token_api.wire import EventLines
from dualpath.workload.replay.result import ServerCounters

# ------------------------------------------------------------------------------------------ server
# Reads ``/v1/models`` and ``/dualpath/v1/status`` of an endpoint.

_T = TypeVar("_T")

#: The paper's block size, used if the endpoint does not report its own.
DEFAULT_BLOCK_TOKENS = 64


class EngineStatus(msgspec.Struct, frozen=True):
    """One registered engine; ``api_url`` is the URL of its own HTTP server."""

    engine_id: str
    api_url: str
    alive: bool


class Status(msgspec.Struct, frozen=True):
    """The fields of ``/dualpath/v1/status`` that clients use; other fields are ignored."""

    front_end: str | None = None
    mode: str | None = None
    mode_note: str | None = None
    vocab_size: int | None = None
    block_tokens: int | None = None
    snic_bytes_per_s: float | None = None
    counters: dict[str, Any] = {}
    engines: list[EngineStatus] = []


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


async def served_model(
    http: aiohttp.ClientSession, endpoint: str, wanted: str | None
) -> tuple[str, int | None]:
    """Return name and context limit in tokens of ``wanted`` or of the first served model.

    Raises ``ConfigError`` if it is not served, ``EngineLostError`` if the endpoint does not answer.
    """
    url = f"{endpoint}/v1/models"
    models = await _get(http, url, _Models)
    if models is None or not models.data:
        raise ConfigError(f"{url}: lists no model; check that {endpoint} is an OpenAI endpoint")
    for model in models.data:
        if wanted in (None, model.id):
            return model.id, model.max_model_len
    names = ", ".join(model.id for model in models.data)
    raise ConfigError(f"model {wanted!r} is not served at {endpoint}; it serves {names}")


async def status(http: aiohttp.ClientSession, endpoint: str) -> Status | None:
    """Return the endpoint's status, None if it has none (a plain vLLM server)."""
    return await _get(http, f"{endpoint}/dualpath/v1/status", Status)


async def _get(http: aiohttp.ClientSession, url: str, as_type: type[_T]) -> _T | None:
    """Return the JSON at ``url``, or None on HTTP 404."""
    try:
        async with http.get(url) as response:
            if response.status == 404:
                return None
            text = await response.text()
            if response.status != 200:
                raise ConfigError(f"{url}: HTTP {response.status}: {text[:200]}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineLostError(
            f"{url}: no answer ({error}); check that the server is running"
        ) from error
    try:
        return msgspec.json.decode(text, type=as_type)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{url}: the answer has an unexpected form ({error})") from error


def counter_changes(before: Status | None, after: Status | None) -> ServerCounters | None:
    """Return the increase of each counter between two statuses; None if either is missing."""
    if before is None or after is None:
        return None
    moved = _difference(before.counters, after.counters)
    return ServerCounters(
        hit_tokens=moved.pop("hit_tokens", None),
        recomputed_tokens=moved.pop("recomputed_tokens", None),
        path_bytes=_numbers(moved.pop("bytes", {})),
        snic_read_bytes=_numbers(moved.pop("snic_read_bytes", {})),
        other=moved,
    )


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Subtract numbers at any depth; a counter that is new starts from 0."""
    moved: dict[str, Any] = {}
    for name, value in after.items():
        earlier = before.get(name)
        if isinstance(value, dict):
            moved[name] = _difference(earlier if isinstance(earlier, dict) else {}, value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            moved[name] = value - (earlier if isinstance(earlier, (int, float)) else 0)
    return moved


def _numbers(values: object) -> dict[str, int]:
    if not isinstance(values, dict):
        return {}
    return {name: int(value) for name, value in values.items() if isinstance(value, (int, float))}


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
        data = msgspec.json.encode(body)
        async with sent(http, "POST", url, data=data, headers=headers) as response:
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
