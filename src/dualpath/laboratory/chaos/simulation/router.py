"""One process of the router in a simulated cluster, and its clients' connections to it."""

import asyncio
import functools
from collections.abc import Callable

from dualpath.core.errors import DualPathError
from dualpath.laboratory.chaos.simulation.api import SimTokenApi
from dualpath.laboratory.chaos.simulation.cluster_parts import Shared
from dualpath.laboratory.chaos.simulation.loop import ProcessLoop
from dualpath.laboratory.emulated.engine_client import EngineClient
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings
from dualpath.router.standby.file_turn import FileTurn
from dualpath.router.standby.turn import OnlyOne, bound

_DELAYS_S = (0.0001, 0.0005, 0.002)

#: What a client gets: tokens, an error, None at a good end, "reset" when the connection breaks.
Reply = TokenEvent | DualPathError | str | None


class SimRouter:
    """A router from the start of its process to its end; it serves when its turn comes."""

    def __init__(
        self,
        shared: Shared,
        settings: RouterSettings,
        start: int,
        host: str,
        turn: FileTurn | OnlyOne,
    ) -> None:
        self.serves = False
        self._turn = turn
        self.name = f"router#{start}"
        self._shared = shared
        self.process, _ = shared.process(self.name, host)
        self.loop = ProcessLoop(self.process)  # type: ignore[abstract]
        self._exchanges: dict[Exchange, None] = {}
        shared.world.note(self.name, "starts")
        calls = EngineClient(SimTokenApi(shared.http, self.loop, self._called))
        socket = shared.control.listen(self.loop)
        self.service = RouterService(
            settings,
            calls,
            self.loop.time,
            socket,
            epoch=self.name,
            is_gone=functools.partial(shared.is_gone, host),
        )
        self.loop.call_soon(lambda: self.loop.create_task(self._serve_in_turn()))
        shared.world.at_the_end(self._free_turn)

    def _free_turn(self) -> None:
        if isinstance(self._turn, FileTurn):
            self._turn.free()

    async def _serve_in_turn(self) -> None:
        await self._turn.taken()
        await bound(self._turn, self.service.start)
        self.serves = True
        self._shared.world.note(self.name, "serves")

    def _called(self, engine: EngineInfo) -> None:
        """Nothing may be asked of a group that has lost a rank: what is left of it is dying."""
        if engine.dp is None:
            return
        for other in self.service.registry.all():
            dp = other.info.dp
            if dp is not None and dp.start == engine.dp.start and not other.alive:
                self._shared.world.problem(
                    f"{self.name}: asks {engine.engine_id} though {other.info.engine_id} is lost"
                )

    def ask(self, job: Job, reply: Callable[[Reply], None]) -> "Exchange":
        """Send a request; ``reply`` gets what comes."""
        exchange = Exchange(self, job, reply)
        self._exchanges[exchange] = None
        return exchange

    def over(self, exchange: "Exchange") -> None:
        """An exchange has ended."""
        self._exchanges.pop(exchange, None)

    def kill(self) -> None:
        """End as after SIGKILL."""
        if not self.process.alive:
            return
        self._shared.world.note(self.name, "is dead")
        self.serves = False
        self.process.kill()
        self._free_turn()
        self._shared.control.router_died()
        self._shared.http.router_died()
        for exchange in list(self._exchanges):
            exchange.send("reset")

    def left_over(self) -> list[str]:
        """Return what it still holds though nobody is served."""
        if not self.serves:
            return [f"{self.name} does not serve"]
        context = self.service.context
        status = self.service.status()
        found = {
            "requests that wait": status["waiting"],
            "requests that run": status["running"],
            "releases held": context.releases.held,
            "accounts of the scheduler": int(context.has_dispatch and not context.dispatch.idle()),
            "clients": len(self._exchanges),
            "engines without their group": sum(bool(e["waits_for"]) for e in status["engines"]),
        }
        return [f"{self.name}: {what} {count}" for what, count in found.items() if count]


class Exchange:
    """A client's request on its connection."""

    def __init__(self, router: SimRouter, job: Job, reply: Callable[[Reply], None]) -> None:
        self._router = router
        self._world = router.process.world
        self._reply = reply
        self._free_s = 0.0
        self._left = False
        self._task: asyncio.Task[None] | None = None
        self._later(functools.partial(self._begin, job))

    def leave(self) -> None:
        """The client closes the connection."""
        self._left = True
        self._later(self._cancel)

    def send(self, reply: Reply) -> None:
        """Send something to the client; what is sent arrives in order."""
        delay_s = self._world.pick(_DELAYS_S)
        self._free_s = max(self._free_s, self._world.now_s + delay_s)
        self._world.at(self._free_s, lambda: self._left or self._reply(reply))

    def _later(self, call: Callable[[], None]) -> None:
        loop = self._router.loop
        delay_s = self._world.pick(_DELAYS_S)
        self._world.after(delay_s, lambda: loop.call_soon(call))

    def _begin(self, job: Job) -> None:
        if self._left:
            self._router.over(self)
        else:
            self._task = self._router.loop.create_task(self._serve(job))

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _serve(self, job: Job) -> None:
        stream = self._router.service.submit(job)
        try:
            async for event in stream:
                self.send(event)
            self.send(None)
        except DualPathError as error:
            self.send(error)
        finally:
            await stream.aclose()
            self._router.over(self)
