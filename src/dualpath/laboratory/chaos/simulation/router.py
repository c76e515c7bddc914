"""One process of the simulated router: the scheduler, and its own front end."""

import asyncio
import functools
from collections.abc import Callable
from contextlib import AsyncExitStack

from dualpath.laboratory.chaos.simulation.api import SimTokenApi
from dualpath.laboratory.chaos.simulation.cluster_parts import ClusterResources
from dualpath.laboratory.chaos.simulation.entrance import ClientEndpoint
from dualpath.laboratory.emulated.engine_client import EngineClient
from dualpath.router.engines import EngineInfo
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings
from dualpath.router.standby.file_turn import FileTurn
from dualpath.router.standby.leased_turn import LeasedTurn
from dualpath.router.standby.turn import bound, ended_when_lost

#: How long the connections of clients take to end before the service stops.
_CLOSES_S = (0.0, 0.05, 1.0)


class SimRouter(ClientEndpoint):
    """A router from the start of its process to its end; it serves once it leads.

    ``ended`` is called when it has ended by itself.
    """

    def __init__(
        self,
        shared: ClusterResources,
        settings: RouterSettings,
        start: int,
        host: str,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(shared, f"router#{start}", host, shared.leadership.clock())
        self._ended = ended
        self._leadership = shared.leadership.leadership(self.process, self.loop.time)
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
            has_exited=functools.partial(shared.has_exited, host),
            front_ends_socket=front_ends,
        )
        self._run(self._serve_as_leader)
        shared.world.on_end(self._release_leadership)

    @property
    def service(self) -> RouterService:
        """Scheduler and front end."""
        return self._service

    def _release_leadership(self) -> None:
        if isinstance(self._leadership, FileTurn):
            self._leadership.free()

    async def _serve_as_leader(self) -> None:
        await self._leadership.taken()
        self._shared.leadership.check(self.process)
        self.service.cluster.fence(self._may_act)
        if isinstance(self._leadership, LeasedTurn):  # others last as long as the process
            await ended_when_lost(
                self._leadership, AsyncExitStack(), self._step_down, self._interrupted
            )
        await bound(self._leadership, self.service.start)
        if not self.lost_leadership:
            self.serves = True
            self._shared.world.note(self.name, "serves")

    def _may_act(self) -> bool:
        """Return whether it still leads; called before each placement."""
        if not self._leadership.held:
            self.lost_leadership = True
            return False
        self._shared.leadership.check(self.process)
        return True

    async def _step_down(self) -> None:
        self.lost_leadership = True
        await self.service.stop()

    def _interrupted(self) -> None:
        """SIGINT."""
        self._run(functools.partial(self._end, "ends at once"))

    def _called(self, engine: EngineInfo) -> None:
        """Check that no engine is called whose group has lost a rank: the others are ending."""
        if engine.dp is None:
            return
        for other in self.service.registry.all():
            dp = other.info.dp
            if dp is not None and dp.start == engine.dp.start and not other.alive:
                self._shared.world.problem(
                    f"{self.name} calls {engine.engine_id} although {other.info.engine_id} is lost"
                )

    async def _stop(self) -> None:
        self.serves = False
        await asyncio.sleep(self._shared.world.pick(_CLOSES_S))
        await self.service.stop()
        await self._leadership.over()
        self._ended()

    def _died(self) -> None:
        self._release_leadership()
        for network, socket in self._sockets:
            network.router_died(socket)

    def held_when_idle(self) -> list[str]:
        """Return descriptions of what it still holds without requests, for any client."""
        if not self.serves:
            return [f"{self.name} does not serve"]
        context = self.service.context
        status = self.service.status()
        found = {
            "waiting requests": status["waiting"],
            "running requests": status["running"],
            "releases held": context.releases.held,
            "loads recorded by the scheduler": int(
                context.has_dispatch and not context.dispatch.idle()
            ),
            "attempts": len(context.exchange._channels),
            "clients": self.clients,
            "blocks kept for sessions": sum(context.sessions._warmth._kept_blocks.values()),
            "role switches": int(self.service.roles.under_way is not None),
            "engines without their group": sum(bool(e["waits_for"]) for e in status["engines"]),
        }
        return [f"{self.name}: {what} {count}" for what, count in found.items() if count]
