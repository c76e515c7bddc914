"""Ranks of one engine: a failure, delay or death of one of them counts for the engine."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.engine_harness import GEOMETRY, full_block, prompt_keys
from tests.guard import GUARD_S
from tests.ranked_harness import Cut, RankedCluster

from dualpath.core.cluster import AgentAddress, EngineAddress, Role
from dualpath.core.control import KvInHbm, Persist, PrefillDone, Release, Released
from dualpath.core.errors import EngineLostError
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.engine.counters import Counter
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.ranks.group import ONE_RANK, RankBoard, RankWork, TimedGroup
from dualpath.engine.threads import Health
from dualpath.node.host_process import has_exited, this_process
from dualpath_lab.emulated.ranks import ThreadRanks

TOKENS = 4 * GEOMETRY.block_tokens
BLOCKS = 4
KEYS = prompt_keys(TOKENS)
PE_FOLLOWER, DE_FOLLOWER = "pe-0-epoch-1-1", "de-0-epoch-1-1"
#: Two replicas.
LATENT = Cut(2, heads=1)
#: Short, since a test waits for it.
STALL_S = 0.3


@pytest.fixture
def cluster() -> Iterator[RankedCluster]:
    """A PE and a DE of two ranks each."""
    cluster = RankedCluster(Cut(2), Cut(2), transfer_deadline_s=STALL_S)
    yield cluster
    cluster.close()


def prefill(
    cluster: RankedCluster,
    transfer: PrefillTransfer,
    at_layer: Callable[[int, int], None] = lambda rank, layer: None,
) -> list[dict[str, str]]:
    hits = transfer.hit_blocks
    chunk = BlockRun(hits, BLOCKS - hits)
    return cluster.pass_of([(transfer, KEYS, chunk, range(BLOCKS))], at_layer)


def take_over(cluster: RankedCluster, transfer: PrefillTransfer) -> list["queue.Queue[str | None]"]:
    """Have every rank copy a prompt into its HBM; return the results by rank."""
    cluster.de.command(Persist("r", transfer.hit_blocks, len(KEYS)))
    waiting = DecodeTransfer("r", TOKENS, transfer.de_slots)
    over: list[queue.Queue[str | None]] = [queue.Queue() for _ in range(2)]
    for rank in range(2):
        cluster.serving.mover(rank).fill_hbm(waiting, range(BLOCKS), over[rank].put)
    return over


def test_a_failure_at_a_follower_fails_the_request(cluster: RankedCluster) -> None:
    transfer = cluster.load("r", KEYS, TOKENS, 0, 0)
    cluster.fabric.fail_next("injected", agent=PE_FOLLOWER)
    of_leader, of_follower = prefill(cluster, transfer)
    assert of_follower == {"r": "injected"}
    assert of_leader == {"r": "rank 1: injected"}
    assert cluster.pe.answer(PrefillDone, "r").failure == "rank 1: injected"


def test_a_decode_engine_that_only_a_follower_cannot_reach_fails_the_request(
    cluster: RankedCluster,
) -> None:
    transfer = cluster.load("r", KEYS, TOKENS, 0, 0)
    cluster.fabric.kill(DE_FOLLOWER)
    prefill(cluster, transfer)
    failure = cluster.pe.answer(PrefillDone, "r").failure
    assert failure is not None
    assert failure.startswith("rank 1: ")


def in_one_pass(cluster: RankedCluster) -> dict[str, PrefillTransfer]:
    """Two prompts of which two blocks each are hits, on either side, computed together.

    Where a rank computed without its hits the request has failed, or the pass says so.
    """
    transfers, work = {}, []
    for number, name in enumerate(("r", "s")):
        keys = prompt_keys(TOKENS, name)
        cluster.store(keys[:2])
        transfers[name] = cluster.load(name, keys, TOKENS, 1, 1)
        hbm = range(number * BLOCKS, (number + 1) * BLOCKS)
        work.append((transfers[name], keys, BlockRun(2, BLOCKS - 2), hbm))
    cluster.pass_of(work)
    return transfers


def sent_whole(cluster: RankedCluster, transfer: PrefillTransfer) -> bool:
    keys = prompt_keys(TOKENS, transfer.request_id)
    slots = zip(keys, transfer.de_slots, strict=True)
    return all(cluster.de.slot_bytes(slot) == full_block(key) for key, slot in slots)


def test_a_failed_shared_load_of_a_rank_fails_only_that_request() -> None:
    """The others would have received its missing part."""
    with contextlib.closing(RankedCluster(LATENT, Cut(1), share_loads=True)) as cluster:
        cluster.fabric.fail_next("injected", agent=PE_FOLLOWER)
        transfers = in_one_pass(cluster)
        failures = {r: cluster.pe.answer(PrefillDone, r).failure for r in transfers}
        assert sorted(map(str, failures.values())) == ["None", "rank 1: injected"]
        (served,) = (transfers[r] for r, failure in failures.items() if failure is None)
        assert sent_whole(cluster, served)


def test_a_rank_without_a_decode_engine_still_shares_its_loads() -> None:
    """It moves nothing for the request, but is in every exchange: the others wait for it."""
    with contextlib.closing(RankedCluster(LATENT, LATENT, share_loads=True)) as cluster:
        cluster.fabric.kill(DE_FOLLOWER)  # the PE's follower is connected to it
        transfers = in_one_pass(cluster)
        for request_id in transfers:
            assert str(cluster.pe.answer(PrefillDone, request_id).failure).startswith("rank 1: ")


def test_late_bytes_of_a_follower_hold_the_request_and_its_hbm(cluster: RankedCluster) -> None:
    transfer = cluster.load("r", KEYS, TOKENS, 0, 0)
    cluster.fabric.stall(DE_FOLLOWER)  # the PE's follower is connected to it
    of_leader, _ = prefill(cluster, transfer)
    assert "stall" in of_leader["r"]
    cluster.pe.command(Release("r", "given up"))
    assert cluster.prefill.held.now == set(range(BLOCKS))
    assert cluster.pe.answers(Released) == []
    assert cluster.pe.manager.in_doubt().unsettled == ("r",)
    cluster.fabric.wake(DE_FOLLOWER)
    cluster.pe.answer(Released, "r")
    cluster.prefill.held.wait_for_none()


def test_a_release_in_mid_pass_waits_for_all_ranks(cluster: RankedCluster) -> None:
    transfer = cluster.load("r", KEYS, TOKENS, 0, 0)

    def at_layer(rank: int, layer: int) -> None:
        if (rank, layer) == (0, 2):
            cluster.pe.command(Release("r", "its client went away"))
            assert cluster.pe.answers(Released) == []

    assert prefill(cluster, transfer, at_layer) == [{"r": "it was released"}, {}]
    cluster.pe.answer(Released, "r")


def test_a_request_released_before_the_pass_is_moved_by_no_rank(cluster: RankedCluster) -> None:
    transfer = cluster.load("r", KEYS, TOKENS, 0, 0)
    cluster.pe.command(Release("r", "its client went away"))
    prefill(cluster, transfer)
    assert not any(t.posted for t in cluster.prefill.transports)


def test_a_follower_that_dies_in_mid_pass_ends_the_engine(cluster: RankedCluster) -> None:
    transfer = cluster.load("r", KEYS, TOKENS, 0, 0)

    def at_layer(rank: int, layer: int) -> None:
        if (rank, layer) == (1, 2):
            cluster.prefill.group.fail()
            raise SystemExit  # all of its work ends

    with pytest.raises((EngineLostError, SystemExit)):
        prefill(cluster, transfer, at_layer)
    assert cluster.pe.answers(PrefillDone) == []
    broken = cluster.pe.manager.broken
    assert broken is not None
    assert broken.startswith("rank 0 of 2 has lost the others")


def test_a_follower_with_a_model_that_bypasses_the_connector_ends_the_engine(
    cluster: RankedCluster,
) -> None:
    transfer = cluster.load("r", KEYS, TOKENS, 0, 0)
    parts = [PrefillChunk(transfer, BlockRun(0, BLOCKS), tuple(range(BLOCKS)))]

    def run(rank: int) -> None:
        forward = cluster.prefill.begin_pass(rank, parts)
        for layer in range(GEOMETRY.layers):
            if (rank, layer) != (1, 2):
                forward.wait_loaded(layer)
            forward.computed(layer)
        with contextlib.suppress(EngineLostError):  # whichever rank sees the other's end first
            forward.finish({})

    cluster.prefill.on_ranks(run)
    (follower,) = cluster.prefill.followers
    assert "layer 2 is computed without a wait" in str(follower.rank.health.broken)
    while cluster.prefill.ended == []:
        pass
    assert set(cluster.prefill.ended) == {1}


def test_slots_are_held_until_the_last_rank_has_copied_them(cluster: RankedCluster) -> None:
    transfer = cluster.load("r", KEYS, TOKENS, 0, 0)
    prefill(cluster, transfer)
    cluster.fabric.stall(DE_FOLLOWER)
    over = take_over(cluster, transfer)
    assert over[0].get(timeout=GUARD_S) is None
    free = cluster.de.report().load.free_buffer_tokens
    assert free == cluster.de.manager.buffer_tokens - TOKENS
    assert cluster.de.answers(KvInHbm) == []
    cluster.fabric.wake(DE_FOLLOWER)
    assert over[1].get(timeout=GUARD_S) is None
    cluster.de.answer(KvInHbm, "r")
    cluster.release("r")
    assert cluster.de.report().load.free_buffer_tokens == cluster.de.manager.buffer_tokens


def test_a_generated_block_that_one_rank_could_not_copy_is_not_stored(
    cluster: RankedCluster,
) -> None:
    lost, whole = prompt_keys(2 * GEOMETRY.block_tokens, "generated")
    cluster.fabric.fail_next(agent=DE_FOLLOWER)
    cluster.generate([(1, lost)])
    cluster.generate([(2, whole)])
    while cluster.de.manager.staging.free < 4:
        assert cluster.de.manager.persister.drain(GUARD_S)
    assert not cluster.storage.is_stored(lost)
    stored = bytearray(GEOMETRY.full_block_bytes)
    assert cluster.storage.is_stored(whole)
    cluster.storage.read(whole, memoryview(stored))
    assert bytes(stored) == full_block(whole)
    assert cluster.de.report().counters[Counter.PERSIST_DROPPED_BLOCKS.value] == 1


def test_without_free_staging_slots_all_ranks_drop_the_same_blocks(cluster: RankedCluster) -> None:
    keys = prompt_keys(6 * GEOMETRY.block_tokens, "generated")
    taken = [cluster.de.manager.staging.allocate() for _ in range(3)]
    cluster.generate(list(enumerate(keys[:2])))
    for slot in taken:
        assert slot is not None
        cluster.de.manager.staging.free_slot(slot)
    cluster.generate(list(enumerate(keys[2:5])))
    while cluster.de.manager.staging.free < 4:
        assert cluster.de.manager.persister.drain(GUARD_S)
    stored = [cluster.storage.is_stored(key) for key in keys]
    assert stored == [True, False, True, True, True, False]


def test_ranks_that_do_not_do_the_same_work_end(cluster: RankedCluster) -> None:
    transfer = cluster.load("r", KEYS, TOKENS, 0, 0)
    cluster.prefill.followers[0].rank.work.begin()
    with pytest.raises(EngineLostError, match="do not do the same"):
        prefill(cluster, transfer)
    while not cluster.prefill.ended:
        cluster.prefill.followers[0].poll()


def test_an_engine_is_unhealthy_when_a_follower_is(cluster: RankedCluster) -> None:
    watchdog = cluster.serving.followers[0].rank.health.watchdog("nothing moves", limit_s=-1.0)
    watchdog.started()
    cluster.serving.followers[0].poll()
    assert cluster.de.manager.health() == "ranks [1] of this engine are unhealthy; see their log"
    watchdog.idle()
    cluster.serving.followers[0].poll()
    assert cluster.de.manager.health() is None


def test_all_agents_and_processes_are_in_the_address(cluster: RankedCluster) -> None:
    address = cluster.de.manager.address("e", this_process())
    assert [a.agent for a in address.agents] == ["de-0-epoch-1-0", DE_FOLLOWER]
    assert address.process.ranks == (this_process(),)
    assert not has_exited(address.process)


def test_followers_connect_to_the_leaders_decode_engines(cluster: RankedCluster) -> None:
    agent = AgentAddress("de-9-agent", b"in-process", ())
    cluster.prefill.manager._rank.peer_up(EngineAddress("de-9", "1", Role.DECODE, (agent,)))
    transfer = cluster.load("r", KEYS, TOKENS, 0, 0)
    prefill(cluster, transfer)
    follower = cluster.prefill.followers[0].rank
    assert [peer.engine_id for peer in follower.peers.known()] == ["de-0", "de-9"]
    follower.movers.stalled.posted(DE_FOLLOWER)
    follower.movers.stalled.add(DE_FOLLOWER)
    cluster.prefill.followers[0]._set_peers(follower.peers.known()[:1])
    assert [peer.engine_id for peer in follower.peers.known()] == ["de-0"]
    assert DE_FOLLOWER in follower.movers.stalled


def test_a_wait_for_another_rank_that_takes_too_long_breaks_the_engine() -> None:
    ranks = ThreadRanks(2)
    health = Health()
    group = TimedGroup(ranks.ends[1], health, limit_s=0.0)

    def wait() -> None:
        with contextlib.suppress(EngineLostError):
            group.broadcast(None)

    waits = threading.Thread(target=wait)
    waits.start()
    while health.broken is None:
        group.poll()
    assert "rank 1 of 2 has waited" in health.broken
    ranks.fail()
    waits.join(GUARD_S)


def test_work_is_idle_when_every_follower_reports_it_done() -> None:
    memory = bytearray(RankBoard.size_bytes(3, staging_slots=1))
    shared = np.frombuffer(memory, dtype=np.uint8)
    leader, *followers = (RankWork(RankBoard(shared, rank, 3)) for rank in range(3))
    over: list[str] = []
    first, second = leader.begin(), leader.begin()
    for follower in followers:
        assert [follower.begin(), follower.begin()] == [first, second]
    leader.when_idle(second, lambda: over.append("second"))
    leader.when_idle(first, lambda: over.append("first"))
    followers[0].ended(first)
    followers[0].ended(second)
    followers[1].ended(second)
    leader.poll()
    assert over == []  # the first of one follower still moves
    followers[1].ended(first)
    leader.poll()
    assert sorted(over) == ["first", "second"]
    assert not leader.board.others_staged(0, second)
    for follower in followers:
        follower.staged(second, 0)
    assert leader.board.others_staged(0, second)


def test_an_engine_of_one_rank_broadcasts_and_gathers_its_own_values() -> None:
    assert ONE_RANK.broadcast(3) == 3
    assert ONE_RANK.gather(3) == [3]
