"""One request to two servers, and where the two answers differ.

Names, times, the configuration's fingerprint and tokens found in storage are left out.  A stream is
put together again first: its division into chunks depends on timing.
"""

import http.client
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.guard import GUARD_S

#: Sequence numbers count chunks.
LEFT_OUT = frozenset(
    {
        "id",
        "call_id",
        "item_id",
        "signature",
        "created",
        "created_at",
        "completed_at",
        "sequence_number",
        "system_fingerprint",
        "cached_tokens",
        "created_cache_tokens",
        "cache_write_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    }
)

#: Engines compute in float32, in batches of other shapes.
TOLERANCE = 1e-3


class Reply(NamedTuple):
    """Status and body of an answer; a stream's body is the list of its events."""

    status: int
    body: Any


def ask(url: str, method: str, path: str, body: Any = None) -> Reply:
    """Send one request and read the whole answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=GUARD_S)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        connection.request(method, path, None if body is None else raw, headers)
        response = connection.getresponse()
        content = response.read()
        kind = response.headers.get("Content-Type", "")
    finally:
        connection.close()
    if kind.startswith("text/event-stream"):
        return Reply(response.status, joined(_events(content)))
    if kind.startswith("application/json"):
        return Reply(response.status, json.loads(content))
    return Reply(response.status, content.decode())


def differences(plain: Any, routed: Any, at: str = "") -> Iterator[str]:
    """Yield every place where two JSON values differ."""
    if isinstance(plain, dict) and isinstance(routed, dict):
        plain, routed = _with_cached(plain), _with_cached(routed)
        for name in sorted((plain.keys() | routed.keys()) - LEFT_OUT):
            if (name in plain) is not (name in routed):
                yield f"{at}.{name}: only in {'plain' if name in plain else 'routed'} answer"
            else:
                yield from differences(plain[name], routed[name], f"{at}.{name}")
    elif isinstance(plain, list) and isinstance(routed, list):
        if len(plain) != len(routed):
            yield f"{at}: {len(plain)} and {len(routed)} items: {plain!r} and {routed!r}"
        for index, (ours, theirs) in enumerate(zip(plain, routed, strict=False)):
            yield from differences(ours, theirs, f"{at}[{index}]")
    elif not _equal(plain, routed):
        yield f"{at}: {plain!r} and {routed!r}"


def _with_cached(value: dict[str, Any]) -> dict[str, Any]:
    """Count cached tokens as input, which the Anthropic API does not."""
    if "cache_read_input_tokens" not in value:
        return value
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return {**value, "input_tokens": sum(value.get(kind) or 0 for kind in kinds)}


def _equal(plain: Any, routed: Any) -> bool:
    if isinstance(plain, float) and isinstance(routed, float):
        return math.isclose(plain, routed, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(plain == routed)


def _events(content: bytes) -> Iterator[Any]:
    """Yield the JSON of each event; the end mark as the string it is."""
    for line in content.decode().splitlines():
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            yield data if data == "[DONE]" else json.loads(data)


def joined(events: Iterable[Any]) -> list[Any]:
    """Return a stream's events with neighbours of one kind made into one."""
    whole: list[Any] = []
    for event in events:
        if whole and _joinable(whole[-1], event):
            whole[-1] = _sum(whole[-1], event)
        else:
            whole.append(_sum({}, event))
    return whole


def _joinable(last: Any, event: Any) -> bool:
    if not isinstance(last, dict) or not isinstance(event, dict):
        return False
    if "type" in event:
        return "delta" in event and last.get("type") == event["type"]
    return bool(last.get("choices")) and bool(event.get("choices"))


def _sum(last: dict[str, Any], event: Any) -> Any:
    """Return both events as one: choices by index, pieces of text and lists appended."""
    if not isinstance(event, dict):
        return event
    pieces = [name for name in ("choices", "delta") if name in event]
    return last | event | {name: _appended(last.get(name), event[name]) for name in pieces}


def _appended(last: Any, new: Any) -> Any:
    """Return a value extended by a later chunk; ``last`` is None if there was no value."""
    if isinstance(new, dict) and isinstance(last, dict | None):
        last = last or {}
        return {name: _appended(last.get(name), new.get(name)) for name in {**last, **new}}
    if isinstance(new, list) and isinstance(last, list | None):
        return _by_index([*(last or []), *new])
    if isinstance(last, str) and isinstance(new, str):
        return last if last == new in ("assistant", "function", "text_delta") else last + new
    return last if new is None else new


def _by_index(pieces: list[Any]) -> list[Any]:
    """Put the pieces of each choice or tool call together; one chunk may have several."""
    if not all(isinstance(piece, dict) and "index" in piece for piece in pieces):
        return pieces
    whole: dict[int, Any] = {}
    for piece in pieces:
        whole[piece["index"]] = _appended(whole.get(piece["index"]), piece)
    return [whole[index] for index in sorted(whole)]
