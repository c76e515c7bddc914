"""Two units, each a router's service with fake engines, over one storage, and their front ends."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dualpath.core.cluster import Role
from dualpath.router.engine_calls import Job
from dualpath.router.linked_front_end import LinkedFrontEnd
from dualpath.router.settings import LinkSettings, RouterSettings
from tests.control_network import ControlNetwork
from tests.unit.router_cluster import Cluster, WatchedService
from tests.unit.router_fakes import GUARD_S, FakeCalls, FakeEngine

_SETTINGS = RouterSettings(front_ends_port=0, exclusive_engine_ids=True)


class UnitCluster:
    """A unit: the networks of its scheduler outlive its processes."""

    def __init__(self, name: str, calls: FakeCalls, stored: set[bytes]) -> None:
        self.name = name
        self.address = f"tcp://{name}:1"
        self.links = ControlNetwork()
        self.settings = _SETTINGS
        self._calls, self._stored = calls, stored
        self._network = ControlNetwork()
        self._engines: list[FakeEngine] = []
        self.made: Cluster

    @property
    def scheduler(self) -> Any:
        return self.made.service.scheduler

    async def start(self, prefill: int = 1, decode: int = 1, **options: Any) -> None:
        """Start the scheduler and its engines; also after ``kill``."""
        await self.start_scheduler()
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for number in range(count):
                await self.add(f"{role.value[0]}{self.name}{number}", role, **options)

    async def start_scheduler(self) -> None:
        service = WatchedService(self.settings, self._calls, self._network, self.links)
        await service.start()
        self.made = Cluster(service, self._calls, self._network)
        self.made.stored = self._stored

    async def add(self, engine_id: str, role: Role, **options: Any) -> FakeEngine:
        engine = await self.made.add(engine_id, role, **options)
        self._engines.append(engine)
        return engine

    async def kill(self) -> None:
        """End all of its processes without a message, as the loss of their machines does."""
        self.made.service.kill()
        await self.kill_engines(*Role)

    async def kill_engines(self, *roles: Role) -> None:
        for engine in self._engines:
            if engine.role in roles and not engine.dead.is_set():
                await engine.kill()
                with contextlib.suppress(KeyError):
                    self.made.lose(engine.engine_id, certain=True)
        self._engines = [engine for engine in self._engines if not engine.dead.is_set()]

    async def stop(self) -> None:
        await self.made.service.stop()
        for engine in self._engines:
            await engine.kill()

    async def nothing_is_left(self) -> None:
        """Wait until its engines have released everything, and check the scheduler's ledger."""
        async with asyncio.timeout(GUARD_S):
            await self.made.settled(*(engine.engine_id for engine in self._engines))
        assert self.scheduler.releases.held == 0
        assert self.scheduler.dispatch.idle()


class TwoUnits:
    """Units ``a`` and ``b``, their storage and the model work of all their engines."""

    def __init__(self) -> None:
        self.calls, self.stored = FakeCalls(), set[bytes]()
        self.a, self.b = (UnitCluster(name, self.calls, self.stored) for name in "ab")
        self._epochs = itertools.count(1)

    def decoded_in(self) -> list[str]:
        """Return the unit of each decode so far, in their order."""
        return [engine_id[1] for engine_id in self.calls.decodes]

    @contextlib.asynccontextmanager
    async def front_end(
        self,
        name: str = "f",
        *,
        settings: RouterSettings = _SETTINGS,
        units: Sequence[str] = ("a", "b"),
        waits_for: Sequence[str] | None = None,
    ) -> AsyncIterator[LinkedFrontEnd]:
        """A front end of these units; ``waits_for`` have to serve, by default all."""
        made = [getattr(self, unit) for unit in units]
        service = LinkedFrontEnd(
            settings,
            LinkSettings(scheduler=",".join(unit.address for unit in made), front_end_name=name),
            self.calls,
            asyncio.get_running_loop().time,
            connections=[unit.links.connect() for unit in made],
            epoch=f"{name} {next(self._epochs)}",
        )
        await service.start()
        try:
            await until(
                lambda: all(
                    service.links[f"{wanted}:1"].engines.alive(role)
                    for wanted in (units if waits_for is None else waits_for)
                    for role in Role
                )
            )
            yield service
        finally:
            await service.stop()


@contextlib.asynccontextmanager
async def two_units(**options: Any) -> AsyncIterator[TwoUnits]:
    """Both units with 1P1D each; ``options`` as those of ``UnitCluster.start``."""
    made = TwoUnits()
    for unit in (made.a, made.b):
        await unit.start(**options)
    try:
        yield made
    finally:
        for unit in (made.a, made.b):
            await unit.stop()


async def until(true: Any) -> None:
    """Wait until it is true, for ``GUARD_S`` at most."""
    async with asyncio.timeout(GUARD_S):
        while not true():
            await asyncio.sleep(0.05)


async def answer(service: LinkedFrontEnd, asked: Job) -> list[int]:
    """Return the tokens of a job."""
    async with asyncio.timeout(GUARD_S):
        events = [event async for event in service.submit(asked)]
    return [token for event in events for token in event.token_ids]
