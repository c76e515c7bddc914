"""The router as a library: submit a job, get tokens.  HTTP front ends sit on top of it."""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualpath.core.addresses import Writer
from dualpath.core.cluster import HostProcess
from dualpath.core.control import EngineMessage, Kept, Released, Report
from dualpath.core.errors import (
    BadRequestError,
    DrainingError,
    EngineLostError,
    OverloadedError,
    TurnedAwayError,
)
from dualpath.core.names import unfit_name
from dualpath.core.session_hints import SessionHints
from dualpath.policy.agent_sessions import SessionName
from dualpath.router.context import RouterContext
from dualpath.router.control.control_server import ControlServer
from dualpath.router.control.control_socket import ControlSocket
from dualpath.router.control.engine_calls import EngineCalls, Job, TokenEvent
from dualpath.router.control.event_recorder import EventLogWriter
from dualpath.router.control.registry import EngineInfo, Pause, Registry, missing_engines
from dualpath.router.control.served_adapters import ServedAdapters
from dualpath.router.observe.dashboard.board import Dashboard, Load
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.observe.status import status_report
from dualpath.router.observe.tracing import open_tracing
from dualpath.router.requests.records import RequestRecord
from dualpath.router.requests.request_life import RequestLife
from dualpath.router.settings import RouterSettings
from dualpath.storage.host_process import is_gone
from dualpath.transport.cluster_secret import load_secret

logger = logging.getLogger(__name__)

