"""Reads ``/v1/models`` and ``/dualpath/v1/status`` of an endpoint."""

from typing import Any, TypeVar

import aiohttp
import msgspec

from dualpath.core.errors import ConfigError, EngineLostError
from dualpath.laboratory.workload.replay.result import ServerCounters

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
