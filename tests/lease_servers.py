"""Stores that grant leases: an etcd of this machine, and what of Kubernetes' API leases need."""

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess
from tests.guard import GUARD_S

ETCD = shutil.which("etcd")
TOKEN = "a service account's"


def certificates(folder: Path) -> None:
    """Make an authority (ca.pem), and what it signs: etcd.pem, client.pem; keys are NAME.key.

    Their subjects have no common name: with users, etcd's gateway refuses such certificates.
    """

    def openssl(*words: str) -> None:
        subprocess.run(("openssl", *words), check=True, cwd=folder, capture_output=True)

    made = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl("req", "-x509", *made, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    (folder / "names").write_text(
        "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    for name in ("etcd", "client"):
        subject = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/O={name}")
        openssl("req", *made[:3], *subject)
        signed = ("-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        openssl("x509", "-req", *signed, "-out", f"{name}.pem", "-days", "2", "-extfile", "names")


@contextlib.asynccontextmanager
async def guarded_etcd(folder: Path, *, user: str, password: str) -> AsyncIterator[str]:
    """Run an etcd with `certificates` of this folder: TLS, clients' certificates, one user."""
    certificates(folder)
    files = ("--cert-file", "etcd.pem", "--key-file", "etcd.key", "--trusted-ca-file", "ca.pem")
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(str(folder / "client.pem"), str(folder / "client.key"))
    async with etcd(folder, (*files, "--client-cert-auth"), context) as url:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:
            everything = {"permType": "READWRITE", "key": _base64("dualpath/")}
            for method, body in (
                ("auth/user/add", {"name": "root", "password": "root's"}),
                ("auth/role/add", {"name": "root"}),
                ("auth/user/grant", {"user": "root", "role": "root"}),
                ("auth/user/add", {"name": user, "password": password}),
                ("auth/role/add", {"name": "dualpath"}),
                (
                    "auth/role/grant",
                    {"name": "dualpath", "perm": {**everything, "range_end": _base64("dualpath0")}},
                ),
                ("auth/user/grant", {"user": user, "role": "dualpath"}),
                ("auth/enable", {}),
            ):
                async with http.post(f"{url}/v3/{method}", json=body) as answer:
                    assert answer.status == 200, (method, await answer.text())
        yield url


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@contextlib.asynccontextmanager
async def etcd(
    folder: Path, more: Sequence[str] = (), context: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Run Debian's etcd, with TLS if there is a ``context`` for it; yields its URL."""
    assert ETCD is not None
    peers = f"http://127.0.0.1:{claim_port()}"
    url = f"{'https' if context else 'http'}://127.0.0.1:{claim_port()}"
    words = (
        *more,
        *("--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
        *("--initial-cluster", f"default={peers}"),
    )
    process = SpawnedProcess(
        "etcd", (ETCD, *words), folder / "etcd.log", dict(os.environ), folder=folder
    )
    try:
        connector = aiohttp.TCPConnector(ssl=context if context is not None else True)
        async with asyncio.timeout(GUARD_S), aiohttp.ClientSession(connector=connector) as http:
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
