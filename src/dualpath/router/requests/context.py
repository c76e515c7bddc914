"""What the lives of all requests of a front end share."""

import asyncio
from collections.abc import Callable

from dualpath.core.modes import Mode
from dualpath.router.engine_calls import EngineCalls
from dualpath.router.engines import geometry
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.observe.tracing import Tracing
from dualpath.router.scheduling import Scheduling
from dualpath.router.settings import RouterSettings


class FrontEndContext:
    """Holds a front end's parts together; ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        settings: RouterSettings,
        scheduling: Scheduling,
        metrics: RouterMetrics,
        calls: EngineCalls,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.scheduling = scheduling
        self.metrics = metrics
        self.calls = calls
        self.clock = clock
        self.admission = asyncio.Semaphore(settings.max_concurrent_requests)
        self.tracing: Tracing | None = None

    @property
    def moves_bytes(self) -> bool:
        """False in Oracle mode."""
        return self.scheduling.engines.mode is not Mode.ORACLE

    @property
    def block_tokens(self) -> int:
        """Tokens of a Full Block; raises ``EngineLostError`` before any engine has joined."""
        return geometry(self.scheduling.engines).block_tokens
