"""A DE that receives prompts in HBM: what it reserves, when a load is over, and what is reused.

The story: a prompt of six blocks, of which the DE reads two and the PE sends four into blocks of
the DE's HBM.  Then everything that can go wrong while a PE may still write there.
"""

from collections.abc import Iterator

import pytest
from tests.engine_harness import GEOMETRY, ToyCluster, kv_bytes, prompt_keys
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.core.control import (
    Assign,
    Failed,
    KvInHbm,
    Persist,
    Read,
    ReadDone,
    Registered,
    Release,
    Released,
    Reserved,
)
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.engine.counters import Counter
from dualpath.engine.threads import LEAVE_S, OS_THREADS, TimeLimit

BLOCKS = 6
TOKENS = BLOCKS * GEOMETRY.block_tokens
DE_HITS = 2
NEW_TOKENS = 2 * GEOMETRY.block_tokens
PE_HBM = list(range(BLOCKS))


@pytest.fixture
def cluster() -> Iterator[ToyCluster]:
    made = ToyCluster()
    yield made
    made.close()


class Prompt:
    """A prompt on its way into the HBM of the DE."""

    def __init__(self, cluster: ToyCluster, request_id: str, salt: str = "s") -> None:
        self.cluster, self.request_id = cluster, request_id
        self.keys = prompt_keys(TOKENS, salt)
        self.loads: list[str | None] = []
        cluster.store(self.keys[:DE_HITS])

    def reserve(self) -> Reserved:
        de = self.cluster.de
        de.command(
            Assign(
                self.request_id,
                TOKENS,
                DE_HITS,
                tuple(self.keys),
                hbm_prompt_tokens=TOKENS,
                hbm_new_tokens=NEW_TOKENS,
            )
        )
        self.reserved = de.answer(Reserved, self.request_id)
        run = HitRun(Role.DECODE, BlockRun(0, DE_HITS), self.reserved.slots)
        de.command(Read(self.request_id, run, 0, GUARD_S))
        assert de.answer(ReadDone, self.request_id).good_blocks == DE_HITS
        self.hits = (run,)
        return self.reserved

    def prefill(self) -> None:
        """Let the PE load the hit, compute the rest, and send it into the DE's HBM."""
        self.cluster.pe.assign(self.request_id, TOKENS, 0)
        transfer = PrefillTransfer(
            request_id=self.request_id,
            prompt_tokens=TOKENS,
            hit_blocks=DE_HITS,
            hit_key_tail=self.keys[DE_HITS - 1],
            hits=self.hits,
            decode_engine="de-0",
            decode_epoch=self.cluster.de.epoch,
            de_slots=(),
            de_hbm_blocks=self.reserved.hbm_blocks,
        )
        chunk = BlockRun(DE_HITS, BLOCKS - DE_HITS)
        assert self.cluster.forward([(transfer, self.keys, chunk, PE_HBM)]) == {}

    def confirm(self) -> None:
        """State that all KV is there, and have the new blocks stored."""
        persist = Persist(self.request_id, DE_HITS, len(self.keys), hits=self.hits)
        self.cluster.de.command(persist)

    def load(self) -> None:
        """Send the request to the DE's engine, which loads the prompt."""
        transfer = DecodeTransfer(self.request_id, TOKENS, (), hits=self.hits, in_hbm=True)
        blocks = self.cluster.de.manager.reserved_hbm.blocks_of(self.request_id)[:BLOCKS]
        self.cluster.de.manager.fill_hbm(transfer, blocks, self.loads.append)

    def loaded(self) -> None:
        self.cluster.de.answer(KvInHbm, self.request_id)

    def release(self, *, certain: bool = True) -> None:
        self.cluster.de.command(Release(self.request_id, "over", certain))
        self.cluster.de.answer(Released, self.request_id)

    @property
    def in_hbm(self) -> list[bool]:
        """Whether each block is complete in the DE's HBM."""
        hbm = self.cluster.de.hbm
        return [
            all(
                hbm[layer][block].tobytes() == kv_bytes(key, layer)
                for layer in range(GEOMETRY.layers)
            )
            for key, block in zip(self.keys, self.reserved.hbm_blocks, strict=True)
        ]


