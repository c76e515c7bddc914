"""The requests that the router has assigned to an engine: load, served prompts, end of a session.

An assignment counts against the engine's load at once and may reserve slots of its buffer.  A
release removes the request; its slots are free once nothing can write to them.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dualpath.core.blocks import BlockKey, BlockOrigin, chain_root
from dualpath.core.cluster import Role, Writer
from dualpath.core.control import (
    EngineMessage,
    KvInHbm,
    Persist,
    Release,
    RequestOver,
)
from dualpath.core.modes import Handover
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import CallAssignment, DecodeTransfer
from dualpath.engine.buffer.block_buffer import BlockBuffer
from dualpath.engine.buffer.hbm_reservations import HbmReservations
from dualpath.engine.control.peers import Peers
from dualpath.engine.counters import Counter
from dualpath.engine.io.persister import ChainWrites, Persister, WriteTask, Written
from dualpath.engine.passes.generated import GeneratedBlock
from dualpath.engine.passes.hbm_layout import NO_BLOCK, HbmBlock
from dualpath.engine.passes.pass_transfers import BlockHolder
from dualpath.engine.ranks.rank import Rank
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.plan.movements import PERSIST_PROMPT
from dualpath.plan.steps import PromptLayout, decode_steps, step_of

_NS_PER_S = 1_000_000_000

# --------------------------------------------------------------------------------- active requests
# The requests of one engine: their load, and their state until their buffer slots are free.


#: Numbers above the first one that was not taken which ``TakenNumbers`` stores.
MOST_TAKEN = 1024


class TakenNumbers:
    """Which of the numbers from 1 on were taken; each is taken once.

    They come nearly in order.  If too many lie above one that does not come, that one counts as
    taken: so memory is bounded, and no number is ever taken twice.
    """

    def __init__(self) -> None:
        #: All numbers up to this one count as taken, and these above it.
        self._all_up_to = 0
        self._above: set[int] = set()

    def take(self, number: int) -> bool:
        """Take a number; False if it counts as taken already."""
        if number <= self._all_up_to or number in self._above:
            return False
        self._above.add(number)
        if len(self._above) > MOST_TAKEN:
            self._all_up_to = min(self._above) - 1
        while self._all_up_to + 1 in self._above:
            self._all_up_to += 1
            self._above.discard(self._all_up_to)
        return True


class HbmWanted(NamedTuple):
    """The HBM that a request asks for before its prefill; of 0 prompt tokens, none."""

    prompt_tokens: int = 0
    new_tokens: int = 0


#: The request receives its KV in the buffer.
NO_HBM = HbmWanted()


class _Request:
    def __init__(
        self,
        tokens: int,
        assigned_ns: int,
        keys: Sequence[BlockKey] = (),
        hbm_wanted: HbmWanted = NO_HBM,
        *,
        called: bool = False,
        fetches: bool = False,
        third: bool = False,
    ) -> None:
        self.tokens = tokens
        self.fetches = fetches
        #: This engine serves a part of its hit and has no other part in it.
        self.third = third
        self.hbm_wanted = hbm_wanted
        self.assigned_ns = assigned_ns
        self.keys = keys
        self.called = called
        self.hbm_allocated = self.kv_in_hbm = False
        #: It decodes on after the end of its session, until the end of its HTTP call.
        self.detached = False
        self.ended = False
        self.persist_seen = False
        self.streams = 0
        self.pass_ns = 0
        self.waited_ns = 0
        self.release: Release | None = None

    @property
    def is_served(self) -> bool:
        """Whether it holds nothing of the buffer and no one has asked for its release."""
        return self.kv_in_hbm and self.persist_seen and self.release is None


class ActiveRequests:
    """State of requests by id; all methods may be called from any thread.

    A request in a forward pass (``streams`` > 0) is never dropped: its transfers may still write
    into slots of another engine's buffer, which must not be reused before the transfers end.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._lock = threads.lock()
        self._active: dict[str, _Request] = {}
        #: The present session, and which of its assignments came with calls, or were released.
        self._session = ""
        self._taken = TakenNumbers()

    def begin_session(self, session: str) -> None:
        """A session begins: assignments that come with calls are numbered from 1 on."""
        with self._lock:
            self._session, self._taken = session, TakenNumbers()

    def add_called(self, request_id: str, assignment: CallAssignment, now_ns: int) -> None:
        """Count a request that was assigned with its call, unless it is here.

        An assignment of another session, and one that was taken or released before, does not count.
        """
        with self._lock:
            if request_id in self._active or assignment.session != self._session:
                return
            if self._taken.take(assignment.number):
                self._active[request_id] = _Request(assignment.tokens, now_ns, called=True)

    def called(self) -> tuple[str, ...]:
        """Return the requests that were assigned with their calls."""
        with self._lock:
            return tuple(name for name, request in self._active.items() if request.called)

    def add(
        self,
        request_id: str,
        tokens: int,
        now_ns: int,
        keys: Sequence[BlockKey] = (),
        hbm_wanted: HbmWanted = NO_HBM,
        *,
        fetches: bool = False,
    ) -> None:
        """Count a request of ``tokens`` that was assigned to this engine with these keys.

        ``fetches``: this engine itself fetches its KV, and no other one writes it.
        """
        with self._lock:
            assert request_id not in self._active, f"request {request_id} is active already"
            self._active[request_id] = _Request(tokens, now_ns, keys, hbm_wanted, fetches=fetches)

    def add_third(self, request_id: str, now_ns: int, keys: Sequence[BlockKey]) -> None:
        """A third DE serves the blocks of these keys; the request is not unfinished here."""
        with self._lock:
            assert request_id not in self._active, f"request {request_id} is active already"
            self._active[request_id] = _Request(0, now_ns, keys, third=True)

    def to_be_persisted(self, request_id: str) -> Sequence[BlockKey] | None:
        """Return the keys of a request whose new blocks are not being persisted yet, else None."""
        with self._lock:
            request = self._active.get(request_id)
            persists = request is not None and request.release is None and not request.persist_seen
            return request.keys if request is not None and persists else None

    def keys_of(self, request_id: str) -> Sequence[BlockKey]:
        """Return the keys of a request's assignment; none if it is not (or no longer) here."""
        with self._lock:
            request = self._active.get(request_id)
            return () if request is None else request.keys

    def hbm_wanted(self, request_id: str) -> HbmWanted | None:
        """Return the HBM that a request asks for; None if it is not (or no longer) here."""
        with self._lock:
            request = self._active.get(request_id)
            return None if request is None else request.hbm_wanted

    def end_session(self, reason: str) -> dict[str, bool]:
        """Drop all requests except those in a forward pass, which are released after it.

        Return the requests that still hold buffer slots, which have to be released, and whether
        each still expects KV from another engine: a request that waits for its prompt to be
        persisted has all of its KV, and nothing is sent to a third DE.  A request that decodes
        needs no slots and no router: it is detached and counts until ``ended``.
        """
        dropped = {}
        with self._lock:
            self._session = ""
            for request_id, request in list(self._active.items()):
                if request.streams:
                    request.release = request.release or Release(request_id, reason)
                    continue
                has_all = request.persist_seen or request.kv_in_hbm or request.third
                dropped[request_id] = not (has_all or request.fetches)
                request.detached = request.kv_in_hbm and not request.ended
                if not request.detached:
                    del self._active[request_id]
        return dropped

    def ended(self, request_id: str) -> bool:
        """The engine's own request is over: drop it if nothing of it is left here.

        Return whether it is dropped and the router does not know that yet.
        """
        with self._lock:
            if (request := self._active.get(request_id)) is None:
                return False
            request.ended = True
            if not (request.detached or request.is_served):
                return False
            del self._active[request_id]
            return not request.detached

    @property
    def any_detached(self) -> bool:
        """Whether requests decode after the end of their session."""
        with self._lock:
            return any(request.detached for request in self._active.values())

    def unsettled(self) -> tuple[str, ...]:
        """Return the requests that are released after their forward pass."""
        with self._lock:
            return tuple(name for name, r in self._active.items() if r.release is not None)

    def is_known(self, request_id: str) -> bool:
        """Whether the request is here, released or not."""
        with self._lock:
            return request_id in self._active

    def drop(self, request_id: str) -> None:
        """Remove a request that is in no forward pass."""
        with self._lock:
            request = self._active.pop(request_id, None)
            assert request is None or not request.streams, f"request {request_id} is in a pass"

    def load(self) -> tuple[int, int]:
        """Return (seq_e, tok_e) of §6.1."""
        with self._lock:
            own = [request.tokens for request in self._active.values() if not request.third]
            return len(own), sum(own)

    def assigned_ns(self, request_id: str) -> int | None:
        """Return when the request was assigned; None if it is not (or no longer) here."""
        with self._lock:
            request = self._active.get(request_id)
            return None if request is None else request.assigned_ns

    def is_active(self, request_id: str) -> bool:
        """Whether the request is here and not released."""
        with self._lock:
            request = self._active.get(request_id)
            return request is not None and request.release is None

    def is_released(self, request_id: str) -> bool:
        """Whether the request is released or no longer here; an atomic read without the lock."""
        request = self._active.get(request_id)
        return request is None or request.release is not None

    def is_persisted(self, request_id: str) -> bool:
        """Whether the prompt's new blocks are being persisted, or have been."""
        with self._lock:
            request = self._active.get(request_id)
            return request is not None and request.persist_seen

    def persist_seen(self, request_id: str) -> bool:
        """Note that the prompt's new blocks are being persisted; False for an unknown request."""
        with self._lock:
            if (request := self._active.get(request_id)) is None:
                return False
            request.persist_seen = True
            return True

    def is_complete(self, request_id: str) -> bool | None:
        """Whether all of the prompt's KV is here by ``Persist``; None for an unknown request."""
        with self._lock:
            request = self._active.get(request_id)
            return None if request is None or request.release else request.persist_seen

    def hbm_allocated(self, request_id: str) -> None:
        """Note that a DE has allocated HBM for the request; its free HBM shows that already."""
        with self._lock:
            if request := self._active.get(request_id):
                request.hbm_allocated = True

    def unallocated_tokens(self) -> int:
        """Return the tokens of all requests for which a DE has allocated no HBM yet."""
        with self._lock:
            return sum(r.tokens for r in self._active.values() if not r.hbm_allocated)

    def kv_in_hbm(self, request_id: str) -> bool:
        """Note that the prompt's KV is in HBM; return whether the request is dropped with that.

        It is if its tokens, and its end, have come before.
        """
        with self._lock:
            if (request := self._active.get(request_id)) is None:
                return False
            request.kv_in_hbm = True
            if not (request.ended and request.is_served):
                return False
            del self._active[request_id]
            return True

    def done_with_buffer(self, request_id: str) -> bool:
        """Whether its slots can be freed: the KV is in HBM and new blocks are being persisted."""
        with self._lock:
            request = self._active.get(request_id)
            return request is not None and request.kv_in_hbm and request.persist_seen

    def enter_stream(self, request_ids: Iterable[str]) -> set[str]:
        """Add requests to a forward pass; return those refused, which are unknown or released.

        Check and addition are atomic: a release that comes later waits for the pass.
        """
        refused = set()
        with self._lock:
            for request_id in request_ids:
                request = self._active.get(request_id)
                if request is None or request.release is not None:
                    refused.add(request_id)
                else:
                    request.streams += 1
        return refused

    def passed(self, request_ids: Iterable[str], pass_ns: int, waited_ns: int) -> None:
        """Add the duration of a forward pass, and its wait for transfers, to its requests."""
        with self._lock:
            for request_id in request_ids:
                if request := self._active.get(request_id):
                    request.pass_ns += pass_ns
                    request.waited_ns += waited_ns

    def pass_times_ns(self, request_id: str) -> tuple[int, int]:
        """Return the sums of ``passed``; zeros for an unknown request."""
        with self._lock:
            request = self._active.get(request_id)
            return (0, 0) if request is None else (request.pass_ns, request.waited_ns)

    def leave_stream(self, request_ids: Iterable[str]) -> list[Release]:
        """Remove requests from a forward pass; return the releases that waited for it."""
        waiting = []
        with self._lock:
            for request_id in request_ids:
                if request := self._active.get(request_id):
                    # A request that was assigned during the pass is not part of it.
                    request.streams = max(request.streams - 1, 0)
                    if request.streams == 0 and request.release is not None:
                        waiting.append(request.release)
        return waiting

    def ask_release(self, release: Release) -> bool:
        """Note the release of a request; False if it has to wait for a forward pass."""
        with self._lock:
            if release.assignment:
                self._taken.take(release.assignment)
            request = self._active.get(release.request_id)
            if request is None:
                return True
            request.release = release
            return request.streams == 0


