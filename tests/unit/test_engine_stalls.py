"""Transfers that neither end nor fail: one deadline, their own requests, and no wrong byte."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.engine_harness import GEOMETRY, ToyCluster, full_block, kv_bytes, prompt_keys
from tests.guard import GUARD_S
from tests.passed_waits import PassedWaits

from dualpath.core.control import PeerUp, Release, Released
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import PrefillTransfer
from dualpath.engine.counters import Counter
from dualpath.engine.passes.generated import GeneratedBlock
from dualpath.engine.passes.layer_stream import LayerStream
from dualpath.engine.passes.pump import (
    SLOWEST_BYTES_PER_S,
    TRIAL_GAP_S,
    TRIAL_S,
    StalledAgents,
    WaitBudget,
)
from dualpath.transport.contract import TransferState
from dualpath.transport.in_process import InProcessTransport

TOKENS = 30  # seven full blocks and a partial one
BLOCKS = 8
HITS = 2
CHUNK = BlockRun(2 * HITS, BLOCKS - 2 * HITS)
DEADLINE_S = 0.5
#: The last poll may be late.
ONE_DEADLINE_S = DEADLINE_S + 0.25
HBM_OF = {"a": list(range(BLOCKS)), "b": list(range(BLOCKS, 2 * BLOCKS))}
HBM_OF["c"], HBM_OF["d"] = [[block + 2 * BLOCKS for block in HBM_OF[name]] for name in "ab"]


class Story:
    """One PE and two DEs: requests a and c belong to the first, b and d to the other."""

    def __init__(self) -> None:
        self.waits = PassedWaits()
        self.cluster = ToyCluster(
            decode_engines=2, transfer_deadline_s=DEADLINE_S, threads=self.waits
        )
        self.fabric = self.cluster.fabric

    def load(self, name: str) -> PrefillTransfer:
        keys = prompt_keys(TOKENS, name)
        self.cluster.store(keys[: 2 * HITS])
        return self.cluster.load(name, keys, TOKENS, HITS, HITS, decode=int(name in "bd"))

    def forward(self, *transfers: PrefillTransfer, stall_at: int | None = None) -> dict[str, str]:
        def at_layer(layer: int, stream: LayerStream) -> None:
            if layer == stall_at:
                self.fabric.stall("de-1-epoch-1")

        work = [
            (t, prompt_keys(TOKENS, t.request_id), CHUNK, HBM_OF[t.request_id]) for t in transfers
        ]
        return self.cluster.forward(work, at_layer)

    def assert_complete(self, transfer: PrefillTransfer) -> None:
        de = self.cluster.decode[int(transfer.decode_engine[-1])]
        for slot, key in zip(
            transfer.de_slots, prompt_keys(TOKENS, transfer.request_id), strict=True
        ):
            assert de.slot_bytes(slot) == full_block(key)


@pytest.fixture
def story() -> Iterator[Story]:
    made = Story()
    yield made
    made.fabric.wake("de-1-epoch-1")
    made.fabric.wake("pe-0-epoch-1")
    made.fabric.wake("de-0-epoch-1")
    made.cluster.close()


@pytest.mark.parametrize("layer", [None, 0, 2, GEOMETRY.layers - 1])
def test_a_stalled_peer_costs_one_deadline_and_its_own_requests(
    story: Story, layer: int | None
) -> None:
    mine, theirs = story.load("a"), story.load("b")
    if layer is None:
        story.fabric.stall("de-1-epoch-1")
    failures = story.forward(mine, theirs, stall_at=layer)
    assert set(failures) == {"b"}
    assert "'de-1-epoch-1' stall" in failures["b"]
    assert sum(story.waits.passed_s) <= ONE_DEADLINE_S
    story.assert_complete(mine)


def test_a_core_that_waits_for_a_stalled_peer_does_not_seem_to_hang(story: Story) -> None:
    mine, theirs = story.load("a"), story.load("b")
    story.fabric.stall("de-1-epoch-1")
    before = story.cluster.pe.report().steps
    story.forward(mine, theirs)
    passed = story.cluster.pe.report().steps - before
    # Each layer is a step, and so is each poll of the wait.
    assert passed >= GEOMETRY.layers + len(story.waits.passed_s)
    assert story.cluster.pe.report().steps == before + passed


def test_the_next_pass_does_not_wait_for_it_again_until_it_moves(story: Story) -> None:
    transfers = {name: story.load(name) for name in "abcd"}
    story.fabric.stall("de-1-epoch-1")
    story.forward(transfers["a"], transfers["b"])
    story.waits.passed_s.clear()
    assert set(story.forward(transfers["d"])) == {"d"}  # a trial
    assert sum(story.waits.passed_s) <= TRIAL_S + 0.25
    failures = story.forward(transfers["c"], transfers["d"])
    assert set(failures) == {"d"}
    assert "earlier pass" in failures["d"]  # nothing was posted
    story.assert_complete(transfers["c"])
    story.fabric.wake("de-1-epoch-1")
    story.cluster.pe.held.wait_for_none()
    assert story.forward(transfers["d"]) == {}
    story.assert_complete(transfers["d"])


def test_an_agent_of_which_one_transfer_hangs_serves_the_next_pass(story: Story) -> None:
    transfers = {name: story.load(name) for name in "bd"}
    story.fabric.stall("de-1-epoch-1")
    story.forward(transfers["b"])
    transport = story.cluster.pe.manager._transport
    assert isinstance(transport, InProcessTransport)
    for transfer in transport._unfinished:  # these alone never end
        transfer.poll = lambda: TransferState.MOVING  # type: ignore[method-assign]
    story.fabric.wake("de-1-epoch-1")
    assert story.forward(transfers["d"]) == {}
    story.assert_complete(transfers["d"])
    assert story.cluster.pe.held.now == set(HBM_OF["b"])


def test_a_stalled_agent_is_tried_from_time_to_time() -> None:
    threads = PassedWaits()
    stalled = StalledAgents(threads)
    assert not stalled.is_avoided("de")
    stalled.posted("de")
    stalled.add("de")
    assert not stalled.is_avoided("de")
    stalled.tried("de")
    assert stalled.is_avoided("de")
    stalled.add("de")  # the trial failed
    assert stalled.is_avoided("de")
    threads.late_s += TRIAL_GAP_S
    assert not stalled.is_avoided("de")
    stalled.ended("de")
    assert "de" not in stalled
    stalled.tried("de")
    assert not stalled.is_avoided("de")


def test_what_a_late_transfer_may_write_belongs_to_its_request_until_it_is_over(
    story: Story,
) -> None:
    theirs, pe = story.load("b"), story.cluster.pe
    story.fabric.stall("de-1-epoch-1")
    story.forward(theirs)
    assert pe.held.now == set(HBM_OF["b"])
    pe.command(Release(request_id="b", reason="failed"))
    assert pe.answers(Released) == []
    assert pe.report().load.unfinished_requests == 1
    story.fabric.wake("de-1-epoch-1")
    pe.answer(Released, "b")
    pe.held.wait_for_none()
    assert pe.report().load.unfinished_requests == 0
    assert pe.report().load.free_buffer_tokens == pe.manager.buffer_tokens


def test_a_peer_that_joins_again_is_not_stalled(story: Story) -> None:
    transfers = {name: story.load(name) for name in "bd"}
    story.fabric.stall("de-1-epoch-1")
    story.forward(transfers["b"])
    address = story.cluster.decode[1].manager.address("epoch-1")
    story.cluster.pe.command(PeerUp(address=address))
    assert "earlier pass" not in story.forward(transfers["d"])["d"]


def test_a_device_that_hangs_in_copies_makes_the_engine_unhealthy(
    story: Story,
) -> None:
    pe = story.cluster.pe
    assert pe.manager.health() is None
    first, second = story.load("a"), story.load("c")
    story.fabric.stall("pe-0-epoch-1")
    assert set(story.forward(first)) == {"a"}
    assert pe.manager.health() is None  # one copy that hangs may be an exception
    assert set(story.forward(second)) == {"c"}
    assert pe.manager.health() == "copies within this engine stall"
    story.fabric.wake("pe-0-epoch-1")
    pe.held.wait_for_none()
    assert pe.manager.health() is None


def test_a_generated_block_that_left_hbm_too_late_is_never_stored(story: Story) -> None:
    de, storage = story.cluster.de, story.cluster.storage
    stuck, beside, tried, third = prompt_keys(4 * GEOMETRY.block_tokens, "generated")
    dropped = Counter.PERSIST_DROPPED_BLOCKS.value
    story.fabric.stall("de-0-epoch-1")
    for step in ([(3, stuck), (6, beside)], [(4, tried)], [(5, third)]):
        de.manager.persist_generated([GeneratedBlock(*block) for block in step])
    assert len(story.waits.passed_s) == 2  # not for the third one
    assert sum(story.waits.passed_s) <= DEADLINE_S + TRIAL_S  # the first step had one deadline
    assert de.report().counters[dropped] == 1
    de.hbm[:, 3] = 0xEE  # the engine writes another request's KV there
    story.fabric.wake("de-0-epoch-1")
    while de.manager.staging.free < 4:  # the late copy frees its slot
        assert de.manager.persister.drain(GUARD_S)
    assert de.report().counters[dropped] == 4
    assert not any(storage.is_stored(key) for key in (stuck, beside, tried))
    for layer in range(GEOMETRY.layers):
        de.hbm[layer, 5] = np.frombuffer(kv_bytes(stuck, layer), np.uint8)
    de.manager.persist_generated([GeneratedBlock(5, stuck)])
    assert de.manager.persister.drain(GUARD_S)
    assert storage.is_stored(stuck)


def test_a_slow_link_is_waited_for_while_it_makes_progress() -> None:
    patience = WaitBudget(1.0, StalledAgents())
    layer_bytes = int(5 * SLOWEST_BYTES_PER_S)
    patience.posted("de", layer_bytes)
    for _ in range(100):  # each layer takes four deadlines
        patience.posted("de", layer_bytes)
        assert patience.waited({"de"}, 4.0) == []
        patience.ended("de", layer_bytes)


def test_a_link_that_is_too_slow_is_abandoned_after_one_deadline() -> None:
    stalled = StalledAgents()
    patience = WaitBudget(1.0, stalled)
    waits = 0
    while True:
        patience.posted("de", 1000)
        waits += 1
        if patience.waited({"de"}, 0.25):
            break
        patience.ended("de", 1000)
    assert waits == 5  # 4,000 bytes refill less than one poll
    stalled.add("de")
    assert "de" in stalled
    patience.ended("de", 1000)
    assert "de" not in stalled


def test_agents_without_transfers_do_not_stall() -> None:
    stalled = StalledAgents()
    stalled.add("de")
    assert "de" not in stalled


def _wait(gate: threading.Event) -> None:
    gate.wait(GUARD_S)


def test_a_pump_that_hangs_costs_a_deadline_and_fails_the_pass(story: Story) -> None:
    gate, transfer = threading.Event(), story.load("a")

    def hang(layer: int, stream: LayerStream) -> None:
        if layer == 2:
            story.cluster.pe.manager._rank.movers.pump.call(lambda: _wait(gate))

    work = [(transfer, prompt_keys(TOKENS, "a"), CHUNK, HBM_OF["a"])]
    failures = story.cluster.forward(work, hang)
    gate.set()
    assert set(failures) == {"a"}
    assert sum(story.waits.passed_s) < 10 * DEADLINE_S
