"""The router as a library, front end and scheduler in one process: submit a job, get tokens.

HTTP servers sit on top of it.  Further front ends may be processes of their own (``links``).
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from dualpath.core.cluster import HostProcess
from dualpath.router.control.control_socket import ControlSocket, ZmqControlSocket
from dualpath.router.control.roles import Roles
from dualpath.router.engine_calls import EngineCalls
from dualpath.router.engines import EngineInfo
from dualpath.router.front_end_service import FrontEndService
from dualpath.router.links.door import FrontEndDoor
from dualpath.router.observe.dashboard.board import Dashboard, Load
from dualpath.router.observe.status import status_report
from dualpath.router.scheduler import Scheduler
from dualpath.router.settings import RouterSettings
from dualpath.storage.host_process import is_gone
from dualpath.transport.cluster_secret import load_secret


class RouterService(FrontEndService):
    """Engines register with it, front ends submit jobs to it; lives in one event loop.

    ``clock`` gives seconds and must be monotonic; limits on waits follow the event loop's own time,
    which live is the same.  ``control_socket`` is where engines register, by default ZMQ's.
    ``epoch`` names this process of the router, by default it is drawn; ``is_gone`` says whether a
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
        is_gone: Callable[[HostProcess], bool] = is_gone,
        adapter_paths: Mapping[str, str] | None = None,
    ) -> None:
        self.scheduler = Scheduler(
            settings, engine_calls, clock, control_socket, epoch, is_gone, adapter_paths
        )
        self.registry, self.server = self.scheduler.registry, self.scheduler.server
        self.context, metrics = self.scheduler.context, self.scheduler.metrics
        self.dashboard = Dashboard(self.registry, metrics, clock, self._load)
        super().__init__(
            settings, self.scheduler, metrics, engine_calls, clock, self.dashboard.ended
        )
        self.door = FrontEndDoor(
            self.scheduler, ZmqControlSocket(), clock, settings.engine_timeout_s
        )
        self._sampling: asyncio.Task[None] | None = None

    @property
    def control_address(self) -> str:
        """Endpoint engines connect to, "tcp://host:port"; empty before ``start``."""
        return self.server.address

    @property
    def front_ends_address(self) -> str:
        """Endpoint for front ends that are processes of their own; empty if there are none."""
        return self.door.address

    async def start(self) -> None:
        """Open the event log and the traces, if they are kept, and the control address.

        Raises ``ConfigError`` if the file cannot be written, OpenTelemetry is not there, the
        address cannot be bound or others could reach it without a cluster secret.
        """
        self.front_end.start()
        if (port := self.settings.front_ends_port) is not None:
            secret = load_secret(self.settings.cluster_secret_file)
            await self.door.start(self.settings.control_host, port, secret)
        await self.scheduler.start()
        self._sampling = asyncio.create_task(self.dashboard.run(), name="dashboard samples")

    async def stop(self) -> None:
        """End all requests (their streams raise ``EngineLostError``) and close; idempotent."""
        await self.front_end.stop()
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
        await self.door.stop()
        await self.scheduler.stop()
        await self.front_end.close()

    @property
    def roles(self) -> Roles:
        """Engines that change their role."""
        return self.scheduler.roles

    def pause_engine(self, engine_id: str, *, paused: bool) -> bool:
        """As ``Scheduler.pause_engine``."""
        return self.scheduler.pause_engine(engine_id, paused=paused)

    def engines(self) -> list[EngineInfo]:
        """Return the live engines, by arrival."""
        return self.registry.alive()

    def status(self) -> dict[str, Any]:
        """Return the body of ``GET /dualpath/v1/status``."""
        waiting, running = self.front_end.counts()
        return status_report(
            self.registry,
            self.metrics,
            waiting=waiting,
            running=running,
            thresholds=self.context.thresholds,
            assignments=self.context.dispatch.recent if self.context.has_dispatch else (),
            roles=self.roles.report(),
        )

    def _load(self) -> Load:
        return Load(
            self.front_end.running,
            *self.front_end.counts(),
            self.context.dispatch.recent if self.context.has_dispatch else (),
        )
