"""One attempt at a request, from look-up to last token, as one readable coroutine.

Everything an attempt has taken (buffer slots, its place with the scheduler, model work) is given
back when it ends, however it ends; ``request_life`` decides whether there is another attempt.
"""

import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from dualpath.core.blocks import holding_blocks, most_hit_blocks
from dualpath.core.control import KvInHbm, PrefillDone
from dualpath.core.errors import EngineLostError
from dualpath.core.request import KeptPrefix, Request
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.policy.events import Assignment
from dualpath.router.context import RouterContext
from dualpath.router.control.engine_calls import Job, TokenEvent
from dualpath.router.control.exchange import AttemptChannel, run_until_broken
from dualpath.router.control.registry import EngineInfo
from dualpath.router.observe.tracing import RequestTrace
from dualpath.router.requests.attempt_steps import AttemptSteps
from dualpath.router.requests.hit_account import FASTER, GONE, NOT_CACHEABLE, Found
from dualpath.router.requests.hits import Loaded, good_runs
from dualpath.router.requests.loading import Loading
from dualpath.router.requests.look_up import look_up
from dualpath.router.requests.records import RequestRecord, Stage

logger = logging.getLogger(__name__)

_GIVEN_UP = ("abort", "error")


class Attempt:
    """Runs ``job`` once under the name ``attempt_id``; tokens go to ``emit``.

    ``kept`` False: its hits are read from storage, whatever buffers keep.
    """

    def __init__(
        self,
        context: RouterContext,
        job: Job,
        attempt_id: str,
        arrival_seq: int,
        record: RequestRecord,
        emit: Callable[[TokenEvent], None],
        trace: RequestTrace | None = None,
        *,
        kept: bool = True,
    ) -> None:
        self.attempt_id = attempt_id
        self._kept = kept and context.settings.dram_tier
        self.placed = False
        #: The engines it was placed on; a failure may be theirs.
        self.engines: tuple[EngineInfo, ...] = ()
        self._context = context
        self._job = job
        self._arrival_seq = arrival_seq
        self._record = record
        self._emit = emit
        self._trace = trace
        self._unstored_reason = GONE if job.cacheable else NOT_CACHEABLE
        self._short_reason = ""
        self._channel = AttemptChannel(attempt_id, self._kv_in_hbm)
        self._steps = AttemptSteps(context, self._channel)
        self._decode_start_s: float | None = None
        self._decoding_s: float | None = None
        self._kv_in_hbm_noted = False

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
        wanted_blocks = await self._find_engines(stored_blocks)  # 3: PE, DE and read side
        loaded = await self._load(wanted_blocks)  # 4: reserve, read (labels 1-2 of Fig. 4)
        first = await self._prefill(loaded)  # 5: layer by layer, KV to the DE buffer
        self._account(stored_blocks, wanted_blocks, loaded.hit_blocks)
        over = self._stream_first(first)  # 6: the PE's token
        self._persist(loaded)  # 7: the prompt's new blocks
        if not over:
            await self._decode(loaded, first)  # 6: H2D at the DE, decode

    async def _look_up(self) -> int:
        job, block_tokens = self._job, self._context.block_tokens
        keys = job.keys[: most_hit_blocks(job.prompt_tokens, block_tokens)]
        if not job.cacheable or not keys:
            return 0
        with self._record.stage(Stage.LOOKUP):
            found = await look_up(self._context, keys)
        if found.failure is not None:
            logger.warning(
                "request %s: look-up failed (%s) within %g s; of %d blocks it found %d, the rest "
                "is computed; see the storage and the engines' logs, or raise lookup_timeout_s",
                self.attempt_id, found.failure, self._context.settings.lookup_timeout_s,
                len(keys), found.stored_blocks,
            )  # fmt: skip
            self._context.metrics.lookup_failed(found.failure)
            self._unstored_reason = f"lookup-{found.failure}"
        return found.stored_blocks

    async def _find_engines(self, stored_blocks: int) -> int:
        """Return how many of the stored blocks are to be loaded; the rest is faster computed."""
        request = Request(
            request_id=self.attempt_id,
            prompt_tokens=self._job.prompt_tokens,
            hit_tokens=stored_blocks * self._context.block_tokens,
            max_new_tokens=self._job.max_new_tokens,
            arrival_seq=self._arrival_seq,
            kept=self._kept_prefixes(stored_blocks),
        )
        with self._record.stage(Stage.QUEUE):
            self._assignment: Assignment = await self._context.dispatch.place(request)
        self._prefill_engine = self._context.engine(self._assignment.prefill_engine)
        self._decode_engine = self._context.engine(self._assignment.decode_engine)
        self.engines = self._prefill_engine, self._decode_engine
        self.placed = True
        recomputed = self._assignment.recompute_tokens
        if recomputed:
            self._count_recomputed(recomputed, FASTER)
        return stored_blocks - recomputed // self._context.block_tokens

    def _kept_prefixes(self, stored_blocks: int) -> tuple[KeptPrefix, ...]:
        mode = self._context.registry.mode
        if not self._kept or mode is None:
            return ()
        return self._context.kept.prefixes(self._job.keys[:stored_blocks], mode)

    async def _load(self, wanted_blocks: int) -> Loaded:
        if not self._context.moves_bytes:
            await self._steps.assign(self._decode_engine)
            await self._steps.assign(self._prefill_engine)
            return Loaded(hit_blocks=wanted_blocks, hits=(), de_slots=())
        prompt_blocks = holding_blocks(self._job.prompt_tokens, self._context.block_tokens)
        engines = self._prefill_engine, self._decode_engine
        loading = Loading(
            self._context, self._steps, self._record, self._job.keys, *engines, kept=self._kept
        )
        brought = await loading.load(self._assignment.reads, prompt_blocks)
        hits, hit_blocks, short = good_runs(brought.outcomes)
        loaded = Loaded(hit_blocks=hit_blocks, hits=hits, de_slots=brought.de_slots)
        if short is not None:
            loaded = await loading.with_windows(loaded)
            self._short_reason = short
            self._recompute(wanted_blocks - loaded.hit_blocks, short)
        self._context.dispatch.read_done(self.attempt_id)
        return loaded

    def _recompute(self, blocks: int, reason: str) -> None:
        tokens = blocks * self._context.block_tokens
        logger.warning(
            "request %s: %d stored tokens are recomputed: %s", self.attempt_id, tokens, reason
        )
        self._count_recomputed(tokens, reason)

    def _count_recomputed(self, tokens: int, reason: str) -> None:
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
            shared_blocks=loaded.shared_blocks,
        )
        if loaded.de_slots:
            holder = self._decode_engine.engine_id
            self._context.releases.writer_started(self.attempt_id, engine.writer, holder)
        done = self._channel.expect(PrefillDone, engine.engine_id)
        with self._record.stage(Stage.PREFILL, engine.engine_id):
            job = self._traced(Stage.PREFILL, engine)
            call = self._context.calls.prefill(engine, job, prefill_transfer)
            first = await self._steps.model_work(engine, call)
            if first.finish_reason in _GIVEN_UP:
                # Why, it has said on its control link: that is here by the answer to a Sync.
                await self._steps.synced(engine)
                if done.done():
                    await self._steps.kv_arrived(engine, self._decode_engine, done)
            _check_not_given_up(engine, first)
            self._record_forward(
                engine, await self._steps.kv_arrived(engine, self._decode_engine, done)
            )
        self._steps.prefilled(engine)
        return first

    def _traced(self, stage: Stage, engine: EngineInfo) -> Job:
        """Return the job with the trace context of a call to ``engine``."""
        if self._trace is None:
            return self._job
        headers = self._trace.call(stage, engine.engine_id)
        return msgspec.structs.replace(self._job, trace_headers=headers)

    def _record_forward(self, engine: EngineInfo, done: PrefillDone) -> None:
        """Note the PE's own times; it knows how long, and of the router's clock only the end."""
        if done.forward_s > 0:
            end_s = self._context.clock()
            where = engine.engine_id
            self._record.add(Stage.FORWARD, end_s - done.forward_s, where, end_s)
            self._record.add(Stage.TRANSFER, end_s - done.transfer_s, where, end_s)

    def _account(self, stored_blocks: int, wanted_blocks: int, hit_blocks: int) -> None:
        """Count the prompt's tokens as hit or missed, once per request."""
        if self._record.prefilled:
            return
        found = Found(
            stored_blocks,
            hit_blocks,
            self._unstored_reason,
            self._short_reason,
            faster_blocks=stored_blocks - wanted_blocks,
        )
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
        keys, engine = self._job.keys, self._decode_engine
        self._steps.persist(engine, loaded.hit_blocks, keys, self._job.tenant)
        self._context.writers.note(keys[loaded.hit_blocks :] or keys[-1:], engine.engine_id)

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
            await self._steps.model_work(engine, self._stream(engine, events))
        finally:
            self._record.add(Stage.DECODE, self._decode_start_s, engine.engine_id)
        if not self._kv_in_hbm_noted:
            # The record waits for the word; the client has its tokens, whatever becomes of the DE.
            self._channel.done_with(engine.engine_id)
            await self._steps.synced(engine)

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

    def _kv_in_hbm(self, arrived: KvInHbm) -> None:
        self._context.releases.writer_done(self.attempt_id)
        self._context.dispatch.kv_in_hbm(self.attempt_id, self._decode_engine.engine_id)
        if self._decode_start_s is not None:
            where = self._decode_engine.engine_id
            # Tokens travel on another connection: they may come first, even all of them.
            end_s = self._context.clock() if self._decoding_s is None else self._decoding_s
            self._record.add(Stage.HANDOVER, self._decode_start_s, where, end_s)
            self._record.add(Stage.H2D, end_s - arrived.h2d_s, where, end_s)
            self._kv_in_hbm_noted = True

    def _give_back(self, reason: str) -> None:
        context = self._context
        context.exchange.close(self.attempt_id)
        if self.placed:
            self._steps.release(self._prefill_engine, self._decode_engine, reason)
            self.placed = False
        context.dispatch.over(self.attempt_id)


def _check_not_given_up(engine: EngineInfo, event: TokenEvent) -> None:
    if event.finish_reason in _GIVEN_UP:
        raise EngineLostError(
            f"engine {engine.engine_id} gave the request up ({event.finish_reason}: "
            f"{event.stop_reason}); see its log"
        )
