"""A router service with fake engines registered, and means to wait for what happens in it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec
from tests.control_network import Arrivals, ControlNetwork, Network, ZmqNetwork
from tests.unit.router_fakes import GUARD_S, FakeCalls, FakeEngine

from dualpath.core import control
from dualpath.core.cluster import Role
from dualpath.router.engine_calls import EngineCalls, Job, TokenEvent
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings


class WatchedService(RouterService):
    """A router service that lets a test wait until it has got a message."""

    def __init__(
        self,
        settings: RouterSettings,
        calls: EngineCalls,
        network: ControlNetwork | None = None,
        front_ends: ControlNetwork | None = None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        super().__init__(settings, calls, clock, network, front_ends_socket=front_ends)
        self.arrivals = Arrivals(self)

    def kill(self) -> None:
        """End as SIGKILL does: no more messages to engines, streams end."""
        for loops in (self.server.loops, self.scheduler.front_ends.loops):
            for task in loops.tasks:
                task.cancel()
            loops.post = lambda identity, frame: None  # type: ignore[method-assign]
        for request in self._tasks:
            request.cancel()

    async def saw_loss(self, engine_id: str) -> None:
        await self.arrivals.until(
            lambda: all(e.engine_id != engine_id for e in self.registry.alive()), GUARD_S
        )

    async def saw(self, kind: type, count: int = 1) -> None:
        """Wait for the ``count``-th message of a kind since the start."""
        await self.arrivals.until(
            lambda: sum(isinstance(m, kind) for m in self.arrivals.messages) >= count, GUARD_S
        )


class Cluster:
    """A router service and the engines registered with it."""

    def __init__(self, service: WatchedService, calls: FakeCalls, network: Network) -> None:
        self.service, self.calls, self.network = service, calls, network
        self.stored: set[bytes] = set()

    @property
    def engines(self) -> dict[str, FakeEngine]:
        return self.calls.engines

    async def add(self, engine_id: str, role: Role, **options) -> FakeEngine:
        engine = FakeEngine(engine_id, role, self.stored, **options)
        self.engines[engine_id] = engine
        engine.others = self.engines
        return await engine.join(self.network)

    async def caches(self, engine_id: str, keys: Sequence[bytes]) -> None:
        """Store blocks, and let an engine report that it caches them; its slots are empty."""
        self.stored.update(keys)
        heads = tuple(key[: control.CACHE_UPDATE_KEY_BYTES] for key in keys)
        self.engines[engine_id].send(control.CacheUpdate(added=heads))
        await self.delivered(self.engines[engine_id])

    async def run(self, job: Job) -> list[int]:
        """Return a job's tokens, checking that the stream ends as it should."""
        return [t for event in await self.events(job) for t in event.token_ids]

    async def events(self, job: Job) -> list[TokenEvent]:
        async with asyncio.timeout(GUARD_S):
            events = [event async for event in self.service.submit(job)]
        assert [e.finish_reason is not None for e in events] == [False] * (len(events) - 1) + [True]
        return events

    async def settled(self, *engine_ids: str) -> None:
        """Wait until engines have got all messages and hold nothing any more."""
        engines = [self.engines[i] for i in engine_ids] or list(self.engines.values())
        roles = [engine.role for engine in engines]
        here = roles.count(Role.PREFILL), roles.count(Role.DECODE)
        # An engine that was declared lost registers again.
        await self.service.wait_ready(*here, GUARD_S)
        async with asyncio.timeout(GUARD_S):
            for engine in engines:
                await self.delivered(engine)
                while not engine.idle():
                    seen = len(engine.received)
                    await engine.more_than(seen)

    async def delivered(self, engine: FakeEngine) -> None:
        """Wait until an engine has got all that was sent to it."""
        call_id, answer = self.service.scheduler.exchange.call(engine.engine_id)
        self.service.server.send(engine.engine_id, control.Sync(call_id))
        await answer

    async def arrives(self, stage: str) -> None:
        """Wait until model work has got to its gate."""
        await asyncio.wait_for(self.calls.entered[stage].wait(), GUARD_S)

    async def revive(self, engine_id: str) -> None:
        """Start an engine's next process."""
        await self.engines[engine_id].join(self.network)

    async def restart_router(self) -> None:
        """Start the router's next process; its engines' connections are those of the network."""
        assert isinstance(self.network, ControlNetwork)
        self.service = WatchedService(self.service.settings, self.calls, self.network)
        await self.service.start()

    def lose(self, engine_id: str, *, certain: bool = False) -> None:
        """Let the router notice that an engine is gone."""
        self.service.server.declare_lost(engine_id, "test", certain)


@contextlib.asynccontextmanager
async def cluster(
    prefill: int = 1,
    decode: int = 1,
    *,
    settings: RouterSettings | None = None,
    network: ControlNetwork | None = None,
    real_sockets: bool = False,
    **engine_options,
) -> AsyncIterator[Cluster]:
    """Control connections are in memory, unless ``real_sockets``: then they are ZMQ's."""
    calls = FakeCalls()
    in_memory = None if real_sockets else network or ControlNetwork()
    settings = msgspec.structs.replace(settings or RouterSettings(), exclusive_engine_ids=True)
    service = WatchedService(settings, calls, in_memory)
    await service.start()
    made = Cluster(service, calls, in_memory or ZmqNetwork(service.scheduler.server.address))
    try:
        for number in range(prefill):
            await made.add(f"p{number}", Role.PREFILL, **engine_options)
        for number in range(decode):
            await made.add(f"d{number}", Role.DECODE, **engine_options)
        yield made
    finally:
        await made.service.stop()
        for engine in made.engines.values():
            await engine.kill()
