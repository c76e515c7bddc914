"""A proxy with the wire format of vLLM's example for NIXL, ``toy_proxy_server.py``.

It knows nothing of dualpath: it sends each request to a prefill engine with one token to generate
and ``do_remote_decode``, puts the ``kv_transfer_params`` of the answer into the request, sends that
to a decode engine, and streams the answer.  ``at_once`` is what proxies of other connectors do
(Mooncake's): both legs are sent at the same time, with one ``transfer_id``.
"""

import asyncio
import itertools
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web
from tests.guard import GUARD_S


class TwoLegProxy:
    """Engines in turn, on a thread of this process; a context manager.

    ``prefill`` and ``decode`` are base URLs; ``passed_on`` are the parameters of all second legs.
    """

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], *, at_once: bool = False
    ) -> None:
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)
        self._at_once = at_once
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.passed_on: list[Mapping[str, Any]] = []
        self.url = ""

    def __enter__(self) -> "TwoLegProxy":
        self._thread.start()
        assert self._ready.wait(GUARD_S)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(GUARD_S)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._serve)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        async with aiohttp.ClientSession() as self._session:
            await site.start()
            assert site._server is not None
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
            self.url = f"http://127.0.0.1:{port}"
            self._ready.set()
            await self._over.wait()
            await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        if self._at_once:
            name = {"transfer_id": f"xfer-{uuid.uuid4()}"}
            first = asyncio.create_task(self._first_leg(request.path, body, headers, name))
            body["kv_transfer_params"] = {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                **name,
            }
        else:
            first = None
            params = await self._first_leg(request.path, body, headers, {})
            if params:
                body["kv_transfer_params"] = params
        self.passed_on.append(body["kv_transfer_params"])
        url = next(self._decode) + request.path
        async with self._session.post(url, json=body, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers=_shown(answer.headers))
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        if first is not None:
            await first
        return response

    async def _first_leg(
        self, path: str, body: dict[str, Any], headers: dict[str, str], name: dict[str, str]
    ) -> dict[str, Any] | None:
        leg = {key: value for key, value in body.items() if key != "stream_options"}
        leg["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            **name,
        }
        leg |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in leg:
            leg["max_completion_tokens"] = 1
        async with self._session.post(
            next(self._prefill) + path, json=leg, headers=headers
        ) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] | None = (await answer.json()).get("kv_transfer_params")
            return found


def _shown(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an engine's answer that a client sees."""
    kept = ("content-type", "x-dualpath-prefill")
    return {name: value for name, value in headers.items() if name.lower() in kept}
