"""One attempt at its engines: what is looked up, placed, reserved and read before the PE may begin.

This is the scheduler's side of an attempt; model work and tokens are the front end's
(``requests.request``).  Whatever an attempt holds is released by ``close``, however it ends.

*Look-up.*  A first attempt asks no engine if the scheduler knows where its chain ends in storage
(``stored_chains``).  All engines see the same storage.  So an engine that at its deadline reports
only the blocks that it knows is not followed by another, but if an engine is lost or silent,
another is asked in the time left.  An engine that was asked may still answer until then: a router
or an engine that is late for a moment loses no hits.

*What only DRAM has.*  A block of which the write failed, or which storage has evicted, may still be
cached by engines, or shared by those of a node.  It is a hit if the request is placed on such an
engine and still finds it there when slots are granted, else it is computed: storage is not asked
for it.  The DE writes it again with the prompt's new blocks.  A retry of an attempt that failed
uses stored blocks only (``use_cached``).

*Loading.*  Which blocks an engine caches is known when it has granted slots; the assignment was
made with what the router believed.  So the DE first reports what it caches of the prompt's head.
If that is less than was believed, the reads are planned again (``policy.scheduler``), else those of
the assignment hold behind it.  Then the PE reports the same of the blocks that it is to load, and
reads those that it does not cache.

Slots with cached blocks are shared and must not be written to.  At a DE they are the first slots of
the prompt and only these: no run before them can turn out short, in which case the PE would
recompute what follows and write it there.

*Hand-over in HBM.*  With such an assignment the DE reserves slots only for the hits that it reads
or caches, then HBM for the prompt, and the PE sends the prompt's KV there.  Slots come before HBM,
and both before the PE's slots: a request that holds HBM of a DE waits for no slots of that DE.

*Third DEs* serve a part of the hit of a first attempt, from their buffers.  They are chosen when
the DE has granted its slots, so that the DE's read does not begin with the grant.  Each grants its
slots at once or refuses; then the reads are planned again, at first without reads by third DEs.  No
slot of a third DE is waited for, so that there is still no deadlock.  A third DE that is lost ends
the attempt.  If one has not read all that it was to, or the PE could not load it, the attempt ends
without being counted as failed: reads that were planned again for the PE would need a second
reservation there, for which two requests could wait in turn.

A third DE drops its slots by itself at the end of its session, and may then cache other blocks in
them while the PE still loads, before anyone knows.  So a prefill counts only once each third DE has
been released and has answered in the session in which it had granted: it had the slots until then.

*Append at the DE.*  If the assignment has no PE, the DE reserves slots for the hit alone, and the
front end sends it the request as soon as they are filled.  If a part of the hit turns out to be
lost, the attempt ends in ``HitLostError``, and the next one has a PE.

*Move.*  Between two legs (``scheduler.handovers``) the prompt's KV may be moved to another DE,
which serves the attempt then.  That DE grants its slots at once or not at all, so that nothing that
holds slots of one DE waits for slots of another.  The former DE holds its slots until the other one
has reported that all KV is there, and the former one has answered a ``Sync`` after that report:
then its session lasts, and no other request had its slots meanwhile.  Until then the loss of either
DE ends the attempt.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from enum import Enum
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from dualpath.core.blocks import (
    BlockKey,
    chain_root,
    holding_blocks,
    max_hit_blocks,
)
from dualpath.core.cluster import Role
from dualpath.core.control import (
    Assign,
    Fetch,
    FetchDone,
    GrantRead,
    KvInHbm,
    Lookup,
    LookupDone,
    Persist,
    PrefillDone,
    Read,
    ReadDone,
    Released,
    ReservationWaits,
    Reserved,
    ReserveThird,
    Sync,
    ThirdRefused,
)
from dualpath.core.errors import EngineLostError, HitLostError, TransportError
from dualpath.core.modes import Handover, Mode
from dualpath.core.request import CachedPrefix, Request
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import CallAssignment, DecodeTransfer, PrefillTransfer, ThirdEngine
from dualpath.policy.events import Assignment, SlotsGranted
from dualpath.router.engines import EngineInfo
from dualpath.router.hit_account import (
    ENGINE_LOST,
    FASTER,
    GONE,
    NOT_CACHEABLE,
    TIMEOUT,
    HitAccount,
)
from dualpath.router.scheduler.cached_blocks import serves
from dualpath.router.scheduler.exchange import AttemptChannel, CallAnswer
from dualpath.router.scheduler.hits import (
    Loaded,
    RunRead,
    behind,
    by_third,
    cached_head,
    good_runs,
    in_slots,
    side_of,
    split_at,
    to_read_whole,
)
from dualpath.router.scheduling import (
    FINISHED,
    Arrived,
    AttemptListener,
    AttemptOrder,
    Placed,
    Prefilled,
    Prepared,
    Recomputed,
    Staged,
)
from dualpath.router.stages import Stage, Stages, StageTime
from dualpath.router.waits import gather_or_cancel, run_until_broken

if TYPE_CHECKING:
    from dualpath.router.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOKUP_TRIES = 2
#: A third DE that has not answered by then serves nothing; engines answer at once.
_THIRD_ANSWER_S = 1.0
#: Part of the router's time limit for a look-up that the engine may use; the rest is for messages.
ENGINE_SHARE = 0.75


class EngineAttempt(AttemptChannel):
    """The ``ScheduledAttempt`` of the scheduler's own process.

    Raises ``BadRequestError`` if another attempt has its name.  Whatever starts something new
    raises ``EngineLostError`` once ``broken`` is done.  An engine that does not answer within a
    limit is suspect from then on.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        order: AttemptOrder,
        listener: AttemptListener,
    ) -> None:
        super().__init__(order.attempt_id)
        self._scheduler = scheduler
        self._order = order
        self.prompt_tokens = order.prompt_tokens
        self._listener = listener
        self._use_cached = order.use_cached and scheduler.settings.dram_tier
        self._stages = Stages(scheduler.clock, self._staged, order.number)
        self._placed = False
        #: The KV that the DE needs is complete in its buffer, and in its HBM.
        self._complete = self._arrived = False
        #: It has ended at the DE, which has released it.
        self._over = False
        #: The DE computes the append: there is no PE.
        self._appends = False
        #: Its KV was to be moved to another DE, and it was moved there.
        self._move_tried = self._moved = False
        #: Engines that count the request.
        self._assigned: set[str] = set()
        #: By PE and third DE: blocks of which it has been sent the keys, in their order.
        self._keys_at: dict[str, Sequence[BlockRun]] = {}
        #: The PE's assignment, if its call brings it.
        self._call_assignment: CallAssignment | None = None
        #: Blocks at the head of the prompt: those stored; the hits at the engines of the
        #: assignment, stored or not; the hits that are to be loaded.
        self._stored_blocks = self._found_blocks = self._wanted_blocks = 0
        #: The stored ones are known without a look-up.
        self._known = False
        self._whole_from = 0
        self._unstored_reason = GONE if order.cacheable else NOT_CACHEABLE
        self._short_reason = ""
        scheduler.exchange.open(self)
        given = order.prefill_engine or order.decode_engine
        if given:
            self.engines.add(given)

    @property
    def decode_engine(self) -> EngineInfo:
        """The DE of an attempt that is placed."""
        return self._decode_engine

    @property
    def decode_transfer(self) -> DecodeTransfer:
        """What the DE has to know, once the KV of the prompt or of an append's hit is in DRAM."""
        order, tokens, tail = self._order, self._order.prompt_tokens, b""
        if self._appends:
            tokens = self._wanted_blocks * self._scheduler.block_tokens
            tail = order.keys[self._wanted_blocks - 1]
        hits, in_hbm = side_of(self._loaded.hits, Role.DECODE), bool(self._loaded.de_hbm_blocks)
        return DecodeTransfer(
            request_id=self.attempt_id,
            prompt_tokens=tokens,
            slots=() if in_hbm else self._loaded.de_slots,
            tenant=order.tenant,
            hit_key_tail=tail,
            prompt_digest=order.prompt_digest,
            hits=tuple(hits if in_hbm else (run.with_slots(()) for run in hits)),
            in_hbm=in_hbm,
            persist_from=None if in_hbm else self._first_unstored_block(),
        )

    # ------------------------------------------------------------------ ScheduledAttempt

    async def prepare(self) -> Prepared:
        """Return the transfers, once all hits are in DRAM."""
        self._stored_blocks = await self._look_up()  # 2: longest stored prefix
        await self._find_engines()  # 3: PE, DE and read side
        self._loaded = loaded = await self._load()  # 4: reserve, read (labels 1-2 of Fig. 4)
        self.check()
        if self._appends:
            return Prepared(self.decode_transfer, None)
        if loaded.de_slots or loaded.de_hbm_blocks:
            holder, writer = self._decode_engine.engine_id, self._prefill_engine.writer
            self._scheduler.releases.writer_started(self.attempt_id, writer, holder)
        self._done = self.expect(PrefillDone, self._prefill_engine.engine_id)
        thirds = (self.thirds[name] for name in by_third(loaded.hits))
        prefill = PrefillTransfer(
            request_id=self.attempt_id,
            prompt_tokens=self._order.prompt_tokens,
            hit_blocks=loaded.hit_blocks,
            hit_key_tail=self._order.keys[loaded.hit_blocks - 1] if loaded.hit_blocks else b"",
            hits=loaded.hits,
            decode_engine=self._decode_engine.engine_id,
            decode_epoch=self._decode_engine.epoch,
            de_slots=() if loaded.de_hbm_blocks else loaded.de_slots,
            shared_blocks=loaded.shared_blocks,
            prompt_digest=self._order.prompt_digest,
            assignment=self._call_assignment,
            de_hbm_blocks=loaded.de_hbm_blocks,
            thirds=tuple(ThirdEngine(third.engine_id, third.epoch) for third in thirds),
        )
        return Prepared(self.decode_transfer, prefill)

    async def prefilled(self) -> Prefilled:
        """Wait until the KV has arrived."""
        if self._appends:
            self._buffer_complete()
            return Prefilled(self._account(), 0.0, 0.0)
        done = await self._kv_arrived()
        engine_id = self._prefill_engine.engine_id
        self.engines.discard(engine_id)
        self._assigned.discard(engine_id)  # It has released the request with ``PrefillDone``.
        await self._thirds_held()
        self._scheduler.dispatch.prefill_done(self.attempt_id, engine_id)
        self._buffer_complete()
        account = self._account()
        if self._order.prefill_engine or self._order.decode_engine:
            # Engines that are front ends have no metrics of requests.
            self._scheduler.metrics.prefilled(account)
        return Prefilled(account, done.forward_s, done.transfer_s)

    async def prefill_aborted(self) -> None:
        """Raise ``TransportError`` if the PE has reported why."""
        # The report is on its control link: it is here by the answer to a Sync.
        await self._synced(self._prefill_engine)
        if self._done.done():
            await self._kv_arrived()

    def decoding_started(self) -> None:
        """The DE generates: nothing is in transfer any more."""
        # Tokens need all of the prompt's KV.
        self._scheduler.releases.writer_done(self.attempt_id)
        if self._appends:
            self._scheduler.dispatch.prompt_computed(self.attempt_id, self._decode_engine.engine_id)

    def close(self, reason: str) -> None:
        """Release everything."""
        scheduler = self._scheduler
        if scheduler.exchange.get(self.attempt_id) is not self:
            return
        scheduler.exchange.close(self.attempt_id)
        if self._placed:
            decode = self._decode_engine.engine_id
            number = 0 if self._call_assignment is None else self._call_assignment.number
            for prefill in sorted(self._assigned - {decode}):
                scheduler.releases.release(prefill, self.attempt_id, reason, number)
            scheduler.releases.release_thirds(self.attempt_id, self.thirds, reason)
            if decode in self._assigned:
                self._release_at_decode(decode, reason)
        scheduler.dispatch.ended(self.attempt_id)

    def _release_at_decode(self, engine_id: str, reason: str) -> None:
        releases, whole = self._scheduler.releases, self._complete and not self.broken.done()
        if whole and self._over:
            return

        def release() -> None:
            if whole and not self._arrived:
                self._persist()  # The DE may not have got the transfer, which orders it as well.
            releases.release_when_safe(engine_id, self.attempt_id, reason)

        if whole and reason == FINISHED:
            releases.await_over(engine_id, self.attempt_id, release)
        else:
            release()

    # ------------------------------------------------------------------ 2: look-up

    async def _look_up(self) -> int:
        """Return how many blocks at the head of the prompt are known to be stored."""
        keys = self._hit_keys()
        if not keys:
            return 0
        with self._stages.stage(Stage.LOOKUP):
            if self._order.number == 1 and not self._order.look_up:
                end = self._scheduler.stored_end(keys)
                if end is not None:
                    self._known = True
                    self._scheduler.metrics.lookup_saved()
                    return end
            stored_blocks, failure = await look_up(self._scheduler, keys)
        if failure is not None:
            logger.warning(
                "request %s: look-up failed (%s) within %g s; of %d blocks it found %d, the rest "
                "is recomputed unless it is in DRAM; see the storage and the engines' logs, or "
                "raise lookup_timeout_s",
                self.attempt_id, failure, self._scheduler.settings.lookup_timeout_s,
                len(keys), stored_blocks,
            )  # fmt: skip
            self._scheduler.metrics.lookup_failed(failure)
            self._unstored_reason = f"lookup-{failure}"
        return stored_blocks

    def _hit_keys(self) -> tuple[BlockKey, ...]:
        """Return the keys of the blocks that can be hits."""
        order = self._order
        most = max_hit_blocks(order.prompt_tokens, self._scheduler.block_tokens)
        if (limit_blocks := self._limit_blocks()) is not None:
            most = min(most, limit_blocks)
        return order.keys[:most] if order.cacheable else ()

    def _limit_blocks(self) -> int | None:
        """Return how many blocks the request may load at most, None without a limit."""
        limit_tokens = self._order.max_load_tokens
        return None if limit_tokens is None else limit_tokens // self._scheduler.block_tokens

    # ------------------------------------------------------------------ 3: engines and read side

    async def _find_engines(self) -> None:
        """Wait until the attempt is placed."""
        scheduler, order = self._scheduler, self._order
        preferred = order.decode_engine
        if order.prefill_engine and not preferred:
            preferred = scheduler.handovers.waits_at(order.handover)
        request = Request(
            request_id=self.attempt_id,
            prompt_tokens=self._order.prompt_tokens,
            hit_tokens=self._stored_blocks * scheduler.block_tokens,
            max_new_tokens=self._order.max_new_tokens,
            cached=self._cached_prefixes(),
            append_at_decode=order.number == 1,
            prefill_engine=order.prefill_engine or msgspec.UNSET,
            decode_engine=preferred or msgspec.UNSET,
        )
        with self._stages.stage(Stage.QUEUE):
            self._assigned_to(await scheduler.dispatch.place(request))
        scheduler.check_leader()
        self._decode_engine = scheduler.engine(self._assignment.decode_engine)
        if self._assignment.prefill_engine is None:
            self._appends = True
        else:
            self._prefill_engine = scheduler.engine(self._assignment.prefill_engine)
        self._placed = True
        prefill_engine = None if self._appends else self._prefill_engine
        self._listener.notify(Placed(prefill_engine, self._decode_engine))

    def _assigned_to(self, assignment: Assignment) -> None:
        """Take an assignment, or its re-planned reads."""
        self._assignment, block_tokens = assignment, self._scheduler.block_tokens
        self._found_blocks = self._stored_blocks + assignment.unstored_tokens // block_tokens
        self._wanted_blocks = self._found_blocks - assignment.recompute_tokens // block_tokens

    def _cached_prefixes(self) -> tuple[CachedPrefix, ...]:
        mode = self._scheduler.registry.mode
        if not self._use_cached or mode is None:
            return ()
        return self._scheduler.cached.prefixes(self._hit_keys(), mode)

    # ------------------------------------------------------------------ 4: slots and reads

    async def _load(self) -> Loaded:
        """Let both engines count the request, reserve slots, read what is not in DRAM."""
        scheduler = self._scheduler
        if not scheduler.moves_bytes:
            await self._assign(self._decode_engine, self._order.keys)
            await self._assign(self._prefill_engine)
            return Loaded(hit_blocks=self._wanted_blocks, hits=(), de_slots=())
        runs = self._assignment.reads
        if self._appends:
            received, outcomes = await self._reserve_and_read(runs, pe_idle=True)
        elif (
            self._thirds_may_serve()
            or self._may_be_replanned
            or any(run.side is Role.PREFILL for run in runs)
        ):
            received, outcomes = await self._reserve_and_read(runs, pe_idle=False)
        else:
            # A PE that gets no slots in any case need not wait for the DE's slots and reads.
            _, loaded = await gather_or_cancel(
                self._assign_idle_prefill(), self._reserve_and_read(runs, pe_idle=True)
            )
            assert loaded is not None
            received, outcomes = loaded
        hits, hit_blocks, short = good_runs(outcomes)
        if self._appends:
            self._check_whole(hit_blocks, short)
        loaded_hits = msgspec.structs.replace(received, hit_blocks=hit_blocks, hits=hits)
        if short is not None:
            if short == GONE:  # Neither storage nor DRAM has the rest: it is no hit.
                self._found_blocks = self._wanted_blocks = hit_blocks
            loaded_hits = await self._read_windows(loaded_hits)
            self._short_reason = short
            self._recompute(self._wanted_blocks - loaded_hits.hit_blocks, short)
        if recomputed := self._assignment.recompute_tokens:
            self._count_recomputed(recomputed, FASTER)
        scheduler.dispatch.reads_done(self.attempt_id)
        return loaded_hits

    @property
    def _may_be_replanned(self) -> bool:
        """Whether reads are planned again when the DE has granted slots."""
        assignment = self._assignment
        return bool(assignment.recompute_tokens) or any(run.cached for run in assignment.reads)

    def _check_whole(self, hit_blocks: int, short: str | None) -> None:
        """Raise ``HitLostError`` if the DE has not got the whole hit behind which it appends."""
        if short is not None:
            raise HitLostError(
                f"engine {self._decode_engine.engine_id} has {hit_blocks} of the "
                f"{self._wanted_blocks} hit blocks behind which it was to compute ({short}); the "
                "next attempt has a prefill engine"
            )

    async def _reserve_and_read(
        self, runs: Sequence[HitRun], *, pe_idle: bool
    ) -> tuple[Loaded, list[RunRead]]:
        """Return where the DE receives the prompt, and the outcome of every run in block order.

        Its slots are those of the hit if the DE computes the append, and those of its own hits if
        it receives the prompt in HBM.

        Slots at the DE come first, always: a request that holds PE slots waits for no other slots,
        so there is no deadlock.  The PE reads nothing if it is idle.
        """
        hit_run = BlockRun(0, _hit_blocks(runs))
        self._whole_from = self._scheduler.geometry.whole_from(hit_run.count)
        with_thirds = not pe_idle and self._thirds_may_serve()
        in_hbm = self._assignment.handover is Handover.HBM
        if in_hbm:
            own = [run.blocks for run in side_of(runs, Role.DECODE)]
            # Cached blocks are shared at the head of the prompt only.
            head_run = [run for run in own[:1] if run.first == 0]
            blocks = sum(run.count for run in own)
            granted = await self._reserve(self._decode_engine, blocks, head_run, in_hbm=True)
        else:
            blocks = holding_blocks(self._order.prompt_tokens, self._scheduler.block_tokens)
            if self._appends:
                blocks = hit_run.count
            read = None if with_thirds else self._read_at_decode(runs, announced=not pe_idle)
            granted = await self._reserve(self._decode_engine, blocks, [hit_run], read)
        at_thirds: list[HitRun] = []
        if with_thirds:
            runs, at_thirds = await self._plan_with_thirds(granted.cached_blocks)
        elif granted.read is None and self._may_be_replanned:
            runs = self._slots_granted(granted.cached_blocks)
        elif granted.read is None:
            self._scheduler.dispatch.slots_known(self.attempt_id)
        hit_blocks = _hit_blocks(runs)
        self._whole_from = self._scheduler.geometry.whole_from(hit_blocks)
        slots, cached = granted.slots, min(granted.cached_blocks, hit_blocks)
        head = HitRun(Role.DECODE, BlockRun(0, cached), slots[:cached], cached=True)
        rest = behind((run for run in runs if not run.third), cached)
        at_decode = side_of(rest, Role.DECODE)
        if in_hbm:
            at_decode = in_slots(at_decode, slots[cached:], 0)
        else:
            at_decode = [
                run.with_slots(slots[run.blocks.first : run.blocks.end]) for run in at_decode
            ]
        decode_reads = self._read_all(
            self._decode_engine, [head, *at_decode] if cached else at_decode, granted.read
        )
        if pe_idle:
            of_decode, of_prefill = await decode_reads, []
        else:
            prefill_reads = self._load_at_prefill(side_of(rest, Role.PREFILL))
            works = [decode_reads, prefill_reads]
            if at_thirds:
                works.append(self._read_at_thirds(at_thirds))
            of_decode, *others = await gather_or_cancel(*works)
            of_prefill = [outcome for own in others for outcome in own]
        for outcome in of_decode:
            slots = outcome.slots or slots  # A deadline may have replaced slots.
        outcomes = sorted(of_decode + of_prefill, key=lambda one: one.assigned.blocks.first)
        return Loaded(0, (), slots, granted.hbm_blocks), outcomes

    # ------------------------------------------------------------------ third DEs

    def _thirds_may_serve(self) -> bool:
        """Whether third DEs may serve a part of the hit: of a first attempt, if some is read."""
        scheduler, runs = self._scheduler, self._assignment.reads
        if not scheduler.settings.third_engine_reads or self._order.number > 1 or self._appends:
            return False
        if scheduler.registry.mode not in (Mode.DUALPATH, Mode.SPLIT):
            return False
        own = {self._prefill_engine.node, self._decode_engine.node}
        others = any(one.node not in own for one in scheduler.registry.alive(Role.DECODE))
        return others and any(not run.cached for run in runs)

    async def _plan_with_thirds(
        self, cached_blocks: int
    ) -> tuple[tuple[HitRun, ...], list[HitRun]]:
        """Return the reads planned at the DE's grant, and the runs of third DEs in their slots."""
        for third_reads in (True, False):
            runs = self._slots_granted(cached_blocks, use_thirds=True, third_reads=third_reads)
            wanted = by_third(runs)
            placed = await gather_or_cancel(
                *(self._reserve_at_third(engine_id, own) for engine_id, own in wanted.items())
            )
            if all(isinstance(own, list) for own in placed):
                return runs, [run for own in placed if isinstance(own, list) for run in own]
            self._drop_thirds("another third engine serves nothing")
            reads = any(not run.cached for own in wanted.values() for run in own)
            # An answer that is late could be taken for that to a second question.
            if _Refusal.SILENT in placed or not reads:
                break
        return self._slots_granted(cached_blocks), []

    async def _reserve_at_third(
        self, engine_id: str, runs: list[HitRun]
    ) -> "list[HitRun] | _Refusal":
        """Return the runs that a third DE serves, in its slots, or that it serves none."""
        scheduler, order = self._scheduler, self._order
        keys = tuple(key for run in runs for key in order.keys[run.blocks.first : run.blocks.end])
        self._keys_at[engine_id] = [run.blocks for run in runs]
        reserved, refused = self.expect(Reserved, engine_id), self.expect(ThirdRefused, engine_id)
        self.check()
        self.thirds[engine_id] = scheduler.engine(engine_id)
        number = scheduler.server.send_numbered(
            engine_id,
            ReserveThird(
                request_id=self.attempt_id,
                keys=keys,
                cached_blocks=sum(run.blocks.count for run in runs if run.cached),
                spare_blocks=holding_blocks(order.prompt_tokens, scheduler.block_tokens),
            ),
        )
        if number is not None:
            scheduler.dispatch.assign_sent(engine_id, self.attempt_id, number)
        try:
            async with asyncio.timeout(_THIRD_ANSWER_S):
                await _first_of(reserved, refused)
        except TimeoutError:
            logger.info(
                "request %s: engine %s serves nothing, as it has not answered within %g s",
                *(self.attempt_id, engine_id, _THIRD_ANSWER_S),
            )
            return _Refusal.SILENT
        if refused.done():
            why = refused.result().reason
            logger.debug(
                "request %s: engine %s serves nothing: %s", self.attempt_id, engine_id, why
            )
            return _Refusal.REFUSED
        slots = reserved.result().slots
        placed = []
        for run in runs:
            placed.append(run.with_slots(slots[: run.blocks.count]))
            slots = slots[run.blocks.count :]
        return placed

    def _drop_thirds(self, reason: str) -> None:
        """Release the request at third DEs, of which the PE does not know."""
        self._scheduler.releases.release_thirds(self.attempt_id, self.thirds, reason)
        self.engines.difference_update(self.thirds)
        self.thirds = {}

    async def _read_at_thirds(self, runs: list[HitRun]) -> list[RunRead]:
        """Return the outcomes of the runs of third DEs.

        Raises ``HitLostError`` if one of them is short, unless the sender of a leg would have to
        send it again.
        """
        read = await gather_or_cancel(
            *(
                self._read_all(self.thirds[engine_id], own, None)
                for engine_id, own in by_third(runs).items()
            )
        )
        outcomes = [one for own in read for one in own]
        leg = self._order.prefill_engine or self._order.decode_engine
        for one in outcomes:
            if one.good.blocks != one.assigned.blocks and not leg:
                raise HitLostError(
                    f"engine {one.assigned.third} has read {one.good.blocks.count} of "
                    f"{one.assigned.blocks.count} blocks ({one.reason}); the next attempt does "
                    "without third engines"
                )
        return outcomes

    async def _thirds_held(self) -> None:
        """Release the third DEs; return once each has confirmed that it had its slots until then.

        Raises ``HitLostError`` if one does not answer.
        """
        thirds, limit_s = self.thirds, self._scheduler.settings.engine_timeout_s
        if not thirds:
            return
        answers = {name: self.expect(Released, name) for name in thirds}
        self._scheduler.releases.release_thirds(self.attempt_id, thirds, "prefill done")
        self.thirds = {}
        for engine_id, answer in answers.items():
            silent = (
                f"engine {engine_id} has not confirmed within {limit_s:g} s (engine_timeout_s) "
                "that it held what the prefill has loaded; see its log"
            )
            try:
                await self._within(limit_s, thirds[engine_id], answer, silent)
            except EngineLostError as error:
                raise HitLostError(str(error)) from error
        self.check()
        self.engines.difference_update(thirds)

    # ------------------------------------------------------------------ own slots and reads

    def _read_at_decode(self, runs: Sequence[HitRun], *, announced: bool) -> GrantRead | None:
        """Return the DE's read if it can begin when the DE grants slots, None if it cannot.

        It cannot if it may have to be planned again for other reasons than what the DE caches, or
        if it is no single run.
        """
        own = [run for run in side_of(runs, Role.DECODE) if not run.cached]
        at_prefill = any(run.cached and run.side is Role.PREFILL for run in runs)
        if len(own) != 1 or at_prefill or self._assignment.recompute_tokens:
            return None
        cached = max((run.blocks.end for run in runs if run.cached), default=0)
        return self._grant_read(self._decode_engine, own[0], 0, cached, announced=announced)

    def _grant_read(
        self,
        engine: EngineInfo,
        run: HitRun,
        first: int,
        cached_blocks: int = 0,
        *,
        announced: bool = False,
    ) -> GrantRead | None:
        """Return the read of a run whose slots are those of the blocks from ``first`` on.

        None if the engine cannot read all of it.
        """
        if run.blocks.end > self._readable_blocks(engine):
            return None
        return GrantRead(
            run.with_slots(()).whole_behind(self._whole_from),
            run.blocks.first - first,
            self._scheduler.settings.read_deadline_s,
            cached_blocks,
            self._order.keys[first - 1] if first else chain_root(),
            announced,
        )

    def _slots_granted(
        self, cached_blocks: int, *, use_thirds: bool = False, third_reads: bool = True
    ) -> tuple[HitRun, ...]:
        """Return the planned reads now that the DE has reported what its buffer caches.

        What its node shares besides is read without a storage NIC, as long as it is there.
        ``use_thirds`` and ``third_reads`` as in ``SlotsGranted``.
        """
        found, cached = self._order.keys[: self._found_blocks], self._scheduler.cached
        decode = self._decode_engine.engine_id
        at_prefill = 0 if self._appends else cached.of(self._prefill_engine.engine_id, found)
        mode = self._scheduler.registry.mode
        others: tuple[CachedPrefix, ...] = ()
        if use_thirds and self._use_cached and mode is not None:
            others = cached.prefixes(found, mode, in_buffers=True)
        replanned = self._scheduler.dispatch.slots_granted(
            SlotsGranted(
                self.attempt_id,
                decode_blocks=max(cached_blocks, cached.shared(decode, found)),
                prefill_blocks=at_prefill,
                others=others,
                third_reads=third_reads,
                use_thirds=use_thirds or not self._scheduler.settings.third_engine_reads,
            )
        )
        if replanned is not None:
            self._scheduler.metrics.reads_replanned(self._assignment, replanned)
            expected_blocks = self._found_blocks
            self._assigned_to(replanned)
            # At the moment of decision: an engine may be lost before this task goes on.
            self.engines.update(third.engine_id for third in replanned.thirds)
            if self._appends and self._found_blocks < expected_blocks:
                raise HitLostError(
                    f"engine {decode} has evicted hit blocks that are not stored, behind which it "
                    "was to compute; the next attempt has a prefill engine"
                )
        return self._assignment.reads

    async def _load_at_prefill(self, runs: list[HitRun]) -> list[RunRead]:
        """Load runs into the PE's buffer, as many of their blocks as it can hold."""
        engine = self._prefill_engine
        most = engine.buffer_tokens // self._scheduler.block_tokens
        fitting, cut = split_at(runs, most)
        short = [RunRead(run, run.head(0), (), "buffer-too-small") for run in cut]
        if not fitting:
            await self._assign_idle_prefill()
            return short
        count = sum(run.blocks.count for run in fitting)
        first, read = fitting[0].blocks.first, None
        if fitting[-1].blocks.end - first == count:
            read = self._grant_read(engine, HitRun(Role.PREFILL, BlockRun(first, count)), first)
        blocks = self._keys_at[engine.engine_id] = [run.blocks for run in fitting]
        granted = await self._reserve(engine, count, blocks, read)
        placed = in_slots(fitting, granted.slots, granted.cached_blocks)
        return await self._read_all(engine, placed, granted.read) + short

    async def _read_all(
        self, engine: EngineInfo, runs: Sequence[HitRun], begun: "_BegunRead | None"
    ) -> list[RunRead]:
        """Return the outcomes of runs in an engine's slots, which are read one after the other.

        ``begun`` is the read of the only one that is not cached, if it has begun with the grant.
        """
        outcomes = []
        for run in runs:
            if run.cached:
                outcomes.append(RunRead(run, run))
            elif begun is not None:
                behind = run.whole_behind(self._whole_from)
                outcomes.append(await self._outcome(engine, run, behind, begun))
            else:
                outcomes.append(await self._read(engine, run))
        return outcomes

    async def _read_windows(self, loaded: Loaded) -> Loaded:
        """Read the window layers of a hit that ended early, or end it with its cached blocks."""
        self._whole_from = self._scheduler.geometry.whole_from(loaded.hit_blocks)
        slots, complete = loaded.de_slots, True
        for run in to_read_whole(loaded.hits, self._whole_from):
            decode = run.side is Role.DECODE
            own = self._decode_engine if decode else self._prefill_engine
            again = await self._read(self.thirds[run.third] if run.third else own, run)
            if decode:
                slots = again.slots or slots
            complete = complete and again.good.blocks == run.blocks
        if complete:
            hits = tuple(run.whole_behind(self._whole_from) for run in loaded.hits)
            return msgspec.structs.replace(loaded, hits=hits, de_slots=slots)
        hits = cached_head(loaded.hits)
        hit_blocks = hits[-1].blocks.end if hits else 0
        return msgspec.structs.replace(loaded, hit_blocks=hit_blocks, hits=hits, de_slots=slots)

    async def _read(self, engine: EngineInfo, run: HitRun) -> RunRead:
        """Return the outcome of a storage read of a run's blocks into its slots.

        Blocks that neither storage nor the engine's node has (any more) are not read.
        Raises ``EngineLostError`` if the engine does not even report that its deadline has passed.
        """
        scheduler, settings = self._scheduler, self._scheduler.settings
        assigned, run = run, run.head(max(self._readable_blocks(engine) - run.blocks.first, 0))
        if not run.blocks:
            return RunRead(assigned, run, (), GONE)
        run, first = run.whole_behind(self._whole_from), run.blocks.first
        self.check()
        answer = self.expect(ReadDone, engine.engine_id)
        self._reading(engine)
        scheduler.send(
            engine.engine_id,
            Read(
                request_id=self.attempt_id,
                run=run,
                first_key=self._first_key(engine, first),
                deadline_s=settings.read_deadline_s,
                parent=self._order.keys[first - 1] if first else chain_root(),
            ),
        )
        return await self._outcome(engine, assigned, run, _BegunRead(scheduler.clock(), answer))

    def _first_key(self, engine: EngineInfo, block: int) -> int:
        """Return the place of a block's key among those that an engine was sent; a DE has all."""
        if engine.engine_id == self._decode_engine.engine_id:
            return block
        runs = self._keys_at.get(engine.engine_id, ())
        return sum(min(max(block - run.first, 0), run.count) for run in runs)

    def _reading(self, engine: EngineInfo) -> None:
        """An engine is sent a read."""
        self._scheduler.dispatch.reading(self.attempt_id, engine.engine_id)

    async def _outcome(
        self, engine: EngineInfo, assigned: HitRun, run: HitRun, begun: "_BegunRead"
    ) -> RunRead:
        """Wait for the outcome of a read; errors as in ``_read``."""
        start_s, engine_id = begun.start_s, engine.engine_id
        limit_s = self._read_limit_s()
        try:
            done = await self._within(
                max(limit_s - (self._scheduler.clock() - start_s), 0.0),
                engine,
                begun.answer,
                f"engine {engine_id} has not answered a read of {run.blocks.count} blocks within "
                f"{limit_s:g} s; check its storage",
            )
        finally:
            self._stages.add(Stage.READ, start_s, engine_id)
        read_s = start_s + done.queue_s
        self._stages.add(Stage.READ_QUEUE, start_s, engine_id, read_s)
        self._stages.add(Stage.STORAGE_READ, read_s, engine_id, read_s + done.read_s)
        good = run.head(done.good_blocks)
        all_good = good.blocks == run.blocks
        reason = GONE if all_good else done.reason or "buffer-too-small"
        return RunRead(assigned, good, done.slots, reason)

    def _read_limit_s(self) -> float:
        return self._scheduler.settings.read_deadline_s + self._scheduler.settings.read_margin_s

    def _readable_blocks(self, engine: EngineInfo) -> int:
        """Return how many blocks at the head of the prompt an engine can read."""
        found = self._order.keys[: self._found_blocks]
        shared = self._scheduler.cached.shared(engine.engine_id, found) if self._use_cached else 0
        return max(self._stored_blocks, shared)

    async def _reserve(
        self,
        engine: EngineInfo,
        count: int,
        blocks: Sequence[BlockRun],
        read: GrantRead | None = None,
        *,
        in_hbm: bool = False,
    ) -> "_GrantedSlots":
        """Let an engine count the request and grant buffer slots; return them, in block order.

        ``blocks`` will be stored in the slots, from the first slot on: the engine reports how many
        of them it caches.  ``read`` begins with the grant.  The slots of a read that has begun are
        known with its end, unless it is ``announced`` or had to wait for slots.  ``in_hbm``, which
        has no read: the engine also reserves HBM for the whole prompt.
        """
        mode = self._scheduler.registry.mode
        use_cached = self._use_cached and mode is not None and serves(engine.role, mode)
        keys = tuple(key for run in blocks for key in self._order.keys[run.first : run.end])
        start_s, engine_id = self._scheduler.clock(), engine.engine_id
        reserved, done = self.expect(Reserved, engine_id), self.expect(ReadDone, engine_id)
        waits = self.expect(ReservationWaits, engine_id)
        if read is not None:
            self._reading(engine)
        shared_blocks = len(keys) if use_cached else 0
        if engine.role is Role.DECODE:
            keys = self._order.keys
        order = self._order
        hbm = (order.prompt_tokens, order.max_new_tokens) if in_hbm else (0, 0)
        assign = Assign(self.attempt_id, 0, count, keys, shared_blocks, read, *hbm)
        self._send_assign(engine, assign)
        if read is None:
            with self._stages.stage(Stage.BUFFER_WAIT, engine_id):
                granted = await reserved
            return _GrantedSlots(granted.slots, granted.cached_blocks, None, granted.hbm_blocks)
        limit_s = self._read_limit_s()
        await self._within(
            limit_s,
            engine,
            _first_of(waits, reserved, done),
            f"engine {engine_id} has neither read {read.run.blocks.count} blocks nor reported that "
            f"its buffer is full within {limit_s:g} s; check its storage",
        )
        if not reserved.done() and not done.done():
            self._scheduler.dispatch.reading(self.attempt_id, engine_id, begins=False)
            with self._stages.stage(Stage.BUFFER_WAIT, engine_id):
                await reserved
            self._reading(engine)
            start_s = self._scheduler.clock()
        if reserved.done():
            granted = reserved.result()
            slots, cached_blocks, wait_s = granted.slots, granted.cached_blocks, granted.wait_s
        else:
            at_once = done.result()
            slots, cached_blocks, wait_s = at_once.slots, at_once.cached_blocks, at_once.wait_s
            self._stages.add(Stage.BUFFER_WAIT, start_s, engine_id, start_s + wait_s)
        begins = read.behind(cached_blocks) is not None
        return _GrantedSlots(slots, cached_blocks, _BegunRead(start_s, done) if begins else None)

    async def _assign_idle_prefill(self) -> None:
        """Let a PE that reads nothing count the request, with its call if that is possible.

        The call may overtake control messages, so the PE has to know its session and the DE.  If it
        still has an attempt of this name, from an earlier router, it refuses an ``Assign``.
        """
        prefill, decode = self._prefill_engine.engine_id, self._decode_engine.engine_id
        server, tokens = self._scheduler.server, self._assignment.at(Role.PREFILL).tokens
        unsettled = self._scheduler.releases.is_unsettled(
            self._prefill_engine.writer, self.attempt_id
        )
        peers = (decode, *self.thirds)
        for peer in peers if not unsettled else ():
            if not server.knows_peer(prefill, peer):
                await self._synced(self._prefill_engine, peer)
        if unsettled or not all(server.knows_peer(prefill, peer) for peer in peers):
            await self._assign(self._prefill_engine)
            return
        self.check()
        self._assigned.add(prefill)
        self._call_assignment = server.call_assignment(prefill, tokens)

    async def _assign(self, engine: EngineInfo, keys: tuple[BlockKey, ...] = ()) -> None:
        """Let an engine count the request, which holds no slot in its buffer.

        Returns when the engine has taken the message: the vLLM request travels on another
        connection and must not overtake its ``Assign``.
        """
        self._send_assign(engine, Assign(self.attempt_id, 0, 0, keys))
        await self._synced(engine)

    def _send_assign(
        self, engine: EngineInfo, assign: Assign, peer: EngineInfo | None = None
    ) -> None:
        """Send an assignment with the tokens that count at an engine of this role.

        ``peer`` is the engine with which it exchanges KV, None for the other one of the assignment.
        """
        self.check()
        scheduler, tokens = self._scheduler, self._assignment.at(engine.role).tokens
        used_blocks = self._stored_blocks if self._known and engine.role is Role.DECODE else 0
        self._assigned.add(engine.engine_id)
        server, address = scheduler.server, None
        if peer is None and scheduler.moves_bytes and not self._appends:
            prefill = engine.role is Role.PREFILL
            peer = self._decode_engine if prefill else self._prefill_engine
            for third in self.thirds if prefill else ():
                server.name_peer(engine.engine_id, third)
        if peer is not None:
            address = server.unnamed_peer(engine.engine_id, peer.engine_id)
        number = server.send_numbered(
            engine.engine_id,
            msgspec.structs.replace(assign, tokens=tokens, used_blocks=used_blocks, peer=address),
        )
        if number is not None:
            scheduler.dispatch.assign_sent(engine.engine_id, self.attempt_id, number)
            if address is not None:
                server.peer_named(engine.engine_id, address, number)

    def _recompute(self, blocks: int, reason: str) -> None:
        if not blocks:
            return
        tokens = blocks * self._scheduler.block_tokens
        logger.warning(
            "request %s: %d stored tokens are recomputed: %s", self.attempt_id, tokens, reason
        )
        self._count_recomputed(tokens, reason)

    def _count_recomputed(self, tokens: int, reason: str) -> None:
        self._scheduler.metrics.recomputed(tokens, reason)
        self._listener.notify(Recomputed(tokens, reason))

    # ------------------------------------------------------------------ 5 and 6: prefill, decode

    async def _kv_arrived(self) -> PrefillDone:
        """Return the PE's report that the prompt's KV is complete at the DE.

        Its first token alone does not prove that, and a token is streamed only once it is true.
        Raises ``EngineLostError`` after ``read_margin_s``, ``TransportError`` if KV did not arrive.
        """
        engine, limit_s = self._prefill_engine, self._scheduler.settings.read_margin_s
        done = await self._within(
            limit_s,
            engine,
            self._done,
            f"engine {engine.engine_id} computed the first token but has not confirmed its "
            f"transfers within {limit_s:g} s; see its log",
        )
        if done.failure is not None:
            error = f"engine {engine.engine_id} could not load or send KV: {done.failure}"
            # The PE has just reported; the DE or a third DE may be gone.
            for peer in (self._decode_engine, *self.thirds.values()):
                self._scheduler.suspects.suspect(peer, error)
            raise HitLostError(error) if self.thirds else TransportError(error)
        return done

    def _account(self) -> HitAccount:
        """Divide the prompt's tokens into hit and missed."""
        return self._scheduler.seen_blocks.account(
            self._order.keys,
            self._order.prompt_tokens,
            self._scheduler.block_tokens,
            self._found_blocks,
            self._loaded.hit_blocks,
            unstored_reason=self._unstored_reason,
            short_reason=self._short_reason,
            faster_blocks=self._found_blocks - self._wanted_blocks,
            hits=self._loaded.hits,
            most_blocks=self._limit_blocks(),
        )

    def _buffer_complete(self) -> None:
        """The prompt's KV, or that of an append's hit, is complete at the DE.

        With its call the DE is ordered to store its new blocks; at once if a second leg makes it,
        which may come late or never, and if the KV is in HBM: its load waits for the order.
        """
        self.check()
        self._complete = True
        self._scheduler.chains.note(
            *(self._order.keys, self._first_unstored_block(), self._stored_blocks),
            self._decode_engine.engine_id,
            known=self._known,
            whole=self._stored_blocks == len(self._hit_keys()),
        )
        if self._order.handover or self._loaded.de_hbm_blocks:
            self._persist()

    def _persist(self) -> None:
        """Have the DE store those full blocks of the prompt that are not stored."""
        # The DE stores the blocks of an append as those of generated tokens.
        blocks = self._loaded.hit_blocks if self._appends else len(self._order.keys)
        in_hbm = bool(self._loaded.de_hbm_blocks)
        self._scheduler.send(
            self._decode_engine.engine_id,
            Persist(
                request_id=self.attempt_id,
                first_block=self._first_unstored_block(),
                blocks=blocks,
                tenant=self._order.tenant,
                hits=tuple(side_of(self._loaded.hits, Role.DECODE)) if in_hbm else (),
            ),
        )

    def _first_unstored_block(self) -> int:
        """Return the first block of the prompt that the DE writes; it holds all that follow.

        Hits that only DRAM has are written again.  In a model with window layers, hits that came
        from elsewhere than the DE's own cache may lack layers there; then no hit is written.
        """
        hit_blocks, stored_blocks = self._loaded.hit_blocks, self._stored_blocks
        if self._moved:
            return len(self._order.keys)  # The DE that the PE has sent them to writes them.
        windows = self._scheduler.geometry.layer_windows
        if windows and self._loaded.shared_blocks < hit_blocks:
            return hit_blocks
        return min(hit_blocks, stored_blocks)

    def kv_in_hbm(self, arrived: KvInHbm) -> None:
        """The DE has the prompt's KV in its HBM."""
        self._scheduler.releases.writer_done(self.attempt_id)
        self._arrived = True
        self._listener.notify(Arrived(arrived.h2d_s))

    def over_at_decode(self) -> None:
        """The request has ended at the DE, which has released it."""
        self._over = True

    def _staged(self, stage: StageTime) -> None:
        self._listener.notify(Staged(stage))

    # ------------------------------------------------------------------ move to another DE

    async def move(self, engine_id: str) -> str:
        """Move the prompt's KV to another DE, which serves the attempt then.

        Return an empty text, or why the KV was not moved and stays where it is.  A move is tried
        once.  Raises ``EngineLostError`` if one of the DEs is lost or silent; the attempt has to be
        closed then.
        """
        self.check()
        scheduler, source = self._scheduler, self._decode_engine
        if refusal := self._move_refusal():
            return refusal
        try:
            target = scheduler.engine(engine_id)
            scheduler.dispatch.move_begins(self.attempt_id, engine_id)
        except EngineLostError as error:
            return str(error)
        self._move_tried = True
        self.engines.add(engine_id)
        done = await run_until_broken(self._fetched(source, target), self.broken)
        if done.failure is not None:
            self.engines.discard(engine_id)
            self._assigned.discard(engine_id)
            scheduler.releases.release(engine_id, self.attempt_id, done.failure)
            scheduler.dispatch.move_ended(self.attempt_id, moved=False)
            return f"engine {engine_id} cannot fetch the KV: {done.failure}"
        # Its answer proves that its session has not ended, and that its slots were not reused.
        await run_until_broken(self._synced(source), self.broken)
        self.check()
        self._serve_at(target, done.slots)
        return ""

    def _move_refusal(self) -> str:
        """Return why the KV stays where it is, empty if it may be moved."""
        if not self._scheduler.settings.move_kv:
            return "move_kv is off"
        if self._loaded.de_hbm_blocks:
            return f"the KV is in the HBM of engine {self._decode_engine.engine_id} (handover)"
        if not self._loaded.de_slots:
            return "there is no KV to be moved in this mode"
        return "a move of this KV has failed before" if self._move_tried else ""

    async def _fetched(self, source: EngineInfo, target: EngineInfo) -> FetchDone:
        """Have ``target`` fetch the KV from ``source``; return its answer."""
        scheduler, keys = self._scheduler, self._order.keys
        mode, slots = scheduler.registry.mode, self._loaded.de_slots
        use_cached = self._use_cached and mode is not None and serves(target.role, mode)
        done = self.expect(FetchDone, target.engine_id)
        fetch = Fetch(source.engine_id, source.epoch, slots, scheduler.settings.read_deadline_s)
        shared_blocks = len(keys) if use_cached else 0
        assign = Assign(self.attempt_id, 0, len(slots), keys, shared_blocks, fetch=fetch)
        self._send_assign(target, assign, source)
        limit_s = self._read_limit_s()
        return await self._within(
            limit_s,
            target,
            done,
            f"engine {target.engine_id} has not answered the fetch of {len(slots)} blocks within "
            f"{limit_s:g} s; see its log",
        )

    def _serve_at(self, target: EngineInfo, slots: tuple[int, ...]) -> None:
        """All KV is in these slots of another DE: release the former one."""
        scheduler, source = self._scheduler, self._decode_engine.engine_id
        self.engines.discard(source)
        self._assigned.discard(source)
        reason = f"its KV was moved to engine {target.engine_id}"
        scheduler.releases.release_when_safe(source, self.attempt_id, reason)
        scheduler.dispatch.move_ended(self.attempt_id, moved=True)
        self._moved, self._decode_engine = True, target
        self._loaded = Loaded(self._loaded.hit_blocks, (), slots)
        # It writes the blocks that it generates behind the prompt.  Those of the prompt are written
        # by the former DE, which may fail: the end of this chain is known only if it had none.
        scheduler.chains.note(
            *(self._order.keys, len(self._order.keys), self._stored_blocks),
            target.engine_id,
            known=self._known,
        )
        logger.info(
            "request %s: its KV was moved from %s to %s", self.attempt_id, source, target.engine_id
        )

    # ------------------------------------------------------------------ waits

    async def _synced(self, engine: EngineInfo, peer_id: str = "") -> None:
        """Wait until an engine has taken all messages that were sent to it, or is lost.

        The last of them names the peer ``peer_id``, if it is given and was not named before.
        Raises ``EngineLostError`` after ``engine_timeout_s``.
        """
        limit_s = self._scheduler.settings.engine_timeout_s
        await self._within(
            limit_s,
            engine,
            self._answer_to_sync(engine, peer_id),
            f"engine {engine.engine_id} has not taken up within {limit_s:g} s what it was sent "
            "(engine_timeout_s); see its log, raise the limit if its machine is overloaded",
        )

    async def _answer_to_sync(self, engine: EngineInfo, peer_id: str) -> CallAnswer | None:
        if not self._scheduler.is_alive(engine):
            return None
        call_id, answer = self._scheduler.exchange.call(engine.engine_id)
        server = self._scheduler.server
        if not peer_id or not server.name_peer(engine.engine_id, peer_id, call_id):
            self._scheduler.send(engine.engine_id, Sync(call_id))
        return await answer

    async def _within(
        self, limit_s: float, engine: EngineInfo, answer: Awaitable[T], otherwise: str
    ) -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            self._scheduler.suspects.suspect(engine, otherwise)
            raise EngineLostError(otherwise) from None


