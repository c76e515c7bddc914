"""Writes new Full Blocks to storage in the background; nobody waits for it."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.errors import StorageError
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.pending_writes import PendingWrites
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.engine.trace import TraceRecorder
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step
from dualpath.storage.contract import BlockStorage

log = logging.getLogger(__name__)


class WriteTask:
    """A step to storage, with keys and memory of its blocks, and what to do once it is over."""

    def __init__(
        self,
        request_id: str,
        step: Step,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        then: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.step = step
        self.keys = keys
        self.sources = sources
        self.then = then


class Persister:
    """One writer thread; a failed write is counted and logged, the block is simply not stored.

    ``pending`` has the keys of writes that are not over.  ``blank`` stands for the content of all
    blocks where storage takes their lengths only.
    """

    def __init__(
        self,
        storage: BlockStorage,
        counters: Counters,
        trace: TraceRecorder,
        blank: memoryview | None = None,
        threads: Threads = OS_THREADS,
    ) -> None:
        self.pending = PendingWrites(threads)
        self._storage = storage
        self._blank = blank
        self._counters = counters
        self._trace = trace
        self._wake = threads.condition()
        self._tasks: deque[WriteTask] = deque()
        self._busy = False
        self._closing = False
        self._thread = threads.start("storage-writer", self._run)

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

    def close(self) -> None:
        """Write what is queued, then stop; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._tasks and not self._closing:
                    self._wake.wait()
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._busy = True
            try:
                self._write(task)
            finally:
                task.then()
                self.pending.end(task.keys)
                with self._wake:
                    self._busy = False
                    self._wake.notify_all()

    def _write(self, task: WriteTask) -> None:
        start_ns = self._trace.now_ns()
        try:
            new = self._storage.write(task.keys, task.sources)
        except StorageError as error:
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, len(task.keys))
            log.warning("%d blocks are not persisted: %s", len(task.keys), error)
            return
        except Exception:  # a defect must not end the only writer
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, len(task.keys))
            log.exception("%d blocks are not persisted", len(task.keys))
            return
        self._counters.add(Counter.PERSISTED_BLOCKS, new)
        self._counters.moved(task.step)
        done = Executed(task.step, start_ns, self._trace.now_ns())
        self._trace.moved([(task.request_id, done)], blocks=new)
