"""What all attempts share: the engines, the scheduler and the way to talk to them."""

import itertools
import logging
from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockGeometry, BlockKey
from dualpath.core.cluster import Role
from dualpath.core.control import RouterMessage
from dualpath.core.errors import EngineLostError
from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath.policy.events import Assignment, SchedulerSettings
from dualpath.policy.scheduler import RequestScheduler
from dualpath.policy.session_warmth import WarmthSettings
from dualpath.router.attempts.hit_account import SeenBlocks
from dualpath.router.control.chain_writers import ChainWriters
from dualpath.router.control.control_server import ControlServer
from dualpath.router.control.dispatch import Dispatch
from dualpath.router.control.event_recorder import EventLogWriter, RecordedScheduler
from dualpath.router.control.exchange import Exchange
from dualpath.router.control.kept_blocks import CachedBlocks, serves
from dualpath.router.control.pauses import Pauses
from dualpath.router.control.registry import Registry
from dualpath.router.control.releases import Releases
from dualpath.router.control.session_orders import SessionOrders
from dualpath.router.control.suspicions import Suspicions
from dualpath.router.control.thresholds import ClusterThresholds, derive
from dualpath.router.engine_calls import EngineHealth
from dualpath.router.engines import EngineInfo, Presence, geometry
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.settings import RouterSettings

logger = logging.getLogger(__name__)


