"""Proxy of vLLM's disaggregated serving: prefill on one engine, then decode on another.

    python pd_proxy.py --prefill URL … [--decode URL …] [--host HOST] [--port PORT]

A request is sent to the next prefill engine with one token to generate, and then, with the
``kv_transfer_params`` of its response, to the next decode engine; its stream is forwarded.  By
the engines' convention the prefill engine's token is dropped and computed again.  Without decode
engines every engine serves complete requests, and all requests of an agent are sent to one engine
(by the first block of the prompt), so that its KV in HBM is reused.

The last chunk's ``cached_tokens`` is replaced by that of the prefill engine, because the decode
engine counts the whole prompt as cached.
"""

import argparse
import asyncio
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import aiohttp
from aiohttp import web

#: Number of first tokens that distinguish agents.
_AFFINITY_TOKENS = 64
_CONNECT_TIMEOUT_S = 10.0
_MAX_BODY_BYTES = 64 << 20


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request for the prefill engine: one token, not streamed, KV held for transfer."""
    copied = {name: value for name, value in body.items() if name != "stream_options"}
    return {
        **copied,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def decode_body(body: dict[str, Any], prefilled: dict[str, Any]) -> dict[str, Any]:
    """Return the request for the decode engine, given the prefill engine's response.

    Raises ``ValueError`` if the response has no ``kv_transfer_params``.
    """
    transfer = prefilled.get("kv_transfer_params")
    if not transfer:
        raise ValueError("the prefill engine's response has no kv_transfer_params")
    return {**body, "kv_transfer_params": transfer}


def cached_tokens(response: dict[str, Any]) -> int | None:
    """Return how many prompt tokens an engine had cached, None if not reported."""
    details = (response.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens")


class UsageLines:
    """Forwards a stream of events line by line with ``cached`` in the usage chunk."""

    def __init__(self, cached: int | None) -> None:
        self._cached = cached
        self._rest = b""

    def feed(self, received: bytes) -> bytes:
        """Add received bytes and return the lines completed by them."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        return b"".join(self._line(line) + b"\n" for line in lines)

    def end(self) -> bytes:
        """Return the bytes after the last line."""
        return self._rest

    def _line(self, line: bytes) -> bytes:
        if self._cached is None or b'"prompt_tokens_details":{' not in line.replace(b" ", b""):
            return line
        chunk = json.loads(line.removeprefix(b"data:"))
        chunk["usage"]["prompt_tokens_details"]["cached_tokens"] = self._cached
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode()


class Proxy:
    """Round robin over prefill engines and, independently, over decode engines."""

    def __init__(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        self.prefill, self.decode = tuple(prefill), tuple(decode)
        self._next_prefill: Iterator[str] = itertools.cycle(self.prefill)
        self._next_decode: Iterator[str] = itertools.cycle(self.decode)
        self._http: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """Return the HTTP application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.cleanup_ctx.append(self._session)
        return app

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Serve one completion."""
        body = await request.json()
        if not self.decode:
            return await self._stream(request, self._own_engine(body), body, None)
        answer = await self._prefill(body)
        if isinstance(answer, web.Response):
            return answer
        try:
            second = decode_body(body, answer)
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=502)
        return await self._stream(request, next(self._next_decode), second, cached_tokens(answer))

    async def models(self, request: web.Request) -> web.Response:
        """Forward an engine's list of models."""
        async with self._session_now.get(f"{self.prefill[0]}/v1/models") as response:
            return web.Response(
                body=await response.read(), status=response.status, content_type="application/json"
            )

    async def health(self, request: web.Request) -> web.Response:
        """Respond with 200 if all engines do, else with 503."""
        try:
            codes = await asyncio.gather(*map(self._code, (*self.prefill, *self.decode)))
        except (aiohttp.ClientError, TimeoutError):
            codes = [503]
        return web.Response(status=200 if set(codes) == {200} else 503)

    @property
    def _session_now(self) -> aiohttp.ClientSession:
        assert self._http is not None
        return self._http

    def _own_engine(self, body: dict[str, Any]) -> str:
        key = json.dumps(body["prompt"][:_AFFINITY_TOKENS]).encode()
        return self.prefill[zlib.crc32(key) % len(self.prefill)]

    async def _prefill(self, body: dict[str, Any]) -> dict[str, Any] | web.Response:
        url = f"{next(self._next_prefill)}/v1/completions"
        async with self._session_now.post(url, json=prefill_body(body)) as response:
            if response.status != 200:
                return web.Response(
                    body=await response.read(),
                    status=response.status,
                    content_type="application/json",
                )
            answer: dict[str, Any] = await response.json()
            return answer

    async def _stream(
        self, request: web.Request, engine: str, body: dict[str, Any], cached: int | None
    ) -> web.StreamResponse:
        async with self._session_now.post(f"{engine}/v1/completions", json=body) as response:
            forwarded = web.StreamResponse(
                status=response.status, headers={"Content-Type": response.content_type}
            )
            await forwarded.prepare(request)
            lines = UsageLines(cached)
            async for received in response.content.iter_any():
                await forwarded.write(lines.feed(received))
            await forwarded.write(lines.end())
            await forwarded.write_eof()
            return forwarded

    async def _code(self, engine: str) -> int:
        async with self._session_now.get(f"{engine}/health") as response:
            return response.status

    async def _session(self, app: web.Application) -> Any:  # noqa: ANN401 - an async generator
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        # No connection limit: waiting for a connection would add a queue.
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._http:
            yield


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="proxy of vLLM's disaggregated serving")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", default=[], metavar="URL")
    args = parser.parse_args()
    proxy = Proxy(args.prefill, args.decode)
    web.run_app(proxy.application(), host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main()
