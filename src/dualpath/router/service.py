"""The router as a library, front end and scheduler in one process: submit a job, get tokens.

HTTP servers sit on top of it.  Further front ends may be processes of their own (``links``).
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from dualpath.core.cluster import HostProcess
from dualpath.node.host_process import has_exited
from dualpath.router.control.control_socket import ControlSocket
from dualpath.router.control.roles import Roles
from dualpath.router.engine_calls import EngineCalls
from dualpath.router.engines import EngineInfo
from dualpath.router.front_end_service import FrontEndService
from dualpath.router.links.door import FrontEndDoor
from dualpath.router.scheduler_service import SchedulerService
from dualpath.router.settings import RouterSettings


class RouterService(FrontEndService):
    """Engines register with it, front ends submit jobs to it; lives in one event loop.

    ``clock`` gives seconds and must be monotonic; limits on waits follow the event loop's own time,
    which live is the same.  ``control_socket`` is where engines register, ``front_ends_socket``
    where front ends come in that are processes of their own; by default they are ZMQ's.  ``epoch``
    names this process of the router, by default it is drawn; ``has_exited`` says whether a
    process of this machine has ended.  ``adapter_paths`` are the LoRA adapters that clients may
    name, which every engine must have.  ``records`` holds the latest finished requests with the
    times of their stages.
    """

    def __init__(
        self,
        settings: RouterSettings,
        engine_calls: EngineCalls,
        clock: Callable[[], float] = time.monotonic,
        control_socket: ControlSocket | None = None,
        epoch: str = "",
        has_exited: Callable[[HostProcess], bool] = has_exited,
        adapter_paths: Mapping[str, str] | None = None,
        front_ends_socket: ControlSocket | None = None,
    ) -> None:
        self.cluster = cluster = SchedulerService(
            settings,
            engine_calls,
            clock,
            control_socket,
            epoch,
            has_exited,
            adapter_paths,
            own=lambda: self.front_end,
            front_ends_socket=front_ends_socket,
        )
        self.scheduler, self.dashboard = cluster.scheduler, cluster.dashboard
        self.registry, self.server = cluster.registry, cluster.server
        self.context = cluster.context
        super().__init__(
            settings,
            self.scheduler,
            cluster.metrics,
            engine_calls,
            clock,
            self.dashboard.ended,
        )

    @property
    def door(self) -> FrontEndDoor:
        """Where front ends come in that are processes of their own."""
        return self.cluster.door

    @property
    def control_address(self) -> str:
        """Endpoint engines connect to, "tcp://host:port"; empty before ``start``."""
        return self.cluster.control_address

    @property
    def front_ends_address(self) -> str:
        """Endpoint for front ends that are processes of their own; empty if there are none."""
        return self.cluster.front_ends_address

    async def start(self) -> None:
        """Open the traces, if they are kept, and all that ``SchedulerService`` opens.

        Raises ``ConfigError`` as it does, and if OpenTelemetry is not there.
        """
        self.front_end.start()
        await self.cluster.start()

    async def stop(self) -> None:
        """End all requests (their streams raise ``EngineLostError``) and close; idempotent."""
        await self.front_end.stop()
        await self.cluster.stop()
        await self.front_end.close()

    @property
    def roles(self) -> Roles:
        """Engines that change their role."""
        return self.cluster.roles

    def pause_engine(self, engine_id: str, *, paused: bool) -> bool:
        """As ``Scheduler.pause_engine``."""
        return self.cluster.pause_engine(engine_id, paused=paused)

    def engines(self) -> list[EngineInfo]:
        """Return the live engines, by arrival."""
        return self.cluster.engines()

    def status(self) -> dict[str, Any]:
        """Return the body of ``GET /dualpath/v1/status``."""
        return self.cluster.status()
