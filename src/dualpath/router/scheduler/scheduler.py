"""The scheduler's process: engines register with it, front ends have it place their requests.

``Scheduler`` does the I/O: it owns the engines' sessions, the registry, timers and the attempts'
state, and drives the pure ``policy.scheduler.RequestScheduler`` through ``Dispatch``.  No tokens
pass here.  A front end in the same process calls it directly (``router.service``); others connect
to ``front_ends`` (``front_end_server``).
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dualpath.core.blocks import BlockGeometry, BlockKey
from dualpath.core.cluster import HostProcess, Role, Writer
from dualpath.core.control import (
    CacheUpdate,
    EngineMessage,
    KvInHbm,
    PrefillDone,
    Released,
    Report,
    RequestOver,
    RouterMessage,
    StoredChain,
)
from dualpath.core.errors import EngineLostError
from dualpath.core.modes import DEFAULT_MODE, Handover, Mode
from dualpath.core.session_hints import SessionHints
from dualpath.node.cluster_secret import load_secret
from dualpath.node.host_process import has_exited
from dualpath.policy.events import RECOMPUTE_LIMIT_S, Assignment, SchedulerSettings
from dualpath.policy.rebalance import RoleQueue
from dualpath.policy.scheduler import RequestScheduler
from dualpath.policy.session_warmth import SessionName, WarmthSettings
from dualpath.router.api_keys import engine_headers
from dualpath.router.engine_calls import EngineHealth
from dualpath.router.engines import EngineInfo, Membership, geometry, missing_engines
from dualpath.router.hit_account import SeenBlocks
from dualpath.router.observe.dashboard.board import Dashboard, Load
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.observe.status import quarantine_report, status_report
from dualpath.router.scheduler.attempt import EngineAttempt
from dualpath.router.scheduler.cached_blocks import CachedBlockIndex, serves
from dualpath.router.scheduler.control_server import ControlServer
from dualpath.router.scheduler.control_socket import ControlSocket, ZmqControlSocket
from dualpath.router.scheduler.dispatch import Dispatch
from dualpath.router.scheduler.event_recorder import EventLogWriter
from dualpath.router.scheduler.exchange import Exchange
from dualpath.router.scheduler.front_end_server import FrontEndServer
from dualpath.router.scheduler.handovers import Handovers
from dualpath.router.scheduler.pauses import Pauses, SuspectList
from dualpath.router.scheduler.registry import Pause, Registry
from dualpath.router.scheduler.releases import Releases
from dualpath.router.scheduler.roles import LiveRolePolicy, Roles, rebalance_settings
from dualpath.router.scheduler.session_orders import SessionOrders
from dualpath.router.scheduler.stored_chains import StoredChains
from dualpath.router.scheduler.thresholds import ClusterThresholds, derive
from dualpath.router.scheduler.weights import HttpOperator, WeightUpdates
from dualpath.router.scheduling import Answered, AttemptListener, AttemptOrder, RequestOrder
from dualpath.router.served_adapters import ServedAdapters
from dualpath.router.settings import RouterSettings
from dualpath.router.stages import RequestRecord

logger = logging.getLogger(__name__)


class OwnRequests(Protocol):
    """The requests of a front end in the scheduler's own process."""

    def counts(self) -> tuple[int, int]:
        """Return how many requests wait, and how many have their engines."""
        ...

    @property
    def running(self) -> Iterable[RequestRecord]:
        """The requests that have not ended."""
        ...


#: POST: front ends that know other schedulers send new requests to those; DELETE: no longer.
DRAIN_PATH = "/dualpath/v1/drain"


class NoRequests:
    """The ``OwnRequests`` of a process that has no clients."""

    running: Iterable[RequestRecord] = ()

    def counts(self) -> tuple[int, int]:
        """Return zeros."""
        return 0, 0


