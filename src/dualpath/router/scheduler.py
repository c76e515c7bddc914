"""The scheduler's process: engines register with it, front ends have it place their requests.

Registry, ledger, placement and the control link to engines; no tokens pass here.  A front end in
the same process calls it directly (``service``).
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from dualpath.core.cluster import HostProcess, Writer
from dualpath.core.control import CacheUpdate, EngineMessage, Released, Report
from dualpath.core.session_hints import SessionHints
from dualpath.node.cluster_secret import load_secret
from dualpath.node.host_process import has_exited
from dualpath.policy.agent_sessions import SessionName
from dualpath.router.attempts.engine_attempt import EngineAttempt
from dualpath.router.control.context import SchedulerContext
from dualpath.router.control.control_server import ControlServer
from dualpath.router.control.control_socket import ControlSocket
from dualpath.router.control.engine_state import Pause
from dualpath.router.control.event_recorder import EventLogWriter
from dualpath.router.control.registry import Registry
from dualpath.router.control.role_policy import LiveRolePolicy, rebalance_settings
from dualpath.router.control.roles import Roles
from dualpath.router.control.served_adapters import ServedAdapters
from dualpath.router.engine_calls import EngineHealth
from dualpath.router.engines import EngineInfo
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.scheduling import Answered, AttemptListener, AttemptOrder, RequestOrder
from dualpath.router.settings import RouterSettings


class Scheduler:
    """The ``Scheduling`` of its own process, and the control server's listener.

    ``engine_calls`` asks engines whether their HTTP servers answer.  ``clock``, ``control_socket``,
    ``epoch``, ``has_exited`` and ``adapter_paths`` are those of ``RouterService``.
    """

    def __init__(
        self,
        settings: RouterSettings,
        engine_calls: EngineHealth,
        clock: Callable[[], float],
        control_socket: ControlSocket | None = None,
        epoch: str = "",
        has_exited: Callable[[HostProcess], bool] = has_exited,
        adapter_paths: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self.registry = Registry(settings.mode, ServedAdapters(adapter_paths or {}))
        self.server = ControlServer(
            self.registry,
            self,
            clock,
            settings.engine_timeout_s,
            control_socket,
            epoch,
            has_exited,
            enable_caching=settings.dram_tier,
        )
        self.metrics = RouterMetrics(self.registry, self.server.refusals, clock)
        self.roles = Roles(
            self.registry, clock, settings.role_switch_timeout_s, self.metrics.role_switched
        )
        self.role_policy = (
            LiveRolePolicy(rebalance_settings(settings.rebalance_options), self.roles, clock)
            if settings.rebalance
            else None
        )
        self.context = SchedulerContext(
            settings, self.registry, self.server, self.metrics, engine_calls, clock
        )
        self._arrivals = itertools.count()

    async def start(self) -> None:
        """Open the event log, if one is kept, and the control address.

        Raises ``ConfigError`` if the file cannot be written, the address cannot be bound or others
        could reach it without a cluster secret.
        """
        if self._settings.event_log:
            self.context.event_log = EventLogWriter(Path(self._settings.event_log))
        secret = load_secret(self._settings.cluster_secret_file)
        await self.server.start(self._settings.control_host, self._settings.control_port, secret)

    async def stop(self) -> None:
        """Tell engines what was to be told, then close; idempotent."""
        self.context.sessions.stop()
        await self.context.suspicions.stop()
        await self.server.stop()
        if self.context.event_log is not None:
            await asyncio.to_thread(self.context.event_log.close)

    @property
    def engines(self) -> Registry:
        """The engines there are."""
        return self.registry

    @property
    def keeps_answers(self) -> bool:
        """Whether decode engines keep blocks for next turns."""
        return self.context.sessions.wanted

    async def engines_present(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait for live engines; raises ``DeadlineError`` with what is missing."""
        await self.context.presence.wait(prefill, decode, timeout_s, self.server.address)

    def begin(self, order: RequestOrder) -> "ArrivedRequest":
        """Take note of a request that has arrived."""
        session = self.context.sessions.began(order)
        return ArrivedRequest(self.context, next(self._arrivals), session)

    def suspect(self, engine: EngineInfo, why: str, *, call_failed: bool = False) -> None:
        """Something failed on an engine."""
        self.context.suspicions.suspect(engine, why, call_failed=call_failed)

    async def settled(self, engines: Iterable[EngineInfo]) -> None:
        """Wait until it is known which of these engines live."""
        await self.context.suspicions.settled(engines)

    async def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Take what a client says of a session; False if nobody knows it."""
        return self.context.sessions.hint(tenant, session_id, hints)

    def pause_engine(self, engine_id: str, *, paused: bool) -> bool:
        """Let a live engine get nothing new, or something again; False if there is no such engine.

        What is on it goes on.  It holds until the engine's process ends or the scheduler does.
        """
        state = self.registry.get(engine_id)
        if state is None or not state.alive:
            return False
        if paused:
            self.context.pauses.pause(engine_id, Pause.ASKED)
        else:
            self.context.pauses.resume(engine_id, Pause.ASKED)
        return True

    def on_joined(self, info: EngineInfo) -> None:
        """Called by the control server."""
        self.context.engine_joined(info)
        self.context.dispatch.watch = self.role_policy
        self.roles.look()

    def on_lost(self, lost: Sequence[EngineInfo], reason: str) -> None:
        """Called by the control server."""
        self.context.engines_lost(lost, reason)
        self.roles.look()

    def on_missed(self, missed: Sequence[EngineInfo]) -> None:
        """Called by the control server."""
        self.context.count_losses(missed)

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
            self.roles.look()
            if self.role_policy is not None:
                self.role_policy.turn(self.context.dispatch.queue)
        elif isinstance(message, Released):
            self.context.releases.writer_done(message.request_id, info.writer)
        elif isinstance(message, CacheUpdate):
            self.context.kept.heard(info.engine_id, message)
        else:
            self.context.exchange.deliver(info.engine_id, message)


class ArrivedRequest:
    """The ``ScheduledRequest`` of the scheduler's own process."""

    def __init__(self, context: SchedulerContext, arrival_seq: int, session: SessionName) -> None:
        self._context = context
        self._arrival_seq = arrival_seq
        self._session: SessionName | None = session

    def attempt(self, order: AttemptOrder, listener: AttemptListener) -> EngineAttempt:
        """Begin an attempt.  Raises ``BadRequestError`` if another one has its name."""
        return EngineAttempt(self._context, order, self._arrival_seq, listener)

    def end(self, answered: Answered | None = None) -> None:
        """It is over, well if ``answered`` is given; idempotent."""
        session, self._session = self._session, None
        if session is not None and answered is not None:
            self._context.sessions.ended(session, answered)
