"""A lease in an etcd that asks for TLS, a certificate and a password."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.guard import GUARD_S
from tests.lease_servers import ETCD, guarded_etcd

from dualpath.core.errors import ConfigError, StorageError
from dualpath.launch.scaled_router import scheduler_command
from dualpath.router.scheduler.leadership import open_leadership
from dualpath.router.scheduler.leases import EtcdAccess, EtcdLease, LeasedLeadership
from dualpath.router.settings import RouterSettings, SchedulerAddress

LEASE = "etcds://etcd.example:2379/name"
FILES = {"lease_ca_file": "ca.pem", "lease_cert_file": "client.pem", "lease_key_file": "client.key"}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"lease_user": "u"}, r"lease_user is given and standby_lease is ''"),
        ({"standby_lease": "kubernetes://a/b", "lease_ca_file": "c"}, "for etcds://HOST:PORT/NAME"),
        ({"standby_lease": LEASE, "lease_cert_file": "c"}, "belong together"),
        ({"standby_lease": LEASE, "lease_key_file": "c"}, "belong together"),
        ({"standby_lease": "etcd://h:1/n", "lease_ca_file": "c"}, "which uses no TLS"),
        ({"standby_lease": "etcd://h.example:1/n", "lease_user": "u"}, "sent in the clear; write"),
    ],
)
def test_credentials_that_the_store_could_not_use_are_refused(given, why):
    with pytest.raises(ConfigError, match=why):
        RouterSettings(**given)


def test_a_user_needs_a_password_and_files_have_to_be_readable(tmp_path, monkeypatch):
    monkeypatch.delenv("DUALPATH_LEASE_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match="there is no password; give lease_password_file or set"):
        open_leadership(RouterSettings(standby_lease=LEASE, lease_user="u"))
    monkeypatch.setenv("DUALPATH_LEASE_PASSWORD", "")
    with pytest.raises(ConfigError, match="DUALPATH_LEASE_PASSWORD is set and empty"):
        open_leadership(RouterSettings(standby_lease=LEASE, lease_user="u"))
    monkeypatch.delenv("DUALPATH_LEASE_PASSWORD")
    missing: dict[str, Any] = {name: str(tmp_path / file) for name, file in FILES.items()}
    with pytest.raises(ConfigError, match=r"cannot be used .*; give files in PEM format"):
        open_leadership(RouterSettings(standby_lease=LEASE, **missing))


def test_no_command_line_or_log_has_the_password():
    settings = RouterSettings(
        standby_lease=LEASE, lease_user="u", lease_password_file="/etc/secret", front_ends_port=1
    )
    words = scheduler_command(settings, SchedulerAddress())
    assert words[words.index("--lease-password-file") + 1] == "/etc/secret"
    assert "s3cret" not in repr(EtcdAccess(user="u", password="s3cret"))


# ---------------------------------------------------------------------- an etcd

needs_etcd = pytest.mark.skipif(ETCD is None, reason="etcd is not here")


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RouterSettings]:
    (tmp_path / "password").write_text("s3cret\n")
    async with guarded_etcd(tmp_path, user="dualpath", password="s3cret") as url:
        files: dict[str, Any] = {name: str(tmp_path / file) for name, file in FILES.items()}
        yield RouterSettings(
            standby_lease=f"{url.replace('https', 'etcds')}/name",
            lease_user="dualpath",
            lease_password_file=str(tmp_path / "password"),
            **files,
        )


@needs_etcd
async def test_schedulers_lead_by_a_lease_in_an_etcd_that_asks_for_everything(guarded):
    first, second = open_leadership(guarded), open_leadership(guarded)
    async with asyncio.timeout(GUARD_S):
        await first.acquired()
        waiting = asyncio.create_task(second.acquired())
        assert [first.held, second.held] == [True, False]
        await first.release()
        await waiting
        assert second.held
        await second.release()


@needs_etcd
async def test_a_token_that_etcd_no_longer_knows_is_replaced(guarded):
    """Tokens of etcd expire after minutes, and with a change of its users."""
    turn = open_leadership(guarded)
    assert isinstance(turn, LeasedLeadership)
    store = turn._store
    assert isinstance(store, EtcdLease)
    assert await store.acquire("holder", 10.0)
    # Without a lease to create, both ask etcd for the key, which needs a valid token.
    store._token = "expired.7"
    assert not await store.acquire("another", 10.0)
    async with as_root(guarded) as call:
        await call("auth/user/add", {"name": "another", "password": "x"})
    assert not await store.acquire("another", 10.0)
    assert await store.renew()
    await store.release()
    await store.close()


@needs_etcd
async def test_without_each_of_them_there_is_no_lease(guarded, tmp_path):
    files = EtcdAccess(
        guarded.lease_ca_file, guarded.lease_cert_file, guarded.lease_key_file, "dualpath", "s3cret"
    )
    url = guarded.standby_lease.removesuffix("/name").replace("etcds", "https")
    for changed in (
        {"ca_file": ""},
        {"cert_file": "", "key_file": ""},
        {"password": "wrong"},
        {"user": "", "password": ""},
        {"user": "root", "password": "s3cret"},
    ):
        store = EtcdLease(url, "name", msgspec.structs.replace(files, **changed))
        with pytest.raises(StorageError, match=r"etcd at https://127\.0\.0\.1"):
            await store.acquire("holder", 10.0)
        await store.close()
    store = EtcdLease(url.replace("https", "http"), "name", files)
    with pytest.raises(StorageError):
        await store.acquire("holder", 10.0)
    await store.close()


@contextlib.asynccontextmanager
async def as_root(settings: RouterSettings):
    context = ssl.create_default_context(cafile=settings.lease_ca_file)
    context.load_cert_chain(settings.lease_cert_file, settings.lease_key_file)
    url = settings.standby_lease.removesuffix("/name").replace("etcds", "https")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:

        async def call(method: str, body: dict[str, str], token: str = "") -> dict[str, str]:
            headers = {"Authorization": token} if token else {}
            async with http.post(f"{url}/v3/{method}", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                found: dict[str, str] = await answer.json()
                return found

        root = await call("auth/authenticate", {"name": "root", "password": "root's"})

        async def authenticated(method: str, body: dict[str, str]) -> dict[str, str]:
            return await call(method, body, root["token"])

        yield authenticated
