"""Look-ups: few queries, one deadline, and no look-up waits behind another."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.engine_harness import GEOMETRY, full_block, memory_storage, prompt_keys
from tests.guard import GUARD_S

from dualpath.core.blocks import BlockKey, StoreNamespace
from dualpath.core.control import Lookup, LookupDone, Message
from dualpath.core.errors import StorageError
from dualpath.engine.buffer.block_buffer import BlockBuffer
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.io.lookups import LOOKUP_THREADS, MAX_WAITING, Lookups
from dualpath.engine.io.persister import PendingWrites, Persister
from dualpath.engine.passes.generated import GeneratedBlock, GeneratedBlocks
from dualpath.engine.passes.hbm_copy import BlockOut
from dualpath.engine.ranks.group import ONE_RANK, RankBoard, RankWork
from dualpath.engine.ranks.rank import Rank
from dualpath.engine.threads import OS_THREADS, Health, OsThreads, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.storage.memory import MemoryStorage
from dualpath.storage.posix import LengthOnlyStorage
from dualpath.storage.wrapping import LookupCachingStorage

NS_PER_S = 1_000_000_000
DEADLINE_S = 1.0
KEYS = prompt_keys(4 * 1000)


class Clock(OsThreads):
    """The operating system's threads, and a time that a test sets."""

    def __init__(self) -> None:
        self.at_ns = 0

    def now_ns(self) -> int:
        return self.at_ns


class Asked(MemoryStorage):
    """Counts questions; ``before`` runs before each is answered."""

    def __init__(self, parallel_lookups: int = 1) -> None:
        super().__init__(memory_storage().namespace)
        self.parallel_lookups = parallel_lookups
        self.before: Callable[[BlockKey], None] = lambda key: None

    def is_stored(self, key: BlockKey) -> bool:
        self.before(key)
        return super().is_stored(key)


