"""The storage reads of one engine: FIFO, one reader, measured in tokens (§6.1, read_q).

A read has a deadline.  When it passes while the device still writes into some slots, those slots
are swapped for fresh ones and stay pinned until the device is done, so that the request goes on
and a late byte cannot reach anybody.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockKey
from dualpath.core.control import ReadDone
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.trace import TraceRecorder
from dualpath.storage.contract import BlockStorage, ReadOutcome

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000


class ReadTask:
    """One request's run of blocks to read; mutated under the queue's lock only."""

    def __init__(
        self,
        request_id: str,
        first_slot: int,
        keys: Sequence[BlockKey],
        received_ns: int,
        deadline_s: float,
    ) -> None:
        self.request_id = request_id
        self.first_slot = first_slot
        self.keys = keys
        self.received_ns = received_ns
        self.deadline_ns = received_ns + int(deadline_s * _NS_PER_S)
        self.started_ns: int | None = None
        self.good_blocks = 0
        self.bytes_read = 0
        self.in_flight = range(0)
        self.over = False


class ReadQueue:
    """Reads blocks into a buffer, a few at a time, and answers each task with ``ReadDone``."""

    def __init__(
        self,
        storage: BlockStorage,
        buffer: BlockBuffer,
        counters: Counters,
        trace: TraceRecorder,
        answer: Callable[[ReadDone], None],
        batch_blocks: int,
    ) -> None:
        self._storage = storage
        self._buffer = buffer
        self._counters = counters
        self._trace = trace
        self._answer = answer
        self._batch_blocks = batch_blocks
        self._wake = threading.Condition()
        self._tasks: deque[ReadTask] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="storage-reader", daemon=True)
        self._thread.start()

    def tokens(self) -> int:
        """Return the tokens still to be read: read_q of §6.1."""
        with self._wake:
            blocks = sum(len(t.keys) - t.good_blocks for t in self._tasks if not t.over)
        return blocks * self._storage.geometry.block_tokens

    def add(self, task: ReadTask) -> None:
        """Append a task."""
        with self._wake:
            self._tasks.append(task)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """Drop a request's task without an answer; a read under way ends with its batch."""
        with self._wake:
            for task in self._tasks:
                if task.request_id == request_id:
                    task.over = True

    def expire(self, now_ns: int) -> None:
        """Answer every task whose deadline has passed with what is verified so far."""
        with self._wake:
            late = [t for t in self._tasks if not t.over and now_ns >= t.deadline_ns]
            expired = [t for t in late if self._set_aside(t)]
            for task in expired:
                task.over = True
        for task in expired:
            self._counters.add(Counter.READ_DEADLINES, 1)
            self._finish(task, now_ns, "deadline")

    def close(self) -> None:
        """Stop after the batch under way; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def _set_aside(self, task: ReadTask) -> bool:
        positions = [task.first_slot + i for i in task.in_flight]
        return self._buffer.replace(task.request_id, positions)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            while not task.over and task.good_blocks < len(task.keys):
                reason = self._read_batch(task)
                if reason is not None:
                    break
            else:
                reason = None
            with self._wake:
                abandoned, task.over = task.over, True
                self._tasks.remove(task)
            if not abandoned:
                self._finish(task, self._trace.now_ns(), reason)

    def _next(self) -> ReadTask | None:
        with self._wake:
            while True:
                while self._tasks and self._tasks[0].over:
                    self._tasks.popleft()
                if self._closing:
                    return None
                if self._tasks:
                    self._tasks[0].started_ns = self._trace.now_ns()
                    return self._tasks[0]
                self._wake.wait()

    def _read_batch(self, task: ReadTask) -> str | None:
        """Read the next blocks; return why the run ended early, None if it goes on."""
        with self._wake:
            if task.over:
                return "cancelled"
            slots = self._buffer.slots_of(task.request_id)
            first = task.good_blocks
            count = min(self._batch_blocks, len(task.keys) - first)
            if len(slots) < task.first_slot + first + count:
                task.over = True  # released meanwhile
                return "cancelled"
            batch = slots[task.first_slot + first : task.first_slot + first + count]
            task.in_flight = range(first, first + count)
            self._buffer.pin(batch)
        start_ns = self._trace.now_ns()
        outcome = ReadOutcome(good_blocks=0, bytes_read=0, reason="read error")
        try:
            outcome = self._storage.read(
                task.keys[first : first + count], [self._buffer.view(s) for s in batch]
            )
        except Exception:  # a defect must not end the only reader; the blocks are recomputed
            log.exception("request %s: reading %d blocks failed", task.request_id, count)
        finally:
            with self._wake:
                task.in_flight = range(0)
                if not task.over:
                    task.good_blocks += outcome.good_blocks
                    task.bytes_read += outcome.bytes_read
            self._buffer.unpin(batch)
        self._counters.add(Counter.STORAGE_READ_BYTES, outcome.bytes_read)
        self._trace.record(
            "read", "storage", start_ns, self._trace.now_ns(), request=task.request_id, blocks=count
        )
        if outcome.good_blocks < count:
            self._counters.add(Counter.VERIFY_FAILURES, 1)
            log.warning(
                "request %s: stored block %d of %d is unusable (%s); the rest is recomputed",
                task.request_id,
                first + outcome.good_blocks,
                len(task.keys),
                outcome.reason,
            )
            return outcome.reason or "short"
        return None

    def _finish(self, task: ReadTask, now_ns: int, reason: str | None) -> None:
        started_ns = task.started_ns if task.started_ns is not None else now_ns
        self._answer(
            ReadDone(
                request_id=task.request_id,
                good_blocks=task.good_blocks,
                reason=reason,
                bytes_read=task.bytes_read,
                queue_s=(started_ns - task.received_ns) / _NS_PER_S,
                read_s=(now_ns - started_ns) / _NS_PER_S,
                slots=self._buffer.slots_of(task.request_id),
            )
        )
