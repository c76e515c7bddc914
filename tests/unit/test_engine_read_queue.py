"""The read queue: several blocks at a time, answers in order of the prompt, late bytes nowhere."""

import queue
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.engine_harness import GEOMETRY, full_block, memory_storage, prompt_keys
from tests.guard import GUARD_S

from dualpath.core.blocks import BlockKey, chain_root
from dualpath.core.cluster import Role
from dualpath.core.control import ReadDone
from dualpath.core.runs import BlockRun, HitRun
from dualpath.engine.buffer.block_buffer import BlockBuffer
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.io.read_queue import ReadQueue, ReadTask
from dualpath.engine.threads import OS_THREADS, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.plan.steps import run_reads

FULL_BLOCKS = 5
KEYS = prompt_keys(FULL_BLOCKS * GEOMETRY.block_tokens)
READERS = 2


class Device:
    """A storage with reads of chosen blocks that end when the test lets them."""

    def __init__(self) -> None:
        self.storage = memory_storage()
        self.storage.write(KEYS, [memoryview(full_block(key)) for key in KEYS])
        self.storage.before_read = self._hold
        self.began: queue.Queue[BlockKey] = queue.Queue()
        self._gates: dict[BlockKey, threading.Event] = {}

    def hold(self, *keys: BlockKey) -> None:
        self._gates |= {key: threading.Event() for key in keys}

    def finish(self, key: BlockKey) -> None:
        self._gates.pop(key).set()

    def _hold(self, key: BlockKey) -> None:
        gate = self._gates.get(key)
        self.began.put(key)
        assert gate is None or gate.wait(GUARD_S)


class Reads:
    """A read queue on a device, with a buffer in which requests hold slots."""

    def __init__(self) -> None:
        self.device = Device()
        self.buffer = BlockBuffer(GEOMETRY, 2 * FULL_BLOCKS, lambda grant: None)
        self.counters = Counters()
        self.answers: queue.Queue[ReadDone] = queue.Queue()
        self.queue = ReadQueue(
            self.device.storage,
            self.buffer,
            self.counters,
            TraceRecorder(None, "test"),
            self.answers.put,
            READERS,
        )

    def add(self, request_id: str, keys: list[BlockKey]) -> None:
        self.buffer.request(request_id, len(keys))
        slots = self.buffer.slots_of(request_id)
        run = HitRun(Role.DECODE, BlockRun(0, len(keys)), slots)
        self.queue.add(ReadTask(request_id, run_reads(GEOMETRY, run), keys, 0, GUARD_S))

    def fetch(self, keys: list[BlockKey]) -> None:
        self.buffer.retain(keys, 0)
        self.queue.fetch(keys)

    def began(self, count: int) -> set[BlockKey]:
        return {self.device.began.get(timeout=GUARD_S) for _ in range(count)}

    def answer(self) -> ReadDone:
        return self.answers.get(timeout=GUARD_S)

    def content(self, done: ReadDone) -> list[bytes]:
        return [bytes(self.buffer.view(slot)) for slot in done.slots]


@pytest.fixture
def reads() -> Iterator[Reads]:
    made = Reads()
    yield made
    made.queue.close(TimeLimit(OS_THREADS, GUARD_S))


def test_the_next_block_begins_while_the_one_before_is_still_read(reads: Reads) -> None:
    reads.device.hold(KEYS[0])
    reads.add("a", KEYS)
    assert reads.began(FULL_BLOCKS) == set(KEYS)  # the first one is held all the while
    assert reads.queue.tokens() == FULL_BLOCKS * GEOMETRY.block_tokens  # of the head none is there
    reads.device.finish(KEYS[0])
    done = reads.answer()
    assert (done.good_blocks, done.reason) == (FULL_BLOCKS, None)
    assert reads.content(done) == [full_block(key) for key in KEYS]
    assert reads.queue.tokens() == 0


def test_the_next_request_begins_before_the_one_before_has_ended(reads: Reads) -> None:
    reads.device.hold(KEYS[0], KEYS[1])
    reads.add("a", KEYS[:1])
    reads.add("b", KEYS[1:2])
    assert reads.began(2) == set(KEYS[:2])
    for name, key in (("b", KEYS[1]), ("a", KEYS[0])):
        reads.device.finish(key)
        assert reads.answer().request_id == name


@pytest.mark.parametrize("bad", range(FULL_BLOCKS))
def test_a_bad_block_ends_the_run_though_later_blocks_were_read(reads: Reads, bad: int) -> None:
    reads.device.storage.corrupt(KEYS[bad])
    reads.add("a", KEYS)
    done = reads.answer()
    assert (done.good_blocks, done.reason) == (bad, "checksum")
    assert reads.counters.snapshot()[Counter.VERIFY_FAILURES.value] == 1


