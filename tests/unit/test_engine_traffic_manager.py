"""The traffic manager under load, faults and bad luck; every story ends with a whole buffer."""

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine_harness import GEOMETRY, ToyCluster, full_block, memory_storage, prompt_keys
from tests.guard import GUARD_S
from tests.stored_runs import read_run, stored_head

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin
from dualpath.core.cluster import Role
from dualpath.core.control import (
    Failed,
    Lookup,
    LookupDone,
    PeerDown,
    Persist,
    Read,
    ReadDone,
    Release,
    Released,
    Reserved,
    Sync,
    Synced,
)
from dualpath.core.errors import ConfigError, TransportError
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.counters import Counter
from dualpath.engine.io.lookups import LOOKUP_THREADS
from dualpath.engine.passes.generated import GeneratedBlock
from dualpath.engine.passes.layer_stream import LayerStream
from dualpath.engine.settings import parse_settings
from dualpath.storage.contract import WriteOutcome

TOKENS = 22  # five full blocks and a partial one
BLOCKS = 6
HBM = list(range(BLOCKS))


@pytest.fixture
def cluster() -> Iterator[ToyCluster]:
    made = ToyCluster()
    yield made
    made.close()


def four_hits(slots: Sequence[int]) -> HitRun:
    return HitRun(Role.DECODE, BlockRun(0, 4), tuple(slots[:4]))


def assert_whole(cluster: ToyCluster) -> None:
    for engine in (cluster.pe, cluster.de):
        report = engine.report()
        assert report.load.free_buffer_tokens == engine.manager.buffer_tokens
        assert (report.load.unfinished_requests, report.load.unfinished_tokens) == (0, 0)
        assert report.load.read_queue_tokens == 0


def test_a_look_up_returns_the_longest_stored_prefix(cluster: ToyCluster) -> None:
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:2])
    cluster.de.command(Lookup(call_id=7, keys=tuple(keys), deadline_s=GUARD_S))
    assert cluster.de.answer(LookupDone) == LookupDone(call_id=7, hit_blocks=2)


def test_a_hole_in_a_chain_costs_one_read_and_is_known_afterwards(cluster: ToyCluster) -> None:
    keys = prompt_keys(TOKENS)
    cluster.store([keys[0], keys[1], keys[3]])
    cluster.de.command(Lookup(call_id=1, keys=tuple(keys), deadline_s=GUARD_S))
    assert cluster.de.answer(LookupDone).hit_blocks == 4
    cluster.de.assign("r", TOKENS, BLOCKS)
    run = four_hits(cluster.de.answer(Reserved, "r").slots)
    cluster.de.command(Read(request_id="r", run=run, keys=tuple(keys[:4]), deadline_s=GUARD_S))
    done = cluster.de.answer(ReadDone, "r")
    assert (done.good_blocks, done.reason) == (2, "missing")
    cluster.de.command(Lookup(call_id=2, keys=tuple(keys), deadline_s=GUARD_S))
    assert cluster.de.answer(LookupDone).hit_blocks == 2


def test_a_look_up_waits_for_blocks_that_are_just_being_written() -> None:
    gate, entered = threading.Event(), threading.Event()
    storage = memory_storage()
    write_now = storage.write

    def slow_write(
        keys: Sequence[bytes], sources: Sequence[memoryview], origin: BlockOrigin = UNKNOWN_ORIGIN
    ) -> WriteOutcome:
        entered.set()
        assert gate.wait(GUARD_S)
        return write_now(keys, sources, origin)

    storage.write = slow_write  # type: ignore[method-assign]
    cluster = ToyCluster(storage)
    keys = prompt_keys(TOKENS)
    prefill_transfer = cluster.load("r", keys, TOKENS, 0, 0)
    cluster.forward([(prefill_transfer, keys, BlockRun(0, BLOCKS), HBM)])
    cluster.hand_to_decode(prefill_transfer, keys, HBM)
    assert entered.wait(GUARD_S)
    cluster.de.command(Lookup(call_id=1, keys=tuple(keys), deadline_s=GUARD_S))
    gate.set()
    assert cluster.de.answer(LookupDone) == LookupDone(call_id=1, hit_blocks=5)
    cluster.close()


