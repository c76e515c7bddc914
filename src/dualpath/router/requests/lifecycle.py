"""One attempt at a request, from look-up to last token, as one readable coroutine.

What it asks of engines' buffers, storage and the ledger is the scheduler's half (``scheduling``);
model work and tokens are here.  Everything an attempt has taken is given back when it ends, however
it ends; ``request_life`` decides whether there is another attempt.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec

from dualpath.core.errors import EngineLostError, TransportError
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.observe.tracing import RequestTrace
from dualpath.router.requests.context import FrontEndContext
from dualpath.router.requests.records import RequestRecord
from dualpath.router.scheduling import (
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
from dualpath.router.stages import Stage
from dualpath.router.waits import run_until_broken

_GIVEN_UP = ("abort", "error")
T = TypeVar("T")


class Attempt:
    """Runs ``job`` once under the name ``attempt_id``; tokens go to ``emit``.

    ``kept`` False: its hits are read from storage, whatever buffers keep.
    """

    def __init__(
        self,
        context: FrontEndContext,
        job: Job,
        attempt_id: str,
        scheduled: ScheduledRequest,
        record: RequestRecord,
        emit: Callable[[TokenEvent], None],
        trace: RequestTrace | None = None,
        *,
        kept: bool = True,
    ) -> None:
        self.attempt_id = attempt_id
        self.placed = False
        #: The engines it was placed on, PE and DE; a failure may be theirs.
        self.engines: tuple[EngineInfo, ...] = ()
        self._context = context
        self._job = job
        self._scheduled = scheduled
        self._record = record
        self._emit = emit
        self._trace = trace
        self._kept = kept
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
            kept=self._kept,
        )
        scheduled = self._scheduled.attempt(order, self)
        reason = "cancelled"
        try:
            await run_until_broken(self._life(scheduled), scheduled.broken)
            reason = "finished"
        except Exception as error:
            reason = f"failed: {error}"
            raise
        finally:
            self._give_back(scheduled, reason)

    async def _life(self, scheduled: ScheduledAttempt) -> None:
        transfer = await scheduled.prepare()  # 2 to 4: look-up, PE, DE and read side, slots, reads
        first = await self._prefill(scheduled, transfer)  # 5: layer by layer, KV to the DE buffer
        if not self._stream_first(first):  # 6: the PE's token
            await self._decode(scheduled, transfer, first)  # 6: H2D at the DE, decode

    def heard(self, event: AttemptEvent) -> None:
        """The scheduler says what has become of the attempt."""
        match event:
            case Placed():
                self.engines = event.prefill, event.decode
                self._take_place()
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
            call = self._context.calls.prefill(engine, job, transfer)
            first = await self._model_work(engine, call)
            if first.finish_reason in _GIVEN_UP:
                await scheduled.given_up()
            _check_not_given_up(engine, first)
            # The PE's first token alone does not say that the KV arrived.
            prefilled = await scheduled.prefilled()
            self._record_forward(engine, prefilled)
        self._account(prefilled)
        return first

    async def _model_work(self, engine: EngineInfo, work: Awaitable[T]) -> T:
        """Return what an engine's call returns; an engine whose call fails is suspect."""
        try:
            return await work
        except (EngineLostError, TransportError) as error:
            self._context.scheduling.suspect(engine, str(error), call_failed=True)
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
            end_s = self._context.clock()
            where = engine.engine_id
            self._record.add(Stage.FORWARD, end_s - done.forward_s, where, end_s)
            self._record.add(Stage.TRANSFER, end_s - done.transfer_s, where, end_s)

    def _account(self, done: Prefilled) -> None:
        """Count the prompt's tokens as hit or missed, once per request."""
        if not self._record.prefilled:
            self._record.prefilled = True
            self._record.hit_tokens = done.account.hit_tokens
            self._context.metrics.prefilled(done.account)

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
        self, scheduled: ScheduledAttempt, transfer: PrefillTransfer, first: TokenEvent
    ) -> None:
        scheduled.check()
        engine, job = self.engines[1], self._job
        decode_transfer = DecodeTransfer(
            request_id=self.attempt_id,
            prompt_tokens=job.prompt_tokens,
            slots=transfer.de_slots,
            tenant=job.tenant,
        )
        prior_tokens = first.token_ids if job.first_token_from_pe else ()
        self._decode_start_s = self._context.clock()
        job = self._traced(Stage.DECODE, engine)
        events = self._context.calls.decode(engine, job, decode_transfer, prior_tokens)
        try:
            await self._model_work(engine, self._stream(scheduled, engine, events))
        finally:
            self._record.add(Stage.DECODE, self._decode_start_s, engine.engine_id)
        await scheduled.decoded()

    async def _stream(
        self, scheduled: ScheduledAttempt, engine: EngineInfo, events: AsyncIterator[TokenEvent]
    ) -> None:
        try:
            async for event in events:
                _check_not_given_up(engine, event)
                if self._decoding_s is None:
                    self._decoding_s = self._context.clock()
                    scheduled.tokens_came()
                self._emit(event)
                if event.finish_reason is not None:
                    return
        finally:
            if (close := getattr(events, "aclose", None)) is not None:
                await close()
        raise EngineLostError(
            f"engine {engine.engine_id} ended its stream without a finish reason; see its log"
        )

    def _kv_in_hbm(self, arrived: Arrived) -> None:
        if self._decode_start_s is not None:
            where = self.engines[1].engine_id
            # Tokens travel on another connection: they may come first, even all of them.
            end_s = self._context.clock() if self._decoding_s is None else self._decoding_s
            self._record.add(Stage.HANDOVER, self._decode_start_s, where, end_s)
            self._record.add(Stage.H2D, end_s - arrived.h2d_s, where, end_s)

    def _take_place(self) -> None:
        if not self.placed:
            self.placed = True
            self._context.metrics.placed()

    def _give_back(self, scheduled: ScheduledAttempt, reason: str) -> None:
        if self.placed:
            self.placed = False
            self._context.metrics.given_back()
        scheduled.over(reason)


def _check_not_given_up(engine: EngineInfo, event: TokenEvent) -> None:
    if event.finish_reason in _GIVEN_UP:
        raise EngineLostError(
            f"engine {engine.engine_id} gave the request up ({event.finish_reason}: "
            f"{event.stop_reason}); see its log"
        )
