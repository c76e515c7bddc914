"""An engine's journal of its storage, and the writes that it declines."""

import threading
from typing import Any

import msgspec
import pytest
from tests.engine_harness import full_block, memory_storage, prompt_keys
from tests.guard import GUARD_S
from tests.maintained_storage import FailingTree, Story

from dualpath.core.blocks import BlockOrigin, chain_root
from dualpath.core.runs import BlockRun
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.io.persister import Persister, WriteTask
from dualpath.engine.trace import TraceRecorder
from dualpath.plan.movements import PERSIST_PROMPT
from dualpath.plan.steps import step_of
from dualpath.storage.contract import DeclinedError, WriteOutcome
from dualpath.storage.janitor import STATUS, Status, write_status
from dualpath.storage.journal import (
    Journal,
    Removed,
    Segment,
    Used,
    Written,
    decode_segment,
    encode_segment,
    segments,
)
from dualpath.storage.maintenance import MaintainedStorage, StorageMaintenance
from dualpath.storage.quotas import BURST_S, Refusal, StorageLimits, WriteGate
from dualpath.storage.wrapping import LookupCachingStorage

KEYS = prompt_keys(160)
ORIGIN = BlockOrigin(chain_root(), "a" * 16)


class Maintained:
    """A ``MaintainedStorage`` over memory storage, and the tree of its journal."""

    def __init__(self, gate: WriteGate | None = None) -> None:
        self.story = Story(StorageLimits())
        self.tree: FailingTree = self.story.tree
        self.inner = memory_storage()
        self.block_bytes = 4096 + self.inner.geometry.full_block_bytes

        def now_s() -> float:
            return self.story.now_s

        journal = Journal(self.tree, "place", "engine-1")
        self.maintenance = StorageMaintenance(
            self.tree, journal, gate or WriteGate(), None, now_s, now_s
        )
        self.storage = MaintainedStorage(self.inner, self.maintenance)
        self.publish_status(used_blocks=0, quota_blocks=0, applied=0)

    def write(self, first: int, end: int, parent: bytes | None = None) -> WriteOutcome:
        before = KEYS[first - 1] if first else chain_root()
        origin = BlockOrigin(before if parent is None else parent, "a" * 16)
        keys = KEYS[first:end]
        return self.storage.write(keys, [memoryview(full_block(key)) for key in keys], origin)

    def journaled(self) -> list[Written | Used | Removed]:
        self.maintenance.tick()
        found: list[Written | Used | Removed] = []
        for _, _, name in segments(self.tree):
            segment = decode_segment(self.tree.get(name) or b"")
            assert segment is not None
            assert segment.namespace == "place"
            found += segment.events
        return found

    def publish_status(
        self, used_blocks: int, quota_blocks: int, applied: int, **more: Any
    ) -> None:
        """Publish a status as the janitor does."""
        limits = StorageLimits(quota_bytes=quota_blocks * self.block_bytes)
        fields: dict[str, Any] = {
            **{"holder": "h", "time_s": 1.0, "blocks": used_blocks, "surveyed_s": 1.0},
            **{
                "used_bytes": used_blocks * self.block_bytes,
                "applied_segments": {"engine-1": applied},
            },
        }
        write_status(self.tree, Status(**fields | {"limits": limits} | more))
        self.maintenance.tick()

    def publish_owners(self, tenants: dict[str, int], places: dict[str, int], applied: int) -> None:
        """Publish a status with blocks by owner; each quota is 12 blocks."""
        quota_bytes = 12 * self.block_bytes
        self.publish_status(
            20,
            0,
            applied,
            limits=StorageLimits(tenant_quota_bytes=quota_bytes, namespace_quota_bytes=quota_bytes),
            fullest_tenants={name: count * self.block_bytes for name, count in tenants.items()},
            fullest_namespaces={name: count * self.block_bytes for name, count in places.items()},
        )