class _Refusal(Enum):
    """Why a third DE serves nothing: it refuses, or does not answer."""

    REFUSED = "refused"
    SILENT = "silent"


class _BegunRead(NamedTuple):
    """A read that an engine was sent at ``start_s``, and its answer."""

    start_s: float
    answer: "asyncio.Future[ReadDone]"


class _GrantedSlots(NamedTuple):
    """Slots at an engine, of which the first hold cached blocks, and the read that has begun."""

    slots: tuple[int, ...]
    cached_blocks: int
    read: _BegunRead | None
    hbm_blocks: tuple[int, ...] = ()


async def _first_of(*futures: "asyncio.Future[Any]") -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _hit_blocks(runs: Sequence[HitRun]) -> int:
    return runs[-1].blocks.end if runs else 0


# ------------------------------------------------------------------------ look-up


async def look_up(scheduler: "Scheduler", keys: tuple[BlockKey, ...]) -> tuple[int, str | None]:
    """Return the blocks at the head of a prompt that are known to be stored, and why no more.

    Asks up to two engines and returns after ``lookup_timeout_s`` at the latest.  Where several DEs
    may be writing what follows the chain's last known block, and the first of them has found an
    end, the others are asked in the time left: the longest answer counts.
    """
    end_s = asyncio.get_running_loop().time() + scheduler.settings.lookup_timeout_s
    writers = scheduler.chain_writers(keys)
    others = (engine for engine in scheduler.engines_rotated() if engine not in writers)
    asked = list(islice(chain(writers, others), _LOOKUP_TRIES))
    found = await _ask_in_turn(scheduler, asked, keys, end_s)
    stored_blocks, failure = found
    if failure is not None or stored_blocks == len(keys):
        return found
    more = [_ask_in_turn(scheduler, [writer], keys, end_s) for writer in writers[1:]]
    return max([found, *await gather_or_cancel(*more)], key=lambda answer: answer[0])


