"""The requests that the router has assigned to an engine: slots in its buffer, reads, their end.

An assignment counts against the engine's load at once and may ask for slots, which are granted in
order (``engine.slots``).  What is read from storage goes into them.  With its release a request
leaves, and its slots are free once nothing can write to them.
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
from dualpath.engine.session_doubts import Doubts, SessionDoubts
from dualpath.engine.settings import EngineSettings
from dualpath.engine.slots import Grant
from dualpath.engine.threads import Threads, TimeLimit
from dualpath.engine.write_share import WriteShare
from dualpath.plan.steps import run_reads
from dualpath.storage.contract import BlockStorage
from dualpath.storage.node_dram import NodeDram

_NS_PER_S = 1_000_000_000


class AssignedRequests:
    """Owns the PE or DE buffer and what fills it from storage; answers go through ``send``.

    Commands come from one thread; slots are granted, and releases carried out, on any.
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
            # A PE may yet compute again what a DE has read: the DE's slots are whole later.
            keeps=settings.role is Role.PREFILL,
            share=share,
        )
        self._retention = Retention(self.buffer, self._reader.fetch, self._reader.leave)
        self._doubts = SessionDoubts(
            settings.role, self.active, self.buffer, rank.peers, self._reader.cancel
        )
        #: The last assignment that counts already; set after its load is there.
        self.assign_seq = 0

    def read_queue_tokens(self) -> int:
        """Return read_q of §6.1."""
        return self._reader.tokens()

    def totals(self) -> dict[str, float]:
        """Return what is counted where blocks are kept."""
        return self._tier.totals()

    # ------------------------------------------------------------------ sessions

    def begin_session(self, *, keeps: bool) -> None:
        """A router listens; ``keeps``: whether blocks are to stay for later requests."""
        self._tier.begin_session(keeps=keeps)

    def tell_settled(self) -> None:
        """Say what has settled between the sessions, which nobody heard."""
        for request_id in self._doubts.settled_since():
            self._send(Released(request_id=request_id))

    def end_session(self, reason: str) -> None:
        """Drop what is not decoding yet (``session_doubts``)."""
        self._tier.end_session()
        self._retention.end_session()
        self._doubts.end_session(reason)
        self.assign_seq = 0

    def doubts(self) -> Doubts:
        """Return what sessions before have left in doubt, for the next ``Hello``."""
        return self._doubts.named()

    # ------------------------------------------------------------------ commands

    def assign(self, message: Assign) -> None:
        """Count a request in and let it wait for its slots; ``Reserved`` follows.

        Raises ``BadRequestError`` for a name that has not left, ``BufferTooSmallError`` for more
        slots than there are.
        """
        if self.active.is_known(message.request_id) or self.buffer.holds(message.request_id):
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
        asked_ns = self.active.asked_ns(grant.request_id)
        if asked_ns is None:  # released while waiting
            self.buffer.release(grant.request_id)
            return
        wait_s = (self._trace.now_ns() - asked_ns) / _NS_PER_S
        self._tier.granted(grant)
        self._send(Reserved(grant.request_id, grant.slots, wait_s, grant.kept))

    def read(self, message: Read) -> None:
        """Queue a run of blocks for its slots; ``ReadDone`` follows."""
        reads, now_ns = run_reads(self._geometry, message.run), self._trace.now_ns()
        self._reader.add(
            ReadTask(
                message.request_id, reads, message.keys, now_ns, message.deadline_s, message.parent
            )
        )

    def retain(self, message: Retain) -> None:
        """Keep blocks for a turn that may follow."""
        self._retention.order(message, self._trace.now_ns())

    def ask_release(self, message: Release) -> None:
        """Release a request, unless a forward pass still needs it: then once that is over."""
        if self.active.ask_release(message):
            self.release(message)

    def release(self, message: Release) -> None:
        """Let a request go that no forward pass needs; ``Released`` follows."""
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
        """Answer reads beyond their deadline; let blocks go whose time is over."""
        self._reader.expire(now_ns)
        self._retention.expire(now_ns)

    def tell_kept(self) -> None:
        """Let the router hear what the buffer keeps since it last did."""
        self._tier.tell()

    def close(self, limit: TimeLimit) -> None:
        """Stop reading."""
        self._reader.close(limit)
