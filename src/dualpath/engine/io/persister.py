"""Writes new Full Blocks to storage in the background; no request waits for it."""

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin
from dualpath.core.control import StoredChain
from dualpath.core.errors import StorageError
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.threads import OS_THREADS, Health, Threads, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step
from dualpath.storage.contract import BlockStorage, DeclinedError

# ---------------------------------------------------------------------------------- pending writes
# Blocks that this engine is writing to storage, and the look-ups that wait for them.


class PendingWrites:
    """Counts the writes under way of each key; thread-safe.

    An agent's next turn can follow its last token immediately: without this its look-up would miss
    blocks that are written milliseconds later.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._lock = threads.lock()
        self._writes: dict[BlockKey, int] = {}
        self._waiting: dict[BlockKey, list[Callable[[], None]]] = {}

    def begin(self, keys: Iterable[BlockKey]) -> None:
        """Writes of these blocks begin; ``end`` must follow."""
        with self._lock:
            for key in keys:
                self._writes[key] = self._writes.get(key, 0) + 1

    def end(self, keys: Iterable[BlockKey]) -> None:
        """Writes have ended or failed; call the callbacks of keys without further writes.

        Keys without a write under way are ignored.
        """
        calls: list[Callable[[], None]] = []
        with self._lock:
            for key in keys:
                left = self._writes.pop(key, 0) - 1
                if left > 0:
                    self._writes[key] = left
                else:
                    calls += self._waiting.pop(key, ())
        for call in calls:
            call()

    def when_over(self, key: BlockKey, call: Callable[[], None]) -> bool:
        """Call ``call`` when the last write of a key is over; return False if there is no write.

        ``call`` runs on a writer's thread and must not block.
        """
        with self._lock:
            if key not in self._writes:
                return False
            self._waiting.setdefault(key, []).append(call)
            return True


# ------------------------------------------------------------------------------------ chain writes
# What each request writes, so that the router knows where its chain ends without a look-up.

#: Receives how many blocks of a write were new, None if some are not stored.
Written = Callable[[int | None], None]


def _unreported(new_blocks: int | None) -> None:
    """Ignore the end of a write that belongs to no chain."""


class _Chain:
    __slots__ = ("failed", "generated", "last", "left", "new_blocks", "over", "prompt_tail")

    def __init__(self, last: BlockKey, prompt_tail: BlockKey) -> None:
        self.last, self.prompt_tail = last, prompt_tail
        self.generated: list[BlockKey] = []
        self.left = self.new_blocks = 0
        self.failed = self.over = False


class ChainWrites:
    """Reports the chain of a request to ``stored`` when it is over and all its writes have ended.

    A chain of which a block could not be stored is not reported.  Thread-safe; ``stored`` is called
    on the thread on which the last of these events comes.
    """

    def __init__(
        self, stored: Callable[[StoredChain], None], threads: Threads = OS_THREADS
    ) -> None:
        self._lock = threads.lock()
        self._stored = stored
        #: Of requests that are not over.
        self._chains: dict[str, _Chain] = {}

    def begin(
        self, request_id: str, keys: Sequence[BlockKey], prompt_keys: Sequence[BlockKey]
    ) -> None:
        """A request begins to write; ``keys`` are those of the prompt's blocks that it has.

        They are fewer than ``prompt_keys`` if the DE computes the others.
        """
        if keys and prompt_keys:
            with self._lock:
                self._chains[request_id] = _Chain(keys[-1], prompt_keys[-1])

    def prompt(self, request_id: str) -> Written:
        """A write of blocks of a request's prompt is queued; the result must be called once."""
        with self._lock:
            return self._expect(self._chains.get(request_id))

    def generated(self, request_id: str, key: BlockKey, parent: BlockKey) -> Written:
        """A block that a request has filled is to be written; the result must be called once."""
        with self._lock:
            chain = self._chains.get(request_id)
            if chain is not None:
                # A block that has left a window is not written: the chain has a gap there.
                chain.failed = chain.failed or parent != chain.last
                chain.last = key
                chain.generated.append(key)
                if key == chain.prompt_tail:  # So far it has computed its prompt.
                    chain.generated.clear()
            return self._expect(chain)

    def over(self, request_id: str) -> None:
        """A request has ended by itself and writes no further blocks."""
        with self._lock:
            if (chain := self._chains.pop(request_id, None)) is None:
                return
            chain.over = True
        self._report(chain)

    def drop(self, request_id: str) -> None:
        """A request has ended in another way: its chain is not reported; idempotent."""
        with self._lock:
            self._chains.pop(request_id, None)

    def clear(self) -> None:
        """A session begins or ends: drop the chains of all requests."""
        with self._lock:
            self._chains.clear()

    def _expect(self, chain: _Chain | None) -> Written:
        if chain is None:
            return _unreported
        chain.left += 1
        return functools.partial(self._written, chain)

    def _written(self, chain: _Chain, new_blocks: int | None) -> None:
        with self._lock:
            chain.left -= 1
            chain.failed = chain.failed or new_blocks is None
            chain.new_blocks += new_blocks or 0
        self._report(chain)

    def _report(self, chain: _Chain) -> None:
        with self._lock:
            if not chain.over or chain.left or chain.failed:
                return
            chain.over = False
        generated = tuple(chain.generated)
        self._stored(StoredChain(chain.prompt_tail, generated, chain.new_blocks))


# ------------------------------------------------------------------------------------- write share
# The share of the storage NIC that writes may use while requests wait for reads.
#
# No request waits for a write, but reads and writes share the device.  The share is counted in
# bytes: with ``share`` 0.2, one byte may be written for every four bytes read.  So no rate has to
# be known, and writes that the storage caches count as well.  While no read is open, writes are not
# limited.

