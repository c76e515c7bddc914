"""The requests that the router has assigned to an engine: their slots, storage reads and release.

An assignment counts against the engine's load at once and may reserve slots, which are granted in
order (``engine.slots``).  Blocks are read from storage into them.  A release removes the request;
its slots are free once nothing can write to them.
"""

from collections.abc import Callable

from dualpath.core.cluster import Role
from dualpath.core.control import EngineMessage, Retain
from dualpath.core.errors import BadRequestError, BufferTooSmallError
from dualpath.core.request_messages import Assign, Read, Release, Released, Reserved
from dualpath.engine.active_requests import ActiveRequests
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.dram_tier import DramTier
from dualpath.engine.rank import Rank
from dualpath.engine.read_queue import ReadQueue, ReadTask
from dualpath.engine.retention import Retention
from dualpath.engine.session_doubts import InDoubt, SessionTeardown
from dualpath.engine.settings import EngineSettings
from dualpath.engine.slots import Grant
from dualpath.engine.threads import Threads, TimeLimit
from dualpath.engine.write_share import WriteShare
from dualpath.plan.steps import run_reads
from dualpath.storage.contract import BlockStorage
from dualpath.storage.node_dram import NodeDram

_NS_PER_S = 1_000_000_000


class AssignedRequests:
    """Owns the PE or DE buffer and its read queue; answers go through ``send``.

    Commands come from one thread; slots are granted, and requests released, on any thread.
    """

    def __init__(
        self,
        settings: EngineSettings,
        rank: Rank,
        storage: BlockStorage,
        threads: Threads,
        send: Callable[[EngineMessage], None],
        share: WriteShare | None = None,
        node_dram: NodeDram | None = None,
    ) -> None:
        self._geometry = rank.geometry
        self._trace = rank.trace
        self._send = send
        self.active = ActiveRequests(threads)
        slots = settings.buffer_slots(rank.geometry)
        self.buffer = BlockBuffer(rank.geometry, slots, self._granted, threads, rank.memory.buffer)
        self._tier = DramTier(self.buffer, rank.counters, send, node_dram)
        self._reader = ReadQueue(
            storage,
            self.buffer,
            rank.counters,
            rank.trace,
            send,
            settings.parallel_reads,
            rank.health,
            # A PE may recompute blocks that a DE has read: a DE caches them only at ``Persist``.
            caches=settings.role is Role.PREFILL,
            share=share,
        )
        self._retention = Retention(self.buffer, self._reader.fetch, self._reader.cancel_fetch)
        self._teardown = SessionTeardown(
            settings.role, self.active, self.buffer, rank.peers, self._reader.cancel
        )
        #: The last assignment that counts already; set after its load is counted.
        self.assign_seq = 0

    def read_queue_tokens(self) -> int:
        """Return read_q of §6.1."""
        return self._reader.tokens()

    def totals(self) -> dict[str, float]:
        """Return the counters of the DRAM cache."""
        return self._tier.totals()

    # ------------------------------------------------------------------ sessions

    def begin_session(self, *, caching: bool) -> None:
        """Begin a session; ``caching``: whether blocks are cached for later requests."""
        self._tier.begin_session(caching=caching)

    def send_settled(self) -> None:
        """Report the in-doubt requests that have settled between the sessions."""
        for request_id in self._teardown.settled_since():
            self._send(Released(request_id=request_id))

    def end_session(self, reason: str) -> None:
        """Drop the requests that do not decode yet (``session_doubts``)."""
        self._tier.end_session()
        self._retention.end_session()
        self._teardown.end_session(reason)
        self.assign_seq = 0

    def in_doubt(self) -> InDoubt:
        """Return the in-doubt requests of earlier sessions, for the next ``Register``."""
        return self._teardown.in_doubt()

    # ------------------------------------------------------------------ commands

    def assign(self, message: Assign) -> None:
        """Count a request and queue its reservation of slots; ``Reserved`` follows.

        Raises ``BadRequestError`` if an earlier request of this id is still here,
        ``BufferTooSmallError`` for more slots than the buffer has.
        """
        if self.active.is_known(message.request_id) or self.buffer.has_request(message.request_id):
            raise BadRequestError(
                f"request {message.request_id}: an earlier request of this name has not left the "
                "engine; send it under another id"
            )
        self.active.add(message.request_id, message.tokens, self._trace.now_ns())
        self.assign_seq = max(self.assign_seq, message.assign_seq)
        if message.reserve_blocks == 0:
            return
        try:
            self.buffer.request(message.request_id, message.reserve_blocks, message.keys)
        except BufferTooSmallError:
            self.active.drop(message.request_id)
            raise

    def _granted(self, grant: Grant) -> None:
        assigned_ns = self.active.assigned_ns(grant.request_id)
        if assigned_ns is None:  # released while waiting
            self.buffer.release(grant.request_id)
            return
        wait_s = (self._trace.now_ns() - assigned_ns) / _NS_PER_S
        self._tier.granted(grant)
        self._send(Reserved(grant.request_id, grant.slots, wait_s, grant.cached))

    def read(self, message: Read) -> None:
        """Queue the storage reads of a run of blocks; ``ReadDone`` follows."""
        reads, now_ns = run_reads(self._geometry, message.run), self._trace.now_ns()
        self._reader.add(
            ReadTask(
                message.request_id, reads, message.keys, now_ns, message.deadline_s, message.parent
            )
        )

    def retain(self, message: Retain) -> None:
        """Retain blocks for a turn that may follow."""
        self._retention.apply(message, self._trace.now_ns())

    def ask_release(self, message: Release) -> None:
        """Release a request, at once or after the forward pass that it is part of."""
        if self.active.ask_release(message):
            self.release(message)

    def release(self, message: Release) -> None:
        """Release a request that is in no forward pass; ``Released`` follows."""
        self._reader.cancel(message.request_id)
        self.active.drop(message.request_id)
        if message.writer_certain:
            self.buffer.end_quarantine(message.request_id)
        else:
            self.buffer.quarantine(message.request_id)
        self.buffer.release(message.request_id)
        self._send(Released(request_id=message.request_id))

    # ------------------------------------------------------------------ time

    def expire(self, now_ns: int) -> None:
        """Answer reads whose deadline has passed; end retentions whose time has passed."""
        self._reader.expire(now_ns)
        self._retention.expire(now_ns)

    def send_cache_updates(self) -> None:
        """Send the changes of the DRAM cache to the router."""
        self._tier.send_changes()

    def close(self, limit: TimeLimit) -> None:
        """Stop reading."""
        self._reader.close(limit)
