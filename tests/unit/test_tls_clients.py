"""Clients of HTTPS servers: which certificates they accept, and who gets the router's."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.tls_authority import TlsFiles, tls_files

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError, EngineLostError
from dualpath.launch.commands import engine_command, router_command
from dualpath.launch.local_cluster import ClusterStatus
from dualpath.launch.settings import LocalClusterSettings
from dualpath.node.certificates import trusting, trusting_only
from dualpath.node.http_client import client_session, sent
from dualpath.vllm.engine_arguments import tls_arguments

STATUS = {"engines": [{"engine_id": "pe-0", "role": "prefill", "alive": True}]}


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return tls_files(tmp_path)


@asynccontextmanager
async def https(files: TlsFiles, *, asks_clients: bool = False) -> AsyncIterator[str]:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response(STATUS)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    if asks_clients:
        context.load_verify_locations(files.authority)
        context.verify_mode = ssl.CERT_REQUIRED
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def status_of(url: str, tls: ssl.SSLContext) -> int:
    async with (
        client_session(timeout=aiohttp.ClientTimeout(total=30), tls=tls) as session,
        sent(session, "POST", url, data=b"") as response,
    ):
        return response.status


async def test_clients_accept_certificates_of_the_authorities_in_their_file(files: TlsFiles):
    async with https(files) as url:
        assert await status_of(url, trusting(files.authority)) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status_of(url, trusting(""))
        by_name = url.replace("127.0.0.1", "127.0.0.2")
        with pytest.raises(aiohttp.ClientConnectorError):
            await status_of(by_name, trusting(files.authority))


@pytest.mark.parametrize("asks_clients", [False, True])
async def test_a_supervisor_accepts_the_certificate_of_its_router(
    files: TlsFiles, asks_clients: bool
):
    async with https(files, asks_clients=asks_clients) as url:
        status = ClusterStatus(url, url, {}, lambda: trusting_only(files.certificate, files.key))
        assert await asyncio.to_thread(status.alive) == {"pe-0": "prefill"}
        assert await asyncio.to_thread(status.serves)
        assert await asyncio.to_thread(status.roles) == STATUS


async def test_a_supervisor_accepts_no_other_certificate(files: TlsFiles, tmp_path: Path):
    (tmp_path / "other").mkdir()
    other = tls_files(tmp_path / "other")
    async with https(other) as url:
        status = ClusterStatus(url, url, {}, lambda: trusting_only(files.certificate, files.key))
        assert not await asyncio.to_thread(status.serves)
        assert await asyncio.to_thread(status.roles) is None


@pytest.mark.parametrize(
    "typed",
    [
        ("--ssl-keyfile", "k.pem", "--ssl-certfile", "c.pem"),
        ("--ssl_keyfile=k.pem", "--ssl_certfile=c.pem"),
        ("--ssl-certfile=c.pem", "--ssl-keyfile", "k.pem", "--enable-ssl-refresh"),
        ("--ssl-keyfile=k.pem", "--ssl-cert-reqs", "2", "--ssl-certfile", "c.pem"),
    ],
)
def test_the_router_alone_gets_the_certificate_of_serve(typed: tuple[str, ...]):
    settings = LocalClusterSettings(
        model="m",
        storage="kv",
        vllm_args=("--max-num-seqs", "4", *typed, "--seed", "1"),
    )
    assert router_command(settings, 1, 2)[-len(settings.vllm_args) :] == [*settings.vllm_args]
    engine = engine_command(settings, Role.PREFILL, 0, 3, 2)
    assert engine[-4:] == ["--max-num-seqs", "4", "--seed", "1"]
    assert not any("ssl" in word for word in engine)
    found = tls_arguments(settings.vllm_args)
    assert (found.certificate_file, found.key_file) == ("c.pem", "k.pem")


def test_files_that_are_no_certificate_are_refused(tmp_path: Path, files: TlsFiles):
    (tmp_path / "empty").write_text("")
    for certificate, key in (("absent", files.key), (str(tmp_path / "empty"), files.key)):
        with pytest.raises(ConfigError, match=r"--ssl-certfile .*give a PEM certificate"):
            trusting_only(certificate, key)
    with pytest.raises(ConfigError, match=r"engine_ca_file is 'absent'"):
        trusting("absent", "engine_ca_file")


async def test_replay_names_the_certificate_that_it_does_not_trust(files: TlsFiles):
    from dualpath.workload.replay.client import ReplayOptions, replay

    async with https(files) as url:
        with pytest.raises(EngineLostError, match="certificate"):
            await replay([], url, ReplayOptions())
        # Its authority is trusted: what fails is the endpoint, which lists no model.
        with pytest.raises(ConfigError, match="lists no model"):
            await replay([], url, ReplayOptions(ca_file=files.authority))
