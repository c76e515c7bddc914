"""One process of the router in a simulated cluster: the scheduler, and a front end of its own."""

import asyncio
import functools
from collections.abc import Callable
from contextlib import AsyncExitStack

from dualpath.laboratory.chaos.simulation.api import SimTokenApi
from dualpath.laboratory.chaos.simulation.cluster_parts import Shared
from dualpath.laboratory.chaos.simulation.entrance import Entrance
from dualpath.laboratory.emulated.engine_client import EngineClient
from dualpath.router.engines import EngineInfo
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings
from dualpath.router.standby.file_turn import FileTurn
from dualpath.router.standby.leased_turn import LeasedTurn
from dualpath.router.standby.turn import bound, ended_when_lost

#: Connections of clients end before the service does, and may take a while.
_CLOSES_S = (0.0, 0.05, 1.0)


class SimRouter(Entrance):
    """A router from the start of its process to its end; it serves when its turn comes.

    ``ended`` is told when it has ended by itself.
    """

    def __init__(
        self,
        shared: Shared,
        settings: RouterSettings,
        start: int,
        host: str,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(shared, f"router#{start}", host, shared.turns.clock())
        self._ended = ended
        self._turn = shared.turns.turn(self.process, self.loop.time)
        self._sockets = tuple(
            (network, network.listen(self.loop)) for network in (shared.control, shared.links)
        )
        (_, engines), (_, front_ends) = self._sockets
        self._service = RouterService(
            settings,
            EngineClient(SimTokenApi(shared.http, self.loop, self._called)),
            self.loop.time,
            engines,
            epoch=self.name,
            is_gone=functools.partial(shared.is_gone, host),
            front_ends_socket=front_ends,
        )
        self._run(self._serve_in_turn)
        shared.world.at_the_end(self._free_turn)

    @property
    def service(self) -> RouterService:
        """Scheduler and front end."""
        return self._service

    def _free_turn(self) -> None:
        if isinstance(self._turn, FileTurn):
            self._turn.free()

    async def _serve_in_turn(self) -> None:
        await self._turn.taken()
        self._shared.turns.check(self.process)
        self.service.cluster.fence(self._in_turn)
        if isinstance(self._turn, LeasedTurn):  # Others last as long as the process.
            await ended_when_lost(self._turn, AsyncExitStack(), self._let_go, self._interrupted)
        await bound(self._turn, self.service.start)
        if not self.lost_turn:
            self.serves = True
            self._shared.world.note(self.name, "serves")

    def _in_turn(self) -> bool:
        """Asked before anything is placed."""
        if not self._turn.held:
            self.lost_turn = True
            return False
        self._shared.turns.check(self.process)
        return True

    async def _let_go(self) -> None:
        self.lost_turn = True
        await self.service.stop()

    def _interrupted(self) -> None:
        """SIGINT."""
        self._run(functools.partial(self._end, "ends at once"))

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

    async def _stop(self) -> None:
        self.serves = False
        await asyncio.sleep(self._shared.world.pick(_CLOSES_S))
        await self.service.stop()
        await self._turn.over()
        self._ended()

    def _died(self) -> None:
        self._free_turn()
        for network, socket in self._sockets:
            network.router_died(socket)

    def left_over(self) -> list[str]:
        """Return what it still holds though nobody is served, of its own clients and of others."""
        if not self.serves:
            return [f"{self.name} does not serve"]
        context = self.service.context
        status = self.service.status()
        found = {
            "requests that wait": status["waiting"],
            "requests that run": status["running"],
            "releases held": context.releases.held,
            "accounts of the scheduler": int(context.has_dispatch and not context.dispatch.idle()),
            "attempts": len(context.exchange._channels),
            "clients": self.clients,
            "blocks kept for sessions": sum(context.sessions._warmth._kept_blocks.values()),
            "switches of roles": int(self.service.roles.under_way is not None),
            "engines without their group": sum(bool(e["waits_for"]) for e in status["engines"]),
        }
        return [f"{self.name}: {what} {count}" for what, count in found.items() if count]
