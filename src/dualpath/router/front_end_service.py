"""A front end as HTTP servers know it: submit a job, get tokens; wherever the scheduler is."""

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

from dualpath.core.errors import TurnedAwayError
from dualpath.core.session_hints import SessionHints
from dualpath.router.engine_calls import EngineCalls, Job, TokenEvent
from dualpath.router.engines import missing_engines
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.requests.context import FrontEndContext
from dualpath.router.requests.front_end import FrontEnd
from dualpath.router.requests.records import RequestRecord
from dualpath.router.scheduling import Scheduling
from dualpath.router.settings import RouterSettings


class FrontEndService:
    """Jobs are submitted to it; lives in one event loop.

    ``ended`` is told of each request that is over, ``metrics`` counts them.  ``clock`` gives
    monotonic seconds.
    """

    def __init__(
        self,
        settings: RouterSettings,
        scheduling: Scheduling,
        metrics: RouterMetrics,
        engine_calls: EngineCalls,
        clock: Callable[[], float],
        ended: Callable[[RequestRecord], None],
    ) -> None:
        self.settings, self.metrics = settings, metrics
        self.scheduling = scheduling
        context = FrontEndContext(settings, scheduling, metrics, engine_calls, clock)
        self.front_end = FrontEnd(context, ended)

    @property
    def records(self) -> deque[RequestRecord]:
        """The latest finished requests."""
        return self.front_end.records

    async def wait_ready(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait for that many live engines; raises ``DeadlineError`` naming what is missing."""
        await self.scheduling.engines_present(prefill, decode, timeout_s)

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
        return missing_engines(self.scheduling.engines) if leaving is None else str(leaving)

    async def drain(self, clients_gone: Callable[[], Awaitable[None]] | None = None) -> None:
        """Let what is under way end, as ``FrontEnd.drain``."""
        await self.front_end.drain(clients_gone)

    def turned_away(self) -> TurnedAwayError | None:
        """Return why no further request is taken, None if one is."""
        return self.front_end.turned_away()

    async def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Take what a client says of a session while its tool runs; False if nobody knows it.

        ``tenant`` is the ``core.blocks.tenant_tag`` of the session's requests.
        """
        return await self.scheduling.hint_session(tenant, session_id, hints)

    def exposition(self) -> bytes:
        """Return the body of ``GET /metrics``."""
        return self.metrics.exposition()
