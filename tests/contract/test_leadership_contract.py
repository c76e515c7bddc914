"""Leadership among schedulers, by any kind of election."""

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.guard import GUARD_S
from tests.lease_servers import ETCD, TOKEN, LeasesOfKubernetes, etcd, kubernetes

from dualpath.core.errors import ConfigError, StorageError
from dualpath.router.scheduler.leadership import (
    FileLeadership,
    Leadership,
    SoleLeader,
    open_leadership,
)
from dualpath.router.scheduler.leases import (
    EtcdLease,
    KubernetesLease,
    LeasedLeadership,
    LeaseStore,
)
from dualpath.router.settings import RouterSettings

#: etcd grants no shorter ones.
LEASE_S = 2.0
needs_etcd = pytest.mark.skipif(ETCD is None, reason="there is no etcd: apt install etcd-server")
STORES = [pytest.param("etcd", marks=needs_etcd), "kubernetes"]


class Store:
    """A store with a connection that a test may cut; it counts renewals."""

    def __init__(self, inner: LeaseStore) -> None:
        self._inner = inner
        self.cut = False
        self.renewals = 0
        self.renewed = asyncio.Event()

    async def acquire(self, holder: str, lease_s: float) -> bool:
        self._reach()
        return await self._inner.acquire(holder, lease_s)

    async def renew(self) -> bool:
        self._reach()
        renewed = await self._inner.renew()
        self.renewals += renewed
        self.renewed.set()
        return renewed

    async def release(self) -> None:
        self._reach()
        await self._inner.release()

    async def close(self) -> None:
        await self._inner.close()

    def _reach(self) -> None:
        if self.cut:
            raise StorageError("cut off")


class Schedulers:
    """Creates leaderships over one lock or lease."""

    def __init__(
        self, leadership: Callable[[str], Leadership], die: Callable[[Leadership], None]
    ) -> None:
        self.leadership = leadership
        self.die = die


def leased(store: Callable[[], LeaseStore]) -> Schedulers:
    def leadership(holder: str) -> LeasedLeadership:
        return LeasedLeadership(Store(store()), "a lease", holder, time.monotonic, LEASE_S)

    def die(leadership: Leadership) -> None:
        assert isinstance(leadership, LeasedLeadership)
        assert leadership._renewing is not None
        leadership._renewing.cancel()

    return Schedulers(leadership, die)


@contextlib.asynccontextmanager
async def stores(kind: str, folder: Path) -> AsyncIterator[Callable[[], LeaseStore]]:
    if kind == "etcd":
        async with etcd(folder) as url:
            yield lambda: EtcdLease(url, "test")
        return
    (folder / "token").write_text(f"{TOKEN}\n")
    async with kubernetes() as url:
        yield lambda: KubernetesLease("default", "test", time.monotonic, url, folder)


@pytest.fixture(params=["file", *STORES])
async def schedulers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Schedulers]:
    if request.param == "file":
        lock = str(tmp_path / "lock")
        free: Callable[[Leadership], None] = FileLeadership.free  # type: ignore[assignment]
        yield Schedulers(lambda holder: FileLeadership(lock), free)
        return
    async with stores(request.param, tmp_path) as store:
        yield leased(store)


@pytest.fixture(params=STORES)
async def leases(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Schedulers]:
    async with stores(request.param, tmp_path) as store:
        yield leased(store)


def held(*leaderships: Leadership) -> list[bool]:
    return [leadership.held for leadership in leaderships]


def store_of(leadership: Leadership) -> Store:
    assert isinstance(leadership, LeasedLeadership)
    assert isinstance(leadership._store, Store)
    return leadership._store


async def test_one_of_many_leads_and_the_next_one_takes_over(schedulers: Schedulers) -> None:
    first, second = (schedulers.leadership(name) for name in "fs")
    assert first.contended
    assert held(first, second) == [False, False]
    async with asyncio.timeout(GUARD_S):
        await first.acquired()
        waiting = asyncio.create_task(second.acquired())
        await asyncio.sleep(0)
        assert held(first, second) == [True, False]
        await first.release()
        assert held(first) == [False]
        await waiting
    assert held(first, second) == [False, True]
    await second.release()
    await second.release()


async def test_a_killed_leader_is_replaced(schedulers: Schedulers) -> None:
    first, second = (schedulers.leadership(name) for name in "fs")
    async with asyncio.timeout(GUARD_S):
        await first.acquired()
        schedulers.die(first)
        await second.acquired()
    assert held(first, second) == [False, True]
    await asyncio.gather(first.release(), second.release())


