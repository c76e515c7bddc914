"""Writes new Full Blocks to storage in the background; nobody waits for it."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin
from dualpath.core.errors import StorageError
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.health import Health
from dualpath.engine.pending_writes import PendingWrites
from dualpath.engine.threads import TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.engine.write_share import WriteShare
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step
from dualpath.storage.contract import BlockStorage, DeclinedError

log = logging.getLogger(__name__)


#: All writers in one write each for longer than this: the storage does not answer.
_WRITE_LIMIT_S = 60.0


class WriteTask:
    """A step to storage: keys, memory and origin of its blocks, and what to do once it is over."""

    def __init__(
        self,
        request_id: str,
        step: Step,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        then: Callable[[], None],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> None:
        self.request_id = request_id
        self.step = step
        self.keys = keys
        self.sources = sources
        self.then = then
        self.origin = origin


class Persister:
    """Some writer threads; a failed write is counted and logged, the block is simply not stored.

    A writer takes one task after the other, in order; which of two is stored first is open.

    ``pending`` has the keys of writes that are not over.  ``blank`` stands for the content of all
    blocks where storage takes their lengths only.
    """

    def __init__(
        self,
        storage: BlockStorage,
        counters: Counters,
        trace: TraceRecorder,
        blank: memoryview | None = None,
        parallel_writes: int = 1,
        health: Health | None = None,
        share: WriteShare | None = None,
    ) -> None:
        self._storage = storage
        self._share = share or WriteShare()
        self._blank = blank
        self._counters = counters
        self._trace = trace
        health = health or Health()
        self.pending = PendingWrites(health.threads)
        self._wake = health.threads.condition()
        self._tasks: deque[WriteTask] = deque()
        self._busy = 0
        self._closing = False
        self._sign = health.sign("no write to storage has ended", _WRITE_LIMIT_S)
        self._threads = [
            health.start(f"storage-writer-{i}", self._run) for i in range(parallel_writes)
        ]

    def add(self, task: WriteTask) -> None:
        """Queue a write; ``task.then`` runs on the writer's thread afterwards, always.

        It runs at once where there is nothing to write.
        """
        if self._blank is not None:
            task.step = msgspec.structs.replace(task.step, bytes=0)
            task.sources = [self._blank] * len(task.keys)
        if not task.keys:
            task.then()
            return
        self.pending.begin(task.keys)
        with self._wake:
            self._tasks.append(task)
            self._wake.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything queued is written; False after the timeout."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._tasks and not self._busy, timeout_s)

    def close(self, limit: TimeLimit) -> None:
        """Write what is queued, then stop, within the limit; the rest is dropped.  Idempotent."""
        self._share.close()
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if limit.join(self._threads):
            return
        with self._wake:
            blocks = sum(len(task.keys) for task in self._tasks)
            self._tasks.clear()
        if blocks:
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, blocks)
            log.warning("%d blocks are not persisted: the engine ends before", blocks)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._tasks and not self._closing:
                    self._wake.wait()
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._busy += 1
                self._moves()
            try:
                self._share.wait_to_write(task.step.bytes, self._moves)
                self._write(task)
                task.then()
            except Exception:  # a defect in what follows must not end a writer
                log.exception("work after a write failed")
            finally:
                self.pending.end(task.keys)
                with self._wake:
                    self._busy -= 1
                    self._sign.idle()
                    self._wake.notify_all()

    def _moves(self) -> None:
        """Storage answers, or a write begins; a sign of it is needed where all writers write."""
        if self._busy == len(self._threads):
            self._sign.moved()

    def _write(self, task: WriteTask) -> None:
        start_ns = self._trace.now_ns()
        step = task.step
        try:
            new = self._storage.write(task.keys, task.sources, task.origin)
        except DeclinedError as declined:
            log.debug("%d of %d blocks: %s", declined.stored, len(task.keys), declined)
            new = declined.new
            share = step.bytes // len(task.keys) if task.keys else 0
            step = msgspec.structs.replace(step, bytes=declined.stored * share)
        except StorageError as error:
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, len(task.keys))
            log.warning("%d blocks are not persisted: %s", len(task.keys), error)
            return
        except Exception:  # a defect must not end a writer
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, len(task.keys))
            log.exception("%d blocks are not persisted", len(task.keys))
            return
        self._counters.add(Counter.PERSISTED_BLOCKS, new)
        self._counters.moved(step)
        done = Executed(step, start_ns, self._trace.now_ns())
        self._trace.moved([(task.request_id, done)], blocks=new)
