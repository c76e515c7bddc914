"""Writes to storage yield to reads that requests wait for."""

import queue
import threading
from collections.abc import Callable

import pytest
from tests.engine_harness import GEOMETRY, full_block, memory_storage, prompt_keys
from tests.guard import GUARD_S

from dualpath.core.blocks import BlockKey
from dualpath.core.cluster import Role
from dualpath.core.control import ReadDone
from dualpath.core.runs import BlockRun, HitRun
from dualpath.engine.buffer.block_buffer import BlockBuffer
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.io.persister import Persister, WriteShare, WriteTask
from dualpath.engine.io.read_queue import ReadQueue, ReadTask
from dualpath.engine.threads import OS_THREADS, OsThreads, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.plan.movements import PERSIST_PROMPT
from dualpath.plan.steps import run_reads, step_of


class _Told(threading.Condition):
    """Calls a function at each wait; its result, if any, is that of the wait."""

    def __init__(self, waits: Callable[[], bool | None]) -> None:
        super().__init__()
        self._waits = waits

    def wait(self, timeout: float | None = None) -> bool:
        ended = self._waits()
        return super().wait() if ended is None else ended


class WhileWaiting(OsThreads):
    """Threads with waits that execute the next action of a list, and time out without one."""

    def __init__(self) -> None:
        self.happens: list[Callable[[], None]] = []

    def condition(self) -> threading.Condition:
        return _Told(self._next)

    def _next(self) -> bool:
        if self.happens:
            self.happens.pop(0)()
            return True
        return False


class Seen(OsThreads):
    """Threads that show when one waits, without a limit of time."""

    def __init__(self) -> None:
        self.waits = threading.Event()

    def condition(self) -> threading.Condition:
        return _Told(self.waits.set)


@pytest.fixture
def threads() -> WhileWaiting:
    return WhileWaiting()


def quarter(threads: WhileWaiting) -> WriteShare:
    return WriteShare(0.25, threads)


def test_three_bytes_are_read_for_one_that_is_written(threads: WhileWaiting) -> None:
    share = quarter(threads)
    share.reading(True)
    share.wait_to_write(100)  # the first has nothing to make up for
    threads.happens = [lambda: share.read(100), lambda: share.read(200), lambda: share.read(1)]
    share.wait_to_write(100)
    assert len(threads.happens) == 1


def test_earlier_reads_do_not_add_to_the_share(threads: WhileWaiting) -> None:
    share = quarter(threads)
    share.reading(True)
    share.read(1_000_000)
    share.wait_to_write(100)
    threads.happens = [lambda: share.read(300)]
    share.wait_to_write(100)
    assert not threads.happens


def test_writes_are_not_delayed_without_reads(threads: WhileWaiting) -> None:
    share = quarter(threads)
    threads.happens = [lambda: share.reading(False), lambda: share.read(1)]
    share.wait_to_write(100)
    share.reading(True)
    share.wait_to_write(100)  # earlier writes are not compensated
    assert len(threads.happens) == 2
    share.wait_to_write(100)
    assert len(threads.happens) == 1


def test_reads_without_progress_do_not_delay_writes(threads: WhileWaiting) -> None:
    share = quarter(threads)
    share.reading(True)
    share.wait_to_write(100)
    moved: list[None] = []
    threads.happens = [lambda: share.read(1)]
    share.wait_to_write(100, lambda: moved.append(None))
    assert moved == [None]  # and then the time was up


def test_an_engine_that_closes_finishes_its_writes(threads: WhileWaiting) -> None:
    share = quarter(threads)
    share.reading(True)
    share.wait_to_write(100)
    threads.happens = [share.close, lambda: share.read(1)]
    share.wait_to_write(100)
    assert len(threads.happens) == 1


def test_a_share_of_one_is_no_limit(threads: WhileWaiting) -> None:
    share = WriteShare(1.0, threads)
    share.reading(True)
    threads.happens = [lambda: share.read(1)]
    for _ in range(3):
        share.wait_to_write(100)
    assert len(threads.happens) == 1


def test_a_full_storage_is_one_warning_until_it_accepts_writes_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each turn of each agent tries again to write what only DRAM has."""
    storage = memory_storage()
    storage._capacity_blocks = 1
    keys = prompt_keys(5 * GEOMETRY.block_tokens)
    persister = Persister(storage, counters := Counters(), TraceRecorder(None, "test"))

    def write(*some: BlockKey) -> None:
        step = step_of(PERSIST_PROMPT, GEOMETRY, BlockRun(0, len(some)), slots=(0,) * len(some))
        content = [memoryview(full_block(key)) for key in some]
        persister.add(WriteTask("writes", step, some, content, lambda: None))
        assert persister.drain(GUARD_S)

    write(keys[0])
    for _ in range(3):
        write(*keys[1:3])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert counters.snapshot()[Counter.PERSIST_DROPPED_BLOCKS.value] == 6
    storage.drop(keys[0])
    write(keys[1])
    assert "storage accepts writes again; 6 blocks were not persisted" in caplog.text
    write(keys[2])
    assert caplog.text.count("blocks are not persisted") == 2, "a new period begins"
    persister.close(TimeLimit(OS_THREADS, GUARD_S))


def test_an_engine_writes_its_next_request_when_enough_is_read() -> None:
    share, counters, storage = WriteShare(0.5, seen := Seen()), Counters(), memory_storage()
    stored, new = (keys := prompt_keys(5 * GEOMETRY.block_tokens))[:3], keys[3:]
    storage.write(stored, [memoryview(full_block(key)) for key in stored])
    trace, over = TraceRecorder(None, "test"), queue.Queue[float]()
    persister = Persister(storage, counters, trace, share=share)

    def write(key: BlockKey) -> None:
        step = step_of(PERSIST_PROMPT, GEOMETRY, BlockRun(0, 1), slots=(0,))
        content = [memoryview(full_block(key))]
        read = Counter.STORAGE_READ_BYTES.value
        notify = lambda: over.put(counters.snapshot()[read])  # noqa: E731
        persister.add(WriteTask("writes", step, [key], content, notify))

    def while_it_is_read(key: BlockKey) -> None:
        if key == stored[0]:
            for one in new:
                write(one)
            assert over.get(timeout=GUARD_S) == 0
            assert seen.waits.wait(GUARD_S)  # the other request's block, for reads
        if key == stored[-1]:
            assert over.get(timeout=GUARD_S) >= GEOMETRY.full_block_bytes

    storage.before_read = while_it_is_read
    buffer = BlockBuffer(GEOMETRY, len(stored), lambda grant: None)
    buffer.request("reads", len(stored))
    answers: queue.Queue[ReadDone] = queue.Queue()
    reader = ReadQueue(storage, buffer, counters, trace, answers.put, 1, share=share)
    run = HitRun(Role.DECODE, BlockRun(0, len(stored)), buffer.slots_of("reads"))
    reader.add(ReadTask("reads", run_reads(GEOMETRY, run), stored, 0, GUARD_S))
    assert answers.get(timeout=GUARD_S).good_blocks == len(stored)
    for part in (persister, reader):
        part.close(TimeLimit(OS_THREADS, GUARD_S))
