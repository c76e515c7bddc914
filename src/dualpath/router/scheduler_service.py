"""A scheduler with all that is asked of its cluster: the live page, status, pauses and roles.

It serves engines and front ends.  A router is one of these and a front end, in one process.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from dualpath.core.cluster import HostProcess
from dualpath.node.cluster_secret import load_secret
from dualpath.node.host_process import has_exited
from dualpath.router.control.context import SchedulerContext
from dualpath.router.control.control_server import ControlServer
from dualpath.router.control.control_socket import ControlSocket, ZmqControlSocket
from dualpath.router.control.registry import Registry
from dualpath.router.control.roles import Roles
from dualpath.router.engine_calls import EngineHealth
from dualpath.router.engines import EngineInfo, missing_engines
from dualpath.router.links.door import FrontEndDoor
from dualpath.router.observe.dashboard.board import Dashboard, Load
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.observe.status import status_report
from dualpath.router.requests.records import RequestRecord
from dualpath.router.scheduler import Scheduler
from dualpath.router.settings import RouterSettings


class OwnRequests(Protocol):
    """The requests of a front end in the scheduler's own process."""

    def counts(self) -> tuple[int, int]:
        """Return how many requests wait, and how many have their engines."""
        ...

    @property
    def running(self) -> Iterable[RequestRecord]:
        """The requests that are not over."""
        ...


class NoRequests:
    """The ``OwnRequests`` of a process that has no clients."""

    running: Iterable[RequestRecord] = ()

    def counts(self) -> tuple[int, int]:
        """Return zeros."""
        return 0, 0


class SchedulerService:
    """Lives in one event loop; parameters are those of ``RouterService``.

    ``own`` are the requests of this process's own clients.
    """

    def __init__(
        self,
        settings: RouterSettings,
        engine_health: EngineHealth,
        clock: Callable[[], float],
        control_socket: ControlSocket | None = None,
        epoch: str = "",
        has_exited: Callable[[HostProcess], bool] = has_exited,
        adapter_paths: Mapping[str, str] | None = None,
        own: Callable[[], OwnRequests] = NoRequests,
        front_ends_socket: ControlSocket | None = None,
    ) -> None:
        self.settings = settings
        self.scheduler = Scheduler(
            settings, engine_health, clock, control_socket, epoch, has_exited, adapter_paths
        )
        self._own = own
        self.dashboard = Dashboard(self.registry, self.metrics, clock, self._load)
        socket = front_ends_socket or ZmqControlSocket()
        timeout_s = settings.engine_timeout_s
        self.door = FrontEndDoor(self.scheduler, socket, clock, timeout_s, epoch)
        self._sampling: asyncio.Task[None] | None = None

    @property
    def registry(self) -> Registry:
        """The engines, as they are known."""
        return self.scheduler.registry

    @property
    def metrics(self) -> RouterMetrics:
        """What is counted."""
        return self.scheduler.metrics

    @property
    def server(self) -> ControlServer:
        """The engines' sessions."""
        return self.scheduler.server

    @property
    def context(self) -> SchedulerContext:
        """The scheduler's parts."""
        return self.scheduler.context

    @property
    def roles(self) -> Roles:
        """Engines that change their role."""
        return self.scheduler.roles

    @property
    def control_address(self) -> str:
        """Endpoint engines connect to, "tcp://host:port"; empty before ``start``."""
        return self.server.address

    @property
    def front_ends_address(self) -> str:
        """Endpoint for front ends that are processes of their own; empty if there are none."""
        return self.door.address

    async def start(self) -> None:
        """Open the event log, if one is kept, and the addresses of engines and front ends.

        Raises ``ConfigError`` if the file cannot be written, an address cannot be bound or others
        could reach it without a cluster secret.
        """
        if (port := self.settings.front_ends_port) is not None:
            secret = load_secret(self.settings.cluster_secret_file)
            await self.door.start(self.settings.control_host, port, secret)
        await self.scheduler.start()
        self._sampling = asyncio.create_task(self.dashboard.run(), name="dashboard samples")

    async def stop(self) -> None:
        """End the sessions of front ends and engines, then close; idempotent."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
        await self.door.stop()
        await self.scheduler.stop()

    def fence(self, in_turn: Callable[[], bool]) -> None:
        """Place nothing while ``in_turn`` is not true: another scheduler may have begun."""
        self.context.in_turn = in_turn

    def pause_engine(self, engine_id: str, *, paused: bool) -> bool:
        """As ``Scheduler.pause_engine``."""
        return self.scheduler.pause_engine(engine_id, paused=paused)

    def engines(self) -> list[EngineInfo]:
        """Return the live engines, by arrival."""
        return self.registry.alive()

    def unready(self) -> str | None:
        """Return why no request can be placed at present, None if one can."""
        return missing_engines(self.registry)

    def counts(self) -> tuple[int, int]:
        """Return how many requests wait, and how many have their engines, of all front ends."""
        waiting, running = self._own().counts()
        others_waiting, others_running = self.door.counts()
        return waiting + others_waiting, running + others_running

    def status(self) -> dict[str, Any]:
        """Return the body of ``GET /dualpath/v1/status``."""
        waiting, running = self.counts()
        return status_report(
            self.registry,
            self.metrics,
            waiting=waiting,
            running=running,
            thresholds=self.context.thresholds,
            assignments=self.context.dispatch.recent if self.context.has_dispatch else (),
            roles=self.roles.report(),
        )

    def exposition(self) -> bytes:
        """Return the body of ``GET /metrics``; requests are counted by their front ends."""
        return self.metrics.exposition()

    def _load(self) -> Load:
        return Load(
            self._own().running,
            *self.counts(),
            self.context.dispatch.recent if self.context.has_dispatch else (),
        )
