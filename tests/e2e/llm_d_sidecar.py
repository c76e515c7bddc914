"""A small proxy with the wire format of llm-d's routing sidecar (``--kv-connector nixlv2``).

Written after llm-d-inference-scheduler at 520af47 of May 2026, ``pkg/sidecar/proxy``, because the
sidecar is a Go program of which no package could be had.  What it does to a request and an answer
is the sidecar's, also where that looks odd: limits of a chat are added to a completion,
``min_tokens`` is left in leg 1, an ``X-Request-Id`` is added to the client's own, and a leg 1 that
fails otherwise than with a client's error is followed by the request as it came.

Each decode engine has its sidecar; llm-d's gateway chooses one of them, and names the prefill
engine in a header.  Here one server does both, with engines in turn.
"""

import itertools
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

PREFILLER_HEADER = "x-prefiller-host-port"
REQUEST_ID_HEADER = "x-request-id"
_LIMITS = ("max_tokens", "max_completion_tokens")
_PER_CONNECTION = ("connection", "content-length", "host", "transfer-encoding")


class Sidecar:
    """The sidecar of one decode engine; ``session`` is its HTTP client."""

    def __init__(self, decode: str, session: aiohttp.ClientSession) -> None:
        self._decode, self._session = decode, session

    async def serve(self, request: web.Request, prefiller: str) -> web.StreamResponse:
        """Answer a request; ``prefiller`` is ``HOST:PORT``, empty to decode only."""
        body = await request.json()
        headers = CIMultiDict(
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in (*_PER_CONNECTION, PREFILLER_HEADER)
        )
        if not prefiller:
            return await self._decoded(request, body, headers, None)
        headers.add(REQUEST_ID_HEADER, str(uuid.uuid1()))
        first = {name: value for name, value in body.items() if name != "stream_options"}
        first |= {"stream": False, **dict.fromkeys(_LIMITS, 1)}
        first["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        status, text = 502, b""
        try:
            url = f"http://{prefiller}{request.path}"
            async with self._session.post(url, json=first, headers=headers) as answer:
                status, text = answer.status, await answer.read()
        except aiohttp.ClientError:
            pass
        if 400 <= status <= 451:
            return web.Response(status=status, body=text, content_type="application/json")
        if status >= 400:
            del headers[REQUEST_ID_HEADER]
            return await self._decoded(request, body, headers, None)
        prefilled = json.loads(text)
        second = {**body, "kv_transfer_params": prefilled.get("kv_transfer_params")}
        return await self._decoded(request, second, headers, cached_tokens(prefilled))

    async def _decoded(
        self,
        request: web.Request,
        body: Mapping[str, Any],
        headers: CIMultiDict[str],
        cached: int | None,
    ) -> web.StreamResponse:
        url = self._decode + request.path
        async with self._session.post(url, json=body, headers=headers) as answer:
            shown = {"Content-Type": answer.headers["Content-Type"]}
            response = web.StreamResponse(status=answer.status, headers=shown)
            await response.prepare(request)
            async for line in answer.content:
                await response.write(line if cached is None else with_cached(line, cached))
            return response


def cached_tokens(answer: Mapping[str, Any]) -> int:
    """Return the hits that leg 1's answer reports, 0 without any."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def with_cached(line: bytes, cached: int) -> bytes:
    """Return a line of leg 2's answer with the hits of leg 1, if it has usage."""
    start = b"data: " if line.startswith(b"data: ") else b""
    try:
        event = json.loads(line[len(start) :])
    except ValueError:
        return line
    if not isinstance(event, dict) or not isinstance(event.get("usage"), dict):
        return line
    details = event["usage"].get("prompt_tokens_details") or {}
    event["usage"]["prompt_tokens_details"] = {**details, "cached_tokens": cached}
    return start + json.dumps(event).encode() + (b"\n" if line.endswith(b"\n") else b"")


def application(prefill: Sequence[str], decode: Sequence[str]) -> web.Application:
    """Return a gateway and the sidecars of all decode engines; arguments are base URLs."""
    app = web.Application()
    prefillers = itertools.cycle([url.removeprefix("http://") for url in prefill])
    sidecars: list[Sidecar] = []
    turns = itertools.count()

    async def session(app: web.Application) -> Any:
        async with aiohttp.ClientSession() as client:
            sidecars.extend(Sidecar(url, client) for url in decode)
            yield

    async def serve(request: web.Request) -> web.StreamResponse:
        sidecar = sidecars[next(turns) % len(sidecars)]
        return await sidecar.serve(request, request.headers.get(PREFILLER_HEADER, next(prefillers)))

    app.cleanup_ctx.append(session)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, serve)
    return app


def main() -> None:
    """Serve until interrupted."""
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", nargs="+", required=True)
    parser.add_argument("--decode", nargs="+", required=True)
    args = parser.parse_args()
    web.run_app(
        application(args.prefill, args.decode), host="127.0.0.1", port=args.port, print=None
    )


if __name__ == "__main__":
    main()
