"""A decode engine that fetches a prompt from the buffer of another one, which has received it.

The story: a PE sends a prompt of six blocks, the last of them not full, to de-0, which stores its
new blocks.  Then de-1 fetches it and decodes.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine_harness import GEOMETRY, ToyCluster, ToyEngine, full_block, kv_bytes, prompt_keys
from tests.guard import GUARD_S
from tests.property.test_plan_order import traced

from dualpath.core.control import (
    Assign,
    Fetch,
    FetchDone,
    KvInHbm,
    PeerDown,
    PeerUp,
    Persist,
    Registered,
    Release,
    Released,
    Reserved,
)
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.counters import Counter
from dualpath.plan.movements import Place
from dualpath.plan.order import Present, begun_too_early
from dualpath.plan.steps import PromptLayout, move_plan

SLOTS = 16
BLOCKS = 6
TOKENS = BLOCKS * GEOMETRY.block_tokens - 1
FULL = TOKENS // GEOMETRY.block_tokens
SOURCE_AGENT = "de-0-epoch-1"


class Story:
    """A prompt that is complete in the buffer of ``source``, and ``target``, which fetches it."""

    def __init__(self, trace_out: str = "") -> None:
        self.cluster = ToyCluster(decode_engines=2, trace_out=trace_out, buffer_blocks=SLOTS)
        self.source, self.target = self.cluster.decode
        self.keys = prompt_keys(TOKENS)
        self.target.command(PeerUp(self.source.manager.address(self.source.epoch)))

    def prefill(self, request_id: str = "r", salt: str = "s") -> None:
        """Compute the prompt, and have its new blocks stored, as between two legs."""
        self.keys = prompt_keys(TOKENS, salt)
        self.transfer = self.cluster.load(request_id, self.keys, TOKENS, 0, 0)
        work = [(self.transfer, self.keys, BlockRun(0, BLOCKS), range(BLOCKS))]
        assert self.cluster.forward(work) == {}
        self.cluster.pe.command(Release(request_id, "prefilled"))
        self.source.command(Persist(request_id, 0, FULL))

    def fetch(
        self, request_id: str = "r", epoch: str = "epoch-1", engine: str = "de-0", blocks: int = 0
    ) -> None:
        slots = self.transfer.de_slots[: blocks or BLOCKS]
        keys = tuple(self.keys[:FULL])
        wanted = Fetch(engine, epoch, slots, GUARD_S)
        self.target.command(Assign(request_id, TOKENS, BLOCKS, keys, len(keys), fetch=wanted))

    def fetched(self, request_id: str = "r") -> FetchDone:
        return self.target.answer(FetchDone, request_id)

    def decode(self, done: FetchDone, request_id: str = "r") -> None:
        """Copy the prompt into the HBM of the target; what is wrong there fails the test."""
        results: list[str | None] = []
        transfer = DecodeTransfer(request_id, TOKENS, done.slots, persist_from=FULL)
        self.target.manager.fill_hbm(transfer, list(range(BLOCKS)), results.append)
        self.target.answer(KvInHbm, request_id)
        assert results == [None]
        for block, key in enumerate(self.keys):
            for layer in range(GEOMETRY.layers):
                found = self.target.hbm[layer][block, : GEOMETRY.bytes_of(layer)].tobytes()
                assert found == kv_bytes(key, layer), (block, layer)

    def release(self, engine: ToyEngine, request_id: str = "r") -> None:
        engine.command(Release(request_id, "over"))
        engine.answer(Released, request_id)

    def posted(self) -> None:
        """Wait until the thread that moves bytes has posted what it was asked for."""
        done = threading.Event()
        self.target.manager._rank.movers.pump.call(done.set)
        assert done.wait(GUARD_S)

    def all_free(self) -> None:
        """Wait until the buffer of the target has room for a request of its size."""
        self.target.assign("all", 1, SLOTS)
        self.target.answer(Reserved, "all")
        self.release(self.target, "all")

    @property
    def moved_blocks(self) -> float:
        counters = self.target.report().counters
        return counters[Counter.DE_TO_DE_BYTES] / GEOMETRY.full_block_bytes

    @property
    def free(self) -> int:
        return self.target.manager.buffer.free


@pytest.fixture
def story() -> Iterator[Story]:
    made = Story()
    yield made
    made.cluster.close()


def test_a_prompt_is_fetched_block_by_block_and_decoded_and_then_cached(story: Story) -> None:
    story.prefill()
    story.fetch()
    done = story.fetched()
    assert (done.failure, done.cached_blocks, len(done.slots)) == (None, 0, BLOCKS)
    story.release(story.source)
    story.decode(done)
    assert story.moved_blocks == BLOCKS
    written = story.target.report().counters[Counter.STORAGE_WRITE_BYTES]
    assert written == 0, "the source has stored the prompt"
    story.release(story.target)
    assert story.free == SLOTS
    cached = story.target.manager.buffer.missing(story.keys[:FULL])
    assert cached == [], "a later turn finds it in DRAM"


def test_blocks_that_the_target_caches_are_not_fetched(story: Story) -> None:
    for request_id in ("r", "again"):
        story.prefill(request_id)
        story.fetch(request_id)
        done = story.fetched(request_id)
        story.release(story.source, request_id)
        story.decode(done, request_id)
        story.release(story.target, request_id)
    assert done.cached_blocks == FULL
    assert story.moved_blocks == BLOCKS + 1, "only the last block, which is not full"


def test_the_steps_of_a_moved_prompt_are_those_of_the_plan(tmp_path: Path) -> None:
    story = Story(str(tmp_path / "trace"))
    try:
        story.prefill()
        now_ns = story.target.manager.trace.now_ns()
        story.fetch()
        story.decode(story.fetched())
    finally:
        story.cluster.close()
    executed = [done for done in traced(tmp_path / "trace.de1") if done.step.label != "persist"]
    planned = list(move_plan(PromptLayout(GEOMETRY, TOKENS)))
    order = lambda step: (step.label, step.layer or 0, step.blocks.first)  # noqa: E731
    assert sorted((done.step for done in executed), key=order) == sorted(planned, key=order)
    present = [Present(Place.THIRD_BUFFER, BlockRun(0, BLOCKS), None, now_ns)]
    assert begun_too_early(executed, present, GEOMETRY) == []


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ({"epoch": "epoch-0"}, "not connected"),
        ({"engine": "de-9"}, "not connected"),
        ({"blocks": 2}, "2 slots of engine de-0 for 6 blocks"),
    ],
)
def test_a_fetch_from_another_process_or_of_other_slots_is_refused(
    story: Story, named: dict[str, object], why: str
) -> None:
    story.prefill()
    story.fetch(**named)  # type: ignore[arg-type]
    assert why in (story.fetched().failure or "")
    story.release(story.target)
    assert (story.free, story.moved_blocks) == (SLOTS, 0)


def test_slots_for_a_fetch_are_granted_at_once_or_not_at_all(story: Story) -> None:
    story.prefill()
    story.target.assign("large", 1, 11)
    story.fetch()
    assert "5 of the 16 blocks of its buffer are free for 6" in (story.fetched().failure or "")
    story.release(story.target)
    story.release(story.target, "large")
    # A reservation that waits is not overtaken, even if the fetch would fit.
    story.target.assign("some", 1, 8)
    story.target.assign("waits", 1, 9)
    story.fetch()
    assert "requests wait" in (story.fetched().failure or "")
    for request_id in ("r", "some", "waits"):
        story.release(story.target, request_id)
    assert story.free == SLOTS


def test_a_transfer_that_fails_fails_the_fetch(story: Story) -> None:
    story.prefill()
    story.cluster.fabric.fail_next("the link is down", agent="de-1-epoch-1")
    story.fetch()
    assert story.fetched().failure == "the link is down"
    story.release(story.target)
    story.all_free()
    assert story.target.report().counters[Counter.TRANSFER_FAILURES] == 1


def test_slots_that_a_late_byte_may_reach_are_not_reused_after_a_release(story: Story) -> None:
    story.prefill()
    story.cluster.fabric.stall(SOURCE_AGENT)
    story.fetch()
    story.posted()
    story.release(story.target)
    assert story.free == SLOTS - BLOCKS
    # The source's slots go to another request meanwhile, which is what the late bytes are of.
    story.release(story.source)
    story.target.assign("other", 1, SLOTS)
    assert not story.target.answers(Reserved), "it waits for the late bytes"
    story.cluster.fabric.wake(SOURCE_AGENT)
    assert len(story.target.answer(Reserved, "other").slots) == SLOTS
    assert not story.target.answers(FetchDone), "a released request gets no answer"


def test_a_fetch_that_stalls_fails_at_its_deadline_and_later_ones_at_once(story: Story) -> None:
    story.prefill()
    story.cluster.fabric.stall(SOURCE_AGENT)
    story.fetch()
    story.posted()
    manager = story.target.manager
    manager.tick(manager.trace.now_ns() + int(2 * GUARD_S * 1e9))
    assert "read_deadline_s" in (story.fetched().failure or "")
    story.release(story.target)
    # One trial is made, then none for a while.
    story.fetch("trial")
    story.fetch("next")
    assert "stalled" in (story.fetched("next").failure or "")
    story.cluster.fabric.wake(SOURCE_AGENT)
    assert story.fetched("trial").failure is None
    for request_id in ("trial", "next"):
        story.release(story.target, request_id)
    story.all_free()


def test_a_source_that_is_lost_fails_the_fetch_and_its_next_process_is_not_read(
    story: Story,
) -> None:
    story.prefill()
    story.cluster.fabric.stall(SOURCE_AGENT)
    story.fetch()
    story.posted()
    story.target.command(PeerDown("de-0", "epoch-1", certain=False))
    assert "was disconnected" in (story.fetched().failure or "")
    story.release(story.target)
    story.all_free()
    story.fetch("next")
    assert "not connected" in (story.fetched("next").failure or "")


def test_a_session_that_ends_drops_a_fetch_and_leaves_no_slot_in_doubt(story: Story) -> None:
    story.prefill()
    story.cluster.fabric.stall(SOURCE_AGENT)
    story.fetch()
    story.posted()
    manager = story.target.manager
    manager.end_session("the router is silent")
    assert manager.in_doubt().quarantined == (), "only this engine writes there, and knows when"
    assert story.free == SLOTS - BLOCKS
    story.target.command(Registered(session="next"))
    story.cluster.fabric.wake(SOURCE_AGENT)
    story.all_free()
    assert not story.target.answers(FetchDone)


def test_the_fetched_bytes_are_those_of_the_source(story: Story) -> None:
    story.prefill(salt="t")
    story.fetch()
    for slot, key in zip(story.fetched().slots, story.keys, strict=True):
        assert story.target.slot_bytes(slot) == full_block(key)