class Engine:
    """The look-ups of an engine, with their queries and answers."""

    def __init__(self, inner: MemoryStorage | LengthOnlyStorage) -> None:
        self.clock = Clock()
        self.counters = Counters()
        self.pending = PendingWrites()
        self.inner = inner
        self.storage = LookupCachingStorage(inner, self.clock.now_ns)
        self.answers: queue.Queue[Message] = queue.Queue()
        self.lookups = Lookups(
            self.storage, self.pending, self.counters, self.answers.put, self.clock
        )

    def store(self, keys: Sequence[bytes]) -> None:
        """Write as another engine would: this engine is not notified."""
        self.inner.write(keys, [memoryview(full_block(key)) for key in keys])

    def write(self, keys: Sequence[bytes]) -> None:
        """Write as this engine's persister does."""
        self.storage.write(keys, [memoryview(full_block(key)) for key in keys])
        self.pending.end(keys)

    def begin(self, keys: Sequence[bytes], call_id: int = 1) -> None:
        self.lookups.begin(Lookup(call_id, tuple(keys), DEADLINE_S))

    def answer(self) -> LookupDone:
        message = self.answers.get(timeout=GUARD_S)
        assert isinstance(message, LookupDone)
        return message

    def look_up(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Return the hit blocks and the queries to the storage."""
        before = self.counters.snapshot()[Counter.LOOKUP_PROBES]
        self.begin(keys)
        hit_blocks = self.answer().hit_blocks
        return hit_blocks, int(self.counters.snapshot()[Counter.LOOKUP_PROBES] - before)

    def pass_deadline(self) -> None:
        self.clock.at_ns += int(DEADLINE_S * NS_PER_S)
        self.lookups.expire(self.clock.at_ns)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(Asked())
    yield made
    made.lookups.close(TimeLimit(OS_THREADS, GUARD_S))


@pytest.mark.parametrize("stored", [0, 1, 499, 999, 1000])
def test_a_thousand_blocks_of_a_directory_take_few_queries_and_none_twice(
    tmp_path: Path, stored: int
) -> None:
    namespace = StoreNamespace("toy", "u8", "toy", GEOMETRY, mode="oracle")
    made = Engine(LengthOnlyStorage(tmp_path, namespace))
    made.store(KEYS[:stored])
    hit_blocks, cold = made.look_up(KEYS)
    assert hit_blocks == stored
    assert cold <= 11
    hit_blocks, warm = made.look_up(KEYS)
    assert hit_blocks == stored
    assert warm == (1 if stored < 1000 else 0)
    made.lookups.close(TimeLimit(OS_THREADS, GUARD_S))


def test_several_blocks_are_asked_for_together_where_the_storage_is_far() -> None:
    storage = Asked(parallel_lookups=4)
    made = Engine(storage)
    made.store(KEYS[:700])
    together = threading.Barrier(4, timeout=GUARD_S)
    storage.before = lambda key: None if key == KEYS[0] else (together.wait(), None)[1]
    made.begin(KEYS[:625])  # 1 question, then 4 at a time: 624 = 5**4 - 1
    assert made.answer() == LookupDone(call_id=1, hit_blocks=625)
    assert made.counters.snapshot()[Counter.LOOKUP_PROBES] == 1 + 4 * 4
    made.lookups.close(TimeLimit(OS_THREADS, GUARD_S))


def test_pending_writes_are_awaited_and_no_query_is_wasted(
    engine: Engine,
) -> None:
    engine.store(KEYS[:94])
    engine.pending.begin(KEYS[94:100])
    engine.begin(KEYS[:100])
    for key in KEYS[94:100]:
        engine.write([key])
    assert engine.answer() == LookupDone(call_id=1, hit_blocks=100)


def test_a_waiting_look_up_is_answered_by_its_deadline_with_the_blocks_found(
    engine: Engine,
) -> None:
    engine.write(KEYS[:94])
    engine.pending.begin(KEYS[94:100])
    engine.begin(KEYS[:100])
    engine.write(KEYS[94:96])
    engine.lookups.expire(engine.clock.at_ns)
    assert engine.answers.empty()
    engine.pass_deadline()
    assert engine.answer() == LookupDone(call_id=1, hit_blocks=96, partial=True)
    engine.write(KEYS[96:100])
    assert engine.answers.empty()
    assert engine.look_up(KEYS[:100]) == (100, 0)


def test_a_write_that_ends_during_its_query_is_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.store(KEYS[:10])
    engine.pending.begin(KEYS[10:11])
    when_over = engine.pending.when_over

    def ends_now(key: BlockKey, call: Callable[[], None]) -> bool:
        if key == KEYS[10]:
            engine.write([key])
        return when_over(key, call)

    monkeypatch.setattr(engine.pending, "when_over", ends_now)
    engine.begin(KEYS[:20])
    assert engine.answer() == LookupDone(call_id=1, hit_blocks=11)


def test_a_failed_write_ends_the_stored_prefix(engine: Engine) -> None:
    engine.store(KEYS[:10])
    engine.pending.begin(KEYS[10:12])
    engine.begin(KEYS[:20])
    engine.pending.end(KEYS[10:12])
    assert engine.answer() == LookupDone(call_id=1, hit_blocks=10)


def test_waiting_look_ups_do_not_delay_others(engine: Engine) -> None:
    engine.pending.begin(KEYS[:1])
    for call_id in range(64):
        engine.begin(KEYS[:1], call_id)
    other = prompt_keys(400, "other")
    engine.store(other)
    engine.begin(other, 99)
    assert engine.answer() == LookupDone(call_id=99, hit_blocks=100)
    engine.write(KEYS[:1])
    assert {engine.answer().call_id for _ in range(64)} == set(range(64))


def test_a_storage_that_hangs_delays_no_look_up_beyond_its_deadline(engine: Engine) -> None:
    gate = threading.Event()
    storage = engine.inner
    assert isinstance(storage, Asked)
    engine.write(KEYS[:5])
    storage.before = lambda key: (gate.wait(GUARD_S), None)[1]
    for call_id in range(2 * LOOKUP_THREADS):
        engine.begin(KEYS, call_id)
    engine.pass_deadline()
    answers = [engine.answer() for _ in range(2 * LOOKUP_THREADS)]
    assert {(answer.hit_blocks, answer.partial) for answer in answers} == {(5, True)}
    gate.set()
    engine.store(KEYS[5:8])
    assert engine.look_up(KEYS)[0] == 8
    assert engine.answers.empty()


def test_a_storage_that_hangs_for_long_does_not_accumulate_look_ups(engine: Engine) -> None:
    gate = threading.Event()
    storage = engine.inner
    assert isinstance(storage, Asked)
    storage.before = lambda key: (gate.wait(GUARD_S), None)[1]
    begun = MAX_WAITING + LOOKUP_THREADS + 50
    for call_id in range(begun):
        engine.begin(KEYS, call_id)
    early = [engine.answer() for _ in range(50)]  # they need not wait for their deadline
    gate.set()
    answers = early + [engine.answer() for _ in range(begun - 50)]
    assert all(answer.partial for answer in early)
    assert sum(not answer.partial for answer in answers) >= MAX_WAITING


def test_look_ups_of_a_session_that_is_over_are_not_answered(engine: Engine) -> None:
    engine.pending.begin(KEYS[:1])
    engine.begin(KEYS[:1], call_id=1)
    engine.lookups.drop()
    engine.write(KEYS[:1])
    engine.pass_deadline()
    engine.begin(KEYS[:1], call_id=2)
    assert engine.answer().call_id == 2
    assert engine.answers.empty()


def test_a_storage_error_ends_a_look_up_with_the_blocks_found(engine: Engine) -> None:
    storage = engine.inner
    assert isinstance(storage, Asked)

    def broken(key: BlockKey) -> None:
        raise StorageError("device is gone")

    engine.write(KEYS[:5])
    storage.before = broken
    engine.begin(KEYS)
    assert engine.answer() == LookupDone(call_id=1, hit_blocks=5, partial=True)


def test_ending_a_write_twice_has_no_effect() -> None:
    pending, over = PendingWrites(), queue.Queue[int]()
    pending.begin(KEYS[:1])
    pending.begin(KEYS[:1])
    assert pending.when_over(KEYS[0], lambda: over.put(1))
    pending.end(KEYS[:1])
    assert over.empty()
    pending.end(KEYS[:1])
    pending.end(KEYS[:1])
    assert over.qsize() == 1
    assert not pending.when_over(KEYS[0], lambda: over.put(2))


class NobodyHolds:
    """An engine whose HBM blocks all requests release at once."""

    def hold(self, blocks: object) -> None:
        """Do nothing."""

    def unhold(self, blocks: object) -> None:
        """Do nothing."""


class HeldCopies:
    """Copies out of HBM that end when a test calls for it."""

    def __init__(self) -> None:
        self.done: list[Callable[[str | None], None]] = []
        self.hangs = False

    def out_of_hbm(self, blocks: Sequence[BlockOut]) -> list[bool]:
        self.done += [block.done for block in blocks]
        return [not self.hangs for _ in blocks]


@pytest.mark.parametrize("end", ["written", "copy fails", "copy hangs"])
def test_a_generated_block_is_pending_from_its_copy_on(engine: Engine, end: str) -> None:
    persister = Persister(engine.storage, engine.counters, TraceRecorder(None, "de-0"))
    copies, staging = HeldCopies(), BlockBuffer(GEOMETRY, 2, lambda grant: None)
    copies.hangs = end == "copy hangs"
    rank = SimpleNamespace(
        geometry=GEOMETRY,
        group=ONE_RANK,
        work=RankWork(RankBoard.alone(2)),
        copier=copies,
        counters=engine.counters,
        health=Health(OS_THREADS),
    )
    generated = GeneratedBlocks(
        cast(Rank, rank), staging, persister, lambda *block: False, NobodyHolds()
    )
    over = threading.Event()
    generated.persist([GeneratedBlock(0, KEYS[0])])
    waits = persister.pending.when_over(KEYS[0], over.set)
    assert waits == (end != "copy hangs")
    if waits:
        copies.done[0](None if end == "written" else "no")
        assert over.wait(GUARD_S)
    assert engine.storage.cached_head(KEYS[:1]) == (end == "written")
    persister.close(TimeLimit(OS_THREADS, GUARD_S))