def test_look_ups_are_answered_by_deadline_and_not_in_the_next_session() -> None:
    gate = threading.Event()
    storage = memory_storage()
    stored_now = storage.is_stored

    def slow(key: bytes) -> bool:
        assert gate.wait(GUARD_S)
        return stored_now(key)

    storage.is_stored = slow  # type: ignore[method-assign]
    cluster = ToyCluster(storage)
    manager, keys = cluster.de.manager, tuple(prompt_keys(TOKENS))
    cluster.de.command(Lookup(call_id=1, keys=keys, deadline_s=1.0))
    manager.tick(manager.trace.now_ns() + 2_000_000_000)
    assert cluster.de.answer(LookupDone) == LookupDone(call_id=1, hit_blocks=0, partial=True)
    cluster.de.command(Lookup(call_id=2, keys=keys, deadline_s=GUARD_S))
    manager.end_session("the router is another")
    gate.set()
    cluster.de.command(Lookup(call_id=1, keys=keys, deadline_s=GUARD_S))
    assert cluster.de.answer(LookupDone) == LookupDone(call_id=1, hit_blocks=0)
    cluster.close()
    assert cluster.de.answers(LookupDone) == []


def test_a_sync_waits_for_no_look_up() -> None:
    gate = threading.Event()
    storage = memory_storage()
    stored_now = storage.is_stored

    def slow(key: bytes) -> bool:
        assert gate.wait(GUARD_S)
        return stored_now(key)

    storage.is_stored = slow  # type: ignore[method-assign]
    cluster = ToyCluster(storage)
    for call_id in range(LOOKUP_THREADS + 1):
        keys = tuple(prompt_keys(TOKENS))
        cluster.de.command(Lookup(call_id=call_id, keys=keys, deadline_s=GUARD_S))
    cluster.de.assign("r", TOKENS, 0)
    cluster.de.command(Sync(call_id=99))
    assert cluster.de.answer(Synced) == Synced(call_id=99)
    assert cluster.de.report().load.unfinished_requests == 1
    assert cluster.de.answers(LookupDone) == []
    gate.set()
    cluster.close()


def test_a_buffer_that_holds_one_request_serves_sixteen() -> None:
    cluster = ToyCluster(buffer_blocks=BLOCKS)
    names = [f"r{i}" for i in range(16)]
    for name in names:
        cluster.de.assign(name, TOKENS, BLOCKS)
    granted = []
    for _ in names:
        reserved = cluster.de.answer(Reserved)
        granted.append(reserved.request_id)
        assert cluster.de.answers(Reserved) == []
        cluster.de.command(Release(request_id=reserved.request_id, reason="finished"))
    assert granted == names
    assert_whole(cluster)
    cluster.close()


def test_a_reservation_that_never_fits_fails_at_once_and_blocks_no_other(
    cluster: ToyCluster,
) -> None:
    cluster.de.assign("huge", 10_000, 65)
    assert "raise buffer_bytes" in cluster.de.answer(Failed, "huge").reason
    cluster.de.assign("next", TOKENS, BLOCKS)
    cluster.de.answer(Reserved, "next")


def test_a_corrupt_block_ends_the_hit_there(cluster: ToyCluster) -> None:
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:4])
    cluster.storage.corrupt(keys[2])  # type: ignore[attr-defined]
    cluster.de.assign("r", TOKENS, BLOCKS)
    run = four_hits(cluster.de.answer(Reserved, "r").slots)
    read = Read(request_id="r", run=run, keys=tuple(keys[:4]), deadline_s=GUARD_S)
    cluster.de.command(read)
    done = cluster.de.answer(ReadDone, "r")
    assert (done.good_blocks, done.reason) == (2, "checksum")
    assert cluster.de.report().counters[Counter.VERIFY_FAILURES.value] == 1
    assert cluster.de.slot_bytes(done.slots[1]) == full_block(keys[1])


