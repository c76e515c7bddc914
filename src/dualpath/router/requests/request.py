"""A request as its client sees it: one stream of tokens, whatever happens behind it.

A lost engine ends an attempt, not the request.  Before the first token the next attempt starts
over; after it, the prompt of the next attempt is the old one with the streamed tokens, most of
which are stored already.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dualpath.core.blocks import are_tokens, holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.errors import (
    BadRequestError,
    DeadlineError,
    EngineLostError,
    HitLostError,
    OverloadedError,
    PromptTooLongError,
    SchedulerLostError,
    TransportError,
)
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.engines import EngineInfo, KnownEngines, is_alive, missing_engines
from dualpath.router.observe.tracing import RequestTrace
from dualpath.router.requests.admission import Ticket
from dualpath.router.requests.call_watch import OpenCall
from dualpath.router.scheduling import (
    FINISHED,
    Arrived,
    AttemptEvent,
    AttemptOrder,
    Placed,
    Prefilled,
    Recomputed,
    ScheduledAttempt,
    ScheduledRequest,
    Staged,
)
from dualpath.router.settings import RouterSettings
from dualpath.router.stages import RequestRecord, Stage
from dualpath.router.waits import run_until_broken, run_until_done

if TYPE_CHECKING:
    from dualpath.router.requests.front_end import FrontEnd

logger = logging.getLogger(__name__)

#: As in vLLM.
LARGEST_SALT_CHARACTERS = 128


def check_prompt(prompt_tokens: int, settings: RouterSettings, engines: KnownEngines) -> None:
    """Raise ``PromptTooLongError`` for one longer than the settings or the engines allow."""
    limits = {
        "max_prompt_tokens": settings.max_prompt_tokens,
        "the model's context": engines.limit("max_model_len"),
        "the draft model's context": engines.limit("max_prompt_tokens"),
    }
    for name, limit in limits.items():
        if limit is not None and prompt_tokens > limit:
            raise PromptTooLongError(
                f"the prompt has {prompt_tokens} tokens, {name} allows {limit}; shorten it"
            )


def check_salt(salt: str | None) -> None:
    """Raise ``BadRequestError`` for a cache salt that separates no tenants or cannot be hashed.

    An empty one would share the blocks of requests without a salt.
    """
    if salt is None:
        return
    if not 1 <= len(salt) <= LARGEST_SALT_CHARACTERS:
        raise BadRequestError(
            f"cache_salt has {len(salt)} characters; send 1 to {LARGEST_SALT_CHARACTERS}, or none "
            "to share blocks with everybody"
        )
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(f"cache_salt is no text: {error}; send valid Unicode") from error


def check_token_ids(token_ids: Sequence[int], engines: KnownEngines) -> None:
    """Raise ``BadRequestError`` for a number that is no token of the model."""
    vocab_size = engines.limit("vocab_size")
    if vocab_size is None or are_tokens(token_ids, vocab_size):
        return
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < vocab_size:
            raise BadRequestError(
                f"token id {token} is outside the vocabulary, 0 to {vocab_size - 1}; send tokens "
                "of this model"
            )


_ABORTED = ("abort", "error")
T = TypeVar("T")


class Attempt:
    """One attempt at a request: runs ``job`` as ``attempt_id``; tokens go to ``emit``.

    What it needs of engines' buffers, storage and the ledger is the scheduler's side
    (``scheduling``); model work and tokens are here.  Everything an attempt holds is released when
    it ends, however it ends; ``RequestLife`` decides whether there is another attempt.
    ``use_cached`` False: hits are read from storage, even if buffers cache them.
    """

    def __init__(
        self,
        front_end: "FrontEnd",
        job: Job,
        attempt_id: str,
        scheduled: ScheduledRequest,
        ticket: Ticket,
        record: RequestRecord,
        emit: Callable[[TokenEvent], None],
        trace: RequestTrace | None = None,
        *,
        use_cached: bool = True,
    ) -> None:
        self.attempt_id = attempt_id
        self.placed = False
        #: The engines it was placed on, PE (if it has one) and DE; a failure may be theirs.
        self.engines: tuple[EngineInfo, ...] = ()
        self._front_end = front_end
        self._job = job
        self._scheduled = scheduled
        self._ticket = ticket
        self._record = record
        self._emit = emit
        self._trace = trace
        self._use_cached = use_cached
        self._asked_s = front_end.clock()
        self._broken: asyncio.Future[None] | None = None
        self._decode_start_s: float | None = None
        self._decoding_s: float | None = None

    async def run(self) -> None:
        """Return when the last token is out.

        Raises ``EngineLostError`` or ``TransportError`` if another attempt may succeed, other
        ``DualPathError`` if not.
        """
        job = self._job
        order = AttemptOrder(
            attempt_id=self.attempt_id,
            number=self._record.attempts,
            prompt_tokens=job.prompt_tokens,
            max_new_tokens=job.max_new_tokens,
            keys=job.keys,
            cacheable=job.cacheable,
            tenant=job.tenant,
            use_cached=self._use_cached,
            max_load_tokens=job.kv_hints.max_load_tokens,
        )
        self._asked_s = self._front_end.clock()
        scheduled = self._scheduled.attempt(order, self)
        self._broken = scheduled.broken
        reason = "cancelled"
        try:
            reason = await run_until_broken(self._life(scheduled), scheduled.broken)
        except Exception as error:
            reason = f"failed: {error}"
            raise
        finally:
            self._release(scheduled, reason)

    def break_off(self, error: EngineLostError) -> None:
        """End the attempt with an error, unless it is broken already."""
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # Marks it as seen: the attempt may have ended already.

    async def _life(self, scheduled: ScheduledAttempt) -> str:
        """Return the reason of the end."""
        prepared = await scheduled.prepare()  # 2 to 4: look-up, PE, DE and read side, slots, reads
        if prepared.prefill is None:  # The DE computes what is no hit.
            self._account(await scheduled.prefilled())
            await self._decode(scheduled, prepared.decode, ())
            return FINISHED
        # 5: layer by layer, KV to the DE buffer
        first = await self._prefill(scheduled, prepared.prefill)
        if self._stream_first(first):  # 6: the PE's token
            return "finished with the first token"
        prior_tokens = first.token_ids if self._job.first_token_from_pe else ()
        await self._decode(scheduled, prepared.decode, prior_tokens)  # 6: H2D at the DE, decode
        return FINISHED

    def notify(self, event: AttemptEvent) -> None:
        """Take an event of the attempt from the scheduler."""
        match event:
            case Placed():
                prefill = () if event.prefill is None else (event.prefill,)
                self.engines = (*prefill, event.decode)
                self._count_placed()
            case Staged():
                self._record.stages.append(event.stage)
            case Recomputed():
                recomputed = self._record.recomputed
                recomputed[event.reason] = recomputed.get(event.reason, 0) + event.tokens
            case Arrived():
                self._kv_in_hbm(event)

    async def _prefill(self, scheduled: ScheduledAttempt, transfer: PrefillTransfer) -> TokenEvent:
        scheduled.check()
        engine = self.engines[0]
        with self._record.stage(Stage.PREFILL, engine.engine_id):
            job = self._traced(Stage.PREFILL, engine)
            call = self._front_end.engine_calls.prefill(engine, job, transfer)
            first = await self._model_work(engine, lambda open_call: call)
            if first.finish_reason in _ABORTED:
                await scheduled.prefill_aborted()
            _check_not_aborted(engine, first)
            # The PE's first token alone does not prove that the KV arrived.
            prefilled = await scheduled.prefilled()
            self._record_forward(engine, prefilled)
        self._account(prefilled)
        return first

    async def _model_work(self, engine: EngineInfo, work: Callable[[OpenCall], Awaitable[T]]) -> T:
        """Return the result of an engine's call; if it fails or is silent, the engine is suspect.

        ``work`` reports to the ``OpenCall`` what it has received.
        """
        try:
            with self._front_end.call_watch.watch(engine, self.attempt_id) as call:
                return await run_until_broken(work(call), call.broken)
        except (EngineLostError, TransportError) as error:
            self._front_end.scheduling.suspect(engine, str(error), call_failed=True)
            raise

    def _traced(self, stage: Stage, engine: EngineInfo) -> Job:
        """Return the job with the trace context of a call to ``engine``."""
        if self._trace is None:
            return self._job
        headers = self._trace.call(stage, engine.engine_id)
        return msgspec.structs.replace(self._job, trace_headers=headers)

    def _record_forward(self, engine: EngineInfo, done: Prefilled) -> None:
        """Note the PE's own times; it knows how long, and of our clock only the end."""
        if done.forward_s > 0:
            end_s = self._front_end.clock()
            where = engine.engine_id
            self._record.add(Stage.FORWARD, end_s - done.forward_s, where, end_s)
            self._record.add(Stage.TRANSFER, end_s - done.transfer_s, where, end_s)

    def _account(self, done: Prefilled) -> None:
        """Count the prompt's tokens as hit or missed, once per request."""
        if not self._record.prefilled:
            self._record.prefilled = True
            self._record.hit_tokens = done.account.hit_tokens
            self._record.hit_sources = done.account.sources
            self._front_end.metrics.prefilled(done.account)

    def _stream_first(self, first: TokenEvent) -> bool:
        """Stream the PE's token; return whether the request ends with it."""
        if not self._job.first_token_from_pe:
            return False
        exhausted = len(first.token_ids) >= self._job.max_new_tokens
        finish_reason = first.finish_reason
        if finish_reason in (None, "length"):
            # The PE was asked for one token: "length" is the request's end only if it was the last.
            finish_reason = "length" if exhausted else None
        self._emit(msgspec.structs.replace(first, finish_reason=finish_reason))
        return finish_reason is not None

    async def _decode(
        self, scheduled: ScheduledAttempt, transfer: DecodeTransfer, prior_tokens: Sequence[int]
    ) -> None:
        scheduled.check()
        engine, job = self.engines[-1], self._job
        self._decode_start_s = self._front_end.clock()
        job = self._traced(Stage.DECODE, engine)
        events = self._front_end.engine_calls.decode(engine, job, transfer, prior_tokens)
        try:
            await self._model_work(
                engine, lambda call: self._stream(scheduled, engine, events, call)
            )
        finally:
            self._record.add(Stage.DECODE, self._decode_start_s, engine.engine_id)

    async def _stream(
        self,
        scheduled: ScheduledAttempt,
        engine: EngineInfo,
        events: AsyncIterator[TokenEvent],
        call: OpenCall,
    ) -> None:
        try:
            async for event in events:
                call.heard()
                _check_not_aborted(engine, event)
                if self._decoding_s is None:
                    scheduled.decoding_started()
                    self._decodes(engine)
                self._emit(event)
                if event.finish_reason is not None:
                    return
        finally:
            if (close := getattr(events, "aclose", None)) is not None:
                await close()
        raise EngineLostError(
            f"engine {engine.engine_id} ended its stream without a finish reason; see its log"
        )

    def _decodes(self, engine: EngineInfo) -> None:
        """The DE has sent its first token: it has had the prompt's KV in its HBM."""
        assert self._decode_start_s is not None
        self._decoding_s = self._front_end.clock()
        self._record.add(Stage.HANDOVER, self._decode_start_s, engine.engine_id, self._decoding_s)

    def _kv_in_hbm(self, arrived: Arrived) -> None:
        if self._decode_start_s is not None:
            # The report comes late, and tokens travel on another connection.
            end_s = self._front_end.clock() if self._decoding_s is None else self._decoding_s
            start_s = max(end_s - arrived.h2d_s, self._decode_start_s)
            self._record.add(Stage.H2D, start_s, self.engines[-1].engine_id, end_s)

    def _count_placed(self) -> None:
        if not self.placed:
            self.placed = True
            self._front_end.metrics.placed()
            self._front_end.admission.has_engines(self._ticket, *self._placement_waits_s())

    def _placement_waits_s(self) -> tuple[float, float]:
        """Return the wait in the scheduler's queue, and all else but the look-up in storage."""
        spent_s = {Stage.LOOKUP: 0.0, Stage.QUEUE: 0.0}
        for stage in self._record.stages:
            if stage.stage in spent_s and stage.attempt == self._record.attempts:
                spent_s[stage.stage] += stage.end_s - stage.start_s
        queue_s = spent_s[Stage.QUEUE]
        since_s = self._front_end.clock() - self._asked_s
        return queue_s, max(since_s - queue_s - spent_s[Stage.LOOKUP], 0.0)

    def _release(self, scheduled: ScheduledAttempt, reason: str) -> None:
        if self.placed:
            self.placed = False
            self._front_end.metrics.given_back()
            self._front_end.admission.has_no_engines(self._ticket)
        scheduled.close(reason)


