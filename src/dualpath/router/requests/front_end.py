"""The requests of one front end: which are taken, how they go, what became of them."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

from dualpath.core.errors import (
    BadRequestError,
    DrainingError,
    EngineLostError,
    OverloadedError,
    TurnedAwayError,
)
from dualpath.core.names import name_problem
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.observe.tracing import open_tracing
from dualpath.router.requests.context import FrontEndContext
from dualpath.router.requests.records import RequestRecord
from dualpath.router.requests.request_life import RequestLife
from dualpath.router.scheduling import Answered, RequestOrder, ScheduledRequest

logger = logging.getLogger(__name__)

_RECORDS_KEPT = 1024


class FrontEnd:
    """Jobs are submitted to it; lives in one event loop.

    ``records`` holds the latest finished requests with the times of their stages; ``ended`` is told
    each.
    """

    def __init__(self, context: FrontEndContext, ended: Callable[[RequestRecord], None]) -> None:
        self.context = context
        self.records: deque[RequestRecord] = deque(maxlen=_RECORDS_KEPT)
        self._ended = ended
        self._lives: dict[str, RequestLife] = {}
        #: In the order in which they came, which a set does not keep: they end in it.
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._draining = self._refusing = False
        self._stopping = False

    def start(self) -> None:
        """Open the traces, if they are kept; raises ``ConfigError`` without OpenTelemetry."""
        if endpoint := self.context.settings.otlp_traces_endpoint:
            self.context.tracing = open_tracing(endpoint, self.context.clock)

    async def stop(self) -> None:
        """End all requests: their streams raise ``EngineLostError``; idempotent."""
        self._stopping = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Export the traces that are left; after ``stop``."""
        if self.context.tracing is not None:
            await asyncio.to_thread(self.context.tracing.close)

    def submit(self, job: Job) -> AsyncGenerator[TokenEvent, None]:
        """Return the job's tokens as they come; as ``RouterService.submit``."""
        return self._stream(job)

    @property
    def running(self) -> list[RequestRecord]:
        """Requests that are not over."""
        return [life.record for life in self._lives.values()]

    def counts(self) -> tuple[int, int]:
        """Return how many requests wait, and how many have their engines."""
        running = sum(life.placed for life in self._lives.values())
        return len(self._lives) - running, running

    async def drain(self, clients_gone: Callable[[], Awaitable[None]] | None = None) -> None:
        """Take no new requests; return when those under way have ended.

        ``clients_gone`` where new clients are led to others: it returns when those that are here
        have gone, and what they send until then is served.  What has not ended after
        ``drain_timeout_s`` is left for ``stop`` to end.
        """
        self._draining, self._refusing = True, clients_gone is None
        limit_s = self.context.settings.drain_timeout_s
        logger.warning("draining: %d requests may take %g s more", len(self._lives), limit_s)
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
        """Return what clients are told while it drains, None if it does not."""
        if not self._draining:
            return None
        return DrainingError(
            f"the router is about to end and takes no new requests, {len(self._lives)} are under "
            "way; send it again, to the router that follows"
        )

    def turned_away(self) -> TurnedAwayError | None:
        """Return why no further request is taken, None if one is."""
        if self._refusing and (leaving := self.leaving()) is not None:
            return leaving
        settings = self.context.settings
        running, waiting = settings.max_concurrent_requests, settings.max_waiting_requests
        if len(self._lives) < running + waiting:
            return None
        return OverloadedError(
            f"{len(self._lives)} requests are under way, at most {running} run and {waiting} wait; "
            "send it again later, or raise --max-concurrent-requests or --max-waiting-requests"
        )

    async def _stream(self, job: Job) -> AsyncGenerator[TokenEvent, None]:
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
        scheduled = self.context.scheduling.begin(
            RequestOrder(job.request_id, job.keys, job.tenant, job.hints)
        )
        life = self._lives[job.request_id] = RequestLife(self.context, job, scheduled)
        self.context.metrics.began()
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

    @staticmethod
    def _stops(job: Job) -> EngineLostError:
        return EngineLostError(
            f"request {job.request_id}: the router stops; send it again when it is back"
        )

    def _over(
        self, life: RequestLife, scheduled: ScheduledRequest, task: asyncio.Task[None]
    ) -> None:
        # Not in the stream's own clean-up: an impatient client may cancel that as well.
        if not task.cancelled():
            task.exception()  # Marks it as seen: the client may have left before the end.
        if life.record.outcome is None:
            life.record.close("cancelled")  # Before it had even begun.
        self._tasks.pop(task, None)
        self._lives.pop(life.job.request_id, None)
        self.context.metrics.ended()
        self.records.append(life.record)
        self._ended(life.record)
        scheduled.end(self._answered(life))
        life.events.put_nowait(None)

    def _answered(self, life: RequestLife) -> Answered | None:
        if life.record.outcome != "finished" or not self.context.scheduling.keeps_answers:
            return None
        # The last token was sampled but never fed back: there is no KV of it.
        tokens = (*life.job.prompt_token_ids, *life.generated)[:-1]
        keys = tuple(life.job.keys_for(tokens))
        return Answered(keys, len(life.job.keys), life.decode_engine)