def test_a_read_past_its_deadline_is_answered_and_its_late_bytes_are_dropped() -> None:
    gate, entered = threading.Event(), threading.Semaphore(0)
    storage = memory_storage()
    cluster = ToyCluster(storage)
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:4])

    def slow(key: bytes) -> None:
        if key in keys[2:4]:
            entered.release()
            assert gate.wait(GUARD_S)

    storage.before_read = slow
    cluster.de.assign("r", TOKENS, BLOCKS)
    before = cluster.de.answer(Reserved, "r").slots
    run = four_hits(before)
    cluster.de.command(Read(request_id="r", run=run, keys=tuple(keys[:4]), deadline_s=1.0))
    for _ in keys[2:4]:  # both readers are in these blocks and have finished those before
        assert entered.acquire(timeout=GUARD_S)
    cluster.de.manager.tick(cluster.de.manager.trace.now_ns() + 2_000_000_000)
    done = cluster.de.answer(ReadDone, "r")
    assert (done.good_blocks, done.reason) == (2, "deadline")
    assert done.slots[:2] == before[:2]
    assert not set(done.slots) & set(before[2:4])
    cluster.de.command(Release(request_id="r", reason="test"))
    free_tokens = cluster.de.report().load.free_buffer_tokens
    assert free_tokens == cluster.de.manager.buffer_tokens - 2 * GEOMETRY.block_tokens
    gate.set()
    cluster.close()
    assert_whole(cluster)


def test_a_release_in_mid_read_frees_the_slots_when_the_read_is_over() -> None:
    gate, entered = threading.Event(), threading.Event()
    storage = memory_storage()
    cluster = ToyCluster(storage)
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:4])

    def slow(key: bytes) -> None:
        entered.set()
        assert gate.wait(GUARD_S)

    storage.before_read = slow
    cluster.de.assign("r", TOKENS, BLOCKS)
    run = four_hits(cluster.de.answer(Reserved, "r").slots)
    cluster.de.command(Read(request_id="r", run=run, keys=tuple(keys[:4]), deadline_s=GUARD_S))
    assert entered.wait(GUARD_S)
    cluster.de.command(Release(request_id="r", reason="client left"))
    cluster.de.answer(Released, "r")
    assert cluster.de.report().load.free_buffer_tokens < cluster.de.manager.buffer_tokens
    gate.set()
    cluster.close()
    assert cluster.de.answers(ReadDone) == []
    assert_whole(cluster)


def test_a_prefill_engine_confirms_a_release_only_after_its_forward_pass(
    cluster: ToyCluster,
) -> None:
    keys = prompt_keys(TOKENS)
    prefill_transfer = cluster.load("r", keys, TOKENS, 0, 0)

    def release(layer: int, stream: LayerStream) -> None:
        if layer == 2:
            cluster.pe.command(Release(request_id="r", reason="client left"))
            assert cluster.pe.answers(Released) == []
            assert not cluster.pe.manager.active.is_active("r")

    cluster.forward([(prefill_transfer, keys, BlockRun(0, BLOCKS), HBM)], release)
    cluster.pe.answer(Released, "r")


def test_a_whole_prefill_is_released_with_its_report(cluster: ToyCluster) -> None:
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:2])
    transfer = cluster.load("r", keys, TOKENS, 2, 0)
    chunk = BlockRun(2, BLOCKS - 2)
    assert cluster.forward([(transfer, keys, chunk, HBM)]) == {}
    manager = cluster.pe.manager
    assert manager.sent("r", "a transfer failed").failure is not None
    assert manager.active.is_active("r")
    assert manager.sent("r", None).failure is None
    assert not manager.active.is_known("r")
    assert cluster.pe.report().load.free_buffer_tokens == manager.buffer_tokens
    assert cluster.pe.answers(Released) == []
    cluster.pe.command(Release(request_id="r", reason="sent before the report had arrived"))
    cluster.pe.answer(Released, "r")