def _check_not_aborted(engine: EngineInfo, event: TokenEvent) -> None:
    if event.finish_reason in _ABORTED:
        raise EngineLostError(
            f"engine {engine.engine_id} gave the request up ({event.finish_reason}: "
            f"{event.stop_reason}); see its log"
        )


class RequestLife:
    """Runs a job to its end; ``events`` gets its tokens, and None from the front end at the end."""

    def __init__(
        self, front_end: "FrontEnd", job: Job, scheduled: ScheduledRequest, ticket: Ticket
    ) -> None:
        self.job = job
        self.ticket = ticket
        self.record = RequestRecord(job.request_id, job.prompt_tokens, front_end.clock)
        # Unbounded: a request has at most max_new_tokens events.
        self.events: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
        self._front_end = front_end
        self._scheduling = front_end.scheduling
        self._scheduled = scheduled
        #: The DE of the last attempt.
        self.decode_engine = ""
        self._generated: list[int] = []
        self._attempt: Attempt | None = None
        #: Engines of each failed attempt, and the number of attempts lost with a scheduler.
        self._failed_on: list[tuple[EngineInfo, ...]] = []
        self._schedulers_lost = 0
        #: A role has had no engine for ``engine_wait_s`` while an attempt waited for its engines.
        self._no_engines: EngineLostError | None = None
        self._finished = False
        self._trace: RequestTrace | None = None

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens that were streamed."""
        return tuple(self._generated)

    def end_unplaced(self, why: str) -> None:
        """End the request if its attempt waits for engines, with the error of one without any."""
        if self._attempt is not None and not self._attempt.placed:
            self._no_engines = EngineLostError(f"request {self.job.request_id}: {why}")
            self._attempt.break_off(self._no_engines)

    async def run(self) -> None:
        """Run all attempts within the deadline; raises the client's error."""
        outcome = "error"
        if self._front_end.tracing is not None:
            self._trace = self._front_end.tracing.begin(self.job, self.record)
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
        except OverloadedError:
            outcome = "refused"
            raise
        except (EngineLostError, TransportError):
            outcome = "engine_lost"
            raise
        finally:
            self.record.close(outcome)
            self._front_end.metrics.finished(self.record)
            if self._trace is not None:
                self._trace.end()

    async def _within_deadline(self) -> None:
        deadline_s = self._front_end.settings.request_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                with self.record.stage(Stage.ADMISSION):
                    await self._admitted()
                await self._all_attempts()
        except TimeoutError as error:
            last = f"; last failure: {self.record.failures[-1]}" if self.record.failures else ""
            raise DeadlineError(
                f"request {self.job.request_id} is not done after {deadline_s:g} s and "
                f"{self.record.attempts} of {self._front_end.settings.max_attempts} attempts, with "
                f"{len(self._generated)} tokens{last}; raise request_deadline_s, add engines or "
                f"send fewer requests at once"
            ) from error

    async def _admitted(self) -> None:
        """Wait in the queue; raises ``EngineLostError`` if a role is missing for too long."""
        while not self.ticket.may_begin():
            if missing_engines(self._scheduling.engines) is None:
                change = self._scheduling.membership.next_change()
                await run_until_done(change, self.ticket.decided)
            else:
                # Being admitted meanwhile does not begin this wait again.
                await run_until_broken(self._some_engines(), self.ticket.refused)

    async def _all_attempts(self) -> None:
        settings = self._front_end.settings
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
            except HitLostError as error:
                # No fault of its PE or DE.  Only a first attempt has no PE, or has third DEs.
                logger.info("request %s: %s", self.job.request_id, error)
            except (EngineLostError, TransportError) as error:
                if self._finished:
                    # The client has its last token; only the cleanup failed.
                    return
                if error is self._no_engines:
                    raise
                self.record.failures.append(str(error))
                if await self._scheduled.ends_aborted():
                    self._emit(TokenEvent(token_ids=(), finish_reason="abort"))
                    return
                if await self._used_up():
                    raise EngineLostError(
                        f"request {self.job.request_id} failed {self.record.attempts} times, at "
                        f"most {settings.max_attempts} attempts are lost with an engine, as many "
                        f"with the scheduler and as many otherwise ({{max_attempts}}); the last "
                        f"one: {error}; see the engines' logs, then send it again"
                    ) from error
                self._front_end.metrics.retried()
                logger.warning(
                    "request %s: attempt %d failed after %d tokens, trying again: %s",
                    self.job.request_id, self.record.attempts, len(self._generated), error,
                )  # fmt: skip

    async def _one_attempt(self, job: Job) -> None:
        number = self.record.attempts
        # Engines never see two attempts under one name: a late answer cannot be mistaken.
        attempt_id = job.request_id if number == 1 else f"{job.request_id}.{number}"
        self._attempt = Attempt(
            self._front_end,
            job,
            attempt_id,
            self._scheduled,
            self.ticket,
            self.record,
            self._emit,
            self._trace,
            # A retry uses no shared blocks, in case these made the attempt fail.
            use_cached=number == 1,
        )
        try:
            await self._attempt.run()
        except SchedulerLostError:
            self._schedulers_lost += 1
            self._front_end.admission.scheduler_lost()
            raise
        except HitLostError:
            raise
        except (EngineLostError, TransportError):
            self._failed_on.append(self._attempt.engines)
            raise
        finally:
            if self._attempt.engines:
                self.decode_engine = self._attempt.engines[-1].engine_id
            self._attempt = None

    async def _used_up(self) -> bool:
        """Whether attempts have failed too often, counting those on dead engines separately.

        The death of an engine or of the scheduler does not suggest that the next attempt fails as
        well; but a request may be the cause of it, so these are bounded, too.
        """
        most = self._front_end.settings.max_attempts
        if self._most_of_a_kind() >= most:
            await self._settled()
        return self._most_of_a_kind() >= most

    async def _settled(self) -> None:
        """Wait until it is known which engines live on which attempts failed."""
        while True:
            try:
                await self._scheduling.await_liveness(
                    e for engines in self._failed_on for e in engines
                )
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
        with self.record.stage(Stage.ADMISSION):
            await self._some_engines()
        self._check()

    async def _some_engines(self) -> None:
        wait_s = self._front_end.settings.engine_wait_s
        try:
            await self._scheduling.wait_for_engines(1, 1, wait_s)
        except DeadlineError as error:
            raise EngineLostError(f"request {self.job.request_id}: {error}") from error

    def _check(self) -> None:
        job, engines = self.job, self._scheduling.engines
        name = f"request {job.request_id}"
        if job.prompt_tokens < 1 or job.max_new_tokens < 1:
            raise BadRequestError(
                f"{name} has {job.prompt_tokens} prompt tokens and max_new_tokens "
                f"{job.max_new_tokens}; both must be at least 1"
            )
        check_prompt(job.prompt_tokens, self._front_end.settings, engines)
        wanted, limit = job.prompt_tokens + job.max_new_tokens, engines.limit("max_model_len")
        if limit is not None and wanted > limit:
            raise BadRequestError(
                f"{name} needs {wanted} tokens ({job.prompt_tokens} prompt, {job.max_new_tokens} "
                f"new), the model's context holds {limit}; shorten the prompt or max_tokens"
            )

    def _check_fits(self, job: Job) -> None:
        """Refuse a prompt, grown by earlier attempts perhaps, that no DE can ever hold."""
        block_tokens = self._front_end.block_tokens
        moves_bytes = self._front_end.moves_bytes
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
            event = msgspec.structs.replace(
                event,
                cached_tokens=self.record.hit_tokens,
                cached_by_source=self.record.hit_sources,
            )
        self._generated += event.token_ids
        self.record.streamed(len(event.token_ids))
        self._finished = event.finish_reason is not None
        self.events.put_nowait(event)