# ---------------------------------------------------------------------------------- served prompts
# A prompt's KV at the DE: it is written to storage and copied to HBM.
#
# Slots of a request at the decode engine are freed when three conditions hold: the KV was copied to
# HBM (or the router released the request), the order to persist has arrived, with the request's
# transfer or as ``Persist``, so that no new block is lost, and the slots are not pinned.
#
# With a hand-over in HBM the PE has written most of the KV into reserved HBM blocks, and only hits
# that the DE has read or cached are in slots.  ``Persist`` also states that no transfer writes to
# these blocks any more: only then can the load of the prompt be over.


class ServedPrompts:
    """``moves_bytes`` False (mode Oracle): there are no slots, and only lengths are stored.

    ``hbm`` are the reserved HBM blocks, ``leave_hbm`` copies blocks out of them into storage and
    the DRAM cache, and ``holder`` holds blocks back from reuse while a copy writes to them.
    ``chains`` gets the outcome of each write.
    """

    def __init__(
        self,
        rank: Rank,
        active: ActiveRequests,
        buffer: BlockBuffer,
        persister: Persister,
        send: Callable[[EngineMessage], None],
        hbm: HbmReservations,
        leave_hbm: Callable[[Sequence[GeneratedBlock], Sequence[GeneratedBlock]], None],
        holder: BlockHolder,
        chains: ChainWrites,
        *,
        moves_bytes: bool,
    ) -> None:
        self._chains = chains
        self._geometry = rank.geometry
        self._rank = rank
        self._active = active
        self._buffer = buffer
        self._persister = persister
        self._counters = rank.counters
        self._trace = rank.trace
        self._send = send
        self._hbm = hbm
        self._leave_hbm = leave_hbm
        self._holder = holder
        self._moves_bytes = moves_bytes
        self._lock = rank.health.threads.lock()
        #: Loads of prompts that the PE has sent into HBM, until ``Persist`` arrives.
        self._loads: dict[str, _Load] = {}

    def persist(self, message: Persist) -> None:
        """Write a prompt's new blocks to storage; drop them if the request is no longer here.

        Does nothing if they are being written already.
        """
        request_id = message.request_id
        if self._active.is_persisted(request_id):
            return
        if hbm_blocks := self._hbm.blocks_of(request_id):
            self._persist_from_hbm(message, hbm_blocks)
            return
        assigned, first = self._active.keys_of(request_id), message.first_block
        keys, new_blocks = assigned[: message.blocks], max(message.blocks - first, 0)
        held = self._buffer.slots_of(request_id)
        slots = held[first : message.blocks]
        # Without new blocks as well: the hit's blocks are cached from these slots.
        complete = len(held) >= message.blocks or not self._moves_bytes
        known = len(keys) == message.blocks and self._active.is_active(request_id)
        if not complete or not known:
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, new_blocks)
            return
        self._buffer.pin(slots)
        if self._moves_bytes:
            self._cache(request_id, first, keys, held)
        self._chains.begin(request_id, keys, assigned)
        written = self._chains.prompt(request_id)
        # From here on another thread may free the request's slots, once its KV is in HBM.
        self._persist_seen(request_id)
        origin = BlockOrigin(keys[first - 1] if first else chain_root(), message.tenant)
        new = BlockRun(first, new_blocks)
        self._write(request_id, new, slots, keys[first:], origin, written)
        self._free_if_served(request_id)

    def _persist_seen(self, request_id: str) -> None:
        if not self._active.persist_seen(request_id):
            self._chains.drop(request_id)  # It was released meanwhile.

    def _write(
        self,
        request_id: str,
        blocks: BlockRun,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        origin: BlockOrigin,
        written: Written,
    ) -> None:
        """Write blocks from pinned slots of the buffer, then unpin the slots."""
        step = step_of(PERSIST_PROMPT, self._geometry, blocks, slots=tuple(slots))
        sources = [self._buffer.view(slot) for slot in slots]
        over = functools.partial(self._buffer.unpin, slots)
        self._persister.add(WriteTask(request_id, step, keys, sources, over, origin, written))

    def _persist_with(self, transfer: DecodeTransfer) -> None:
        """Write the new blocks of a prompt whose KV is complete, as its transfer orders."""
        request_id, first = transfer.request_id, transfer.persist_from
        if first is None or (keys := self._active.to_be_persisted(request_id)) is None:
            return
        blocks = len(keys)
        if self._moves_bytes:
            blocks = min(blocks, len(self._buffer.slots_of(request_id)))
        self.persist(Persist(request_id, first, blocks, transfer.tenant))

    def _cache(
        self, request_id: str, first: int, keys: Sequence[BlockKey], held: Sequence[int]
    ) -> None:
        """Cache the full blocks of a prompt, to which no transfer writes any more.

        In a model with window layers those before block ``first``, hits, may lack layers here and
        are not added.
        """
        begin = first if self._geometry.layer_windows else 0
        parent = keys[begin - 1] if begin else chain_root()
        self._buffer.cache_blocks(request_id, held[begin : len(keys)], keys[begin:], parent)

    def _persist_from_hbm(self, message: Persist, hbm_blocks: Sequence[int]) -> None:
        """Write a prompt's new blocks from where they are: reserved HBM, or slots of the buffer.

        For the DRAM cache alone, hits that the PE has sent leave HBM as well.
        """
        request_id, first = message.request_id, message.first_block
        assigned, tenant = self._active.keys_of(request_id), message.tenant
        keys = assigned[: message.blocks]
        known = len(keys) == message.blocks and len(hbm_blocks) >= message.blocks
        if not known or not self._active.is_active(request_id):
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, max(message.blocks - first, 0))
            return
        parents = (chain_root(), *keys)
        self._chains.begin(request_id, keys, assigned)
        all_queued = self._chains.prompt(request_id)
        new_blocks: int | None = 0
        in_slots: set[int] = set()
        for run in message.hits:
            in_slots.update(range(run.blocks.first, run.blocks.end))
            if run.blocks.end > len(keys) or not self._buffer.pin_some(request_id, run.slots):
                # Neither in the slots nor, before its load, in HBM.
                lost = min(run.blocks.end, len(keys)) - max(first, run.blocks.first)
                self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, max(lost, 0))
                new_blocks = None
                continue
            own = keys[run.blocks.first : run.blocks.end]
            before = parents[run.blocks.first]
            self._buffer.cache_blocks(request_id, run.slots, own, before)
            new = max(first, run.blocks.first)
            skipped = max(min(new, run.blocks.end) - run.blocks.first, 0)
            self._buffer.unpin(run.slots[:skipped])
            if new < run.blocks.end:
                blocks = BlockRun(new, run.blocks.end - new)
                origin = BlockOrigin(parents[new], tenant)
                slots = run.slots[skipped:]
                own = keys[new : run.blocks.end]
                written = self._chains.prompt(request_id)
                self._write(request_id, blocks, slots, own, origin, written)
        sent = [
            GeneratedBlock(hbm_blocks[block], keys[block], parents[block], tenant, request_id)
            for block in range(len(keys))
            if block not in in_slots
        ]
        cached = sum(block not in in_slots for block in range(first))
        self._leave_hbm(sent[cached:], sent[:cached])
        all_queued(new_blocks)
        self._persist_seen(request_id)
        with self._lock:
            load = self._loads.pop(request_id, None)
        if load is not None:
            self._load_hits(load)
        self._free_if_served(request_id)

    def fill_hbm(
        self,
        decode_transfer: DecodeTransfer,
        hbm_blocks: Sequence[HbmBlock],
        done: Callable[[str | None], None],
    ) -> None:
        """See ``TrafficManager.fill_hbm``."""
        request_id, slots = decode_transfer.request_id, decode_transfer.slots
        self._active.hbm_allocated(request_id)
        self._persist_with(decode_transfer)
        start_ns = self._trace.now_ns()
        if not self._moves_bytes:
            self._kv_in_hbm(request_id, 0.0)
            done(None)
            return
        if decode_transfer.in_hbm:
            self._load_reserved(_Load(decode_transfer, hbm_blocks, done, start_ns))
            return
        number = self._rank.work.begin()

        def over(error: str | None) -> None:
            self._buffer.unpin(slots)
            if error is None:
                self._kv_in_hbm(request_id, (self._trace.now_ns() - start_ns) / _NS_PER_S)

        def copied(error: str | None) -> None:
            # Each rank reports its own copy to the engine, which fails the request if one failed.
            self._rank.work.when_idle(number, functools.partial(over, error))
            done(error)

        if not self._buffer.pin_lease(request_id, slots):
            self._counters.add(Counter.STALE_TRANSFERS, 1)
            done(f"request {request_id}: its DE buffer slots have a new owner")
        else:
            prompt = PromptLayout(self._geometry, decode_transfer.prompt_tokens, de_slots=slots)
            self._rank.copier.into_hbm(request_id, decode_steps(prompt), hbm_blocks, copied)

    def _load_reserved(self, load: "_Load") -> None:
        """Load a prompt that the PE has sent into HBM, once ``Persist`` states that all is there.

        The request may arrive before that message, as it travels on another connection.
        """
        request_id = load.transfer.request_id
        with self._lock:
            complete = self._active.is_complete(request_id)
            if complete is False and self._hbm.blocks_of(request_id):
                self._loads[request_id] = load
                return
        if complete:
            self._load_hits(load)
        else:
            self._counters.add(Counter.STALE_TRANSFERS, 1)
            load.done(_released(request_id))

    def _load_hits(self, load: "_Load") -> None:
        """Copy the hits in the buffer into the reserved blocks; then the engine owns these."""
        transfer, request_id = load.transfer, load.transfer.request_id
        reserved = self._hbm.blocks_of(request_id)
        slots = [slot for run in transfer.hits for slot in run.slots]
        named = zip(load.hbm_blocks, reserved, strict=False)
        if not reserved or any(block not in (NO_BLOCK, own) for block, own in named):
            self._counters.add(Counter.STALE_TRANSFERS, 1)
            load.done(f"request {request_id}: its HBM blocks have a new owner")
            return
        if not self._buffer.pin_some(request_id, slots):
            self._counters.add(Counter.STALE_TRANSFERS, 1)
            load.done(f"request {request_id}: its DE buffer slots have a new owner")
            return
        # The router may release the request during the copy, which then still writes.
        self._holder.hold(reserved)

        def copied(error: str | None) -> None:
            self._buffer.unpin(set(slots))
            if error is None and not self._hbm.hand_over(request_id):
                error = _released(request_id)
            self._holder.unhold(reserved)
            if error is None:
                self._kv_in_hbm(request_id, (self._trace.now_ns() - load.start_ns) / _NS_PER_S)
            load.done(error)

        prompt = PromptLayout(
            self._geometry, transfer.prompt_tokens, transfer.hits, handover=Handover.HBM
        )
        self._rank.copier.into_hbm(request_id, decode_steps(prompt), load.hbm_blocks, copied)

    def released(self, request_id: str) -> None:
        """The request is released: its load, if it waits for ``Persist``, has failed."""
        with self._lock:
            load = self._loads.pop(request_id, None)
        if load is not None:
            load.done(_released(request_id))

    def _kv_in_hbm(self, request_id: str, h2d_s: float) -> None:
        if not self._active.is_known(request_id):
            return  # It was released, or its session is over: its name may mean another one.
        is_over = self._active.kv_in_hbm(request_id)
        self._send(KvInHbm(request_id=request_id, h2d_s=h2d_s))
        if is_over:
            self.over(request_id)
        else:
            self._free_if_served(request_id)

    def over(self, request_id: str) -> None:
        """A request that was dropped from the active ones holds nothing any more."""
        self._buffer.release(request_id)
        self._chains.over(request_id)  # First, so that one report has both.
        self._send(RequestOver(request_id))

    def _free_if_served(self, request_id: str) -> None:
        if self._active.done_with_buffer(request_id):
            self._buffer.release(request_id)