def test_writes_uses_and_missing_blocks_are_journaled_with_their_chain() -> None:
    maintained = Maintained()
    assert maintained.write(0, 2).new == 2
    maintained.storage.used(KEYS[1])
    maintained.story.now_s += 1
    maintained.storage.used(KEYS[1])
    maintained.inner.drop(KEYS[0])
    into = memoryview(bytearray(maintained.inner.geometry.full_block_bytes))
    assert maintained.storage.read(KEYS[0], into).reason == "missing"
    assert maintained.storage.read(KEYS[1], into).is_good
    maintained.inner.corrupt(KEYS[1])
    assert maintained.storage.read(KEYS[1], into).reason == "checksum"
    assert maintained.journaled() == [
        Written(1000.0, KEYS[0], chain_root(), "a" * 16, maintained.block_bytes),
        Written(1000.0, KEYS[1], KEYS[0], "a" * 16, maintained.block_bytes),
        Removed(1001.0, KEYS[0]),
        Removed(1001.0, KEYS[1]),
        Used(1001.0, KEYS[1]),
    ]
    maintained.maintenance.tick()
    assert len(maintained.journaled()) == 5  # nothing new, no segment


def test_events_are_dropped_without_a_janitor() -> None:
    maintained = Maintained()
    maintained.story.now_s += 4000
    maintained.write(0, 2)
    assert maintained.journaled() == []
    maintained.story.now_s -= 4000
    assert maintained.journaled() == []
    maintained.write(2, 3)
    assert [event.key for event in maintained.journaled()] == KEYS[2:3]


def test_events_that_cannot_be_written_are_written_later() -> None:
    maintained = Maintained()
    maintained.write(0, 2)
    maintained.tree.steps_left, maintained.tree.refuses = 0, True
    assert not maintained.maintenance.journal.flush()
    maintained.tree.steps_left = None
    maintained.write(2, 3)
    assert [event.key for event in maintained.journaled()] == KEYS[:3]


def test_a_damaged_segment_is_rejected() -> None:
    content = encode_segment(Segment("place", (Used(1.0, KEYS[0]), Removed(2.0, KEYS[1]))))
    assert decode_segment(content) is not None
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 4
        assert decode_segment(bytes(damaged)) is None
        assert decode_segment(content[:position]) is None
    assert decode_segment(encode_segment(Segment("p", (Used(1.0, b"short"),)))) is None


def test_nothing_is_written_beyond_the_quota_including_unapplied_writes() -> None:
    maintained = Maintained()
    maintained.write(0, 4)
    maintained.publish_status(used_blocks=6, quota_blocks=12, applied=0)
    with pytest.raises(DeclinedError, match="quota"):
        maintained.write(4, 10)  # 6 there, 4 journaled and not yet applied: 2 have room
    assert maintained.inner.is_stored(KEYS[5])
    assert not maintained.inner.is_stored(KEYS[6])
    assert maintained.maintenance.stats.refused_blocks == 4
    maintained.publish_status(used_blocks=6, quota_blocks=12, applied=9)
    with pytest.raises(DeclinedError, match="quota"):
        maintained.write(8, 9)  # there is room, but not for blocks behind a gap
    assert maintained.write(6, 8).new == 2
    assert maintained.write(8, 9).new == 1


def test_a_block_that_is_written_again_counts_once() -> None:
    maintained = Maintained()
    for _ in range(2):
        maintained.write(0, 4)
    maintained.maintenance.tick()
    maintained.write(0, 4)
    maintained.publish_status(used_blocks=0, quota_blocks=8, applied=0)
    assert maintained.write(4, 8).new == 4


def test_a_tenant_beyond_its_quota_is_declined_and_others_are_not() -> None:
    maintained = Maintained()
    yours = BlockOrigin(chain_root(), "b" * 16)
    maintained.write(0, 4)
    maintained.publish_owners({"a" * 16: 6, "c" * 16: 12}, {}, applied=0)
    with pytest.raises(DeclinedError, match="quota"):
        maintained.write(4, 10)  # 6 there, 4 journaled and not yet applied: 2 have room
    assert maintained.inner.is_stored(KEYS[5])
    assert not maintained.inner.is_stored(KEYS[6])
    assert maintained.maintenance.stats.refused_blocks == 4
    others = prompt_keys(160, "another")
    maintained.storage.write(others[:5], [memoryview(full_block(key)) for key in others[:5]], yours)
    maintained.publish_owners({"a" * 16: 6}, {"place": 11}, applied=9)
    with pytest.raises(DeclinedError, match="quota"):
        maintained.write(6, 8)  # the tenant has room for both, its namespace for one
    assert [maintained.inner.is_stored(key) for key in KEYS[6:8]] == [True, False]