#: Reads without progress for this time do not delay writes any longer.
_NO_PROGRESS_S = 5.0


class WriteShare:
    """The share of one engine; 0 < ``share`` <= 1 of all bytes read and written, 1 is no limit.

    The blocks of one request are written at once: the excess over the share is compensated before
    the next write.  Thread-safe.
    """

    def __init__(self, share: float = 1.0, threads: Threads = OS_THREADS) -> None:
        self._written_per_read = share / (1 - share) if share < 1 else None
        self._wake = threads.condition()
        self._reading = False
        self._closed = False
        #: Bytes written beyond the share while reads are open.
        self._ahead_bytes = 0.0

    def reading(self, some: bool) -> None:
        """Set whether requests wait for reads."""
        if self._written_per_read is None:
            return
        with self._wake:
            self._reading = some
            if not some:
                self._ahead_bytes = 0.0
                self._wake.notify_all()

    def read(self, size_bytes: int) -> None:
        """Bytes have been read."""
        if self._written_per_read is None:
            return
        with self._wake:
            allowed_bytes = size_bytes * self._written_per_read
            self._ahead_bytes = max(self._ahead_bytes - allowed_bytes, 0.0)
            self._wake.notify_all()

    def wait_to_write(self, size_bytes: int, progressed: Callable[[], None] = lambda: None) -> None:
        """Wait until a write is allowed, or reads make no progress.

        ``progressed`` is called with the progress of reads.
        """
        if self._written_per_read is None:
            return
        with self._wake:
            while self._is_ahead and self._wake.wait(_NO_PROGRESS_S):
                progressed()
            if self._reading:
                self._ahead_bytes += size_bytes

    def close(self) -> None:
        """Delay no writes from now on; idempotent."""
        if self._written_per_read is None:
            return
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    @property
    def _is_ahead(self) -> bool:
        return self._reading and not self._closed and self._ahead_bytes >= 1


log = logging.getLogger(__name__)


#: If all writers are in one write for longer than this, the storage does not respond.
_WRITE_LIMIT_S = 60.0


class WriteTask:
    """A step to storage: keys, memory and origin of its blocks, and callbacks for its end.

    ``written`` is called if its blocks are stored or refused, ``then`` in any case.
    """

    def __init__(
        self,
        request_id: str,
        step: Step,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        then: Callable[[], None],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
        written: Written = _unreported,
    ) -> None:
        self.written = written
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
    blocks if only their lengths are stored.  ``stored`` is called, on a writer's thread, with the
    keys and the parent of blocks that are in storage now.
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
        stored: Callable[[Sequence[BlockKey], BlockKey], None] = lambda keys, parent: None,
    ) -> None:
        self._storage = storage
        self._stored = stored
        self._share = share or WriteShare()
        self._blank = blank
        self._counters = counters
        self._trace = trace
        health = health or Health()
        self.pending = PendingWrites(health.threads)
        self._wake = health.threads.condition()
        self._tasks: deque[WriteTask] = deque()
        self._busy = 0
        #: Blocks of writes that storage has refused since the last one that it accepted.
        self._refused_blocks = 0
        #: Stored bytes per byte of KV in the last write, below 1 with compression.
        self._stored_share = 1.0
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
            task.written(0)
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

    def close(self, limit: TimeLimit) -> bool:
        """Finish queued writes within the limit, drop the others and stop; idempotent.

        Return whether all have been finished.
        """
        self._share.close()
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if limit.join(self._threads):
            return True
        with self._wake:
            blocks = sum(len(task.keys) for task in self._tasks)
            self._tasks.clear()
        if blocks:
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, blocks)
            log.warning("%d blocks are not persisted: the engine ended before their write", blocks)
        return False

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
                self._share.wait_to_write(
                    int(task.step.bytes * self._stored_share), self._progressed
                )
                task.written(self._write(task))
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

    def _refused(self, blocks: int, error: StorageError) -> None:
        """Log the first refused write as a warning: a full storage refuses all that follow."""
        with self._wake:
            level = logging.DEBUG if self._refused_blocks else logging.WARNING
            self._refused_blocks += blocks
        log.log(level, "%d blocks are not persisted: %s", blocks, error)

    def _accepted(self) -> None:
        with self._wake:
            refused, self._refused_blocks = self._refused_blocks, 0
        if refused:
            log.warning("storage accepts writes again; %d blocks were not persisted", refused)

    def _write(self, task: WriteTask) -> int | None:
        """Return how many blocks were new, None if some are not stored."""
        start_ns = self._trace.now_ns()
        step, whole = task.step, True
        try:
            outcome = self._storage.write(task.keys, task.sources, task.origin)
        except DeclinedError as declined:
            outcome, whole = declined.outcome, False
            log.debug("%d of %d blocks: %s", outcome.stored, len(task.keys), declined)
        except StorageError as error:
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, len(task.keys))
            self._refused(len(task.keys), error)
            return None
        except Exception:  # a defect must not end a writer
            self._counters.add(Counter.PERSIST_DROPPED_BLOCKS, len(task.keys))
            log.exception("%d blocks are not persisted", len(task.keys))
            return None
        else:
            self._stored(task.keys, task.origin.parent)
        self._accepted()
        self._counters.add(Counter.PERSISTED_BLOCKS, outcome.new)
        written_bytes = sum(outcome.payload_bytes)
        if outcome.stored and step.bytes:
            self._stored_share = written_bytes * len(task.keys) / (outcome.stored * step.bytes)
        step = msgspec.structs.replace(step, bytes=written_bytes)
        self._counters.moved(step)
        done = Executed(step, start_ns, self._trace.now_ns())
        self._trace.moved([(task.request_id, done)], blocks=outcome.new)
        return outcome.new if whole else None
