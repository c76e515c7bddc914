"""A front end as HTTP servers see it: submit a job, get tokens; wherever the scheduler runs."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

from dualpath.core.errors import (
    BadRequestError,
    DrainingError,
    EngineLostError,
    TurnedAwayError,
)
from dualpath.core.kv_hints import HintStatus, KvHints, hint_results
from dualpath.core.modes import Mode
from dualpath.core.names import name_problem
from dualpath.core.session_hints import SessionHints
from dualpath.router.engine_calls import EngineCalls, Job, TokenEvent
from dualpath.router.engines import MissingRole, geometry, missing_engines
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.observe.tracing import Tracing, open_tracing
from dualpath.router.requests.admission import AdmissionQueue
from dualpath.router.requests.call_watch import CallWatch
from dualpath.router.requests.request import RequestLife
from dualpath.router.scheduling import Answered, RequestOrder, ScheduledRequest, Scheduling
from dualpath.router.settings import RouterSettings
from dualpath.router.stages import RequestRecord

logger = logging.getLogger(__name__)

_RECENT_RECORDS = 1024


class FrontEnd:
    """Jobs are submitted to it; lives in one event loop.

    ``records`` holds the latest finished requests with the times of their stages; ``ended`` is
    called with each, ``metrics`` counts them.  ``clock`` gives monotonic seconds.
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
        self.settings, self.scheduling, self.metrics = settings, scheduling, metrics
        self.records: deque[RequestRecord] = deque(maxlen=_RECENT_RECORDS)
        self.engine_calls, self.clock = engine_calls, clock
        self.call_watch = CallWatch(
            *(engine_calls.open_calls, settings.call_silence_s, settings.inquiry_timeout_s),
            *(scheduling.call_waits, metrics.silent_call),
        )
        self.admission = AdmissionQueue(settings, lambda: scheduling.engines, metrics, clock)
        self._missing_role = MissingRole(
            *(scheduling.engines, scheduling.membership, scheduling.wait_for_engines),
            *(settings.engine_wait_s, self._end_unplaced),
        )
        self.tracing: Tracing | None = None
        self._ended = ended
        self._lives: dict[str, RequestLife] = {}
        #: In the order of arrival, which a set does not preserve: they are cancelled in it.
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._draining = self._refusing = False
        self._stopping = False

    def open_traces(self) -> None:
        """Open the traces, if they are exported; raises ``ConfigError`` without OpenTelemetry."""
        if endpoint := self.settings.otlp_traces_endpoint:
            self.tracing = open_tracing(endpoint, self.clock)

    async def end_requests(self) -> None:
        """End all requests: their streams raise ``EngineLostError``; idempotent."""
        self._stopping = True
        self._missing_role.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.call_watch.stop()

    async def close_traces(self) -> None:
        """Export the traces that are left; after ``end_requests``."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    async def wait_ready(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait for that many live engines; raises ``DeadlineError`` naming what is missing."""
        await self.scheduling.wait_for_engines(prefill, decode, timeout_s)

    async def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Apply a client's hints on a session while its tool runs; False if it is unknown.

        ``tenant`` is the ``core.blocks.tenant_tag`` of the session's requests.
        """
        return await self.scheduling.hint_session(tenant, session_id, hints)

    def exposition(self) -> bytes:
        """Return the body of ``GET /metrics`` at once, see ``scrape``."""
        return self.metrics.exposition()

    async def scrape(self) -> bytes:
        """Return the body of ``GET /metrics``."""
        return await self.metrics.scrape()

    @property
    def moves_bytes(self) -> bool:
        """False in Oracle mode."""
        return self.scheduling.engines.mode is not Mode.ORACLE

    @property
    def block_tokens(self) -> int:
        """Tokens of a Full Block; raises ``EngineLostError`` before any engine has joined."""
        return geometry(self.scheduling.engines).block_tokens

    @property
    def running(self) -> list[RequestRecord]:
        """The requests that have not ended."""
        return [life.record for life in self._lives.values()]

    def counts(self) -> tuple[int, int]:
        """Return how many requests wait, and how many have their engines."""
        running = self.admission.placed
        return len(self._lives) - running, running

    def unready(self) -> str | None:
        """Return why clients should use another front end at present, None if all is well."""
        leaving = self.leaving()
        return missing_engines(self.scheduling.engines) if leaving is None else str(leaving)

    async def drain(self, clients_gone: Callable[[], Awaitable[None]] | None = None) -> None:
        """Take no new requests; return when those that run have ended.

        ``clients_gone`` is given if new clients are led to other front ends: it returns when all
        present clients have disconnected, and their requests until then are served.  Requests that
        have not ended after ``drain_timeout_s`` are left to ``end_requests``.
        """
        self._draining, self._refusing = True, clients_gone is None
        limit_s = self.settings.drain_timeout_s
        if self._lives:
            logger.info("draining: waiting up to %g s for %d requests", limit_s, len(self._lives))
        else:
            logger.info("draining: no request is under way")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                if clients_gone is not None:
                    await clients_gone()
                while self._tasks:
                    await asyncio.wait(self._tasks)
        if self._lives:
            logger.error(
                "%d requests have not ended within %g s and end with an error; --drain-timeout-s "
                "allows more",
                *(len(self._lives), limit_s),
            )

    def leaving(self) -> DrainingError | None:
        """Return the error for clients while it drains, None if it does not."""
        if not self._draining:
            return None
        return DrainingError(
            f"the router is about to end and takes no new requests, {len(self._lives)} are under "
            "way; send it again, to the router that follows"
        )

    def turned_away(self) -> TurnedAwayError | None:
        """Return why a new request is refused, whatever it is; None if it may be taken."""
        if self._refusing and (leaving := self.leaving()) is not None:
            return leaving
        return self.admission.full()

    def retry_after_s(self) -> int:
        """Return after how many seconds a client that was refused should try again."""
        return self.admission.retry_after_s()

    async def submit(self, job: Job) -> AsyncGenerator[TokenEvent, None]:
        """Return the job's tokens as they come; the last event has a ``finish_reason``.

        Closing the iterator (or cancelling the task that waits on it) aborts the request
        everywhere.  Iterating raises ``BadRequestError`` if the job cannot be served as asked,
        ``OverloadedError`` if there are too many requests, ``EngineLostError`` when all attempts
        have failed, ``DeadlineError`` when the time is up.
        """
        if (wrong := name_problem(job.request_id)) is not None:
            raise BadRequestError(f"request id {wrong}")
        if job.request_id in self._lives:
            raise BadRequestError(
                f"request id {job.request_id!r} is in use by a running request; send it under "
                "another id"
            )
        if (error := self.turned_away()) is not None:
            raise error
        if self._stopping:
            raise self._stops(job)
        ticket = self.admission.enter(job)
        if job.kv_hints.kv_hint is not None:
            self._take_hints(job, job.kv_hints.kv_hint)
        order = RequestOrder(job.request_id, job.keys, job.tenant, job.hints)
        try:
            scheduled = self.scheduling.begin(order)
        except BaseException:
            self.admission.leave(ticket)
            raise
        life = self._lives[job.request_id] = RequestLife(self, job, scheduled, ticket)
        self.metrics.began()
        task = asyncio.create_task(life.run(), name=f"request {job.request_id}")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._over(life, scheduled, done))
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

    def _take_hints(self, job: Job, hints: KvHints) -> None:
        """Count what becomes of the hints; a request is served whatever that is."""
        for action, status, reason in hint_results(hints, job.keys):
            self.metrics.kv_hint(action.action_type, status)
            if status is not HintStatus.APPLIED:
                logger.info(
                    "request %s: action %r (%s %s) of KV hint %r is %s: %s",
                    *(job.request_id, action.action_id, action.action_type),
                    *(action.action_version, hints.message_id, status, reason),
                )

    @staticmethod
    def _stops(job: Job) -> EngineLostError:
        return EngineLostError(
            f"request {job.request_id}: the router stops; send it again when it is back"
        )

    def _over(
        self, life: RequestLife, scheduled: ScheduledRequest, task: asyncio.Task[None]
    ) -> None:
        # Not in the stream's own cleanup: an impatient client may cancel that as well.
        if not task.cancelled():
            task.exception()  # Marks it as seen: the client may have left before the end.
        if life.record.outcome is None:
            life.record.close("cancelled")  # Before it had even begun.
        self._tasks.pop(task, None)
        self._lives.pop(life.job.request_id, None)
        self.admission.leave(life.ticket)
        self.metrics.ended()
        self.records.append(life.record)
        self._ended(life.record)
        scheduled.end(self._answered(life))
        life.events.put_nowait(None)

    def _end_unplaced(self, why: str) -> None:
        """End the requests that wait for their engines: a role has had none for too long."""
        for life in list(self._lives.values()):
            life.end_unplaced(why)

    def _answered(self, life: RequestLife) -> Answered | None:
        if life.record.outcome != "finished" or not self.scheduling.caches_answers:
            return None
        # The last token was sampled but never fed back: there is no KV of it.
        tokens = (life.job.prompt_token_ids + life.generated)[:-1]
        keys = tuple(life.job.keys_for(tokens))
        return Answered(keys, len(life.job.keys), life.decode_engine)