def test_nothing_is_declined_by_a_status_without_owners() -> None:
    """A status written before quotas of tenants applied to writers lacks two fields."""
    maintained = Maintained()
    maintained.publish_owners({"a" * 16: 99}, {"place": 99}, applied=0)
    status = msgspec.json.decode(maintained.tree.get(STATUS) or b"")
    del status["fullest_tenants"], status["fullest_namespaces"]
    maintained.tree.replace(STATUS, msgspec.json.encode(status))
    maintained.maintenance.tick()
    assert maintained.maintenance.status is not None
    assert maintained.write(0, 9).new == 9


def test_events_being_written_count_against_the_quota() -> None:
    maintained = Maintained()
    maintained.publish_status(used_blocks=0, quota_blocks=3, applied=0)
    admitted: list[int] = []
    replace = maintained.tree.replace

    def meanwhile(name: str, content: bytes) -> None:
        admitted.append(
            maintained.maintenance.admitted(KEYS[2:5], ORIGIN, maintained.block_bytes)[0]
        )
        replace(name, content)

    maintained.write(0, 2)
    maintained.tree.replace = meanwhile  # type: ignore[method-assign]
    maintained.maintenance.tick()
    assert admitted == [1]


def test_declined_blocks_are_not_cached_as_stored() -> None:
    maintained = Maintained()
    maintained.publish_status(used_blocks=10, quota_blocks=12, applied=0)
    storage = LookupCachingStorage(maintained.storage, lambda: 0)
    with pytest.raises(DeclinedError):
        storage.write(KEYS[:5], [memoryview(full_block(key)) for key in KEYS[:5]], ORIGIN)
    assert storage.cached_head(KEYS) == 2


def test_a_prefix_seen_once_is_not_written_with_the_filter() -> None:
    maintained = Maintained(WriteGate(twice=True))
    with pytest.raises(DeclinedError, match="once"):
        maintained.write(0, 3)
    with pytest.raises(DeclinedError, match="once"):
        maintained.write(0, 5)  # the first three for the second time
    assert [maintained.inner.is_stored(key) for key in KEYS[:5]] == [True] * 3 + [False] * 2
    assert maintained.write(0, 5).new == 2
    assert (
        maintained.maintenance.stats.skipped_blocks,
        maintained.maintenance.stats.refused_blocks,
    ) == (
        5,
        0,
    )


def test_a_write_rate_lets_a_burst_pass_and_then_its_share() -> None:
    gate, block = WriteGate(100.0), 50
    assert gate.admitted(KEYS[:25], chain_root(), block, 0.0, None) == (20, Refusal.RATE)
    assert gate.admitted(KEYS[25:30], KEYS[24], block, 0.0, None) == (0, Refusal.RATE)
    assert gate.admitted(KEYS[20:25], KEYS[19], block, 2.0, None) == (4, Refusal.RATE)
    assert gate.admitted(KEYS[24:25], KEYS[23], block, 2.5, None) == (1, None)
    assert gate.admitted(KEYS[:30], b"", block, 1e6, None) == (int(100 * BURST_S) // block, "rate")


def test_a_persister_counts_what_is_written_and_drops_nothing_silently() -> None:
    maintained = Maintained()
    maintained.publish_status(used_blocks=9, quota_blocks=12, applied=0)
    counters, over = Counters(), threading.Event()
    storage = LookupCachingStorage(maintained.storage, lambda: 0)
    persister = Persister(storage, counters, TraceRecorder(None, "de-0"))
    step = step_of(PERSIST_PROMPT, storage.geometry, BlockRun(0, 5), slots=tuple(range(5)))
    sources = [memoryview(full_block(key)) for key in KEYS[:5]]
    persister.add(WriteTask("r", step, KEYS[:5], sources, over.set, ORIGIN))
    assert over.wait(GUARD_S)
    assert persister.drain(GUARD_S)
    totals = counters.snapshot()
    assert totals[Counter.PERSISTED_BLOCKS.value] == 3
    assert totals[Counter.PERSIST_DROPPED_BLOCKS.value] == 0
    assert totals[Counter.STORAGE_WRITE_BYTES.value] == 3 * storage.geometry.full_block_bytes
    assert maintained.maintenance.stats == msgspec.structs.replace(
        maintained.maintenance.stats, refused_blocks=2
    )