def free_blocks(cluster: ToyCluster) -> int:
    return len(cluster.de.pool.free)


def test_a_prompt_arrives_in_reserved_hbm_and_then_belongs_to_the_engines_request(
    cluster: ToyCluster,
) -> None:
    whole, prompt = free_blocks(cluster), Prompt(cluster, "r")
    reserved = prompt.reserve()
    assert (len(reserved.slots), len(reserved.hbm_blocks)) == (DE_HITS, BLOCKS)
    assert free_blocks(cluster) == whole - BLOCKS - 2, "with room for generated tokens"
    prompt.prefill()
    assert prompt.in_hbm == [False] * DE_HITS + [True] * (BLOCKS - DE_HITS)
    prompt.confirm()
    prompt.load()
    prompt.loaded()
    assert prompt.loads == [None]
    assert prompt.in_hbm == [True] * BLOCKS
    assert cluster.de.manager.persister.drain(GUARD_S)
    cluster.de.held.wait_for_none()
    prompt.release()
    assert free_blocks(cluster) == whole - BLOCKS - 2, "its request still decodes"
    cluster.de.pool.end("r")
    assert free_blocks(cluster) == whole


def test_all_new_blocks_are_stored_though_they_are_more_than_staging_slots(
    cluster: ToyCluster,
) -> None:
    """Staging has four slots, of which a prompt uses half at a time."""
    prompts = [Prompt(cluster, f"r{number}", f"s{number}") for number in range(3)]
    for prompt in prompts:
        prompt.reserve()
        prompt.prefill()
    for prompt in prompts:
        prompt.confirm()
    cluster.de.held.wait_for_none()
    assert cluster.de.manager.persister.drain(GUARD_S)
    assert all(cluster.storage.is_stored(key) for prompt in prompts for key in prompt.keys)
    assert cluster.de.report().counters[Counter.PERSIST_DROPPED_BLOCKS.value] == 0
    moved = cluster.de.manager.staging.capacity * GEOMETRY.full_block_bytes
    assert cluster.de.report().counters[Counter.D2H_BYTES.value] > moved


def test_a_request_that_overtakes_the_confirmation_waits_for_it(cluster: ToyCluster) -> None:
    prompt = Prompt(cluster, "r")
    prompt.reserve()
    prompt.load()
    assert (prompt.loads, cluster.de.answers(KvInHbm)) == ([], [])
    prompt.prefill()
    prompt.load()
    assert prompt.loads == []
    prompt.confirm()
    prompt.loaded()
    assert prompt.in_hbm == [True] * BLOCKS


def test_a_load_that_waits_for_the_confirmation_fails_with_its_release(cluster: ToyCluster) -> None:
    whole, prompt = free_blocks(cluster), Prompt(cluster, "r")
    prompt.reserve()
    prompt.load()
    prompt.release()
    assert prompt.loads == ["request r: it was released before its KV was in HBM"]
    assert free_blocks(cluster) == whole
    prompt.load()
    assert len(prompt.loads) == 2, "a request without a reservation fails at once"


def test_hbm_that_a_pe_may_still_write_is_not_reused_until_that_is_over(
    cluster: ToyCluster,
) -> None:
    whole, prompt = free_blocks(cluster), Prompt(cluster, "r")
    prompt.reserve()
    prompt.release(certain=False)
    assert free_blocks(cluster) == whole - BLOCKS - 2
    assert cluster.de.manager.in_doubt().quarantined == ("r",)
    quarantined_tokens = (BLOCKS + 2) * GEOMETRY.block_tokens
    assert cluster.de.report().load.quarantined_hbm_tokens == quarantined_tokens
    cluster.de.command(Assign("r", TOKENS, 0, hbm_prompt_tokens=TOKENS, hbm_new_tokens=0))
    assert "has not left the engine" in cluster.de.answer(Failed, "r").reason
    prompt.prefill()  # Late bytes reach blocks of no other request.
    cluster.de.command(Release("r", "the PE is dead"))
    assert free_blocks(cluster) == whole
    assert cluster.de.manager.in_doubt().quarantined == ()
    assert cluster.de.report().load.quarantined_hbm_tokens == 0