class Scheduler:
    """Implements ``Scheduling`` in its own process and listens to the control server.

    Lives in one event loop.  ``engine_calls`` checks engines' HTTP servers, ``own`` are the
    requests of this process's own clients; the other parameters are those of ``RouterService``.
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
        own: Callable[[], OwnRequests] = NoRequests,
        front_ends_socket: ControlSocket | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self._own = own
        timeout_s = settings.engine_timeout_s
        #: Whether this process is the leader of the standby schedulers and may place requests.
        self.is_leader: Callable[[], bool] = lambda: True
        #: Whether front ends that know other schedulers send their new requests to those.
        self.draining = False
        self.registry = Registry(
            settings.mode,
            ServedAdapters(adapter_paths or {}),
            exclusive_ids=settings.exclusive_engine_ids,
            by_node=settings.engine_groups == "node",
            handover=settings.handover,
        )
        self.server = ControlServer(
            self.registry,
            self,
            clock,
            timeout_s,
            control_socket,
            epoch,
            has_exited,
            enable_caching=settings.dram_tier,
        )
        self.send: Callable[[str, RouterMessage], None] = self.server.send
        self.metrics = RouterMetrics(
            self.registry, self.server.refusals, clock, settings.tenant_weights
        )
        self.membership = Membership(self.registry)
        # Attempts, and what the scheduler knows of engines' blocks and slots.
        self.exchange = Exchange()
        self.releases = Releases(self.send, settings.release_wait_s, self.registry.is_dead, clock)
        self.cached = CachedBlockIndex()
        self.seen_blocks = SeenBlocks()
        self._weights = self.registry.weights
        self.chains = StoredChains(clock, self.metrics.lookup_was_short)
        self.sessions = SessionOrders(
            WarmthSettings(budget_share=settings.retain_share, prefetch=settings.prefetch_sessions),
            self.registry,
            self.send,
            lambda: self.caches_answers,
            clock,
            self.metrics.session_ordered,
            lambda: self.thresholds.read_tokens_per_s,
        )
        self._lookups = itertools.count()
        # Placement.
        self.thresholds = ClusterThresholds()
        self.event_log: EventLogWriter | None = None
        self._dispatch: Dispatch | None = None
        self.pauses = Pauses(self.registry, self.exchange, self.send, lambda: self.dispatch)
        self.suspects = SuspectList(
            self.registry,
            self.exchange,
            self.pauses,
            engine_calls,
            self.send,
            lambda engine_id, reason: self.server.declare_lost(engine_id, reason, certain=False),
            settings,
            clock,
        )
        self.roles = Roles(
            self.registry, clock, settings.role_switch_timeout_s, self.metrics.role_switched
        )
        self.role_policy = (
            LiveRolePolicy(rebalance_settings(settings.rebalance_options), self.roles, clock)
            if settings.rebalance
            else None
        )
        self.handovers = Handovers(settings)
        self.weights = WeightUpdates(
            self,
            HttpOperator(engine_headers(), settings.engine_ca_file),
            clock,
            self.metrics.weights_changed,
        )
        # What people and front ends in other processes connect to.
        self.dashboard = Dashboard(self.registry, self.metrics, clock, self._load)
        self._background: list[asyncio.Task[None]] = []
        socket = front_ends_socket or ZmqControlSocket()
        self.front_ends = FrontEndServer(self, socket, clock, timeout_s, epoch)

    async def start(self) -> None:
        """Open the event log, if one is recorded, and the addresses of engines and front ends.

        Raises ``ConfigError`` if the file cannot be written, an address cannot be bound or other
        machines could reach it without a cluster secret.
        """
        secret = load_secret(self.settings.cluster_secret_file)
        host = self.settings.control_host
        if (port := self.settings.front_ends_port) is not None:
            await self.front_ends.start(host, port, secret)
        if self.settings.event_log:
            self.event_log = EventLogWriter(Path(self.settings.event_log))
        await self.server.start(host, self.settings.control_port, secret)
        self._background = [
            asyncio.create_task(self.dashboard.run(), name="dashboard samples"),
            asyncio.create_task(self.suspects.patrol(), name="patrol of idle engines"),
        ]

    async def stop(self) -> None:
        """End the sessions of front ends and engines, then close; idempotent."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.weights.stop()
        await self.front_ends.stop()
        self.handovers.close()
        self.sessions.stop()
        await self.suspects.stop()
        await self.server.stop()
        if self.event_log is not None:
            await asyncio.to_thread(self.event_log.close)

    # ------------------------------------------------------------------ Scheduling

    @property
    def engines(self) -> Registry:
        """The engines that have registered."""
        return self.registry

    @property
    def caches_answers(self) -> bool:
        """Whether decode engines cache blocks for next turns."""
        return self.settings.dram_tier and serves(Role.DECODE, self.registry.mode)

    async def wait_for_engines(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait for live engines; raises ``DeadlineError`` with what is missing.

        While the weights change it waits until that is over, without a limit of its own.
        """
        await self.weights.released()
        await self.membership.wait(prefill, decode, timeout_s, self.server.address)

    def begin(self, order: RequestOrder) -> "ArrivedRequest":
        """Register a request that has arrived."""
        return ArrivedRequest(self, self.sessions.began(order))

    def suspect(self, engine: EngineInfo, why: str, *, call_failed: bool = False) -> None:
        """Something failed on an engine."""
        self.suspects.suspect(engine, why, call_failed=call_failed)

    def call_waits(self, engine: EngineInfo, silent_s: float) -> None:
        """An engine has a call and has sent nothing for a while."""
        self.suspects.call_waits(engine, silent_s)

    async def await_liveness(self, engines: Iterable[EngineInfo]) -> None:
        """Wait until it is known which of these engines live."""
        await self.suspects.await_liveness(engines)

    async def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Apply a client's hints on a session; False if the session is unknown."""
        return self.sessions.hint(tenant, session_id, hints)

    # ------------------------------------------------------------------ for operators

    def hold(self, *, held: bool) -> None:
        """Begin no attempt while the weights change, or begin attempts again."""
        self.pauses.hold(held=held)

    def running(self) -> int:
        """Return how many requests have their engines, or decode there."""
        reports = (state.report for state in self.registry.all() if state.alive)
        decoding = sum(r.load.unfinished_requests for r in reports if r is not None)
        return max(self.counts()[1], decoding)

    def take_out(self, engine_id: str, reason: str) -> None:
        """End the session of an engine, if it has one."""
        self.server.declare_lost(engine_id, reason, certain=False)

    def pause_engine(self, engine_id: str, *, paused: bool) -> bool:
        """Stop dispatching new requests to a live engine, or start again; False if there is none.

        Its present requests go on.  A pause lasts until the engine's process ends or the
        scheduler does.
        """
        state = self.registry.get(engine_id)
        if state is None or not state.alive:
            return False
        if paused:
            self.pauses.pause(engine_id, Pause.ASKED)
        else:
            self.pauses.resume(engine_id, Pause.ASKED)
        return True

    def drain(self, *, draining: bool) -> dict[str, Any]:
        """Ask front ends that know other schedulers for no new requests, or for new ones again.

        Requests that are under way go on.  Lasts until this process ends.  Returns the body of the
        answer to a call of ``DRAIN_PATH``.
        """
        self.draining = draining
        self.front_ends.load_changed()
        waiting, running = self.counts()
        return {"draining": draining, "waiting": waiting, "running": running}

    def unready(self) -> str | None:
        """Return why no request can be placed at present, None if one can."""
        return missing_engines(self.registry)

    def counts(self) -> tuple[int, int]:
        """Return how many requests wait, and how many have their engines, of all front ends."""
        waiting, running = self._own().counts()
        others_waiting, others_running = self.front_ends.counts()
        return waiting + others_waiting, running + others_running

    def own_prompt_tokens(self) -> int:
        """Return the prompt tokens of the requests of this process's own clients."""
        return sum(record.prompt_tokens for record in self._own().running)

    def status(self) -> dict[str, Any]:
        """Return the body of ``GET /dualpath/v1/status``."""
        waiting, running = self.counts()
        draining = {"draining": True} if self.draining else {}
        return draining | status_report(
            self.registry,
            self.metrics,
            waiting=waiting,
            running=running,
            thresholds=self.thresholds,
            placements=self._dispatch.recent if self._dispatch is not None else (),
            roles=self.roles.report(),
            weights=self.weights.report(),
            quarantine=quarantine_report(self.releases, self.server.probes, self.clock()),
        )

    def _load(self) -> Load:
        recent = self._dispatch.recent if self._dispatch is not None else ()
        at_scheduler = self._dispatch.waiting if self._dispatch is not None else 0
        return Load(self._own().running, *self.counts(), recent, self.draining, at_scheduler)

    # ------------------------------------------------------------------ for attempts

    @property
    def dispatch(self) -> Dispatch:
        """The driver of ``RequestScheduler``; raises ``EngineLostError`` before an engine joins."""
        if self._dispatch is None:
            raise EngineLostError("no engine has registered yet, at least 1P1D is needed; start it")
        return self._dispatch

    @property
    def idle(self) -> bool:
        """Whether no request waits or counts at any engine."""
        return self._dispatch is None or self._dispatch.idle()

    @property
    def moves_bytes(self) -> bool:
        """False in Oracle mode."""
        return self.registry.mode is not Mode.ORACLE

    @property
    def geometry(self) -> BlockGeometry:
        """Shape of the engines' blocks; raises ``EngineLostError`` before any engine has joined."""
        return geometry(self.registry)

    @property
    def block_tokens(self) -> int:
        """Tokens of a Full Block; raises as ``geometry``."""
        return self.geometry.block_tokens

    def check_leader(self) -> None:
        """Raise ``EngineLostError`` if another scheduler may have begun to place requests."""
        if not self.is_leader():
            raise EngineLostError(
                "this scheduler is no longer the leader, and engines are another's; see its log "
                "for why"
            )

    def engine(self, engine_id: str) -> EngineInfo:
        """Return a live engine; raises ``EngineLostError`` for any other."""
        state = self.registry.get(engine_id)
        if state is None or not state.alive:
            raise EngineLostError(f"engine {engine_id} is lost; restart it")
        return state.info

    def is_alive(self, info: EngineInfo) -> bool:
        """Whether this process of an engine has a session."""
        state = self.registry.get(info.engine_id)
        return state is not None and state.alive and state.info.epoch == info.epoch

    def chain_writers(self, keys: Sequence[BlockKey]) -> list[EngineInfo]:
        """Return live DEs that wrote the last known block of a chain, the latest first.

        Each may still be writing that block, and those that it has generated behind it; it answers
        a look-up when both are written.
        """
        found = (self.registry.live(name) for name in self.chains.of(keys))
        return [info for info in found if info is not None and info.role is Role.DECODE]

    def stored_end(self, keys: Sequence[BlockKey]) -> int | None:
        """Return how many blocks at the head of a chain are stored; None if that is not known.

        Without a decode engine the weights may be changing, and with them what is stored.
        """
        return self.chains.end(keys) if self.registry.alive(Role.DECODE) else None

    def engines_rotated(self) -> Iterator[EngineInfo]:
        """Yield live DEs, then live PEs, each rotated by one more at every call."""
        turn = next(self._lookups)
        for role in (Role.DECODE, Role.PREFILL):
            engines = self.registry.alive(role)
            for position in range(len(engines)):
                yield engines[(turn + position) % len(engines)]

    def _assigned(self, assignment: Assignment) -> None:
        self.metrics.assigned(assignment)
        # At the moment of decision: an engine may be lost before the request's task wakes up.
        if (attempt := self.exchange.get(assignment.request_id)) is not None:
            attempt.engines.update(assignment.engines)

    # ------------------------------------------------------------------ ControlListener

    def on_joined(self, info: EngineInfo) -> None:
        """Called by the control server."""
        if self._weights != self.registry.weights:
            # A block of earlier weights is not missed: it was never computed with these.
            self._weights, self.seen_blocks = self.registry.weights, SeenBlocks()
            self.chains.clear()
        if self._dispatch is None or info.role is Role.PREFILL:
            self._derive_thresholds()
        if self._dispatch is None:
            self._dispatch = self._open_dispatch()
        self.cached.engine_joined(info, self.block_tokens)
        self.releases.engine_joined(info)
        self._dispatch.joined(info, paused=self.pauses.is_paused(info))
        self.suspects.joined(info)
        self.sessions.engine_joined(info)
        self.membership.changed(joined=[info])
        self.roles.poll()

    def on_lost(self, lost: Sequence[EngineInfo], reason: str) -> None:
        """Called by the control server."""
        for info in lost:
            self.cached.engine_lost(info)
            self.releases.engine_lost(info.writer)
            self.exchange.engine_lost(info.engine_id, reason)
        self.dispatch.lost(*(info.engine_id for info in lost))
        if any(info.role is Role.PREFILL for info in lost):
            self._derive_thresholds()
        self.sessions.engines_lost(lost)
        self.on_missed(lost)
        self.membership.changed(lost=lost)
        self.roles.poll()

    def on_missed(self, missed: Sequence[EngineInfo]) -> None:
        """Called by the control server; counts the engines that have not left on purpose."""
        for info in missed:
            state = self.registry.get(info.engine_id)
            if state is None or not state.left:
                self.metrics.engine_lost(info.role)

    def on_dead(self, writer: Writer) -> None:
        """Called by the control server."""
        self.releases.engine_dead(writer)

    def in_doubt(self) -> list[Writer]:
        """Called by the control server."""
        return self.releases.in_doubt()

    def on_message(self, info: EngineInfo, message: EngineMessage, received: int) -> None:
        """Called by the control server."""
        if isinstance(message, Report):
            self.pauses.reported(info, message)
            self.dispatch.report(info.engine_id, message.load, received, message.called)
            self.roles.poll()
            if self.role_policy is not None:
                self.role_policy.tick(self._role_queue)
        elif isinstance(message, Released):
            self.releases.writer_done(message.request_id, info.writer)
            self.exchange.deliver(info.engine_id, message)
        elif isinstance(message, CacheUpdate):
            self.cached.update(info.engine_id, message)
        elif isinstance(message, StoredChain):
            self.chains.stored(info.engine_id, message)
        else:
            if isinstance(message, PrefillDone) and message.failure is None:
                self.releases.writer_done(message.request_id, info.writer)
            elif isinstance(message, RequestOver):
                self.releases.over(info.engine_id, message.request_id)
            elif isinstance(message, KvInHbm):
                self.metrics.kv_in_hbm(message.h2d_s)
            self.exchange.deliver(info.engine_id, message)

    # ------------------------------------------------------------------ placement

    def _role_queue(self, role: Role) -> RoleQueue:
        """Return a role's load and queue; most requests may still wait at their front ends."""
        waiting, _ = self.counts()
        return self.dispatch.queue(role, max(waiting - self.dispatch.waiting, 0))

    def _open_dispatch(self) -> Dispatch:
        thresholds = self.thresholds.for_scheduler()
        settings = SchedulerSettings(
            mode=self.registry.mode or DEFAULT_MODE,
            alpha_tokens=thresholds.alpha_tokens,
            beta_tokens=thresholds.beta_tokens,
            computed_weight=thresholds.computed_weight,
            block_tokens=self.block_tokens,
            recompute_limit_s=self._recompute_limit_s(),
            append_at_decode_tokens=self._append_at_decode_tokens(),
            handover=self._handover(),
            third_engine_reads=self._third_engine_reads(),
        )
        if self.event_log is not None:
            self.event_log.begin(settings)
        return Dispatch(
            RequestScheduler(settings),
            self.event_log,
            self._bytes_per_token(),
            self._assigned,
            self.metrics.scheduled,
            self.clock,
            self.role_policy,
        )

    def _recompute_limit_s(self) -> float:
        """Return the setting, bounded by the deadline of reads; by default that of the mode."""
        limit_s = self.settings.recompute_limit_s
        if limit_s is None:
            split = (self.registry.mode or DEFAULT_MODE) is Mode.SPLIT
            limit_s = RECOMPUTE_LIMIT_S if split else 0.0
        return min(limit_s, self.settings.read_deadline_s)

    def _append_at_decode_tokens(self) -> int:
        """Return the setting; 0 in a model with window layers.

        Blocks of an append that leave a window in the step that computes them would not be stored.
        """
        tokens = self.settings.append_at_decode_tokens
        if tokens and self.geometry.layer_windows:
            logger.warning(
                "append_at_decode_tokens %d is not used: the model has window layers", tokens
            )
            return 0
        return tokens

    def _handover(self) -> Handover:
        """Return the setting; the buffer in a model with window layers.

        Its blocks could not be stored whole once they have left a window.
        """
        handover = self.settings.handover
        if handover is not Handover.BUFFER and self.geometry.layer_windows:
            logger.warning("handover %s is not used: the model has window layers", handover)
            return Handover.BUFFER
        return handover

    def _third_engine_reads(self) -> int:
        """Return the setting; 0 in modes in which engines read for their own requests alone."""
        most, mode = self.settings.third_engine_reads, self.registry.mode or DEFAULT_MODE
        if most and mode not in (Mode.DUALPATH, Mode.SPLIT):
            logger.warning("third_engine_reads %d is not used in mode %s", most, mode.value)
            return 0
        return most

    def _bytes_per_token(self) -> int:
        namespace = self.registry.namespace
        return max(namespace.geometry.bytes_per_token, 1) if namespace else 1

    def _derive_thresholds(self) -> None:
        """Derive α and β from the engines that are live now."""
        engines = self.registry.alive(Role.PREFILL)
        thresholds = derive(self.settings, engines, self._bytes_per_token())
        if thresholds == self.thresholds:
            return
        self.thresholds = thresholds
        alpha, beta = thresholds.alpha, thresholds.beta
        logger.info(
            "alpha %s tokens (%s), beta %s tokens (%s); None: unlimited",
            alpha.tokens, alpha.origin, beta.tokens, beta.origin,
        )  # fmt: skip
        self.sessions.read_rate_changed()
        if self._dispatch is not None:
            self._dispatch.set_thresholds(thresholds.for_scheduler())


class ArrivedRequest:
    """The ``ScheduledRequest`` of the scheduler's own process."""

    def __init__(self, scheduler: Scheduler, session: SessionName) -> None:
        self._scheduler = scheduler
        self._session: SessionName | None = session
        #: Full blocks of the prompt of the last attempt.
        self._assigned_blocks = 0

    def attempt(self, order: AttemptOrder, listener: AttemptListener) -> EngineAttempt:
        """Begin an attempt.  Raises ``BadRequestError`` if another one has its name."""
        attempt = EngineAttempt(self._scheduler, order, listener)
        self._assigned_blocks = len(order.keys)
        return attempt

    async def ends_aborted(self) -> bool:
        """Return whether the request ends with the tokens it has after a failed attempt."""
        return self._scheduler.weights.aborts

    def end(self, answered: Answered | None = None) -> None:
        """The request has ended, with an answer if ``answered`` is given; idempotent."""
        session, self._session = self._session, None
        if session is not None and answered is not None:
            self._scheduler.sessions.ended(session, answered, self._assigned_blocks)
