"""Stores that grant leases: an etcd of this machine, and what of Kubernetes' API leases need."""

import asyncio
import contextlib
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess
from tests.guard import GUARD_S

ETCD = shutil.which("etcd")
TOKEN = "a service account's"


@contextlib.asynccontextmanager
async def etcd(folder: Path) -> AsyncIterator[str]:
    """Run Debian's etcd; yields its URL."""
    assert ETCD is not None
    url, peers = (f"http://127.0.0.1:{claim_port()}" for _ in range(2))
    words = (
        *("--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
        *("--initial-cluster", f"default={peers}"),
    )
    process = SpawnedProcess("etcd", (ETCD, *words), folder / "etcd.log", dict(os.environ))
    try:
        async with asyncio.timeout(GUARD_S), aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{url}/health") as answer:
                        if '"health":"true"' in await answer.text():
                            break
                await asyncio.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait(GUARD_S)


class LeasesOfKubernetes:
    """GET, POST and PUT of Leases, each change of which must name the version it replaces."""

    def __init__(self) -> None:
        self._leases: dict[str, dict[str, Any]] = {}
        self._versions = itertools.count(1)

    def remove(self) -> None:
        """Somebody removes all Leases."""
        self._leases.clear()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_authenticated])
        path = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        app.router.add_get(path + "/{name}", self._get)
        app.router.add_post(path, self._post)
        app.router.add_put(path + "/{name}", self._put)
        return app

    async def _get(self, request: web.Request) -> web.Response:
        lease = self._leases.get(request.match_info["name"])
        return _status(404) if lease is None else web.json_response(lease)

    async def _post(self, request: web.Request) -> web.Response:
        lease = await request.json()
        name = lease["metadata"]["name"]
        return _status(409) if name in self._leases else self._changed(name, lease, 201)

    async def _put(self, request: web.Request) -> web.Response:
        name, lease = request.match_info["name"], await request.json()
        if name not in self._leases:
            return _status(404)
        known = self._leases[name]["metadata"]["resourceVersion"]
        if lease["metadata"].get("resourceVersion") != known:
            return _status(409)
        return self._changed(name, lease, 200)

    def _changed(self, name: str, lease: dict[str, Any], status: int) -> web.Response:
        lease["metadata"]["resourceVersion"] = str(next(self._versions))
        self._leases[name] = lease
        return web.json_response(lease, status=status)


def _status(code: int) -> web.Response:
    return web.json_response({"kind": "Status", "code": code}, status=code)


@web.middleware
async def _authenticated(request: web.Request, handler: Any) -> web.StreamResponse:
    if request.headers.get("Authorization") != f"Bearer {TOKEN}":
        return _status(401)
    answer: web.StreamResponse = await handler(request)
    return answer


@contextlib.asynccontextmanager
async def kubernetes(leases: LeasesOfKubernetes | None = None) -> AsyncIterator[str]:
    """Serve Leases; yields the API's URL."""
    runner = web.AppRunner((leases or LeasesOfKubernetes()).app(), access_log=None)
    await runner.setup()
    port = claim_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