def test_a_request_released_before_the_pass_takes_no_part_and_moves_nothing(
    cluster: ToyCluster,
) -> None:
    keys = prompt_keys(TOKENS)
    prefill_transfer = cluster.load("r", keys, TOKENS, 0, 0)
    cluster.pe.command(Release(request_id="r", reason="client left"))
    cluster.pe.answer(Released, "r")
    failures = cluster.forward([(prefill_transfer, keys, BlockRun(0, BLOCKS), HBM)])
    assert failures == {"r": "it was released"}
    assert cluster.pe.report().counters[Counter.PE_TO_DE_BYTES.value] == 0


def test_a_failed_transfer_fails_its_request_and_no_other(cluster: ToyCluster) -> None:
    keys, others = prompt_keys(TOKENS), prompt_keys(TOKENS, "other")
    first = cluster.load("a", keys, TOKENS, 0, 0)
    second = cluster.load("b", others, TOKENS, 0, 0)
    chunk = BlockRun(0, BLOCKS)

    def fail(layer: int, stream: LayerStream) -> None:
        if layer == 3:
            cluster.fabric.fail_next("cable pulled")

    hbm_of_b = [block + BLOCKS for block in HBM]
    work = [(first, keys, chunk, HBM), (second, others, chunk, hbm_of_b)]
    failures = cluster.forward(work, fail)
    assert len(failures) == 1
    assert "cable pulled" in next(iter(failures.values()))
    assert cluster.pe.report().counters[Counter.TRANSFER_FAILURES.value] == 1


def test_a_lost_decode_engine_fails_transfers_under_way_and_is_disconnected(
    cluster: ToyCluster,
) -> None:
    keys = prompt_keys(TOKENS)
    prefill_transfer = cluster.load("r", keys, TOKENS, 0, 0)

    def kill(layer: int, stream: LayerStream) -> None:
        if layer == 1:
            cluster.fabric.kill("de-0-epoch-1")

    failures = cluster.forward([(prefill_transfer, keys, BlockRun(0, BLOCKS), HBM)], kill)
    assert set(failures) == {"r"}
    cluster.pe.command(PeerDown(engine_id="de-0", epoch="epoch-1", certain=True))
    with pytest.raises(TransportError, match="lost or restarted"):
        cluster.pe.manager.peers.agents_of("de-0", "epoch-1")


def test_slots_of_a_lost_writer_are_quarantined_until_it_is_confirmed_dead(
    cluster: ToyCluster,
) -> None:
    cluster.de.assign("r", TOKENS, BLOCKS)
    cluster.de.answer(Reserved, "r")
    cluster.de.command(Release(request_id="r", reason="PE lost", writer_certain=False))
    held_tokens = BLOCKS * GEOMETRY.block_tokens
    whole_tokens = cluster.de.manager.buffer_tokens
    assert cluster.de.report().load.free_buffer_tokens == whole_tokens - held_tokens
    cluster.de.command(Release(request_id="r", reason="PE is dead"))
    assert_whole(cluster)


def test_a_stale_decode_transfer_is_refused_not_copied(cluster: ToyCluster) -> None:
    errors: list[str | None] = []
    decode_transfer = DecodeTransfer(
        request_id="gone", prompt_tokens=TOKENS, slots=(0, 1, 2, 3, 4, 5)
    )
    cluster.de.manager.fill_hbm(decode_transfer, HBM, errors.append)
    assert "have a new owner" in str(errors[0])
    assert cluster.de.report().counters[Counter.STALE_TRANSFERS.value] == 1


