"""Third DEs at the engines: what they grant, what a PE loads from them, and what a loss does.

The story: a prompt of eight blocks and a token.  de-0 is its DE; de-1 has the first two blocks in
DRAM, de-2 reads the next two, the PE and de-0 one each.
"""

from collections.abc import Iterator

import pytest
from tests.engine_harness import (
    GEOMETRY,
    ToyCluster,
    ToyEngine,
    full_block,
    kv_bytes,
    prompt_keys,
)
from tests.guard import GUARD_S

from dualpath.core.blocks import BlockKey
from dualpath.core.cluster import Role
from dualpath.core.control import (
    Assign,
    Failed,
    PeerUp,
    Read,
    ReadDone,
    Release,
    Released,
    Reserved,
    ReserveThird,
    ThirdRefused,
)
from dualpath.core.errors import TransportError
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import PrefillTransfer, ThirdEngine
from dualpath.engine.counters import Counter
from dualpath.engine.passes.layer_stream import LayerStream
from dualpath.engine.passes.step_transfers import PrefillChunk

TOKENS = 33
BLOCKS = 9
KEYS = prompt_keys(TOKENS)
HITS = 6
PE_HBM = list(range(BLOCKS))
ROOM = 64


@pytest.fixture
def cluster() -> Iterator[ToyCluster]:
    made = ToyCluster(decode_engines=3)
    yield made
    made.close()


def cache(engine: ToyEngine, keys: list[BlockKey]) -> None:
    """Let blocks be in an engine's DRAM from an earlier request."""
    for key, parent in zip(keys, [b"", *keys], strict=False):
        assert engine.manager.buffer.cache_copy(key, parent, memoryview(full_block(key)))


def reserve(
    engine: ToyEngine, keys: list[BlockKey], cached: int, spare: int = 0, request_id: str = "r"
) -> Reserved | ThirdRefused:
    engine.command(ReserveThird(request_id, tuple(keys), cached, spare))
    (answer,) = [*engine.answers(Reserved), *engine.answers(ThirdRefused)]
    assert isinstance(answer, Reserved | ThirdRefused)
    engine._kept.remove(answer)
    return answer


def run_at(engine: ToyEngine, first: int, count: int, cached: int) -> HitRun:
    """Return a run of the prompt at a third DE, which reads what it does not cache."""
    keys = KEYS[first : first + count]
    granted = reserve(engine, keys, cached)
    assert isinstance(granted, Reserved)
    name = engine.settings.engine_id
    run = HitRun(
        Role.PREFILL, BlockRun(first, count), granted.slots, cached=cached == count, third=name
    )
    if not run.cached:
        engine.command(Read("r", run, 0, GUARD_S, KEYS[first - 1]))
        assert engine.answer(ReadDone, "r").good_blocks == count
    return run


def loaded(cluster: ToyCluster) -> PrefillTransfer:
    """Bring every hit block to where the story has it."""
    cluster.store(KEYS[:HITS])
    cache(cluster.decode[1], KEYS[:2])
    thirds = [run_at(cluster.decode[1], 0, 2, 2), run_at(cluster.decode[2], 2, 2, 0)]
    cluster.de.assign("r", TOKENS, BLOCKS, KEYS)
    de_slots = cluster.de.answer(Reserved, "r").slots
    cluster.pe.assign("r", TOKENS, 1, KEYS)
    own = HitRun(Role.PREFILL, BlockRun(4, 1), cluster.pe.answer(Reserved, "r").slots)
    at_decode = HitRun(Role.DECODE, BlockRun(5, 1), de_slots[5:6])
    cluster._read(cluster.pe, "r", own)
    cluster._read(cluster.de, "r", at_decode)
    return PrefillTransfer(
        request_id="r",
        prompt_tokens=TOKENS,
        hit_blocks=HITS,
        hit_key_tail=KEYS[HITS - 1],
        hits=(*thirds, own, at_decode),
        decode_engine="de-0",
        decode_epoch=cluster.de.epoch,
        de_slots=de_slots,
        thirds=(ThirdEngine("de-1", "epoch-1"), ThirdEngine("de-2", "epoch-1")),
    )


@pytest.mark.parametrize("chunks", [[3], [1, 1, 1]])
def test_hits_of_four_engines_reach_the_prefill_engine_and_the_decode_engine(
    cluster: ToyCluster, chunks: list[int]
) -> None:
    """Each chunk loads them again from where they are."""
    transfer, first = loaded(cluster), HITS
    for count in chunks:
        chunk = BlockRun(first, count)
        assert cluster.forward([(transfer, KEYS, chunk, PE_HBM)]) == {}
        first += count
    for slot, key in zip(transfer.de_slots, KEYS, strict=True):
        assert cluster.de.slot_bytes(slot) == full_block(key)
    size_bytes = GEOMETRY.full_block_bytes
    counted = [engine.report().counters for engine in (cluster.pe, *cluster.decode)]
    read = [each[Counter.STORAGE_READ_BYTES] for each in counted]
    assert read == [size_bytes, size_bytes, 0, 2 * size_bytes]
    assert [each[Counter.DRAM_HIT_BLOCKS] for each in counted] == [0, 0, 2, 0]
    # Five hit blocks come from DEs in each chunk, and blocks of earlier chunks from de-0.
    reloaded = sum(range(len(chunks)))
    assert counted[0][Counter.DE_TO_PE_BYTES] == (5 * len(chunks) + reloaded) * size_bytes
    assert counted[0][Counter.PE_TO_DE_BYTES] == (5 + 3) * size_bytes
    for engine in (cluster.pe, *cluster.decode):
        engine.command(Release("r", "over"))
        engine.answer(Released, "r")
        assert engine.report().load.free_buffer_tokens == engine.manager.buffer_tokens