def test_a_short_run_is_answered_when_the_device_writes_into_none_of_its_slots(
    reads: Reads,
) -> None:
    reads.device.storage.corrupt(KEYS[0])
    reads.device.hold(KEYS[0], KEYS[1])
    reads.add("a", KEYS)
    assert reads.began(2) == set(KEYS[:2])
    reads.device.finish(KEYS[0])
    reads.add("b", KEYS[2:3])  # takes the free reader, which has checked "a" again by then
    assert reads.answer().request_id == "b"
    assert reads.answers.empty()  # the request must not go on while the device writes
    reads.device.finish(KEYS[1])
    assert (reads.answer().good_blocks, reads.device.began.qsize()) == (0, 1)


@pytest.mark.parametrize("end", ["cancel", "release"])
def test_a_dropped_task_gets_no_answer_and_reads_no_more(reads: Reads, end: str) -> None:
    drop: dict[str, Callable[[str], None]] = {
        "cancel": reads.queue.cancel,
        "release": reads.buffer.release,
    }
    reads.device.hold(KEYS[0], KEYS[1])
    reads.add("a", KEYS)
    assert reads.began(READERS) == set(KEYS[:READERS])
    drop[end]("a")
    for key in KEYS[:READERS]:
        reads.device.finish(key)
    reads.add("b", KEYS[4:])
    assert reads.answer().request_id == "b"
    assert reads.began(1) == {KEYS[4]}
    assert reads.answers.empty()


def test_a_run_of_no_blocks_is_answered_at_once(reads: Reads) -> None:
    reads.device.hold(KEYS[0], KEYS[1])
    reads.add("a", KEYS)  # occupies both readers
    nothing = run_reads(GEOMETRY, HitRun(Role.DECODE, BlockRun(0, 0)))
    reads.queue.add(ReadTask("b", nothing, [], 0, GUARD_S))
    assert (reads.answer().request_id, reads.began(2)) == ("b", set(KEYS[:2]))
    for key in KEYS[:2]:
        reads.device.finish(key)
    assert reads.answer().request_id == "a"


def fetched(reads: Reads, keys: list[BlockKey]) -> list[bytes]:
    """Close the queue, which waits for reads under way; return the cached prefix."""
    reads.queue.close(TimeLimit(OS_THREADS, GUARD_S))
    missing = {*reads.buffer.missing(keys)}
    reads.buffer.request("looks", len(keys), keys)
    slots = reads.buffer.slots_of("looks")
    return [
        bytes(reads.buffer.view(s)) for s, k in zip(slots, keys, strict=True) if k not in missing
    ]


def test_blocks_are_fetched_before_a_request_asks_for_them(reads: Reads) -> None:
    reads.fetch(KEYS)
    reads.began(FULL_BLOCKS)
    assert fetched(reads, KEYS) == [full_block(key) for key in KEYS]
    assert reads.counters.snapshot()[Counter.DRAM_FETCHED_BLOCKS.value] == FULL_BLOCKS
    assert reads.answers.empty()


def test_cached_blocks_are_not_fetched_again(reads: Reads) -> None:
    reads.buffer.cache_copy(KEYS[0], chain_root(), memoryview(full_block(KEYS[0])))
    reads.fetch(KEYS[:2])
    assert reads.began(1) == {KEYS[1]}
    assert len(fetched(reads, KEYS[:2])) == 2


def test_reads_of_requests_precede_fetches(reads: Reads) -> None:
    reads.device.hold(*KEYS[:4])
    reads.add("a", KEYS[:3])
    assert reads.began(2) == set(KEYS[:2])
    reads.fetch(KEYS[3:])
    reads.device.finish(KEYS[0])
    assert reads.began(1) == {KEYS[2]}
    reads.device.finish(KEYS[1])
    assert reads.began(1) == {KEYS[3]}
    for key in KEYS[2:4]:
        reads.device.finish(key)
    assert reads.answer().good_blocks == 3


def test_only_retained_blocks_are_fetched(reads: Reads) -> None:
    reads.queue.close(TimeLimit(OS_THREADS, GUARD_S))
    reads.queue.fetch(KEYS[:1])
    with pytest.raises(AssertionError, match="is fetched, not retained"):
        reads.queue._next_fetch()


def test_nothing_is_fetched_into_slots_that_reservations_wait_for(reads: Reads) -> None:
    reads.buffer.request("holds", FULL_BLOCKS)
    slot = reads.buffer.allocate_for(KEYS[0])
    assert slot is not None
    reads.buffer.request("waits", FULL_BLOCKS)
    assert reads.buffer.allocate_for(KEYS[1]) is None
    reads.buffer.release("waits")
    reads.buffer.cache_allocated(slot, KEYS[0], chain_root())
    assert reads.buffer.allocate_for(KEYS[0]) is None, "it is there"


def test_blocks_after_a_missing_one_are_not_fetched(reads: Reads) -> None:
    reads.device.storage.corrupt(KEYS[0])
    reads.device.hold(*KEYS[:2])
    reads.fetch(KEYS)
    reads.began(2)
    reads.device.finish(KEYS[0])
    reads.add("a", KEYS[2:3])  # the free reader has seen the bad block by then
    assert reads.answer().good_blocks == 1
    reads.device.finish(KEYS[1])
    assert len(fetched(reads, KEYS)) == 1
