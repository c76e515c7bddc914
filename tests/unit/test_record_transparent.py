"""`dualpath record` changes nothing: what clients get through the proxy, and from the endpoint."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiohttp import web
from tests.guard import GUARD_S
from yarl import URL

from dualpath.cli.main import main
from dualpath.workload.record.recording_proxy import RecordingProxy

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: Headers of one connection, and the time.
OWN = {"connection", "keep-alive", "transfer-encoding", "date"}
Handler = Callable[[web.BaseRequest, bytes], Awaitable[web.StreamResponse]]


class Seen(NamedTuple):
    """A request as the endpoint got it."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


class Got(NamedTuple):
    """An answer as the client got it."""

    status: int
    reason: str | None
    headers: list[tuple[str, str]]
    body: bytes


class Both:
    """An endpoint, and the proxy in front of it."""

    def __init__(self, endpoint: str, proxy: RecordingProxy, port: int) -> None:
        self.proxy = proxy
        self.urls = (endpoint, f"http://127.0.0.1:{port}")
        self.seen: list[Seen] = []

    async def ask(self, method: str, path: str, body: bytes | None, **headers: str) -> list[Got]:
        """Return the answer of the endpoint, and that through the proxy."""
        return [await self._ask(url, method, path, body, headers) for url in self.urls]

    async def _ask(
        self, url: str, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> Got:
        async with (
            asyncio.timeout(GUARD_S),
            aiohttp.ClientSession(auto_decompress=False) as http,
            http.request(
                *(method, URL(url + path, encoded=True)),
                data=body,
                headers=headers,
                allow_redirects=False,
            ) as answer,
        ):
            content = await answer.read()
            kept = [(n, v) for n, v in answer.headers.items() if n.lower() not in OWN]
            return Got(answer.status, answer.reason, kept, content)


@asynccontextmanager
async def both(handler: Handler) -> AsyncIterator[Both]:
    made: list[Both] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.content.read()
        headers = [(n, v) for n, v in request.headers.items() if n.lower() not in {"host", *OWN}]
        made[0].seen.append(Seen(request.method, request.raw_path, sorted(headers), body))
        return await handler(request, body)

    server = web.Server(handle, handler_cancellation=True, auto_decompress=False)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
        proxy = RecordingProxy(endpoint, lambda exchange: None, lambda: 0.0)
        async with proxy.serving("127.0.0.1", 0) as port:
            made.append(Both(endpoint, proxy, port))
            yield made[0]
    finally:
        await runner.cleanup()


def response(status: int, body: bytes = b"", **headers: str) -> Handler:
    async def handler(request: web.BaseRequest, asked: bytes) -> web.StreamResponse:
        made = web.Response(status=status, reason="Its Own", body=body or None)
        for name, value in headers.items():
            made.headers.add(name.replace("_", "-"), value)
        made.headers.add("Set-Cookie", "a=1")
        made.headers.add("Set-Cookie", "b=2")
        return made

    return handler


@pytest.mark.parametrize(
    "handler",
    [
        response(200, b"text", Content_Type="text/plain; charset=latin-1"),
        response(404, b'{ "error" : "none" }', Content_Type="application/json"),
        response(307, Location="http://elsewhere.invalid/v1/models"),
        response(204),
        response(304, ETag='"1"'),
        response(200, gzip.compress(b"packed"), Content_Encoding="gzip"),
        response(503, b"later", Retry_After="1", Server="Its Own"),
    ],
    ids=["200", "404", "307", "204", "304", "gzip", "503"],
)
@pytest.mark.parametrize("path", ["/v1/models", COMPLETIONS])
async def test_status_headers_and_bodies_are_the_endpoints(handler: Handler, path: str):
    async with both(handler) as made:
        body = b'{"prompt": "hello", "max_tokens": 1}'
        asked = [await made.ask(m, path, b) for m, b in (("GET", None), ("POST", body))]
        asked.append(await made.ask("HEAD", path, None))
    for direct, through in asked:
        assert through == direct


@pytest.mark.parametrize("method", ["PATCH", "OPTIONS", "PROPFIND", "DELETE", "PUT"])
async def test_methods_paths_and_headers_arrive_as_they_were_written(method: str):
    async with both(response(200)) as made:
        path = "/a%2Fb//c/../d?x=%20&y=+&z"
        await made.ask(method, path, b"\x00\xff", X_Twice="1", Accept_Language="de")
        await made.ask(method, path, gzip.compress(b"{}"), **{"Content-Encoding": "gzip"})
        direct, through, packed, packed_through = made.seen
    assert through == direct
    assert packed_through == packed


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "hello", "echo": true, "max_tokens": 0, "logprobs": 1}',
        b"no JSON",
        b'["no object"]',
        b'"\xed\xa0\x80"',
        b"",
    ],
)
async def test_requests_that_cannot_be_recorded_arrive_unchanged_and_are_counted(body: bytes):
    async with both(response(200, b"{}")) as made:
        direct, through = await made.ask("POST", COMPLETIONS, body)
    assert through == direct
    assert made.seen[1] == made.seen[0]
    assert (made.proxy.recorded, made.proxy.not_recorded) == (0, 1)


async def test_a_completion_differs_in_nothing_but_the_request_for_token_ids():
    body = b'{ "prompt": [1,2], "max_tokens": 1e1, "seed": 123456789012345678901234567890 }'
    async with both(response(200, b"{}")) as made:
        await made.ask("POST", COMPLETIONS, body, Authorization="Bearer k")
        direct, through = made.seen
    assert json.loads(through.body) == json.loads(body) | {"return_token_ids": True}
    assert through.body.startswith(b'{ "prompt": [1,2], "max_tokens": 1e1, "seed": 1234567890123')
    changed = {"content-length", "accept-encoding"}
    kept = [[h for h in seen.headers if h[0].lower() not in changed] for seen in (direct, through)]
    assert kept[0] == kept[1]
    assert dict(through.headers)["Authorization"] == "Bearer k"


