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
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import CallAssignment, DecodeTransfer
from dualpath.engine.buffer.block_buffer import BlockBuffer
from dualpath.engine.control.peers import Peers
from dualpath.engine.counters import Counter
from dualpath.engine.io.persister import Persister, WriteTask
from dualpath.engine.passes.hbm_layout import HbmBlock
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


class _Request:
    def __init__(
        self,
        tokens: int,
        assigned_ns: int,
        keys: Sequence[BlockKey] = (),
        *,
        called: bool = False,
    ) -> None:
        self.tokens = tokens
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

    def add(self, request_id: str, tokens: int, now_ns: int, keys: Sequence[BlockKey] = ()) -> None:
        """Count a request of ``tokens`` that was assigned to this engine with these keys."""
        with self._lock:
            assert request_id not in self._active, f"request {request_id} is active already"
            self._active[request_id] = _Request(tokens, now_ns, keys)

    def to_be_persisted(self, request_id: str) -> Sequence[BlockKey] | None:
        """Return the keys of a request whose new blocks are not being persisted yet, else None."""
        with self._lock:
            request = self._active.get(request_id)
            persists = request is not None and request.release is None and not request.persist_seen
            return request.keys if request is not None and persists else None

    def end_session(self, reason: str) -> dict[str, bool]:
        """Drop all requests except those in a forward pass, which are released after it.

        Return the requests that still hold buffer slots, which have to be released, and whether
        each still expects KV from another engine: a request that waits for its prompt to be
        persisted has all of its KV.  A request that decodes needs no slots and no router: it is
        detached and counts until ``ended``.
        """
        dropped = {}
        with self._lock:
            self._session = ""
            for request_id, request in list(self._active.items()):
                if request.streams:
                    request.release = request.release or Release(request_id, reason)
                    continue
                dropped[request_id] = not (request.persist_seen or request.kv_in_hbm)
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
            return len(self._active), sum(r.tokens for r in self._active.values())

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
# A prompt's KV in the DE's buffer: it is written to storage and copied to HBM.
#
# Slots of a request at the decode engine are freed when three conditions hold: the KV was copied to
# HBM (or the router released the request), the order to persist has arrived, with the request's
# transfer or as ``Persist``, so that no new block is lost, and the slots are not pinned.


class ServedPrompts:
    """``moves_bytes`` False (mode Oracle): there are no slots, and only lengths are stored."""

    def __init__(
        self,
        rank: Rank,
        active: ActiveRequests,
        buffer: BlockBuffer,
        persister: Persister,
        send: Callable[[EngineMessage], None],
        *,
        moves_bytes: bool,
    ) -> None:
        self._geometry = rank.geometry
        self._rank = rank
        self._active = active
        self._buffer = buffer
        self._persister = persister
        self._counters = rank.counters
        self._trace = rank.trace
        self._send = send
        self._moves_bytes = moves_bytes

    def persist(self, message: Persist) -> None:
        """Write a prompt's new blocks to storage; drop them if the request is no longer here.

        Does nothing if they are being written already.
        """
        if self._active.is_persisted(message.request_id):
            return
        blocks = BlockRun(message.first_block, len(message.keys))
        held = self._buffer.slots_of(message.request_id)
        slots = held[blocks.first : blocks.end]
        # Without new blocks as well: the hit's blocks are cached from these slots.
        complete = len(held) >= blocks.end or not self._moves_bytes
        if not complete or not self._active.is_active(message.request_id):
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, len(message.keys))
            return
        self._buffer.pin(slots)
        self._cache(message, held)
        # From here on another thread may free the request's slots, once its KV is in HBM.
        self._active.persist_seen(message.request_id)
        step = step_of(PERSIST_PROMPT, self._geometry, blocks, slots=slots)
        sources = [self._buffer.view(slot) for slot in slots]
        over = functools.partial(self._buffer.unpin, slots)
        self._persister.add(
            WriteTask(message.request_id, step, message.keys, sources, over, message.origin)
        )
        self._free_if_served(message.request_id)

    def _persist_with(self, transfer: DecodeTransfer) -> None:
        """Write the new blocks of a prompt whose KV is complete, as its transfer orders."""
        request_id, first = transfer.request_id, transfer.persist_from
        if first is None or (keys := self._active.to_be_persisted(request_id)) is None:
            return
        if self._moves_bytes:
            keys = keys[: len(self._buffer.slots_of(request_id))]
        parent = keys[first - 1] if first else chain_root()
        origin = BlockOrigin(parent, transfer.tenant)
        new, hits = tuple(keys[first:]), tuple(keys[:first])
        self.persist(Persist(request_id, first, new, origin, hits))

    def _cache(self, message: Persist, held: Sequence[int]) -> None:
        """Cache the full blocks of a prompt, to which no transfer writes any more.

        In a model with window layers hit blocks may lack layers here and are not added.
        """
        hit_keys, first = message.hit_keys, message.first_block
        if self._moves_bytes and len(hit_keys) == first:
            begin = first if self._geometry.layer_windows else 0
            keys = (hit_keys + message.keys)[begin:]
            slots = held[begin : begin + len(keys)]
            parent = hit_keys[begin - 1] if begin else chain_root()
            self._buffer.cache_blocks(message.request_id, slots, keys, parent)

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
        self._send(RequestOver(request_id))

    def _free_if_served(self, request_id: str) -> None:
        if self._active.done_with_buffer(request_id):
            self._buffer.release(request_id)


# ------------------------------------------------------------------------------- in-doubt requests
# The teardown of a session at an engine: only in-doubt requests are left.


class InDoubt(NamedTuple):
    """The in-doubt requests of earlier sessions, and their writers: see ``control.Register``."""

    unsettled: tuple[str, ...]
    quarantined: tuple[str, ...]
    writers: tuple[Writer, ...]


class SessionTeardown:
    """Ends sessions and tracks in-doubt requests; methods may be called from any thread.

    ``cancel_reads`` drops a request's storage reads.
    """

    def __init__(
        self,
        role: Role,
        active: ActiveRequests,
        buffer: BlockBuffer,
        peers: Peers,
        cancel_reads: Callable[[str], None],
    ) -> None:
        self._cancel_reads = cancel_reads
        self._role = role
        self._active = active
        self._buffer = buffer
        self._peers = peers
        self._reported_unsettled: set[str] = set()

    def end_session(self, reason: str) -> None:
        """Drop all requests except those that decode, which hold no slots any more.

        Memory to which transfers may still write is not reused: a DE's slots are quarantined until
        the router confirms that they have no writer, a PE's requests in a forward pass stay until
        it is over.
        """
        for request_id, awaits_kv in self._active.end_session(reason).items():
            self._cancel_reads(request_id)
            if awaits_kv and self._role is Role.DECODE:
                self._buffer.quarantine(request_id)
            self._buffer.release(request_id)

    def in_doubt(self) -> InDoubt:
        """Return the in-doubt requests, for the next ``Register``."""
        unsettled = self._active.unsettled()
        self._reported_unsettled.update(unsettled)
        return InDoubt(unsettled, self._buffer.quarantined(), self._peers.writers())

    def settled_since(self) -> list[str]:
        """A session begins: return requests that have settled since they were reported in doubt."""
        settled = self._reported_unsettled.difference(self._active.unsettled())
        self._reported_unsettled.clear()
        return sorted(settled)
