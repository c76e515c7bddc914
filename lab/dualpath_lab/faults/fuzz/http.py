"""Requests to an HTTP endpoint: bodies with something wrong in them, and malformed HTTP streams.

The endpoint is a running process with live engines.  Statuses below 500 are right, including 429;
503 and 504 are not, as engines are alive.  A client may disconnect before the end of an answer.
"""

import asyncio
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from dualpath.node.http_client import client_session
from dualpath.router.api_keys import client_headers
from dualpath_lab.faults.fuzz.inputs import Inputs

_GUARD_S = 120.0
#: Maximum of an answer that is checked.
_CHECKED_BYTES = 1 << 16
#: How long to wait for an answer to malformed HTTP, which the server may still be reading.
_SILENCE_S = 0.05

_PROMPT = list(range(1, 20))
_CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
_SAMPLING = {"max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["a"], "n": 1}
_GENERATE = {"request_id": "x", "token_ids": _PROMPT, "sampling_params": {"max_tokens": 1}}
_FETCH = {"block_hashes": [1, 2], "mode": "copy"}
_ACTION = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": _FETCH}
_HINTS = {"protocol_version": "0.1", "message_id": "m", "actions": [_ACTION]}
#: Valid bodies by path; requests to paths that the endpoint does not have must be answered, too.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        **{"prompt": _PROMPT, "stream": False, "cache_salt": "s", "logprobs": 1, "echo": False},
        **_SAMPLING,
        **{"structured_outputs": {"regex": "a"}},
        "kv_transfer_params": {"dualpath": {}, "max_load_tokens": 64, "kv_hint": _HINTS},
    },
    "/v1/chat/completions": {
        **{"messages": _CHAT, "stream": True, "tools": [], "tool_choice": "none"},
        **_SAMPLING,
        **{"stream_options": {"include_usage": True}, "response_format": {"type": "text"}},
    },
    "/v1/responses": {"input": "x", "max_output_tokens": 2, "stream": False},
    "/v1/messages": {"messages": _CHAT[:1], "max_tokens": 2},
    "/tokenize": {"prompt": "x", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/invocations": {"prompt": "x", **_SAMPLING},
    "/inference/v1/generate": _GENERATE,
}
_HEADERS = (
    *("Content-Length", "Transfer-Encoding", "Content-Encoding", "Content-Type", "Expect", "Host"),
    *("Connection", "Upgrade", "Authorization", "X-Request-Id", "traceparent", "Range", "Cookie"),
)
_VALUES = (
    *(b"gzip", b"chunked", b"br", b"100-continue", b"-1", b"99999999999999999999", b"\xff\xfe"),
    *(b"", b"x" * 10_000, b"application/json; charset=no-such", b"websocket", b"close", b"0x10"),
)


class HttpSubject:
    """The endpoint ``url``; if ``pid`` is given, the memory of that process is watched."""

    def __init__(self, url: str, model: str, pid: int | None, paths: tuple[str, ...]) -> None:
        self.pid = pid
        self._url = url.rstrip("/")
        self._model = model
        self._paths = paths or tuple(BODIES)

    async def __aenter__(self) -> Self:
        self._http = client_session(
            headers=client_headers(), timeout=aiohttp.ClientTimeout(total=_GUARD_S)
        )
        await self.still_works()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.close()

    def input(self, inputs: Inputs) -> tuple[str, bytes]:
        """Return a path and a body; or an empty path and a stream of bytes."""
        path = inputs.one_of(self._paths)
        valid = BODIES[path]
        named = {**valid, "model": self._model} if self._model else valid
        body = inputs.json(named)
        return (path, body) if inputs.chance(0.9) else ("", _stream(inputs, path, body))

    async def run_input(self, given: Any) -> str:  # noqa: ANN401 - what ``input`` returns
        """Send it and check the answer."""
        path, content = given
        if not path:
            return await self._raw(content)
        headers = {"Content-Type": "application/json"}
        url = self._url + path
        async with self._http.post(url, data=content, headers=headers) as response:
            text = await response.content.read(_CHECKED_BYTES)
            assert response.status < 500, f"status {response.status}: {text[:200]!r}"
            _check(text)
            if not response.content.at_eof():
                response.close()  # clients may disconnect in the middle of an answer
            return str(response.status)

    async def still_works(self) -> None:
        """A valid request is answered twice in the same way."""
        body = {"prompt": _PROMPT, "max_tokens": 3, "temperature": 0.0}
        named = {**body, "model": self._model} if self._model else body
        answers = []
        for _ in range(2):
            async with self._http.post(f"{self._url}/v1/completions", json=named) as response:
                answer = await response.json()
                assert response.status == 200, answer
                choice = answer["choices"][0]
                answers.append((choice.get("token_ids"), choice["text"]))
        assert answers[0] == answers[1], answers

    async def _raw(self, content: bytes) -> str:
        place = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            writer.write(content)
            async with asyncio.timeout(_SILENCE_S):
                answer = await reader.read(_CHECKED_BYTES)
        except (TimeoutError, ConnectionError):
            return "stream: no answer"
        finally:
            writer.close()
        _check(answer)
        status = answer.split(b" ", 2)[1] if answer.startswith(b"HTTP/") else b"closed"
        assert not status.startswith(b"5"), answer[:200]
        return f"stream: {status.decode()}"


def _stream(inputs: Inputs, path: str, body: bytes) -> bytes:
    """Return an almost valid request."""
    method = inputs.one_of(("POST", "POST", "GET", "PUT", "OPTIONS", "CONNECT", "\x16\x03"))
    target = inputs.one_of(
        (path, path, "*", "/%ff", "//", "/..", "http://[::1", "/\xff", "/health")
    )
    lines = [f"{method} {target} HTTP/1.1".encode("latin-1"), b"Host: x"]
    for _ in range(inputs.random.randrange(3)):
        lines.append(inputs.one_of(_HEADERS).encode() + b": " + inputs.one_of(_VALUES))
    lines.append(b"Content-Length: %d" % len(body))
    whole = b"\r\n".join(lines) + b"\r\n\r\n" + body
    return inputs.damaged(whole) if inputs.chance(0.5) else whole


def _check(text: bytes) -> None:
    assert b"Traceback" not in text, text[:400]
    assert b'File "/' not in text, text[:400]