@pytest.mark.parametrize("confirmed", [False, True])
def test_the_end_of_a_session_quarantines_hbm_unless_all_kv_is_there(
    cluster: ToyCluster, confirmed: bool
) -> None:
    whole, prompt = free_blocks(cluster), Prompt(cluster, "r")
    prompt.reserve()
    prompt.prefill()
    if confirmed:
        prompt.confirm()
        cluster.de.held.wait_for_none()
    cluster.de.manager.end_session("the router is silent")
    assert cluster.de.manager.in_doubt().quarantined == (() if confirmed else ("r",))
    assert free_blocks(cluster) == whole - (0 if confirmed else BLOCKS + 2)
    cluster.de.command(Registered())
    cluster.de.command(Release("r", "former session"))
    assert free_blocks(cluster) == whole


@pytest.mark.parametrize("arrived", [False, True])
def test_an_engine_opens_no_other_data_plane_while_a_pe_may_write_to_its_hbm(
    cluster: ToyCluster, arrived: bool
) -> None:
    prompt = Prompt(cluster, "r")
    prompt.reserve()
    prompt.prefill()
    if arrived:
        prompt.confirm()
        cluster.de.held.wait_for_none()
    cluster.de.manager.end_session("its weights change")
    assert cluster.de.manager.close(TimeLimit(OS_THREADS, LEAVE_S)) is arrived


def test_a_waiting_reservation_ends_with_its_release_and_the_next_one_is_granted(
    cluster: ToyCluster,
) -> None:
    whole = free_blocks(cluster)
    all_tokens = whole * GEOMETRY.block_tokens
    for request_id in ("first", "second", "third"):
        cluster.de.command(
            Assign(request_id, TOKENS, 0, hbm_prompt_tokens=all_tokens - 1, hbm_new_tokens=1)
        )
    assert len(cluster.de.answer(Reserved, "first").hbm_blocks) == whole
    cluster.de.command(Release("second", "cancelled"))
    cluster.de.command(Release("first", "over"))
    assert len(cluster.de.answer(Reserved, "third").hbm_blocks) == whole
    assert cluster.de.answers(Reserved) == []


def test_a_prompt_that_hbm_can_never_hold_is_refused(cluster: ToyCluster) -> None:
    tokens = free_blocks(cluster) * GEOMETRY.block_tokens
    cluster.de.command(Assign("r", TOKENS, 0, hbm_prompt_tokens=tokens, hbm_new_tokens=1))
    assert f"{tokens + 1} tokens" in cluster.de.answer(Failed, "r").reason
    assert cluster.de.report().load.unfinished_requests == 0


def test_blocks_that_leave_hbm_are_held_though_their_request_ends(cluster: ToyCluster) -> None:
    """The copies to staging stall, and the request ends meanwhile."""
    prompt = Prompt(cluster, "r")
    prompt.reserve()
    prompt.prefill()
    agent = f"de-0-{cluster.de.epoch}"
    cluster.fabric.stall(agent)
    prompt.confirm()
    prompt.release()
    assert not set(prompt.reserved.hbm_blocks[DE_HITS:]) & cluster.de.pool.free
    cluster.fabric.wake(agent)
    cluster.de.held.wait_for_none()
    assert set(prompt.reserved.hbm_blocks) <= cluster.de.pool.free
    assert cluster.de.manager.persister.drain(GUARD_S)
    assert all(cluster.storage.is_stored(key) for key in prompt.keys)


def test_hits_that_the_pe_has_sent_are_cached_from_hbm(cluster: ToyCluster) -> None:
    """Only the last block is new; those before it, which the PE has sent, are cached alone."""
    prompt = Prompt(cluster, "r")
    prompt.reserve()
    prompt.prefill()
    keys = tuple(prompt.keys)
    cluster.de.command(Persist("r", BLOCKS - 1, BLOCKS, hits=prompt.hits))
    cluster.de.held.wait_for_none()
    assert cluster.de.manager.persister.drain(GUARD_S)
    assert cluster.de.manager.buffer.missing(keys) == []
    stored = [cluster.storage.is_stored(key) for key in keys]
    assert stored == [True] * DE_HITS + [False] * (BLOCKS - DE_HITS - 1) + [True]