_RECORDS_KEPT = 1024


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
        self.registry = Registry(self.settings.mode, ServedAdapters(adapter_paths or {}))
        self.server = ControlServer(
            self.registry,
            self,
            clock,
            self.settings.engine_timeout_s,
            control_socket,
            epoch,
            is_gone,
            keep_blocks=self.settings.dram_tier,
        )
        self.metrics = RouterMetrics(self.registry, self.server.refusals, clock)
        self.context = RouterContext(
            self.settings, self.registry, self.server, self.metrics, engine_calls, clock
        )
        self.records: deque[RequestRecord] = deque(maxlen=_RECORDS_KEPT)
        self.dashboard = Dashboard(self.registry, self.metrics, clock, self._load)
        self._sampling: asyncio.Task[None] | None = None
        self._lives: dict[str, RequestLife] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrivals = itertools.count()
        self._draining = False
        self._stopping = False

    @property
    def control_address(self) -> str:
        """Endpoint engines connect to, "tcp://host:port"; empty before ``start``."""
        return self.server.address

    async def start(self) -> None:
        """Open the event log and the traces, if they are kept, and the control address.

        Raises ``ConfigError`` if the file cannot be written, OpenTelemetry is not there, the
        address cannot be bound or others could reach it without a cluster secret.
        """
        if self.settings.event_log:
            self.context.event_log = EventLogWriter(Path(self.settings.event_log))
        if self.settings.otlp_traces_endpoint:
            self.context.tracing = open_tracing(
                self.settings.otlp_traces_endpoint, self.context.clock
            )
        secret = load_secret(self.settings.cluster_secret_file)
        await self.server.start(self.settings.control_host, self.settings.control_port, secret)
        self._sampling = asyncio.create_task(self.dashboard.run(), name="dashboard samples")

    async def stop(self) -> None:
        """End all requests (their streams raise ``EngineLostError``) and close; idempotent."""
        self._stopping = True
        tasks = [*self._tasks, *([self._sampling] if self._sampling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.context.sessions.stop()
        await self.context.suspicions.stop()
        await self.server.stop()
        if self.context.event_log is not None:
            await asyncio.to_thread(self.context.event_log.close)
        if self.context.tracing is not None:
            await asyncio.to_thread(self.context.tracing.close)

    async def wait_ready(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait for that many live engines; raises ``DeadlineError`` naming what is missing."""
        await self.context.engines_present(prefill, decode, timeout_s)

    def submit(self, job: Job) -> AsyncIterator[TokenEvent]:
        """Return the job's tokens as they come; the last event has a ``finish_reason``.

        Closing the iterator (or cancelling who waits on it) aborts the request everywhere.
        Iterating raises ``BadRequestError`` if the job cannot be served as asked,
        ``OverloadedError`` if too many are under way, ``EngineLostError`` when attempts are used
        up, ``DeadlineError`` when time is.
        """
        return self._stream(job)

    def unready(self) -> str | None:
        """Return why clients had better go elsewhere at present, None if all is well."""
        return str(self._leaving()) if self._draining else missing_engines(self.registry)

    async def drain(self) -> None:
        """Take no new requests; return when those under way have ended.

        What has not ended after ``drain_timeout_s`` is left for ``stop`` to end.
        """
        self._draining = True
        limit_s = self.settings.drain_timeout_s
        logger.warning("draining: %d requests may take %g s more", len(self._lives), limit_s)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        if self._lives:
            logger.error(
                "%d requests have not ended within %g s and end with an error; --drain-timeout-s "
                "allows more",
                *(len(self._lives), limit_s),
            )

    def turned_away(self) -> TurnedAwayError | None:
        """Return why no further request is taken, None if one is."""
        if self._draining:
            return self._leaving()
        running, waiting = self.settings.max_concurrent_requests, self.settings.max_waiting_requests
        if len(self._lives) < running + waiting:
            return None
        return OverloadedError(
            f"{len(self._lives)} requests are under way, at most {running} run and {waiting} wait; "
            "send it again later, or raise --max-concurrent-requests or --max-waiting-requests"
        )

    def _leaving(self) -> DrainingError:
        return DrainingError(
            f"the router is about to end and takes no new requests, {len(self._lives)} are under "
            "way; send it again, to the router that follows"
        )

    def pause_engine(self, engine_id: str, *, paused: bool) -> bool:
        """Let a live engine get nothing new, or something again; False if there is no such engine.

        What is on it goes on.  It holds until the engine's process ends or the router does.
        """
        state = self.registry.get(engine_id)
        if state is None or not state.alive:
            return False
        if paused:
            self.context.pauses.pause(engine_id, Pause.ASKED)
        else:
            self.context.pauses.resume(engine_id, Pause.ASKED)
        return True

    def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Take what a client says of a session while its tool runs; False if nobody knows it.

        ``tenant`` is the ``core.blocks.tenant_tag`` of the session's requests.
        """
        return self.context.sessions.hint(tenant, session_id, hints)

    def engines(self) -> list[EngineInfo]:
        """Return the live engines, by arrival."""
        return self.registry.alive()

    def status(self) -> dict[str, Any]:
        """Return the body of ``GET /dualpath/v1/status``."""
        waiting, running = self._counts()
        return status_report(
            self.registry,
            self.metrics,
            waiting=waiting,
            running=running,
            thresholds=self.context.thresholds,
            assignments=self.context.dispatch.recent if self.context.has_dispatch else (),
        )

    def exposition(self) -> bytes:
        """Return the body of ``GET /metrics``."""
        self.metrics.queues(*self._counts())
        return self.metrics.exposition()

    def on_joined(self, info: EngineInfo) -> None:
        """Called by the control server."""
        self.context.engine_joined(info)

    def on_lost(self, lost: Sequence[EngineInfo], reason: str) -> None:
        """Called by the control server."""
        self.context.engines_lost(lost, reason)

    def on_dead(self, writer: Writer) -> None:
        """Called by the control server."""
        self.context.releases.engine_dead(writer)

    def doubted(self) -> list[Writer]:
        """Called by the control server."""
        return self.context.releases.doubted()

    def on_message(self, info: EngineInfo, message: EngineMessage) -> None:
        """Called by the control server."""
        if isinstance(message, Report):
            self.context.pauses.reported(info, message)
            self.context.dispatch.report(info.engine_id, message)
        elif isinstance(message, Released):
            self.context.releases.writer_done(message.request_id, info.writer)
        elif isinstance(message, Kept):
            self.context.kept.heard(info.engine_id, message)
        else:
            self.context.exchange.deliver(info.engine_id, message)

    def _load(self) -> Load:
        return Load(
            [life.record for life in self._lives.values()],
            *self._counts(),
            self.context.dispatch.recent if self.context.has_dispatch else (),
        )

    def _counts(self) -> tuple[int, int]:
        running = sum(life.placed for life in self._lives.values())
        return len(self._lives) - running, running

    async def _stream(self, job: Job) -> AsyncIterator[TokenEvent]:
        if (wrong := unfit_name(job.request_id)) is not None:
            raise BadRequestError(f"request id {wrong}")
        if job.request_id in self._lives:
            raise BadRequestError(
                f"request id {job.request_id!r} is in use by a running request; send it under "
                "another id"
            )
        if self._stopping:
            raise self._stops(job)
        if (error := self.turned_away()) is not None:
            raise error
        life = self._lives[job.request_id] = RequestLife(self.context, job, next(self._arrivals))
        session = self.context.sessions.began(job)
        task = asyncio.create_task(life.run(), name=f"request {job.request_id}")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._over(life, session, done))
        try:
            while (event := await life.events.get()) is not None:
                yield event
            await asyncio.wait({task})
            if task.cancelled():
                raise self._stops(job)
            task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    @staticmethod
    def _stops(job: Job) -> EngineLostError:
        return EngineLostError(
            f"request {job.request_id}: the router stops; send it again when it is back"
        )

    def _over(self, life: RequestLife, session: SessionName, task: asyncio.Task[None]) -> None:
        # Not in the stream's own clean-up: an impatient client may cancel that as well.
        if not task.cancelled():
            task.exception()  # Marks it as seen: the client may have left before the end.
        if life.record.outcome is None:
            life.record.close("cancelled")  # Before it had even begun.
        self._tasks.discard(task)
        self._lives.pop(life.job.request_id, None)
        self.records.append(life.record)
        self.dashboard.ended(life.record)
        if life.record.outcome == "finished":
            self.context.sessions.ended(session, life.job, life.generated, life.decode_engine)
        life.events.put_nowait(None)