async def test_leadership_lasts_as_long_as_it_is_renewed(leases: Schedulers) -> None:
    first, second = (leases.leadership(name) for name in "fs")
    async with asyncio.timeout(GUARD_S):
        await first.acquired()
        waiting = asyncio.create_task(second.acquired())
        while store_of(first).renewals < 10:  # two leases
            store_of(first).renewed.clear()
            await store_of(first).renewed.wait()
            assert first.held
        assert not waiting.done()
        waiting.cancel()
    await asyncio.gather(first.release(), second.release())


async def test_a_leader_that_cannot_renew_stops_before_the_next_one_begins(
    leases: Schedulers,
) -> None:
    first, second = (leases.leadership(name) for name in "fs")
    async with asyncio.timeout(GUARD_S):
        await first.acquired()
        store_of(first).cut = True
        waiting = asyncio.create_task(second.acquired())
        assert "could not be renewed in time" in await first.lost()
        assert not first.held
        assert not waiting.done()
        await waiting
        assert second.held
        # Its release comes too late and does not end the lease of the next one.
        store_of(first).cut = False
        assert not await store_of(first).renew()
        await first.release()
        assert second.held
        assert await store_of(second).renew()
    await second.release()


async def test_a_store_that_is_not_there_is_tried_again(leases: Schedulers) -> None:
    leadership = leases.leadership("f")
    store_of(leadership).cut = True
    async with asyncio.timeout(GUARD_S):
        waiting = asyncio.create_task(leadership.acquired())
        await asyncio.sleep(0)
        store_of(leadership).cut = False
        await waiting
    await leadership.release()


async def test_after_a_long_sleep_leadership_is_lost(tmp_path: Path) -> None:
    now_s = 0.0
    async with stores("kubernetes", tmp_path) as store:
        leadership = LeasedLeadership(store(), "a lease", "f", lambda: now_s, LEASE_S)
        await leadership.acquired()
        assert held(leadership) == [True]
        now_s += LEASE_S  # as after SIGSTOP, before anything else runs
        assert held(leadership) == [False]
        assert "could not be renewed in time" in await leadership.lost()
        await leadership.release()


async def test_a_removed_lease_is_lost(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    leases = LeasesOfKubernetes()
    async with kubernetes(leases) as url, asyncio.timeout(GUARD_S):
        store = KubernetesLease("default", "test", time.monotonic, url, tmp_path)
        leadership = LeasedLeadership(store, "a lease", "f", time.monotonic, LEASE_S)
        await leadership.acquired()
        leases.remove()
        assert "is another's" in await leadership.lost()
        assert held(leadership) == [False]
        await leadership.release()


@pytest.mark.parametrize("kind", STORES)
async def test_a_renewal_without_an_answer_does_not_prevent_the_release(
    kind: str, tmp_path: Path
) -> None:
    """The store has renewed the lease, but the renewal was cancelled before its answer came."""
    async with stores(kind, tmp_path) as opened, asyncio.timeout(GUARD_S):
        first, second = opened(), opened()
        assert await first.acquire("first", 3600.0)
        assert await copy.copy(first).renew()
        await first.release()
        assert await second.acquire("second", 3600.0)
        await second.release()
        for store in (first, second):
            await store.close()


async def test_an_account_that_may_do_nothing_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a stranger's")
    async with kubernetes() as url:
        store = KubernetesLease("default", "test", time.monotonic, url, tmp_path)
        with pytest.raises(StorageError, match=r"401.*get, create and update leases"):
            await store.acquire("f", LEASE_S)
        await store.close()


async def test_a_sole_scheduler_always_leads() -> None:
    leadership = open_leadership(RouterSettings())
    assert isinstance(leadership, SoleLeader)
    await leadership.acquired()
    assert leadership.held
    assert not leadership.contended
    await leadership.release()


@pytest.mark.parametrize(
    ("lease", "why"),
    [
        ("etcd://host/name", "give etcds://HOST:PORT/NAME"),
        ("zookeeper://host:1/name", "give etcds://HOST:PORT/NAME"),
        ("kubernetes://default/name", "KUBERNETES_SERVICE_HOST is not set"),
    ],
)
def test_a_lease_that_cannot_be_is_refused(
    lease: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=why):
        open_leadership(RouterSettings(standby_lease=lease))