def like_vllm(body: bytes) -> tuple[bytes, bytes]:
    """Return vLLM's answers, at once and as a stream, with token ids only if asked for."""
    asks = json.loads(body).get("return_token_ids", False)
    ids = "[7]" if asks else "null"
    whole = (
        f'{{"id":"x","choices":[{{"index":0,"message":{{"content":"\\u00fc"}},"token_ids":{ids},'
        f'"logprob":-1e-05}}],"usage":{{"total_tokens":3}},"prompt_token_ids":{ids}}}'
    )
    chunk = (
        f'{{"choices":[{{"index":0,"delta":{{"content":"a"}},"token_ids":{ids}}}],'
        f'"prompt_token_ids":{ids},"f":1.0}}'
    )
    hidden = f'{{"choices":[{{"index":0,"delta":{{}},"logprobs":null,"token_ids":{ids}}}]}}'
    stream = [
        ": ping\n\n",
        f"data: {chunk}\n\n",
        f"data: {hidden}\n\n" if asks else "",
        f"event: message\r\nid: 4\r\ndata: {chunk}\r\n\r\n",
        ": a comment\ndata: not json\n\n",
        "data: [DONE]\n\n",
        ": after the end\n\n",
        "no blank line",
    ]
    return whole.encode(), "".join(stream).encode()


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_answers_of_vllm_are_byte_by_byte_what_clients_get_without_the_proxy(step: int):
    async def handler(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        whole, stream = like_vllm(body)
        if not json.loads(body)["stream"]:
            return web.Response(body=whole, content_type="application/json")
        made = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await made.prepare(request)
        for at in range(0, len(stream), step):
            await made.write(stream[at : at + step])
        return made

    async with both(handler) as made:
        for stream in (False, True):
            asked: dict[str, object] = {"messages": [], "stream": stream}
            direct, through = await made.ask("POST", CHAT, json.dumps(asked).encode())
            assert through == direct
    assert made.proxy.recorded == 1  # The stream has an event that is no JSON.


async def test_an_endpoint_that_refuses_the_field_gets_the_request_as_it_was():
    async def handler(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        known = "return_token_ids" not in json.loads(body)
        return web.Response(status=200 if known else 422, body=b"{}" if known else b"unknown")

    async with both(handler) as made:
        for _ in range(2):
            direct, through = await made.ask("POST", COMPLETIONS, b'{"prompt": "a"}')
            assert through == direct
    # The proxy asks once with the field, and remembers the refusal.
    asked: list[bool] = [b"return_token_ids" in seen.body for seen in made.seen]
    assert asked == [False, True, False, False, False]
    assert made.proxy.not_recorded == 2


async def test_a_stream_passes_chunk_by_chunk():
    got_one = asyncio.Event()

    async def handler(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        made = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await made.prepare(request)
        await made.write(b'data: {"choices": []}\n\n')
        await got_one.wait()
        await made.write(b"data: [DONE]\n\n")
        return made

    async with both(handler) as made, aiohttp.ClientSession() as http, asyncio.timeout(GUARD_S):
        url = made.urls[1] + CHAT
        async with http.post(url, data=b'{"stream": true}') as answer:
            assert await answer.content.readline() == b'data: {"choices": []}\n'
            got_one.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/other"])
async def test_a_client_that_leaves_ends_its_request_at_the_endpoint(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        try:
            if stream:
                made = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await made.prepare(request)
                await made.write(b"data: {}\n\n")
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError("nothing ends the wait")
        finally:
            ended.set()

    async with both(handler) as made, asyncio.timeout(GUARD_S):
        place = URL(made.urls[1])
        _, writer = await asyncio.open_connection(place.host, place.port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}"
        writer.write(head.encode())
        await begun.wait()
        writer.close()
        await ended.wait()
    assert made.proxy.not_recorded == (path == CHAT)
    assert not caplog.records


async def test_an_endpoint_that_breaks_off_breaks_off_at_the_client(
    caplog: pytest.LogCaptureFixture,
):
    async def handler(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        made = web.StreamResponse(headers={"Content-Length": "100"})
        await made.prepare(request)
        await made.write(b"x")
        assert request.transport is not None
        request.transport.abort()
        return made

    async with both(handler) as made:
        for url in made.urls:
            with pytest.raises(aiohttp.ClientError):
                await made._ask(url, "GET", "/file", None, {})
    assert not caplog.records


@pytest.mark.parametrize(
    "sent",
    [
        b"no HTTP\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_bytes_that_are_no_request_write_no_traceback(
    sent: bytes, caplog: pytest.LogCaptureFixture
):
    async with both(response(200)) as made, asyncio.timeout(GUARD_S):
        place = URL(made.urls[1])
        reader, writer = await asyncio.open_connection(place.host, place.port)
        writer.write(sent)
        writer.write_eof()
        await reader.read()
        writer.close()
        (_, through) = await made.ask("GET", "/v1/models", None)
    assert through.status == 200
    assert not [record for record in caplog.records if record.exc_info]


def test_a_taken_port_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ("record", "--endpoint", "http://127.0.0.1:1", "--port", port)
        assert main([*words, "--out", str(tmp_path / "r.jsonl")]) == 2
    said: Any = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; free it" in said.err
