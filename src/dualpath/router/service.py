"""The router as a library, front end and scheduler in one process: submit a job, get tokens.

HTTP servers sit on top of it.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from dualpath.core.cluster import HostProcess
from dualpath.core.errors import TurnedAwayError
from dualpath.core.session_hints import SessionHints
from dualpath.router.control.control_socket import ControlSocket
from dualpath.router.control.registry import missing_engines
from dualpath.router.control.roles import Roles
from dualpath.router.engine_calls import EngineCalls, Job, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.observe.dashboard.board import Dashboard, Load
from dualpath.router.observe.status import status_report
from dualpath.router.requests.context import FrontEndContext
from dualpath.router.requests.front_end import FrontEnd
from dualpath.router.requests.records import RequestRecord
from dualpath.router.scheduler import Scheduler
from dualpath.router.settings import RouterSettings
from dualpath.storage.host_process import is_gone


class RouterService:
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
        self.settings = settings
        self.scheduler = Scheduler(
            settings, engine_calls, clock, control_socket, epoch, is_gone, adapter_paths
        )
        self.registry, self.server = self.scheduler.registry, self.scheduler.server
        self.context, self.metrics = self.scheduler.context, self.scheduler.metrics
        self.dashboard = Dashboard(self.registry, self.metrics, clock, self._load)
        self.front_end = FrontEnd(
            FrontEndContext(settings, self.scheduler, self.metrics, engine_calls, clock),
            self.dashboard.ended,
        )
        self._sampling: asyncio.Task[None] | None = None

    @property
    def control_address(self) -> str:
        """Endpoint engines connect to, "tcp://host:port"; empty before ``start``."""
        return self.server.address

    @property
    def records(self) -> deque[RequestRecord]:
        """The latest finished requests."""
        return self.front_end.records

    async def start(self) -> None:
        """Open the event log and the traces, if they are kept, and the control address.

        Raises ``ConfigError`` if the file cannot be written, OpenTelemetry is not there, the
        address cannot be bound or others could reach it without a cluster secret.
        """
        self.front_end.start()
        await self.scheduler.start()
        self._sampling = asyncio.create_task(self.dashboard.run(), name="dashboard samples")

    async def stop(self) -> None:
        """End all requests (their streams raise ``EngineLostError``) and close; idempotent."""
        await self.front_end.stop()
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
        await self.scheduler.stop()
        await self.front_end.close()

    async def wait_ready(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait for that many live engines; raises ``DeadlineError`` naming what is missing."""
        await self.scheduler.engines_present(prefill, decode, timeout_s)

    def submit(self, job: Job) -> AsyncGenerator[TokenEvent, None]:
        """Return the job's tokens as they come; the last event has a ``finish_reason``.

        Closing the iterator (or cancelling who waits on it) aborts the request everywhere.
        Iterating raises ``BadRequestError`` if the job cannot be served as asked,
        ``OverloadedError`` if too many are under way, ``EngineLostError`` when attempts are used
        up, ``DeadlineError`` when time is.
        """
        return self.front_end.submit(job)

    def unready(self) -> str | None:
        """Return why clients had better go elsewhere at present, None if all is well."""
        leaving = self.front_end.leaving()
        return missing_engines(self.registry) if leaving is None else str(leaving)

    async def drain(self) -> None:
        """Take no new requests; return when those under way have ended.

        What has not ended after ``drain_timeout_s`` is left for ``stop`` to end.
        """
        await self.front_end.drain()

    def turned_away(self) -> TurnedAwayError | None:
        """Return why no further request is taken, None if one is."""
        return self.front_end.turned_away()

    @property
    def roles(self) -> Roles:
        """Engines that change their role."""
        return self.scheduler.roles

    def pause_engine(self, engine_id: str, *, paused: bool) -> bool:
        """As ``Scheduler.pause_engine``."""
        return self.scheduler.pause_engine(engine_id, paused=paused)

    async def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Take what a client says of a session while its tool runs; False if nobody knows it.

        ``tenant`` is the ``core.blocks.tenant_tag`` of the session's requests.
        """
        return await self.scheduler.hint_session(tenant, session_id, hints)

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

    def exposition(self) -> bytes:
        """Return the body of ``GET /metrics``."""
        self.metrics.queues(*self.front_end.counts())
        return self.metrics.exposition()

    def _load(self) -> Load:
        return Load(
            self.front_end.running,
            *self.front_end.counts(),
            self.context.dispatch.recent if self.context.has_dispatch else (),
        )
