"""A process that serves clients, a router or a front end, and the clients' connections to it."""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine

from dualpath.core.errors import DualPathError
from dualpath.laboratory.chaos.simulation.clock import TRUE_CLOCK, Clock
from dualpath.laboratory.chaos.simulation.cluster_parts import ClusterResources
from dualpath.laboratory.chaos.simulation.loop import ProcessLoop
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.front_end_service import FrontEndService

_DELAYS_S = (0.0001, 0.0005, 0.002)

#: What a client receives: tokens, an error, None at a regular end, "reset" for a lost connection.
Reply = TokenEvent | DualPathError | str | None


class ClientEndpoint(ABC):
    """A process from its start to its end; ``serves``: whether clients can connect."""

    def __init__(
        self, shared: ClusterResources, name: str, host: str, clock: Clock = TRUE_CLOCK
    ) -> None:
        self.serves = False
        #: Whether another process leads, or may lead, instead: its clients must retry.
        self.lost_leadership = False
        self.name = name
        self._shared = shared
        self.process, _ = shared.process(name, host)
        self.loop = ProcessLoop(self.process, clock)  # type: ignore[abstract]
        self._ending = self._over = False
        self._exchanges: dict[Exchange, None] = {}
        shared.world.note(name, "starts")

    @property
    @abstractmethod
    def service(self) -> FrontEndService:
        """The service for clients."""

    @abstractmethod
    def held_when_idle(self) -> list[str]:
        """Return descriptions of what it still holds without requests."""

    @abstractmethod
    def _died(self) -> None:
        """Make the other processes notice its death."""

    def request(self, job: Job, reply: Callable[[Reply], None]) -> "Exchange":
        """Send a client's request; ``reply`` is called with what the client receives."""
        exchange = Exchange(self, job, reply)
        self._exchanges[exchange] = None
        return exchange

    @property
    def clients(self) -> int:
        """Number of open client requests."""
        return len(self._exchanges)

    def on_ended(self, exchange: "Exchange") -> None:
        """An exchange has ended."""
        self._exchanges.pop(exchange, None)

    def terminate(self) -> None:
        """End as after SIGTERM: drain, then end; idempotent."""
        if not self._ending:
            self._ending = True
            self._shared.world.note(self.name, "is asked to end")
            self._run(self._drain)

    async def _drain(self) -> None:
        await self.service.drain()
        await self._end("has drained")

    async def _end(self, why: str) -> None:
        """End by itself; only the first call has an effect."""
        if self._over:
            return
        self._over = True
        self._shared.world.note(self.name, why)
        await self._stop()
        self._shared.world.after(0.0, self.kill)

    @abstractmethod
    async def _stop(self) -> None:
        """Stop the service."""

    def kill(self) -> None:
        """End as after SIGKILL."""
        if not self.process.alive:
            return
        self._shared.world.note(self.name, "is dead")
        self.serves = False
        self.process.kill()
        self._died()
        self._shared.http.caller_died(self.loop)
        for exchange in list(self._exchanges):
            exchange.send("reset")

    def _run(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        self.loop.call_soon(lambda: self.loop.create_task(work()))


class Exchange:
    """One request of a client on its own connection."""

    def __init__(
        self, endpoint: "ClientEndpoint", job: Job, reply: Callable[[Reply], None]
    ) -> None:
        self.endpoint = endpoint
        self._world = endpoint.process.world
        self._reply = reply
        self._free_s = 0.0
        self._left = False
        self._task: asyncio.Task[None] | None = None
        self._later(functools.partial(self._begin, job))

    def leave(self) -> None:
        """Close the connection from the client's side."""
        self._left = True
        self._later(self._cancel)

    def send(self, reply: Reply) -> None:
        """Send a reply to the client; replies arrive in order."""
        delay_s = self._world.pick(_DELAYS_S)
        self._free_s = max(self._free_s, self._world.now_s + delay_s)
        self._world.at(self._free_s, lambda: self._left or self._reply(reply))

    def _later(self, call: Callable[[], None]) -> None:
        loop = self.endpoint.loop
        delay_s = self._world.pick(_DELAYS_S)
        self._world.after(delay_s, lambda: loop.call_soon(call))

    def _begin(self, job: Job) -> None:
        if self._left:
            self.endpoint.on_ended(self)
        else:
            self._task = self.endpoint.loop.create_task(self._serve(job))

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _serve(self, job: Job) -> None:
        stream = self.endpoint.service.submit(job)
        try:
            async for event in stream:
                self.send(event)
            self.send(None)
        except DualPathError as error:
            self.send(error)
        finally:
            await stream.aclose()
            self.endpoint.on_ended(self)