async def _ask_in_turn(
    scheduler: "Scheduler", engines: list[EngineInfo], keys: tuple[BlockKey, ...], end_s: float
) -> tuple[int, str | None]:
    """Return the first answer; the next engine is asked once one had its share of the time."""
    loop = asyncio.get_running_loop()
    asked: set[asyncio.Future[CallAnswer | None]] = set()
    try:
        for left, engine in zip(range(len(engines), 0, -1), engines, strict=True):
            within_s = (end_s - loop.time()) / left
            if scheduler.is_alive(engine):
                call_id, future = scheduler.exchange.call(engine.engine_id)
                deadline_s = ENGINE_SHARE * within_s
                scheduler.send(engine.engine_id, Lookup(call_id, keys, deadline_s))
                asked.add(future)
            answer, asked = await _first(asked, within_s)
            if answer is not None:
                stored_blocks = max(0, min(answer.hit_blocks, len(keys)))
                return stored_blocks, TIMEOUT if answer.partial else None
        return 0, TIMEOUT if asked else ENGINE_LOST
    finally:
        for future in asked:
            future.cancel()


async def _first(
    asked: set[asyncio.Future[CallAnswer | None]], within_s: float
) -> tuple[LookupDone | None, set[asyncio.Future[CallAnswer | None]]]:
    """Return the first answer, None without one in time, and the futures without an answer."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + within_s
    while asked and (left_s := end_s - loop.time()) > 0:
        done, asked = await asyncio.wait(asked, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            if isinstance(answer := one.result(), LookupDone):
                return answer, asked
    return None, asked
