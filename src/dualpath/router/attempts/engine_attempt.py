"""One attempt at its engines: what is found, placed, reserved and read before the PE may begin.

The scheduler's half; model work and tokens are the front end's (``requests.lifecycle``).
Everything an attempt has taken is given back by ``over``, however it ends.
"""

import asyncio
import logging

from dualpath.core.blocks import holding_blocks, max_hit_blocks
from dualpath.core.control import KvInHbm, PrefillDone
from dualpath.core.request import CachedPrefix, Request
from dualpath.core.runs import HitRun
from dualpath.core.transfers import PrefillTransfer
from dualpath.policy.events import Granted
from dualpath.router.attempts.attempt_steps import AttemptSteps
from dualpath.router.attempts.hit_account import FASTER, GONE, NOT_CACHEABLE, Found, HitAccount
from dualpath.router.attempts.hits import Loaded, good_runs
from dualpath.router.attempts.loading import Loading
from dualpath.router.attempts.look_up import look_up
from dualpath.router.control.context import SchedulerContext
from dualpath.router.control.exchange import AttemptChannel
from dualpath.router.scheduling import (
    Arrived,
    AttemptListener,
    AttemptOrder,
    Placed,
    Prefilled,
    Recomputed,
    Staged,
)
from dualpath.router.stages import Stage, Stages, StageTime

logger = logging.getLogger(__name__)


