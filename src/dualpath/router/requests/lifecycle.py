"""One attempt at a request, from look-up to last token, as one readable coroutine.

Everything an attempt has taken (buffer slots, its place with the scheduler, model work) is given
back when it ends, however it ends; ``request_life`` decides whether there is another attempt.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.control import (
    DecodeTransfer,
    KvInHbm,
    Lookup,
    Persist,
    PrefillDone,
    PrefillTransfer,
    Read,
    ReadDone,
    Reserved,
)
from dualpath.core.errors import EngineLostError, TransportError
from dualpath.core.request import Request
from dualpath.policy.events import Assignment, ReadPart
from dualpath.router.context import Desk
from dualpath.router.control.engine_calls import Job, TokenEvent
from dualpath.router.control.exchange import AttemptChannel, gather_or_cancel, run_until_broken
from dualpath.router.control.registry import EngineInfo
from dualpath.router.observe.tracing import RequestTrace
from dualpath.router.requests.hit_account import ENGINE_LOST, GONE, NOT_CACHEABLE, TIMEOUT, Found
from dualpath.router.requests.hits import Loaded, PartRead, good_runs
from dualpath.router.requests.records import RequestRecord, Stage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOKUP_TRIES = 2
_GIVEN_UP = ("abort", "error")


class Attempt:
    """Runs ``job`` once under the name ``attempt_id``; tokens go to ``emit``."""

    def __init__(
        self,
        context: Desk,
        job: Job,
        attempt_id: str,
        arrival_seq: int,
        record: RequestRecord,
        emit: Callable[[TokenEvent], None],
        trace: RequestTrace | None = None,
    ) -> None:
        self.attempt_id = attempt_id
        self.placed = False
        self._context = context
        self._job = job
        self._arrival_seq = arrival_seq
        self._record = record
        self._emit = emit
        self._trace = trace
        self._unstored_reason = GONE if job.cacheable else NOT_CACHEABLE
        self._short_reason = ""
        self._channel = AttemptChannel(attempt_id, self._kv_in_hbm)
        self._told: set[str] = set()
        self._decode_start_s: float | None = None
        self._decoding_s: float | None = None
        self._prefill_transfer_noted = False

    async def run(self) -> None:
        """Return when the last token is out.

        Raises ``EngineLostError`` or ``TransportError`` if another attempt may succeed, other
        ``DualPathError`` if not.
        """
        self._context.exchange.open(self._channel)
        reason = "cancelled"
        try:
            await run_until_broken(self._life(), self._channel.broken)
            reason = "finished"
        except Exception as error:
            reason = f"failed: {error}"
            raise
        finally:
            self._give_back(reason)

    async def _life(self) -> None:
        stored_blocks = await self._look_up()  # 2: longest stored prefix
        await self._find_engines(stored_blocks)  # 3: PE, DE and read side
        loaded = await self._load(stored_blocks)  # 4: reserve, read (labels 1-2 of Fig. 4)
        first = await self._prefill(loaded)  # 5: layer by layer, KV to the DE buffer
        self._account(stored_blocks, loaded.hit_blocks)
        over = self._stream_first(first)  # 6: the PE's token
        self._persist(loaded)  # 7: the prompt's new blocks
        if not over:
            await self._decode(loaded, first)  # 6: H2D at the DE, decode

    async def _look_up(self) -> int:
        job, block_tokens = self._job, self._context.block_tokens
        keys = job.keys[: (job.prompt_tokens - 1) // block_tokens]
        if not job.cacheable or not keys:
            return 0
        with self._record.stage(Stage.LOOKUP):
            for engine in self._context.lookup_candidates()[:_LOOKUP_TRIES]:
                call_id, answer = self._context.exchange.lookup(engine.engine_id)
                self._context.send(engine.engine_id, Lookup(call_id=call_id, keys=keys))
                try:
                    async with asyncio.timeout(self._context.settings.lookup_timeout_s):
                        hit_blocks = await answer
                except TimeoutError:
                    return self._no_hit(TIMEOUT, engine)
                if hit_blocks is not None:
                    return max(0, min(hit_blocks, len(keys)))
        return self._no_hit(ENGINE_LOST, engine)

    def _no_hit(self, reason: str, engine: EngineInfo) -> int:
        logger.warning(
            "request %s: look-up at %s failed (%s after %g s at most); computing the whole prompt",
            self.attempt_id, engine.engine_id, reason, self._context.settings.lookup_timeout_s,
        )  # fmt: skip
        self._context.metrics.lookup_failed(reason)
        self._unstored_reason = f"lookup-{reason}"
        return 0

    async def _find_engines(self, stored_blocks: int) -> None:
        request = Request(
            request_id=self.attempt_id,
            prompt_tokens=self._job.prompt_tokens,
            hit_tokens=stored_blocks * self._context.block_tokens,
            max_new_tokens=self._job.max_new_tokens,
            arrival_seq=self._arrival_seq,
        )
        with self._record.stage(Stage.QUEUE):
            self._assignment: Assignment = await self._context.dispatch.place(request)
        self._prefill_engine = self._context.engine(self._assignment.prefill_engine)
        self._decode_engine = self._context.engine(self._assignment.decode_engine)
        self.placed = True

    async def _load(self, stored_blocks: int) -> Loaded:
        if not self._context.moves_bytes:
            await self._tell(self._decode_engine, 0)
            await self._tell(self._prefill_engine, 0)
            return Loaded(hit_blocks=stored_blocks, hits=(), de_slots=())
        prompt_blocks = -(-self._job.prompt_tokens // self._context.block_tokens)
        parts = self._assignment.reads
        # A PE that gets no slots need not wait for what the DE grants and reads.
        telling = asyncio.ensure_future(self._tell_idle_reader(parts))
        loading = asyncio.ensure_future(self._reserve_and_read(prompt_blocks, parts))
        await gather_or_cancel(loading, telling)
        de_slots, outcomes = loading.result()
        self._context.dispatch.read_done(self.attempt_id)
        for outcome in outcomes:
            if outcome.part.side is Role.DECODE:
                de_slots = outcome.reserved  # A deadline may have replaced slots.
        hits, hit_blocks, short = good_runs(outcomes, self._context.block_tokens)
        if short is not None:
            self._short_reason = short
            self._recompute(stored_blocks - hit_blocks, short)
        return Loaded(hit_blocks=hit_blocks, hits=hits, de_slots=de_slots)

    async def _tell(self, engine: EngineInfo, reserve_blocks: int) -> tuple[int, ...]:
        """Assign the request to an engine; return the slots it grants."""
        self._channel.check()
        message = self._context.dispatch.assign(engine.engine_id, self.attempt_id, reserve_blocks)
        self._told.add(engine.engine_id)
        if reserve_blocks == 0:
            self._context.send(engine.engine_id, message)
            await self._until_heard(engine)
            return ()
        granted = self._channel.expect(Reserved, engine.engine_id)
        self._context.send(engine.engine_id, message)
        with self._record.stage(Stage.BUFFER_WAIT, engine.engine_id):
            return (await granted).slots

    async def _reserve_and_read(
        self, prompt_blocks: int, parts: Sequence[ReadPart]
    ) -> tuple[tuple[int, ...], list[PartRead]]:
        """Return the DE's slots and what was read.

        DE first, always: what holds PE slots waits for nobody, so nothing can deadlock.
        """
        de_slots = await self._tell(self._decode_engine, prompt_blocks)
        return de_slots, await gather_or_cancel(*(self._read(part) for part in parts))

    async def _tell_idle_reader(self, parts: Sequence[ReadPart]) -> None:
        """Assign the request to its PE if the PE has nothing to read for it."""
        if not any(part.side is Role.PREFILL for part in parts):
            await self._tell(self._prefill_engine, 0)

    async def _until_heard(self, engine: EngineInfo) -> None:
        """Wait until an engine has carried out what it was sent so far.

        The vLLM request travels on another connection and must not overtake its ``Assign``.  An
        empty look-up is answered after it, since commands are carried out in order.
        """
        call_id, answer = self._context.exchange.lookup(engine.engine_id)
        self._context.send(engine.engine_id, Lookup(call_id=call_id, keys=()))
        try:
            await asyncio.wait({answer}, timeout=self._context.settings.lookup_timeout_s)
        finally:
            answer.cancel()

    async def _read(self, part: ReadPart) -> PartRead:
        block_tokens = self._context.block_tokens
        first_block, blocks = part.first_token // block_tokens, part.tokens // block_tokens
        engine, first_slot = self._decode_engine, first_block
        if part.side is Role.PREFILL:
            engine, first_slot = self._prefill_engine, 0
            blocks = min(blocks, engine.buffer_tokens // block_tokens)
            await self._tell(engine, blocks)
        if blocks == 0:
            return PartRead(part, 0, (), (), "buffer-too-small")
        keys = self._job.keys[first_block : first_block + blocks]
        start_s = self._context.clock()
        with self._record.stage(Stage.READ, engine.engine_id):
            done = await self._called(engine, self._read_answer(engine, first_slot, keys))
        read_s = start_s + done.queue_s
        self._record.add(Stage.READ_QUEUE, start_s, engine.engine_id, read_s)
        self._record.add(Stage.STORAGE_READ, read_s, engine.engine_id, read_s + done.read_s)
        good_blocks = min(done.good_blocks, blocks)
        return PartRead(
            part=part,
            good_blocks=good_blocks,
            slots=done.slots[first_slot : first_slot + good_blocks],
            reserved=done.slots,
            reason=done.reason or "buffer-too-small",
        )

    async def _read_answer(
        self, engine: EngineInfo, first_slot: int, keys: tuple[bytes, ...]
    ) -> ReadDone:
        self._channel.check()
        settings = self._context.settings
        answer = self._channel.expect(ReadDone, engine.engine_id)
        self._context.dispatch.reading(self.attempt_id, engine.engine_id)
        self._context.send(
            engine.engine_id,
            Read(
                request_id=self.attempt_id,
                first_slot=first_slot,
                keys=keys,
                deadline_s=settings.read_deadline_s,
            ),
        )
        limit_s = settings.read_deadline_s + settings.read_margin_s
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise EngineLostError(
                f"engine {engine.engine_id} has not answered a read of {len(keys)} blocks within "
                f"{limit_s:g} s; check its storage"
            ) from None

    def _recompute(self, blocks: int, reason: str) -> None:
        tokens = blocks * self._context.block_tokens
        logger.warning(
            "request %s: %d stored tokens are recomputed: %s", self.attempt_id, tokens, reason
        )
        self._context.metrics.recomputed(tokens, reason)
        recomputed = self._record.recomputed
        recomputed[reason] = recomputed.get(reason, 0) + tokens

    async def _prefill(self, loaded: Loaded) -> TokenEvent:
        self._channel.check()
        engine, job = self._prefill_engine, self._job
        prefill_transfer = PrefillTransfer(
            request_id=self.attempt_id,
            prompt_tokens=job.prompt_tokens,
            hit_blocks=loaded.hit_blocks,
            hit_key_tail=job.keys[loaded.hit_blocks - 1] if loaded.hit_blocks else b"",
            hits=loaded.hits,
            decode_engine=self._decode_engine.engine_id,
            decode_epoch=self._decode_engine.epoch,
            de_slots=loaded.de_slots,
        )
        if loaded.de_slots:
            self._context.releases.writer_started(self.attempt_id, engine.engine_id)
        sent = self._channel.expect(PrefillDone, engine.engine_id)
        with self._record.stage(Stage.PREFILL, engine.engine_id):
            job = self._traced(Stage.PREFILL, engine)
            first = await self._called(
                engine, self._context.calls.prefill(engine, job, prefill_transfer)
            )
            _check_not_given_up(engine, first)
            done = await self._called(engine, self._arrived(engine, sent))
            self._record_forward(engine, done)
        self._channel.done_with(engine.engine_id)
        self._told.discard(engine.engine_id)
        self._context.releases.release(engine.engine_id, self.attempt_id, "prefill done")
        self._context.dispatch.prefill_done(self.attempt_id, engine.engine_id)
        return first

    def _traced(self, stage: Stage, engine: EngineInfo) -> Job:
        """Return the job with the trace context of a call to ``engine``."""
        if self._trace is None:
            return self._job
        headers = self._trace.call(stage, engine.engine_id)
        return msgspec.structs.replace(self._job, trace_headers=headers)

    def _record_forward(self, engine: EngineInfo, sent: PrefillDone) -> None:
        """Note the PE's own times; it knows how long, and of the router's clock only the end."""
        if sent.forward_s > 0:
            end_s = self._context.clock()
            where = engine.engine_id
            self._record.add(Stage.FORWARD, end_s - sent.forward_s, where, end_s)
            self._record.add(Stage.TRANSFER, end_s - sent.transfer_s, where, end_s)

    async def _arrived(self, engine: EngineInfo, sent: Awaitable[PrefillDone]) -> PrefillDone:
        """Return the PE's word that the prompt's KV is complete in the DE's buffer.

        Its first token alone does not say so, and a token is streamed only once it is true.
        """
        limit_s = self._context.settings.read_margin_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await sent
        except TimeoutError:
            raise EngineLostError(
                f"engine {engine.engine_id} computed the first token but has not confirmed its "
                f"transfers within {limit_s:g} s; see its log"
            ) from None
        if answer.failure is not None:
            raise TransportError(f"engine {engine.engine_id} could not send KV: {answer.failure}")
        return answer

    def _account(self, stored_blocks: int, hit_blocks: int) -> None:
        """Count the prompt's tokens as hit or missed, once per request."""
        if self._record.prefilled:
            return
        found = Found(stored_blocks, hit_blocks, self._unstored_reason, self._short_reason)
        account = self._context.seen_blocks.account(
            self._job.keys, self._job.prompt_tokens, self._context.block_tokens, found
        )
        self._record.prefilled = True
        self._record.hit_tokens = account.hit_tokens
        self._context.metrics.prefilled(account)

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

    def _persist(self, loaded: Loaded) -> None:
        """Have the DE store the prompt's new full blocks; sent even without any.

        The DE gives the buffer back only when it knows that nothing more is to be stored.
        """
        self._channel.check()
        keys = self._job.keys[loaded.hit_blocks :]
        self._context.send(
            self._decode_engine.engine_id,
            Persist(request_id=self.attempt_id, first_slot=loaded.hit_blocks, keys=keys),
        )

    async def _decode(self, loaded: Loaded, first: TokenEvent) -> None:
        self._channel.check()
        engine, job = self._decode_engine, self._job
        decode_transfer = DecodeTransfer(
            request_id=self.attempt_id, prompt_tokens=job.prompt_tokens, slots=loaded.de_slots
        )
        prior_tokens = first.token_ids if job.first_token_from_pe else ()
        self._decode_start_s = self._context.clock()
        job = self._traced(Stage.DECODE, engine)
        events = self._context.calls.decode(engine, job, decode_transfer, prior_tokens)
        try:
            await self._called(engine, self._stream(engine, events))
        finally:
            self._record.add(Stage.DECODE, self._decode_start_s, engine.engine_id)
        if not self._prefill_transfer_noted:
            # The record waits for the word; the client has its tokens, whatever becomes of the DE.
            self._channel.done_with(engine.engine_id)
            await self._until_heard(engine)

    async def _stream(self, engine: EngineInfo, events: AsyncIterator[TokenEvent]) -> None:
        try:
            async for event in events:
                _check_not_given_up(engine, event)
                # Tokens need all of the prompt's KV: nothing is on its way any more.
                self._context.releases.writer_done(self.attempt_id)
                if self._decoding_s is None:
                    self._decoding_s = self._context.clock()
                self._emit(event)
                if event.finish_reason is not None:
                    return
        finally:
            if (close := getattr(events, "aclose", None)) is not None:
                await close()
        raise EngineLostError(
            f"engine {engine.engine_id} ended its stream without a finish reason; see its log"
        )

    def _kv_in_hbm(self, handed: KvInHbm) -> None:
        self._context.releases.writer_done(self.attempt_id)
        self._context.dispatch.kv_in_hbm(self.attempt_id, self._decode_engine.engine_id)
        if self._decode_start_s is not None:
            where = self._decode_engine.engine_id
            # Tokens travel on another connection: they may come first, even all of them.
            end_s = self._context.clock() if self._decoding_s is None else self._decoding_s
            self._record.add(Stage.HANDOVER, self._decode_start_s, where, end_s)
            self._record.add(Stage.H2D, end_s - handed.h2d_s, where, end_s)
            self._prefill_transfer_noted = True

    async def _called(self, engine: EngineInfo, work: Awaitable[T]) -> T:
        """Return what ``work`` returns; if it fails, find out whether its engine still lives."""
        try:
            return await work
        except (EngineLostError, TransportError) as error:
            await self._context.confirm_alive(engine.engine_id, str(error))
            raise

    def _give_back(self, reason: str) -> None:
        context = self._context
        context.exchange.close(self.attempt_id)
        if self.placed:
            prefill, decode = self._prefill_engine.engine_id, self._decode_engine.engine_id
            if prefill in self._told:
                context.releases.release(prefill, self.attempt_id, reason)
            if decode in self._told:
                context.releases.release_when_safe(decode, self.attempt_id, reason)
            self.placed = False
        context.dispatch.over(self.attempt_id)


def _check_not_given_up(engine: EngineInfo, event: TokenEvent) -> None:
    if event.finish_reason in _GIVEN_UP:
        raise EngineLostError(
            f"engine {engine.engine_id} gave the request up ({event.finish_reason}: "
            f"{event.stop_reason}); see its log"
        )
