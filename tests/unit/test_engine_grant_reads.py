"""Storage reads that begin when an engine grants the slots of an assignment."""

from collections.abc import Iterator

import pytest
from tests.engine_harness import GEOMETRY, ToyCluster, full_block, prompt_keys
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.core.control import (
    Assign,
    Failed,
    GrantRead,
    Read,
    ReadDone,
    Release,
    Released,
    ReservationWaits,
    Reserved,
)
from dualpath.core.runs import BlockRun, HitRun

TOKENS, BLOCKS = 22, 6  # five full blocks and a partial one
KEYS = tuple(prompt_keys(TOKENS)[:5])


@pytest.fixture
def cluster() -> Iterator[ToyCluster]:
    made = ToyCluster()
    made.store(KEYS)
    yield made
    made.close()


def read(first: int, count: int, cached_blocks: int = 0, *, announced: bool = False) -> GrantRead:
    run = HitRun(Role.DECODE, BlockRun(first, count))
    return GrantRead(run, first, GUARD_S, cached_blocks, announced=announced)


def assign(cluster: ToyCluster, name: str, order: GrantRead, blocks: int = BLOCKS) -> None:
    cluster.de.command(Assign(name, TOKENS, blocks, KEYS, len(KEYS), order))


def cache(cluster: ToyCluster, blocks: int) -> None:
    """Let the DE cache the first blocks of the prompt."""
    cluster.de.assign("former", TOKENS, BLOCKS, KEYS)
    slots = cluster.de.answer(Reserved, "former").slots
    run = HitRun(Role.DECODE, BlockRun(0, blocks), slots[:blocks])
    cluster.de.command(Read("former", run, 0, GUARD_S))
    cluster.de.answer(ReadDone, "former")
    cluster.de.manager.buffer.cache_blocks("former", slots[:blocks], KEYS[:blocks], b"")
    cluster.de.command(Release("former", "it is over"))
    cluster.de.answer(Released, "former")


def test_the_answer_has_the_slots_and_the_blocks_are_in_them(cluster: ToyCluster) -> None:
    assign(cluster, "r", read(0, 4))
    done = cluster.de.answer(ReadDone, "r")
    assert (done.good_blocks, done.cached_blocks, len(done.slots)) == (4, 0, BLOCKS)
    for slot, key in zip(done.slots, KEYS[:4], strict=False):
        assert cluster.de.slot_bytes(slot) == full_block(key)
    assert cluster.de.answers(Reserved) == []


def test_blocks_that_the_engine_caches_are_not_read(cluster: ToyCluster) -> None:
    cache(cluster, 3)
    assign(cluster, "r", read(1, 3, cached_blocks=1))
    done = cluster.de.answer(ReadDone, "r")
    assert (done.good_blocks, done.cached_blocks) == (1, 3)
    for slot, key in zip(done.slots, KEYS[:4], strict=False):
        assert cluster.de.slot_bytes(slot) == full_block(key)


def test_with_fewer_cached_blocks_than_believed_nothing_is_read(cluster: ToyCluster) -> None:
    cache(cluster, 1)
    assign(cluster, "r", read(2, 2, cached_blocks=2))
    granted = cluster.de.answer(Reserved, "r")
    assert (granted.cached_blocks, len(granted.slots)) == (1, BLOCKS)
    assert cluster.de.report().load.read_queue_tokens == 0
    assert cluster.de.answers(ReadDone) == []


def test_if_all_blocks_are_cached_nothing_is_read(cluster: ToyCluster) -> None:
    cache(cluster, 4)
    assign(cluster, "r", read(1, 3, cached_blocks=1))
    assert cluster.de.answer(Reserved, "r").cached_blocks == 4
    assert cluster.de.answers(ReadDone) == []


def test_a_grant_that_another_engine_waits_for_is_announced(cluster: ToyCluster) -> None:
    assign(cluster, "r", read(2, 2, announced=True))
    granted, done = cluster.de.answer(Reserved, "r"), cluster.de.answer(ReadDone, "r")
    assert (granted.slots, done.good_blocks) == (done.slots, 2)


def test_slots_that_are_not_free_are_waited_for_and_the_grant_is_announced(
    cluster: ToyCluster,
) -> None:
    capacity = cluster.de.manager.buffer_tokens // GEOMETRY.block_tokens
    cluster.de.assign("first", TOKENS, capacity)
    cluster.de.answer(Reserved, "first")
    assign(cluster, "r", read(0, 4))
    cluster.de.answer(ReservationWaits, "r")
    assert cluster.de.report().load.read_queue_tokens == 0
    cluster.de.command(Release("first", "it is over"))
    assert len(cluster.de.answer(Reserved, "r").slots) == BLOCKS
    assert cluster.de.answer(ReadDone, "r").good_blocks == 4


@pytest.mark.parametrize("ends", ["release", "session"])
def test_a_request_that_ends_while_it_waits_reads_nothing(cluster: ToyCluster, ends: str) -> None:
    capacity = cluster.de.manager.buffer_tokens // GEOMETRY.block_tokens
    cluster.de.assign("first", TOKENS, capacity)
    cluster.de.answer(Reserved, "first")
    assign(cluster, "r", read(0, 4))
    cluster.de.answer(ReservationWaits, "r")
    if ends == "release":
        cluster.de.command(Release("r", "its client left"))
        cluster.de.answer(Released, "r")
    else:
        cluster.de.manager.end_session("the router is lost")
    cluster.de.command(Release("first", "it is over"))
    cluster.de.answer(Released, "first")
    assert cluster.de.report().load.free_buffer_tokens == cluster.de.manager.buffer_tokens
    assert cluster.de.answers(ReadDone) == []
    assert cluster.de.manager._grant_reads == {}


@pytest.mark.parametrize(
    ("order", "blocks"), [(read(0, 5), 4), (GrantRead(read(0, 4).run, 2, 1.0), 6)]
)
def test_a_read_beyond_the_slots_or_the_keys_fails_its_request_alone(
    cluster: ToyCluster, order: GrantRead, blocks: int
) -> None:
    assign(cluster, "r", order, blocks)
    assert "are to be read" in cluster.de.answer(Failed, "r").reason
    assert cluster.de.report().load.unfinished_requests == 0
    assign(cluster, "other", read(0, 4))
    assert cluster.de.answer(ReadDone, "other").good_blocks == 4