def test_the_buffer_waits_for_the_prompts_persist_order(cluster: ToyCluster) -> None:
    keys = prompt_keys(TOKENS)
    prefill_transfer = cluster.load("r", keys, TOKENS, 0, 0)
    cluster.forward([(prefill_transfer, keys, BlockRun(0, BLOCKS), HBM)])
    over = threading.Event()
    decode_transfer = DecodeTransfer(
        request_id="r", prompt_tokens=TOKENS, slots=prefill_transfer.de_slots
    )
    cluster.de.manager.fill_hbm(decode_transfer, HBM, lambda error: over.set())
    assert over.wait(GUARD_S)
    assert cluster.de.report().load.free_buffer_tokens < cluster.de.manager.buffer_tokens
    cluster.de.command(Persist(request_id="r", first_block=0, keys=tuple(keys[:5])))
    cluster.release("r")
    assert cluster.de.manager.persister.drain(GUARD_S)
    assert stored_head(cluster.storage, keys[:5]) == 5
    assert_whole(cluster)


def test_a_decode_transfer_stores_the_new_blocks_under_the_keys_of_the_assignment(
    cluster: ToyCluster,
) -> None:
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:2])
    prefill_transfer = cluster.load("r", keys, TOKENS, 0, 2)
    cluster.forward([(prefill_transfer, keys, BlockRun(2, BLOCKS - 2), HBM)])
    cluster.de.manager.active._active["r"].keys = tuple(keys[:5])
    transfer = DecodeTransfer("r", TOKENS, prefill_transfer.de_slots, persist_from=2)
    assert cluster.fill(transfer, HBM) is None
    cluster.de.command(Persist(request_id="r", first_block=0, keys=tuple(keys[:5])))
    cluster.release("r")
    assert cluster.de.manager.persister.drain(GUARD_S)
    assert stored_head(cluster.storage, keys[:5]) == 5
    report = cluster.de.report()
    assert report.counters[Counter.PERSISTED_BLOCKS.value] == 3, "the order is carried out once"
    assert report.load.cached_buffer_tokens == 5 * GEOMETRY.block_tokens
    assert_whole(cluster)


def test_the_transfer_of_a_request_that_is_over_stores_nothing(cluster: ToyCluster) -> None:
    keys = prompt_keys(TOKENS)
    prefill_transfer = cluster.load("r", keys, TOKENS, 0, 0)
    cluster.release("r")
    transfer = DecodeTransfer("r", TOKENS, prefill_transfer.de_slots, persist_from=0)
    assert "new owner" in (cluster.fill(transfer, HBM) or "")
    assert cluster.de.manager.persister.drain(GUARD_S)
    assert stored_head(cluster.storage, keys[:5]) == 0


