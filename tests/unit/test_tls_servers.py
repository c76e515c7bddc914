"""HTTPS of light servers: scheduler, emulated routers and engines; refusals before they start."""

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.emulated_cluster import engine_settings
from tests.guard import GUARD_S
from tests.tls_authority import TlsFiles, tls_files

from dualpath.cli.main import main
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.engine.control.surroundings import Surroundings
from dualpath.node.certificates import serving
from dualpath.router.connections import GuardedConnection
from dualpath.router.http.server import serving_app
from dualpath.router.settings import RouterSettings
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath_lab.emulated.process import emulated_engine
from dualpath_lab.emulated.router_server import emulated_router


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return tls_files(tmp_path)


def trusting(files: TlsFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files.authority)


async def test_an_emulated_cluster_speaks_https_throughout(files: TlsFiles, tmp_path: Path) -> None:
    """Clients reach the router, and the router its engines, over HTTPS alone."""
    fabric = InProcessFabric()
    surroundings = Surroundings(open_transport=lambda name, *_: InProcessTransport(name, fabric))
    router = RouterSettings(mode=Mode.SPLIT, engine_ca_file=files.authority)
    tls = serving(files.certificate, files.key)
    async with (
        aiohttp.ClientSession() as http,
        emulated_router(router, "127.0.0.1", 0, tls) as (endpoint, service),
    ):
        control = service.scheduler.server.address
        own = {"ssl_certfile": files.certificate, "ssl_keyfile": files.key}
        prefill, decode = (
            engine_settings(role, role.value, control, tmp_path / "kv", Mode.SPLIT, **own)
            for role in Role
        )
        async with emulated_engine(prefill, surroundings), emulated_engine(decode, surroundings):
            await service.wait_ready(1, 1, GUARD_S)
            urls = [engine["api_url"] for engine in service.status()["engines"]]
            assert endpoint.startswith("https://127.0.0.1:")
            assert all(url.startswith("https://127.0.0.1:") for url in urls)
            body = {"prompt": list(range(1, 20)), "max_tokens": 3}
            async with http.post(
                f"{endpoint}/v1/completions", json=body, ssl=trusting(files)
            ) as answer:
                assert answer.status == 200
                assert len((await answer.json())["choices"][0]["token_ids"]) == 3
            with pytest.raises(aiohttp.ClientError):  # plain HTTP
                await http.get(endpoint.replace("https", "http") + "/health")
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await http.get(f"{endpoint}/health")


async def test_limits_of_connections_hold_over_https(files: TlsFiles) -> None:
    """A connection shows its requests to the limits, so that a long answer is not idle time."""

    async def guarded(request: web.Request) -> web.Response:
        assert request.transport is not None
        connection = request.transport.get_protocol()
        assert isinstance(connection, GuardedConnection)
        now_s = asyncio.get_running_loop().time()
        return web.Response(text=str(connection.quiet_since_s(now_s) == now_s))

    app = web.Application()
    app.router.add_get("/", guarded)
    tls = serving(files.certificate, files.key)
    async with (
        serving_app(app, "127.0.0.1", 0, tls=tls) as port,
        aiohttp.ClientSession() as http,
        http.get(f"https://127.0.0.1:{port}/", ssl=trusting(files)) as answer,
    ):
        assert await answer.text() == "True"


async def test_a_handshake_that_never_ends_delays_no_other_client(
    files: TlsFiles,
) -> None:
    tls = serving(files.certificate, files.key)
    async with (
        aiohttp.ClientSession() as http,
        emulated_router(RouterSettings(), "127.0.0.1", 0, tls) as (endpoint, _),
    ):
        host, _, port = endpoint.removeprefix("https://").rpartition(":")
        _, silent = await asyncio.open_connection(host, int(port))
        async with http.get(f"{endpoint}/health", ssl=trusting(files)) as answer:
            assert answer.status == 503, "it has no engines"
        silent.close()


def test_files_that_cannot_be_used_are_refused(files: TlsFiles, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    assert serving("", "") is None
    for certificate, key_file, why in (
        ("", files.key, "there is no ssl_certfile"),
        ("none.pem", files.key, "No such file"),
        (files.certificate, files.certificate, "give a PEM certificate and its key"),
        (files.certificate, str(encrypted), "without a password"),
    ):
        with pytest.raises(ConfigError) as refused:
            serving(certificate, key_file)
        assert why in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        "scheduler --port 0 --control-port 0 --front-ends-port 0",
        "emulate router --port 0 --control-port 0",
        "emulate router --port 0 --control-port 0 --front-ends 2",
        "emulate frontend --port 0 --scheduler tcp://127.0.0.1:1",
        "emulate decode --model smollm2-135m --storage kv --transport memory",
    ],
)
def test_a_server_with_a_missing_certificate_does_not_start(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), "--ssl-certfile", "none.pem", "--ssl-keyfile", "none.key"]) == 2
    error = capsys.readouterr().err
    assert "--ssl-certfile is 'none.pem'" in error
    assert "No such file or directory" in error


def test_an_engine_with_a_certificate_needs_a_url_of_https(tmp_path: Path) -> None:
    url = {"api_url": "http://10.0.0.1:1", "ssl_certfile": "cert.pem"}
    with pytest.raises(ConfigError, match="write https:// there"):
        engine_settings(Role.DECODE, "d", "tcp://127.0.0.1:1", tmp_path, Mode.SPLIT, **url)
