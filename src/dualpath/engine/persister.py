"""Writes new Full Blocks to storage in the background; no request waits for it."""

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


#: If all writers are in one write for longer than this, the storage does not respond.
_WRITE_LIMIT_S = 60.0


class WriteTask:
    """A step to storage: keys, memory and origin of its blocks, and a callback for its end."""

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
    """Writer threads with one queue; a failed write is counted and logged, its block is not stored.

    Writers take tasks in order; concurrent tasks may end in any order.

    ``pending`` has the keys of writes that are not over.  ``blank`` replaces the content of all
    blocks if only their lengths are stored.
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
        self._watchdog = health.watchdog("no write to storage has ended", _WRITE_LIMIT_S)
        self._threads = [
            health.start(f"storage-writer-{i}", self._run) for i in range(parallel_writes)
        ]

    def add(self, task: WriteTask) -> None:
        """Queue a write; ``task.then`` runs on the writer's thread afterwards in any case.

        With nothing to write it runs at once.
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
        """Finish queued writes within the limit, drop the others and stop; idempotent."""
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
            log.warning("%d blocks are not persisted: the engine ended before their write", blocks)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._tasks and not self._closing:
                    self._wake.wait()
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._busy += 1
                self._progressed()
            try:
                self._share.wait_to_write(task.step.bytes, self._progressed)
                self._write(task)
                task.then()
            except Exception:  # a defect in a callback must not end a writer
                log.exception("work after a write failed")
            finally:
                self.pending.end(task.keys)
                with self._wake:
                    self._busy -= 1
                    self._watchdog.idle()
                    self._wake.notify_all()

    def _progressed(self) -> None:
        """Storage has responded or a write begins; watched only while all writers are busy."""
        if self._busy == len(self._threads):
            self._watchdog.progressed()

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