class SchedulerContext:
    """Holds the scheduler's parts together; used by every attempt."""

    def __init__(
        self,
        settings: RouterSettings,
        registry: Registry,
        server: ControlServer,
        metrics: RouterMetrics,
        calls: EngineHealth,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.server = server
        self.metrics = metrics
        self.clock = clock
        self.exchange = Exchange()
        self.releases = Releases(self.send, settings.release_wait_s, registry.is_dead)
        self.pauses = Pauses(registry, self.exchange, self.send, lambda: self.dispatch)
        self.suspicions = Suspicions(
            registry,
            self.exchange,
            self.pauses,
            calls,
            self.send,
            lambda engine_id, reason: server.declare_lost(engine_id, reason, certain=False),
            settings.suspect_timeout_s,
        )
        self.sessions = SessionOrders(
            WarmthSettings(budget_share=settings.retain_share, prefetch=settings.prefetch_sessions),
            registry,
            self.send,
            lambda: settings.dram_tier and serves(Role.DECODE, registry.mode),
            clock,
            metrics.session_ordered,
            lambda: self.thresholds.read_tokens_per_s,
        )
        #: Whether this scheduler, of those that take turns, is the one that may place.
        self.in_turn: Callable[[], bool] = lambda: True
        self.event_log: EventLogWriter | None = None
        self.kept = CachedBlocks()
        self.seen_blocks = SeenBlocks()
        self.thresholds = ClusterThresholds()
        self.writers = ChainWriters()
        self._dispatch: Dispatch | None = None
        self.presence = Presence(registry)
        self._turns = itertools.count()

    @property
    def dispatch(self) -> Dispatch:
        """The scheduler's driver; raises ``EngineLostError`` before any engine has joined."""
        if self._dispatch is None:
            raise EngineLostError("no engine has registered yet, at least 1P1D is needed; start it")
        return self._dispatch

    @property
    def has_dispatch(self) -> bool:
        """Whether any engine has ever joined."""
        return self._dispatch is not None

    @property
    def moves_bytes(self) -> bool:
        """False in Oracle mode."""
        return self.registry.mode is not Mode.ORACLE

    @property
    def block_tokens(self) -> int:
        """Tokens of a Full Block; raises as ``geometry``."""
        return self.geometry.block_tokens

    @property
    def geometry(self) -> BlockGeometry:
        """Shape of the engines' blocks; raises ``EngineLostError`` before any engine has joined."""
        return geometry(self.registry)

    def send(self, engine_id: str, message: RouterMessage) -> None:
        """Send a control message."""
        self.server.send(engine_id, message)

    def check_turn(self) -> None:
        """Raise ``EngineLostError`` if another scheduler may have begun to place requests."""
        if not self.in_turn():
            raise EngineLostError(
                "this scheduler's turn is over, and engines are another's; see its log for why"
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

    def engine_joined(self, info: EngineInfo) -> None:
        """Let an engine take part."""
        self._derive_thresholds()
        if self._dispatch is None:
            scheduler = self._scheduler(self._scheduler_settings(self.block_tokens))
            self._dispatch = Dispatch(
                scheduler,
                self._bytes_per_token(),
                self.block_tokens,
                self._assigned,
                self.metrics.scheduled,
            )
        self.kept.engine_joined(info, self.block_tokens)
        self.releases.engine_joined(info)
        self._dispatch.joined(info)
        self.pauses.joined(info)
        self.sessions.engines_changed()
        self.presence.changed()

    def engines_lost(self, lost: Sequence[EngineInfo], reason: str) -> None:
        """Take engines out at once, and end what depends on them."""
        for info in lost:
            self.kept.engine_lost(info)
            self.releases.engine_lost(info.writer)
            self.exchange.engine_lost(info.engine_id, reason)
        self.dispatch.lost(*(info.engine_id for info in lost))
        self._derive_thresholds()
        self.sessions.engines_changed(lost)
        self.count_losses(lost)
        self.presence.changed()

    def count_losses(self, gone: Sequence[EngineInfo]) -> None:
        """Count the engines that have not left on purpose."""
        for info in gone:
            state = self.registry.get(info.engine_id)
            if state is None or not state.left:
                self.metrics.engine_lost(info.role)

    def chain_writers(self, keys: Sequence[BlockKey]) -> list[EngineInfo]:
        """Live DEs that wrote the last known block of a chain, the latest first.

        Each may still be writing that, and what it has generated behind it, and waits for both when
        it is asked.
        """
        alive = {engine.engine_id: engine for engine in self.registry.alive(Role.DECODE)}
        return [alive[name] for name in self.writers.of(keys) if name in alive]

    def engines_in_turn(self) -> list[EngineInfo]:
        """Live DEs, then live PEs, each beginning with another one at every call."""
        turn = next(self._turns)
        in_turn: list[EngineInfo] = []
        for role in (Role.DECODE, Role.PREFILL):
            engines = self.registry.alive(role)
            start = turn % len(engines) if engines else 0
            in_turn += engines[start:] + engines[:start]
        return in_turn

    def _assigned(self, assignment: Assignment) -> None:
        self.metrics.assigned(assignment)
        # At the moment of decision: an engine may be lost before the request's task wakes up.
        if (channel := self.exchange.get(assignment.request_id)) is not None:
            channel.depends_on(assignment.prefill_engine, assignment.decode_engine)

    def _bytes_per_token(self) -> int:
        namespace = self.registry.namespace
        return max(namespace.geometry.bytes_per_token, 1) if namespace else 1

    def _scheduler(self, settings: SchedulerSettings) -> RequestScheduler | RecordedScheduler:
        if self.event_log is None:
            return RequestScheduler(settings)
        return RecordedScheduler(settings, self.event_log)

    def _scheduler_settings(self, block_tokens: int) -> SchedulerSettings:
        thresholds = self.thresholds.for_scheduler()
        return SchedulerSettings(
            mode=self.registry.mode or DEFAULT_MODE,
            alpha_tokens=thresholds.alpha_tokens,
            beta_tokens=thresholds.beta_tokens,
            computed_weight=thresholds.computed_weight,
            block_tokens=block_tokens,
            recompute_limit_s=min(self.settings.recompute_limit_s, self.settings.read_deadline_s),
        )

    def _derive_thresholds(self) -> None:
        """Let α and β follow from the engines that are there now."""
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
        if self._dispatch is not None:
            self._dispatch.set_thresholds(thresholds.for_scheduler())
