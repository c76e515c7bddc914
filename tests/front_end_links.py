"""Links of front ends to a scheduler, over connections in memory."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping

from dualpath.router.scheduler.front_end_server import FrontEndServer
from dualpath.router.scheduler.remote import RemoteScheduling
from dualpath.router.scheduler.scheduler import Scheduler
from dualpath.router.served_adapters import ServedAdapters
from tests.control_network import Connection, ControlNetwork

_epochs = itertools.count(1)
#: As ``engine_timeout_s`` by default.
TIMEOUT_S = 10.0


class Link(RemoteScheduling):
    """A front end's link that a test can reset or kill."""

    def __init__(
        self, connection: Connection, name: str, adapters: Mapping[str, str] | None = None
    ) -> None:
        clock = asyncio.get_running_loop().time
        served = ServedAdapters(adapters or {})
        super().__init__(connection, name, f"epoch {next(_epochs)}", clock, "memory", served)
        self.connection = connection

    async def kill(self) -> None:
        """End without a message, as SIGKILL does."""
        self.connection.close()
        self._post = lambda envelopes: None  # type: ignore[method-assign]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []


class LinkServer:
    """A scheduler's server of front-end links, and its network."""

    def __init__(self, scheduler: Scheduler, network: ControlNetwork) -> None:
        self.network = network
        #: By so much its clock is ahead, as after a stall of the scheduler's process alone.
        self.ahead_s = 0.0
        self.server = FrontEndServer(scheduler, network, self._now_s, TIMEOUT_S)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s

    @contextlib.asynccontextmanager
    async def link(
        self, name: str, adapters: Mapping[str, str] | None = None
    ) -> AsyncIterator[Link]:
        """A front end with a session, and paths of adapters that its clients may name."""
        link = Link(self.network.connect(), name, adapters)
        link.start()
        while not link.session or link.engines.namespace is None:
            await asyncio.sleep(0.01)
        try:
            yield link
        finally:
            await link.stop()


@contextlib.asynccontextmanager
async def link_server(
    scheduler: Scheduler, network: ControlNetwork | None = None
) -> AsyncIterator[LinkServer]:
    """Start the link server of a scheduler with registered engines."""
    made = LinkServer(scheduler, network or ControlNetwork())
    await made.server.start("memory", 0)
    try:
        yield made
    finally:
        await made.server.stop()