def _released(request_id: str) -> str:
    return f"request {request_id}: it was released before its KV was in HBM"


class _Load(NamedTuple):
    """The load of a prompt that the PE has sent into HBM."""

    transfer: DecodeTransfer
    hbm_blocks: Sequence[HbmBlock]
    done: Callable[[str | None], None]
    start_ns: int


# ------------------------------------------------------------------------------- in-doubt requests
# The teardown of a session at an engine: only in-doubt requests are left.


class InDoubt(NamedTuple):
    """The in-doubt requests of earlier sessions, and their writers: see ``control.Register``."""

    unsettled: tuple[str, ...]
    quarantined: tuple[str, ...]
    writers: tuple[Writer, ...]


class SessionTeardown:
    """Ends sessions and tracks in-doubt requests; methods may be called from any thread.

    ``hbm`` are the HBM blocks reserved for requests; ``cancel`` drops a request's storage reads and
    its load into HBM.
    """

    def __init__(
        self,
        role: Role,
        active: ActiveRequests,
        buffer: BlockBuffer,
        hbm: HbmReservations,
        peers: Peers,
        cancel: Callable[[str], None],
    ) -> None:
        self._cancel = cancel
        self._hbm = hbm
        self._role = role
        self._active = active
        self._buffer = buffer
        self._peers = peers
        self._reported_unsettled: set[str] = set()

    def end_session(self, reason: str) -> None:
        """Drop all requests except those that decode, which hold no slots any more.

        Memory to which transfers may still write is not reused: a DE's slots and reserved HBM are
        quarantined until the router confirms that they have no writer, a PE's requests in a forward
        pass stay until it is over.
        """
        for request_id, awaits_kv in self._active.end_session(reason).items():
            self._cancel(request_id)
            for memory in (self._buffer, self._hbm):
                if awaits_kv and self._role is Role.DECODE:
                    memory.quarantine(request_id)
                memory.release(request_id)

    def in_doubt(self) -> InDoubt:
        """Return the in-doubt requests, for the next ``Register``."""
        unsettled = self._active.unsettled()
        self._reported_unsettled.update(unsettled)
        quarantined = dict.fromkeys((*self._buffer.quarantined(), *self._hbm.quarantined()))
        return InDoubt(unsettled, tuple(quarantined), self._peers.writers())

    def settled_since(self) -> list[str]:
        """A session begins: return requests that have settled since they were reported in doubt."""
        settled = self._reported_unsettled.difference(self._active.unsettled())
        self._reported_unsettled.clear()
        return sorted(settled)