class EngineAttempt:
    """The ``ScheduledAttempt`` of the scheduler's own process; ``arrival_seq`` is its request's.

    Raises ``BadRequestError`` if another attempt has its name.
    """

    def __init__(
        self,
        context: SchedulerContext,
        order: AttemptOrder,
        arrival_seq: int,
        listener: AttemptListener,
    ) -> None:
        self._context = context
        self._order = order
        self._arrival_seq = arrival_seq
        self._listener = listener
        self._attempt_id = order.attempt_id
        self._kept = order.kept and context.settings.dram_tier
        self._stages = Stages(context.clock, self._staged, order.number)
        self._placed = self._arrived = False
        self._stored_blocks = self._wanted_blocks = 0
        self._unstored_reason = GONE if order.cacheable else NOT_CACHEABLE
        self._short_reason = ""
        self._channel = AttemptChannel(order.attempt_id, self._kv_in_hbm)
        self._steps = AttemptSteps(context, self._channel)
        context.exchange.open(self._channel)

    @property
    def broken(self) -> "asyncio.Future[None]":
        """Ends in ``EngineLostError`` when an engine is lost that the attempt needs."""
        return self._channel.broken

    def check(self) -> None:
        """Raise ``EngineLostError`` if the attempt is broken off."""
        self._channel.check()

    async def prepare(self) -> PrefillTransfer:
        """Return what the PE has to be told, once all hits lie in DRAM."""
        self._stored_blocks = await self._look_up()  # 2: longest stored prefix
        self._wanted_blocks = await self._find_engines()  # 3: PE, DE and read side
        self._loaded = loaded = await self._load()  # 4: reserve, read (labels 1-2 of Fig. 4)
        self._channel.check()
        if loaded.de_slots:
            holder, writer = self._decode_engine.engine_id, self._prefill_engine.writer
            self._context.releases.writer_started(self._attempt_id, writer, holder)
        self._done = self._channel.expect(PrefillDone, self._prefill_engine.engine_id)
        return PrefillTransfer(
            request_id=self._attempt_id,
            prompt_tokens=self._order.prompt_tokens,
            hit_blocks=loaded.hit_blocks,
            hit_key_tail=self._order.keys[loaded.hit_blocks - 1] if loaded.hit_blocks else b"",
            hits=loaded.hits,
            decode_engine=self._decode_engine.engine_id,
            decode_epoch=self._decode_engine.epoch,
            de_slots=loaded.de_slots,
            shared_blocks=loaded.shared_blocks,
        )

    async def prefilled(self) -> Prefilled:
        """Wait until the KV has arrived; let the PE go, have the prompt's new blocks stored."""
        done = await self._kv_arrived()
        self._steps.prefilled(self._prefill_engine)
        self._persist()
        return Prefilled(self._account(), done.forward_s, done.transfer_s)

    async def given_up(self) -> None:
        """Raise ``TransportError`` if the PE has said why."""
        # It has said so on its control link: that is here by the answer to a Sync.
        await self._steps.synced(self._prefill_engine)
        if self._done.done():
            await self._kv_arrived()

    def tokens_came(self) -> None:
        """Nothing is on its way any more."""
        # Tokens need all of the prompt's KV.
        self._context.releases.writer_done(self._attempt_id)

    async def decoded(self) -> None:
        """Wait for ``KvInHbm``, which tokens may overtake, even all of them."""
        if not self._arrived:
            # The record waits for the word; the client has its tokens, whatever becomes of the DE.
            self._channel.done_with(self._decode_engine.engine_id)
            await self._steps.synced(self._decode_engine)

    def over(self, reason: str) -> None:
        """Give everything back."""
        context = self._context
        if context.exchange.get(self._attempt_id) is not self._channel:
            return
        context.exchange.close(self._attempt_id)
        if self._placed:
            self._steps.release(self._prefill_engine, self._decode_engine, reason)
        context.dispatch.over(self._attempt_id)

    async def _look_up(self) -> int:
        order, block_tokens = self._order, self._context.block_tokens
        keys = order.keys[: max_hit_blocks(order.prompt_tokens, block_tokens)]
        if not order.cacheable or not keys:
            return 0
        with self._stages.stage(Stage.LOOKUP):
            found = await look_up(self._context, keys)
        if found.failure is not None:
            logger.warning(
                "request %s: look-up failed (%s) within %g s; of %d blocks it found %d, the rest "
                "is computed; see the storage and the engines' logs, or raise lookup_timeout_s",
                self._attempt_id, found.failure, self._context.settings.lookup_timeout_s,
                len(keys), found.stored_blocks,
            )  # fmt: skip
            self._context.metrics.lookup_failed(found.failure)
            self._unstored_reason = f"lookup-{found.failure}"
        return found.stored_blocks

    async def _find_engines(self) -> int:
        """Return how many of the stored blocks are to be loaded; the rest is faster computed."""
        request = Request(
            request_id=self._attempt_id,
            prompt_tokens=self._order.prompt_tokens,
            hit_tokens=self._stored_blocks * self._context.block_tokens,
            max_new_tokens=self._order.max_new_tokens,
            arrival_seq=self._arrival_seq,
            cached=self._kept_prefixes(),
        )
        with self._stages.stage(Stage.QUEUE):
            self._assignment = await self._context.dispatch.place(request)
        self._context.check_turn()
        self._prefill_engine = self._context.engine(self._assignment.prefill_engine)
        self._decode_engine = self._context.engine(self._assignment.decode_engine)
        self._placed = True
        self._listener.heard(Placed(self._prefill_engine, self._decode_engine))
        recomputed = self._assignment.recompute_tokens
        if recomputed:
            self._count_recomputed(recomputed, FASTER)
        return self._stored_blocks - recomputed // self._context.block_tokens

    def _kept_prefixes(self) -> tuple[CachedPrefix, ...]:
        mode = self._context.registry.mode
        if not self._kept or mode is None:
            return ()
        return self._context.kept.prefixes(self._order.keys[: self._stored_blocks], mode)

    async def _load(self) -> Loaded:
        if not self._context.moves_bytes:
            await self._steps.assign(self._decode_engine)
            await self._steps.assign(self._prefill_engine)
            return Loaded(hit_blocks=self._wanted_blocks, hits=(), de_slots=())
        prompt_blocks = holding_blocks(self._order.prompt_tokens, self._context.block_tokens)
        engines = self._prefill_engine, self._decode_engine
        loading = Loading(
            *(self._context, self._steps, self._stages, self._order.keys, *engines),
            kept=self._kept,
            granted=self._granted,
        )
        brought = await loading.load(self._assignment.reads, prompt_blocks)
        hits, hit_blocks, short = good_runs(brought.outcomes)
        loaded = Loaded(hit_blocks=hit_blocks, hits=hits, de_slots=brought.de_slots)
        if short is not None:
            loaded = await loading.with_windows(loaded)
            self._short_reason = short
            self._recompute(self._wanted_blocks - loaded.hit_blocks, short)
        self._context.dispatch.read_done(self._attempt_id)
        return loaded

    def _granted(self, kept_blocks: int) -> tuple[HitRun, ...]:
        """Return where the hit comes from now that it is known what the DE's buffer keeps of it.

        What its node shares besides is read without a storage NIC, as long as it lies there.
        """
        stored, kept = self._order.keys[: self._stored_blocks], self._context.kept
        anew = self._context.dispatch.granted(
            Granted(
                self._attempt_id,
                decode_blocks=max(kept_blocks, kept.shared(self._decode_engine.engine_id, stored)),
                prefill_blocks=kept.of(self._prefill_engine.engine_id, stored),
            )
        )
        if anew is not None:
            more = anew.recompute_tokens - self._assignment.recompute_tokens
            self._context.metrics.read_anew(self._assignment, anew)
            self._assignment = anew
            self._wanted_blocks -= more // self._context.block_tokens
            if more:
                self._count_recomputed(more, FASTER)
        return self._assignment.reads

    def _recompute(self, blocks: int, reason: str) -> None:
        tokens = blocks * self._context.block_tokens
        logger.warning(
            "request %s: %d stored tokens are recomputed: %s", self._attempt_id, tokens, reason
        )
        self._count_recomputed(tokens, reason)

    def _count_recomputed(self, tokens: int, reason: str) -> None:
        self._context.metrics.recomputed(tokens, reason)
        self._listener.heard(Recomputed(tokens, reason))

    async def _kv_arrived(self) -> PrefillDone:
        return await self._steps.kv_arrived(self._prefill_engine, self._decode_engine, self._done)

    def _account(self) -> HitAccount:
        """Divide the prompt's tokens into hit and missed."""
        found = Found(
            self._stored_blocks,
            self._loaded.hit_blocks,
            self._unstored_reason,
            self._short_reason,
            faster_blocks=self._stored_blocks - self._wanted_blocks,
        )
        order = self._order
        return self._context.seen_blocks.account(
            order.keys, order.prompt_tokens, self._context.block_tokens, found
        )

    def _persist(self) -> None:
        keys, engine, hit_blocks = self._order.keys, self._decode_engine, self._loaded.hit_blocks
        self._steps.persist(engine, hit_blocks, keys, self._order.tenant)
        self._context.writers.note(keys[hit_blocks:] or keys[-1:], engine.engine_id)

    def _kv_in_hbm(self, arrived: KvInHbm) -> None:
        self._context.releases.writer_done(self._attempt_id)
        self._context.dispatch.kv_in_hbm(self._attempt_id, self._decode_engine.engine_id)
        self._arrived = True
        self._listener.heard(Arrived(arrived.h2d_s))

    def _staged(self, stage: StageTime) -> None:
        self._listener.heard(Staged(stage))
