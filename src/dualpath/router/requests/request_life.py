"""A request as its client sees it: one stream of tokens, whatever happens behind it.

A lost engine ends an attempt, not the request.  Before the first token the next attempt starts
over; after it, the prompt of the next attempt is the old one with the streamed tokens, most of
which are stored already.
"""

import asyncio
import logging

import msgspec

from dualpath.core.blocks import holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.errors import (
    BadRequestError,
    DeadlineError,
    EngineLostError,
    PromptTooLongError,
    SchedulerLostError,
    TransportError,
)
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.engines import EngineInfo, is_alive
from dualpath.router.observe.tracing import RequestTrace
from dualpath.router.requests.context import FrontEndContext
from dualpath.router.requests.lifecycle import Attempt
from dualpath.router.requests.prompt_limits import check_prompt
from dualpath.router.requests.records import RequestRecord
from dualpath.router.scheduling import ScheduledRequest
from dualpath.router.stages import Stage

logger = logging.getLogger(__name__)


class RequestLife:
    """Runs a job to its end; ``events`` gets its tokens and, from the service, None at the end."""

    def __init__(self, context: FrontEndContext, job: Job, scheduled: ScheduledRequest) -> None:
        self.job = job
        self.record = RequestRecord(job.request_id, job.prompt_tokens, context.clock)
        # Unbounded: a request has at most max_new_tokens events.
        self.events: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
        self._context = context
        self._scheduling = context.scheduling
        self._scheduled = scheduled
        #: The DE of the last attempt.
        self.decode_engine = ""
        self._generated: list[int] = []
        self._attempt: Attempt | None = None
        #: Attempts that failed: on which engines; and those that were lost with a scheduler.
        self._failed_on: list[tuple[EngineInfo, ...]] = []
        self._schedulers_lost = 0
        self._finished = False
        self._trace: RequestTrace | None = None

    @property
    def placed(self) -> bool:
        """Whether the request has its engines at the moment."""
        return self._attempt is not None and self._attempt.placed

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens that were streamed."""
        return tuple(self._generated)

    async def run(self) -> None:
        """Run all attempts within the deadline; raises what the client has to know."""
        outcome = "error"
        if self._context.tracing is not None:
            self._trace = self._context.tracing.begin(self.job, self.record)
        try:
            await self._within_deadline()
            outcome = "finished"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except BadRequestError:
            outcome = "bad_request"
            raise
        except DeadlineError:
            outcome = "deadline"
            raise
        except (EngineLostError, TransportError):
            outcome = "engine_lost"
            raise
        finally:
            self.record.close(outcome)
            self._context.metrics.finished(self.record)
            if self._trace is not None:
                self._trace.end()

    async def _within_deadline(self) -> None:
        deadline_s = self._context.settings.request_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                with self.record.stage(Stage.ADMISSION):
                    await self._context.admission.acquire()
                try:
                    await self._all_attempts()
                finally:
                    self._context.admission.release()
        except TimeoutError as error:
            last = f"; last failure: {self.record.failures[-1]}" if self.record.failures else ""
            raise DeadlineError(
                f"request {self.job.request_id} is not done after {deadline_s:g} s and "
                f"{self.record.attempts} of {self._context.settings.max_attempts} attempts, with "
                f"{len(self._generated)} tokens{last}; raise request_deadline_s, add engines or "
                f"send fewer requests at once"
            ) from error

    async def _all_attempts(self) -> None:
        settings = self._context.settings
        while True:
            await self._engines_there()
            job = self.job.continued(self._generated)
            if job.max_new_tokens < 1:
                self._emit(TokenEvent(token_ids=(), finish_reason="length"))
                return
            self._check_fits(job)
            self.record.attempts += 1
            try:
                await self._one_attempt(job)
                return
            except (EngineLostError, TransportError) as error:
                if self._finished:
                    # The client has its last token; what failed was only our cleaning up.
                    return
                self.record.failures.append(str(error))
                if await self._used_up():
                    raise EngineLostError(
                        f"request {self.job.request_id} failed {self.record.attempts} times, at "
                        f"most {settings.max_attempts} attempts are lost with an engine, as many "
                        f"with the scheduler and as many otherwise ({{max_attempts}}); the last "
                        f"one: {error}; see the engines' logs, then send it again"
                    ) from error
                self._context.metrics.retried()
                logger.warning(
                    "request %s: attempt %d failed after %d tokens, trying again: %s",
                    self.job.request_id, self.record.attempts, len(self._generated), error,
                )  # fmt: skip

    async def _one_attempt(self, job: Job) -> None:
        number = self.record.attempts
        # Engines never see two attempts under one name: a late answer cannot be mistaken.
        attempt_id = job.request_id if number == 1 else f"{job.request_id}.{number}"
        self._attempt = Attempt(
            self._context,
            job,
            attempt_id,
            self._scheduled,
            self.record,
            self._emit,
            self._trace,
            # Whatever failed, it is not tried again with what was shared.
            kept=number == 1,
        )
        try:
            await self._attempt.run()
        except SchedulerLostError:
            self._schedulers_lost += 1
            raise
        except (EngineLostError, TransportError):
            self._failed_on.append(self._attempt.engines)
            raise
        finally:
            if self._attempt.engines:
                self.decode_engine = self._attempt.engines[1].engine_id
            self._attempt = None

    async def _used_up(self) -> bool:
        """Whether attempts have failed too often, those on engines that are gone apart.

        What the death of an engine or of the scheduler has cost is no sign that the next attempt
        fails as well; but a request may be what they die of, so that these are bounded, too.
        """
        most = self._context.settings.max_attempts
        if self._most_of_a_kind() >= most:
            await self._settled()
        return self._most_of_a_kind() >= most

    async def _settled(self) -> None:
        """Wait until it is known which engines live on which attempts failed."""
        while True:
            try:
                await self._scheduling.settled(e for engines in self._failed_on for e in engines)
                return
            except SchedulerLostError:
                await self._engines_there()  # By the next scheduler, which knows it.

    def _most_of_a_kind(self) -> int:
        known = self._scheduling.engines
        with_an_engine = sum(
            not all(is_alive(known, engine) for engine in engines) for engines in self._failed_on
        )
        otherwise = len(self._failed_on) - with_an_engine
        return max(with_an_engine, otherwise, self._schedulers_lost)

    async def _engines_there(self) -> None:
        wait_s = self._context.settings.engine_wait_s
        with self.record.stage(Stage.ADMISSION):
            try:
                await self._scheduling.engines_present(1, 1, wait_s)
            except DeadlineError as error:
                raise EngineLostError(f"request {self.job.request_id}: {error}") from error
        self._check()

    def _check(self) -> None:
        job, engines = self.job, self._scheduling.engines
        name = f"request {job.request_id}"
        if job.prompt_tokens < 1 or job.max_new_tokens < 1:
            raise BadRequestError(
                f"{name} has {job.prompt_tokens} prompt tokens and max_new_tokens "
                f"{job.max_new_tokens}; both must be at least 1"
            )
        check_prompt(job.prompt_tokens, self._context.settings, engines)
        wanted, limit = job.prompt_tokens + job.max_new_tokens, engines.limit("max_model_len")
        if limit is not None and wanted > limit:
            raise BadRequestError(
                f"{name} needs {wanted} tokens ({job.prompt_tokens} prompt, {job.max_new_tokens} "
                f"new), the model's context holds {limit}; shorten the prompt or max_tokens"
            )

    def _check_fits(self, job: Job) -> None:
        """Refuse a prompt, grown by earlier attempts perhaps, that no DE can ever hold."""
        block_tokens = self._context.block_tokens
        moves_bytes = self._context.moves_bytes
        blocks = holding_blocks(job.prompt_tokens, block_tokens) if moves_bytes else 0
        largest = max(
            (e.buffer_tokens // block_tokens for e in self._scheduling.engines.alive(Role.DECODE)),
            default=0,
        )
        if blocks > largest:
            raise PromptTooLongError(
                f"request {job.request_id} has a prompt of {blocks} blocks of {block_tokens} "
                f"tokens, the largest DE buffer holds {largest}; shorten the prompt or raise the "
                "engines' buffer_bytes"
            )

    def _emit(self, event: TokenEvent) -> None:
        if self._finished:
            return
        if self.record.first_token_s is None:
            event = msgspec.structs.replace(event, cached_tokens=self.record.hit_tokens)
        self._generated += event.token_ids
        self.record.streamed(len(event.token_ids))
        self._finished = event.finish_reason is not None
        self.events.put_nowait(event)
