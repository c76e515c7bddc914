"""The storage reads of one engine: FIFO, measured in tokens (§6.1, read_q).

Several blocks are read at a time, so that the device is never idle between reads: when a block has
been read, the next one begins, of the same task or of the following one.

A read has a deadline.  If the device still writes into some slots when it passes, these slots are
exchanged for free ones and stay pinned until the device is done, so that the request goes on and
late bytes reach no other request.

While no request waits for a read, retained blocks are *fetched* (prefetched) one by one into free
slots that no reservation waits for: a request never waits for more than the blocks under way.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockKey, chain_root
from dualpath.core.cluster import Role
from dualpath.core.control import ReadDone
from dualpath.core.runs import BlockRun, HitRun
from dualpath.engine.buffer.block_buffer import NO_REQUEST, BlockBuffer, Grant, with_parents
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.io.persister import WriteShare
from dualpath.engine.threads import Health, TimeLimit
from dualpath.engine.trace import STORAGE_TRACK, TraceRecorder
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step, run_reads
from dualpath.storage.contract import BlockStorage, ReadOutcome

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000
#: If all readers are in one read for longer than this, the storage does not respond.  A single read
#: that hangs is handled by its deadline.
_READ_LIMIT_S = 60.0


class ReadTask:
    """The reads of a run of one request, with the keys of its blocks.

    Changed only under the queue's lock.  The first ``good_blocks`` are read and verified; the
    outcomes of later blocks are in ``ahead``.  ``granted`` is the grant with which it began, with
    the seconds that the reservation had waited, if no ``Reserved`` was sent.
    """

    def __init__(
        self,
        request_id: str,
        reads: Sequence[Step],
        keys: Sequence[BlockKey],
        received_ns: int,
        deadline_s: float,
        parent: BlockKey = b"",
        granted: tuple[Grant, float] | None = None,
    ) -> None:
        self.granted = granted
        self.request_id = request_id
        self.reads = reads
        self.slots = tuple(slot for step in reads for slot in step.slots)
        self.keys = keys
        self.parent = parent
        self.received_ns = received_ns
        self.deadline_ns = received_ns + int(deadline_s * _NS_PER_S)
        self.started_ns: int | None = None
        self.started_blocks = 0
        self.good_blocks = 0
        self.bytes_read = 0
        self.in_flight: set[int] = set()
        self.ahead: dict[int, ReadOutcome] = {}
        self.stopped = False
        self.reason: str | None = None
        self.over = False

    @property
    def waits(self) -> bool:
        """Whether reads of some of its blocks are still to be started."""
        return not self.over and not self.stopped and self.started_blocks < len(self.keys)

    @property
    def is_settled(self) -> bool:
        """Whether it can be answered: no more blocks are read, no read is under way."""
        return not self.in_flight and not self.waits

    def key_before(self, position: int) -> BlockKey:
        """Return the parent key of a block, empty if unknown."""
        return self.keys[position - 1] if position else self.parent

    def step(self, position: int) -> Step:
        """Return the read of one of its blocks."""
        for read in self.reads:
            if position < read.blocks.count:
                return read.block(position)
            position -= read.blocks.count
        raise IndexError(position)

    def note(self, position: int, outcome: ReadOutcome) -> None:
        """Record the outcome of a block; a bad block stops the run."""
        assert position in self.in_flight, f"block {position} is not being read"
        self.in_flight.discard(position)
        self.bytes_read += outcome.storage_bytes
        self.ahead[position] = outcome
        self.stopped = self.stopped or not outcome.is_good
        while self.reason is None and self.good_blocks in self.ahead:
            head = self.ahead.pop(self.good_blocks)
            self.reason = head.reason
            self.good_blocks += head.is_good


class ReadQueue:
    """Reads ``parallel_reads`` blocks at a time into a buffer; answers tasks with ``ReadDone``.

    ``caches``: no transfer writes to the slots of a task, so that the buffer caches blocks as soon
    as they are read.  ``share`` is notified of reads, so that writes yield to them.
    """

    def __init__(
        self,
        storage: BlockStorage,
        buffer: BlockBuffer,
        counters: Counters,
        trace: TraceRecorder,
        answer: Callable[[ReadDone], None],
        parallel_reads: int,
        health: Health | None = None,
        *,
        caches: bool = False,
        share: WriteShare | None = None,
    ) -> None:
        self._share = share or WriteShare()
        self._storage = storage
        self._buffer = buffer
        self._caches = caches
        self._counters = counters
        self._trace = trace
        self._answer = answer
        health = health or Health()
        self._wake = health.threads.condition()
        self._open: dict[ReadTask, None] = {}
        self._to_start: deque[ReadTask] = deque()
        self._to_fetch: dict[BlockKey, BlockKey] = {}
        self._reading = 0
        self._watchdog = health.watchdog("no read from storage has ended", _READ_LIMIT_S)
        self._closing = False
        self._threads = [
            health.start(
                f"storage-reader-{i}",
                functools.partial(self._run, f"{STORAGE_TRACK} {i}" if i else STORAGE_TRACK),
            )
            for i in range(parallel_reads)
        ]

    def tokens(self) -> int:
        """Return the tokens still to be read: read_q of §6.1."""
        with self._wake:
            blocks = sum(len(task.keys) - task.good_blocks for task in self._open)
        return blocks * self._storage.geometry.block_tokens

    def add(self, task: ReadTask) -> None:
        """Append a task."""
        if not task.keys:
            self._finish(task, task.received_ns, None)
            return
        with self._wake:
            self._open[task] = None
            self._share.reading(True)
            self._to_start.append(task)
            self._wake.notify_all()

    def fetch(self, keys: Sequence[BlockKey]) -> None:
        """Prefetch the retained blocks of a chain, from its first one, that are not cached (DE).

        They are read while no task waits and free slots are available.
        """
        missing = {*self._buffer.missing(keys)}
        wanted = [(k, before) for k, before in with_parents(keys, chain_root()) if k in missing]
        with self._wake:
            room = max(self._buffer.capacity - len(self._to_fetch), 0)
            self._to_fetch.update(wanted[:room])
            self._wake.notify_all()

    def cancel_fetch(self, keys: Sequence[BlockKey]) -> None:
        """Do not fetch these blocks; reads under way go on."""
        with self._wake:
            for key in keys:
                self._to_fetch.pop(key, None)

    def cancel(self, request_id: str) -> None:
        """Drop a request's tasks without an answer; reads of blocks under way go on."""
        with self._wake:
            for task in [task for task in self._open if task.request_id == request_id]:
                self._close_task(task)

    def expire(self, now_ns: int) -> None:
        """Answer every task that is past its deadline with the blocks verified so far."""
        with self._wake:
            late = [task for task in self._open if now_ns >= task.deadline_ns]
            expired = [task for task in late if self._replace_slots(task)]
            for task in expired:
                self._close_task(task)
        for task in expired:
            self._counters.add(Counter.READ_DEADLINES, 1)
            self._finish(task, now_ns, "deadline")

    def close(self, limit: TimeLimit) -> bool:
        """Stop when the blocks under way are read, within the limit; return whether they are."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        return limit.join(self._threads)

    def _close_task(self, task: ReadTask) -> None:
        task.over = True
        self._open.pop(task, None)
        self._share.reading(bool(self._open))

    def _replace_slots(self, task: ReadTask) -> bool:
        """Exchange the slots that the device still writes to; False if too few are free."""
        slots = [task.slots[position] for position in sorted(task.in_flight)]
        return self._buffer.replace(task.request_id, slots)

    def _run(self, track: str) -> None:
        while (work := self._start()) is not None:
            work(track)

    def _start(self) -> Callable[[str], None] | None:
        """Return the next read, its slot pinned; None when the queue closes."""
        with self._wake:
            while not self._closing:
                while self._to_start and not self._to_start[0].waits:
                    self._to_start.popleft()
                if self._to_start:
                    task = self._to_start[0]
                    if (slot := self._pinned_slot(task)) is not None:
                        return functools.partial(self._read_one, task, self._begin(task), slot)
                elif self._to_fetch:
                    if (fetch := self._next_fetch()) is not None:
                        return fetch
                else:
                    self._wake.wait()
            return None

    def _read_one(self, task: ReadTask, position: int, slot: int, track: str) -> None:
        outcome = self._read(task, position, slot, track)
        if outcome.from_dram:
            self._counters.add(Counter.DRAM_HIT_BLOCKS, 1)
            self._counters.add(Counter.DRAM_HIT_BYTES, outcome.bytes_read)
        with self._wake:
            self._ended()
            live = not task.over
            if live:
                task.note(position, outcome)
                if self._caches and outcome.is_good and task.step(position).whole:
                    key, before = task.keys[position], task.key_before(position)
                    self._buffer.cache_blocks(task.request_id, [slot], [key], before)
            settled = live and task.is_settled
            if settled:
                self._close_task(task)
        self._buffer.unpin([slot])
        if settled:
            self._finish(task, self._trace.now_ns(), self._log_bad_block(task))

    def _next_fetch(self) -> Callable[[str], None] | None:
        key = next(iter(self._to_fetch))
        before = self._to_fetch.pop(key)
        assert self._buffer.is_retained(key), f"block {key.hex()[:8]} is fetched, not retained"
        slot = self._buffer.allocate_for(key)
        if slot is None:  # cached meanwhile, or no slot is available
            return None
        self._buffer.pin([slot])
        self._began()
        return functools.partial(self._fetch_one, key, before, slot)

    def _fetch_one(self, key: BlockKey, before: BlockKey, slot: int, track: str) -> None:
        run = HitRun(Role.DECODE, BlockRun(0, 1), (slot,))
        task = ReadTask(NO_REQUEST, run_reads(self._storage.geometry, run), [key], 0, 0.0)
        outcome = self._read(task, 0, slot, track)
        with self._wake:
            self._ended()
            if not outcome.is_good:
                self._to_fetch.clear()  # Blocks after a missing one are useless.
        self._buffer.unpin([slot])
        if outcome.is_good:
            self._counters.add(Counter.DRAM_FETCHED_BLOCKS, 1)
            self._buffer.cache_allocated(slot, key, before)
        else:
            self._buffer.free_slot(slot)

    def _begin(self, task: ReadTask) -> int:
        """Count the task's next block as being read; return its position."""
        position = task.started_blocks
        task.started_blocks += 1
        task.in_flight.add(position)
        if task.started_ns is None:
            task.started_ns = self._trace.now_ns()
        self._began()
        return position

    def _began(self) -> None:
        self._reading += 1
        if self._reading == len(self._threads):
            self._watchdog.progressed()

    def _ended(self) -> None:
        self._reading -= 1
        self._watchdog.idle()

    def _pinned_slot(self, task: ReadTask) -> int | None:
        slot = task.slots[task.started_blocks]
        if not self._buffer.pin_to_write(task.request_id, slot):
            self._close_task(task)  # released meanwhile
            return None
        return slot

    def _read(self, task: ReadTask, position: int, slot: int, track: str) -> ReadOutcome:
        step, start_ns = task.step(position), self._trace.now_ns()
        key, memory = task.keys[position], self._buffer.view(slot)
        try:
            outcome = self._storage.read(key, memory, whole=step.whole)
        except Exception:  # a defect must not end a reader; the blocks are recomputed
            log.exception("request %s: reading block %d failed", task.request_id, position)
            outcome = ReadOutcome(bytes_read=0, reason="read error")
        assert self._buffer.is_pinned(slot), f"slot {slot} was unpinned while it was read into"
        self._counters.moved(step, outcome.storage_bytes)
        self._share.read(outcome.storage_bytes)
        if outcome.from_dram:
            self._counters.add(Counter.NODE_DRAM_READ_BYTES, outcome.bytes_read)
        done = Executed(step, start_ns, self._trace.now_ns())
        self._trace.moved([(task.request_id, done)], track, request=task.request_id, block=position)
        return outcome

    def _log_bad_block(self, task: ReadTask) -> str | None:
        """Log the block that ended a run early, if there is one; return the reason."""
        if task.reason is not None:
            self._counters.add(Counter.VERIFY_FAILURES, 1)
            log.warning(
                "request %s: stored block %d of %d is unusable (%s); the rest is recomputed",
                *(task.request_id, task.good_blocks, len(task.keys), task.reason),
            )
        return task.reason

    def _finish(self, task: ReadTask, now_ns: int, reason: str | None) -> None:
        started_ns = task.started_ns if task.started_ns is not None else now_ns
        cached_blocks, wait_s = 0, 0.0
        if task.granted is not None:
            grant, wait_s = task.granted
            cached_blocks = grant.cached
        self._answer(
            ReadDone(
                request_id=task.request_id,
                good_blocks=task.good_blocks,
                reason=reason,
                bytes_read=task.bytes_read,
                queue_s=(started_ns - task.received_ns) / _NS_PER_S,
                read_s=(now_ns - started_ns) / _NS_PER_S,
                slots=self._buffer.slots_of(task.request_id),
                wait_s=wait_s,
                cached_blocks=cached_blocks,
            )
        )