def test_a_third_engine_counts_its_slots_and_reads_and_no_request(cluster: ToyCluster) -> None:
    third = cluster.decode[1]
    granted = reserve(third, KEYS[:3], 0)
    assert isinstance(granted, Reserved)
    load = third.report().load
    assert (load.unfinished_requests, load.unfinished_tokens) == (0, 0)
    assert load.unallocated_hbm_tokens == 0
    assert load.free_buffer_tokens == (ROOM - 3) * GEOMETRY.block_tokens
    third.command(Assign("r", TOKENS, BLOCKS))
    assert "an earlier request of this name" in third.answer(Failed, "r").reason
    again = reserve(third, KEYS[:3], 0)
    assert isinstance(again, ThirdRefused)
    assert "an earlier request of this name" in again.reason
    third.command(Release("r", "over"))
    third.command(Release("r", "over"))
    assert third.report().load.free_buffer_tokens == third.manager.buffer_tokens


def test_it_grants_nothing_that_costs_its_own_requests_anything(cluster: ToyCluster) -> None:
    third = cluster.decode[1]
    cache(third, KEYS[:2])

    def refusal(keys: list[BlockKey], cached: int, spare: int = 0) -> str:
        answer = reserve(third, keys, cached, spare)
        assert isinstance(answer, ThirdRefused), answer
        return answer.reason

    assert "not cached any more" in refusal(KEYS[:3], 3)
    assert f"{ROOM} are for requests of this engine" in refusal(KEYS[:2], 2, ROOM)
    third.assign("own", TOKENS, ROOM - 3)
    third.answer(Reserved, "own")
    assert "1 are free without an eviction" in refusal(KEYS[4:6], 0)
    assert isinstance(reserve(third, KEYS[:3], 2), Reserved)
    third.command(Release("r", "over"))
    third.answer(Released, "r")
    third.assign("waits", TOKENS, ROOM)
    assert "1 reservations wait" in refusal(KEYS[:2], 2)
    for name in ("own", "waits"):
        third.command(Release(name, "over"))
        third.answer(Released, name)
    assert third.report().load.free_buffer_tokens == third.manager.buffer_tokens


def test_cached_slots_are_shared_with_own_requests_and_stay_cached(cluster: ToyCluster) -> None:
    third = cluster.decode[1]
    cache(third, KEYS[:2])
    granted = reserve(third, KEYS[:2], 2)
    assert isinstance(granted, Reserved)
    third.command(Assign("own", TOKENS, BLOCKS, tuple(KEYS[:2]), 2))
    assert third.answer(Reserved, "own").slots[:2] == granted.slots
    # Whoever needs all slots waits for both.
    third.assign("last", TOKENS, ROOM)
    third.command(Release("own", "over"))
    assert not third.answers(Reserved)
    third.command(Release("r", "over"))
    third.answer(Reserved, "last")


def test_the_end_of_a_session_frees_its_slots_at_once(cluster: ToyCluster) -> None:
    """Nothing writes there; what a PE may still load from them is not confirmed any more."""
    third = cluster.decode[1]
    assert isinstance(reserve(third, KEYS[:3], 0), Reserved)
    third.manager.end_session("silent")
    assert third.report().load.free_buffer_tokens == third.manager.buffer_tokens
    assert third.manager.in_doubt().quarantined == ()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("layer", [0, 2, GEOMETRY.layers - 1])
def test_a_third_engine_that_dies_in_mid_transfer_costs_its_request_and_no_other(
    cluster: ToyCluster, number: int, layer: int
) -> None:
    """de-1 serves from DRAM, de-2 what it has read; the other request is of de-0 alone."""
    transfer = loaded(cluster)
    others = prompt_keys(TOKENS, "other")
    cluster.store(others[:2])
    other = cluster.load("other", others, TOKENS, 1, 1)
    chunks = [BlockRun(HITS, BLOCKS - HITS), BlockRun(2, BLOCKS - 2)]
    killed = f"de-{number}-epoch-1"

    def at_layer(at: int, stream: LayerStream) -> None:
        if at == layer:
            cluster.fabric.kill(killed)

    work = [
        (transfer, KEYS, chunks[0], PE_HBM),
        (other, others, chunks[1], [block + BLOCKS for block in PE_HBM]),
    ]
    failures = cluster.forward(work, at_layer)
    # All layers may have been loaded by then.
    assert failures.keys() <= {"r"}
    if layer == 0:
        assert killed in failures["r"]
    for slot, key in zip(other.de_slots, others, strict=True):
        assert cluster.de.slot_bytes(slot) == full_block(key)


def test_another_process_of_a_third_engine_is_not_read(cluster: ToyCluster) -> None:
    transfer = loaded(cluster)
    address = cluster.decode[1].manager.address("epoch-2")
    cluster.pe.command(PeerUp(address))
    part = PrefillChunk(transfer, BlockRun(HITS, BLOCKS - HITS), tuple(PE_HBM))
    with pytest.raises(TransportError, match=r"de-1 \(epoch epoch-1\) is not connected"):
        part.connected(cluster.pe.manager.peers.agents_of)


def test_loaded_bytes_are_those_of_the_third_engine(cluster: ToyCluster) -> None:
    """The same slots of the DE, or of the other third engine, have other bytes."""
    transfer = loaded(cluster)
    found: list[bytes] = []

    def at_layer(layer: int, stream: LayerStream) -> None:
        region = cluster.pe.hbm[layer % cluster.pe.regions]
        found.extend(region[block].tobytes() for block in range(4))

    cluster.forward([(transfer, KEYS, BlockRun(HITS, BLOCKS - HITS), PE_HBM)], at_layer)
    assert found == [kv_bytes(key, layer) for layer in range(GEOMETRY.layers) for key in KEYS[:4]]