def test_a_prompt_without_new_blocks_and_without_slots_is_not_cached(
    cluster: ToyCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The teardown of a session has taken its slots before its request ends."""
    keys = prompt_keys(TOKENS)
    cluster.de.manager.buffer.set_caching(enabled=True)
    cluster.load("r", keys, TOKENS, 0, 0)
    cluster.de.manager.buffer.release("r")
    cluster.de.command(Persist(request_id="r", first_block=2, keys=(), hit_keys=tuple(keys[:2])))
    assert cluster.de.report().load.cached_buffer_tokens == 0
    assert caplog.messages == []
    cluster.release("r")
    assert_whole(cluster)


def test_generated_blocks_are_stored_as_in_hbm(cluster: ToyCluster) -> None:
    keys = prompt_keys(TOKENS)
    for layer in range(GEOMETRY.layers):
        start = layer * GEOMETRY.bytes_of(0)
        piece = full_block(keys[0])[start : start + GEOMETRY.bytes_of(0)]
        cluster.de.hbm[layer][9] = list(piece)
    cluster.de.manager.persist_generated([GeneratedBlock(9, keys[0])])
    assert cluster.de.manager.persister.drain(GUARD_S)
    destination = bytearray(GEOMETRY.full_block_bytes)
    assert read_run(cluster.storage, [keys[0]], [memoryview(destination)]).good_blocks == 1
    assert bytes(destination) == full_block(keys[0])


def test_generated_blocks_of_a_step_leave_hbm_in_one_list_for_each_layer(
    cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[int] = []
    transport = cluster.de.manager._transport
    post = transport.post

    def counted(direction: Any, region: str, pieces: Any, *others: Any, **named: Any) -> Any:
        posted.append(len(pieces))
        return post(direction, region, pieces, *others, **named)

    monkeypatch.setattr(transport, "post", counted)
    blocks = [GeneratedBlock(block, key) for block, key in enumerate(prompt_keys(3 * TOKENS)[:3])]
    cluster.de.manager.persist_generated(blocks)
    assert cluster.de.manager.persister.drain(GUARD_S)
    assert posted == [3] * GEOMETRY.layers


def test_generated_blocks_have_tenant_and_parent(
    cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, written = prompt_keys(TOKENS), list[tuple[BlockKey, BlockOrigin]]()

    def write(new: list[BlockKey], sources: object, origin: BlockOrigin) -> WriteOutcome:
        written.extend((key, origin) for key in new)
        return WriteOutcome(len(new), (GEOMETRY.full_block_bytes,) * len(new))

    monkeypatch.setattr(cluster.storage, "write", write)
    cluster.de.manager.persist_generated([GeneratedBlock(9, keys[1], keys[0], "a" * 16)])
    assert cluster.de.manager.persister.drain(GUARD_S)
    assert written == [(keys[1], BlockOrigin(keys[0], "a" * 16))]


def test_oracle_moves_no_byte() -> None:
    cluster = ToyCluster(mode=Mode.ORACLE)
    keys = prompt_keys(TOKENS)
    cluster.de.assign("r", TOKENS, 0)
    decode_transfer = DecodeTransfer(request_id="r", prompt_tokens=TOKENS, slots=())
    errors: list[str | None] = []
    cluster.de.manager.fill_hbm(decode_transfer, HBM, errors.append)
    assert errors == [None]
    counters = cluster.de.report().counters
    moved = [name for name, total in counters.items() if name.endswith("bytes") and total]
    assert moved == []
    assert len(keys) == BLOCKS
    cluster.close()


def test_layer_l_plus_1_is_loaded_while_layer_l_computes(tmp_path: Path) -> None:
    path = tmp_path / "pe.json"
    cluster = ToyCluster(layer_buffers=2, trace_out=str(path))
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:4])
    prefill_transfer = cluster.load("r", keys, TOKENS, 2, 2)

    def next_layer_arrives_meanwhile(layer: int, stream: LayerStream) -> None:
        if layer + 1 < GEOMETRY.layers:
            stream.wait_loaded(layer + 1)
            assert not stream.failures

    cluster.forward([(prefill_transfer, keys, BlockRun(4, 2), HBM)], next_layer_arrives_meanwhile)
    cluster.close()
    events = {e["name"]: e for e in json.loads(path.read_text())["traceEvents"]}
    for layer in range(GEOMETRY.layers - 1):
        load, compute = events[f"load L{layer + 1}"], events[f"compute L{layer}"]
        assert load["ts"] + load["dur"] < compute["ts"] + compute["dur"], layer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer_byte": 1}, "buffer_byte"),
        ({"buffer_bytes": -1}, "must be at least 1"),
        ({"layer_buffers": -2}, "must be at least 0"),
        ({"parallel_reads": 0}, "must be at least 1"),
        ({"role": "both"}, "role"),
        (
            {"dram_dir": "/dev/shm/kv"},
            "dram_dir is '/dev/shm/kv' and dram_bytes is 0; set how much",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    change: dict[str, object], message: str
) -> None:
    good: dict[str, object] = {
        "role": "prefill",
        "engine_id": "pe-0",
        "router": "tcp://127.0.0.1:1",
        "api_url": "http://127.0.0.1:2",
        "storage": "memory://x",
    }
    parse_settings(good)
    with pytest.raises(ConfigError, match=message):
        parse_settings(good | change)
