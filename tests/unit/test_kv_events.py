"""KV events: what an engine notes of its blocks, and what a subscriber of vLLM's gets."""

import pytest

pytest.importorskip("vllm")

import msgspec
import zmq
from tests.engine_harness import GEOMETRY, full_block, memory_storage
from tests.guard import GUARD_S
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
)
from vllm.v1.outputs import KVConnectorOutput

from dualpath.core.blocks import BlockKey, BlockOrigin, block_keys, chain_root, tenant_tag
from dualpath.core.control import CacheUpdate
from dualpath.core.errors import StorageError
from dualpath.core.runs import BlockRun
from dualpath.engine import block_events
from dualpath.engine.block_events import BlockEvent, BlockEvents, Medium
from dualpath.engine.buffer.block_buffer import BlockBuffer
from dualpath.engine.buffer.dram_tier import DramTier
from dualpath.engine.counters import Counters
from dualpath.engine.io.persister import Persister, WriteTask
from dualpath.engine.threads import OS_THREADS, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.launch.ports import claim_port
from dualpath.plan.movements import PERSIST_PROMPT
from dualpath.plan.steps import step_of
from dualpath.storage.contract import BlockStorage, WriteOutcome
from dualpath.vllm.kv_events import connector_events

KEYS = tuple(block_keys(range(24), 4))


def short(key: BlockKey) -> int:
    """The name of a block in vLLM's events, by default."""
    return int.from_bytes(key[-8:], "big")


def test_nothing_is_collected_until_it_is_enabled() -> None:
    events = BlockEvents()
    events.stored(Medium.DRAM, KEYS)
    assert events.take() == []
    events.enabled = True
    events.stored(Medium.STORAGE, KEYS[:2], chain_root())
    events.removed(Medium.DRAM, KEYS[2:3])
    events.stored(Medium.STORAGE, KEYS[3:4], KEYS[2])
    events.removed(Medium.DRAM, ())
    assert events.take() == [
        BlockEvent(Medium.STORAGE, KEYS[:2], True),
        BlockEvent(Medium.DRAM, KEYS[2:3], False),
        BlockEvent(Medium.STORAGE, KEYS[3:4], True, KEYS[2]),
    ]
    assert events.take() == []


def test_events_that_are_not_taken_are_dropped_oldest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_events, "MOST_BLOCKS", 4)
    events = BlockEvents()
    events.enabled = True
    for key in KEYS:
        events.stored(Medium.DRAM, [key])
    assert [event.keys for event in events.take()] == [(key,) for key in KEYS[-4:]]
    assert events.dropped_blocks == len(KEYS) - 4


class FailingStorage:
    """A storage that is full."""

    def write(self, *arguments: object) -> WriteOutcome:
        raise StorageError("no space left")


def persist(storage: BlockStorage) -> list[BlockEvent]:
    events = BlockEvents()
    events.enabled = True
    persister = Persister(
        storage,
        Counters(),
        TraceRecorder(None, "de-0"),
        stored=lambda keys, parent: events.stored(Medium.STORAGE, keys, parent),
    )
    sources = [memoryview(full_block(key)) for key in KEYS[1:3]]
    step = step_of(PERSIST_PROMPT, GEOMETRY, BlockRun(1, 2), slots=(0, 1))
    origin = BlockOrigin(KEYS[0], tenant_tag("tenant"))
    persister.add(WriteTask("r", step, KEYS[1:3], sources, lambda: None, origin))
    assert persister.drain(GUARD_S)
    persister.close(TimeLimit(OS_THREADS, GUARD_S))
    return events.take()


def test_blocks_that_are_written_are_announced_and_those_that_are_not_are_not() -> None:
    assert persist(memory_storage()) == [BlockEvent(Medium.STORAGE, KEYS[1:3], True, KEYS[0])]
    assert persist(FailingStorage()) == []  # type: ignore[arg-type]


def test_changes_of_the_dram_cache_are_announced_with_whole_keys() -> None:
    events = BlockEvents()
    sent: list[CacheUpdate] = []
    events.enabled = True
    buffer = BlockBuffer(GEOMETRY, 2, lambda grant: None)
    tier = DramTier(buffer, Counters(), sent.append, events=events)
    tier.begin_session(caching=True)
    for number, key in enumerate(KEYS[:3]):
        buffer.request(f"r{number}", 1, ())
        slots = buffer.slots_of(f"r{number}")
        buffer.cache_blocks(f"r{number}", slots, [key], chain_root())
        buffer.release(f"r{number}")
        tier.send_changes()
    taken = events.take()
    stored = [key for event in taken if event.stored for key in event.keys]
    removed = [key for event in taken if not event.stored for key in event.keys]
    assert stored == list(KEYS[:3])
    assert removed == [KEYS[0]], "the buffer has two slots"
    assert len(sent) > 0, "the router gets its updates as before"


def test_a_subscriber_of_vllms_publisher_gets_the_events_of_all_media() -> None:
    port = claim_port()
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"tcp://*:{port}", topic="kv", hwm=100
    )
    publisher = EventPublisherFactory.create(config)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    try:
        subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv")
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        noted = [
            BlockEvent(Medium.STORAGE, KEYS[:2], True),
            BlockEvent(Medium.DRAM, KEYS[:1], False),
        ]
        made = connector_events(noted, 4)
        assert made is not None
        output = KVConnectorOutput(kv_cache_events=made)
        assert not output.is_empty()
        frames: list[bytes] = []
        for _ in range(int(GUARD_S * 10)):
            # A subscription arrives late: what is published before is lost.
            publisher.publish(KVEventBatch(ts=0.0, events=made.get_all_events()))
            if subscriber.poll(100):
                frames = subscriber.recv_multipart()
                break
        topic, _, payload = frames
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert topic == b"kv"
        stored, removed = batch.events
        assert isinstance(stored, BlockStored)
        assert isinstance(removed, BlockRemoved)
        assert (stored.medium, stored.block_size, stored.token_ids) == ("STORAGE", 4, [])
        assert stored.block_hashes == [short(key) for key in KEYS[:2]]
        assert stored.parent_block_hash is None
        assert (removed.medium, removed.block_hashes) == ("CPU", [short(KEYS[0])])
    finally:
        publisher.shutdown()
        subscriber.close(linger=0)
        context.term()
    assert connector_events([], 4) is None
