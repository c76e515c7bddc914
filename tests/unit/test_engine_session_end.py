"""State left at an engine after the end of its session: only in-doubt requests."""

from collections.abc import Iterator

import pytest
from tests.engine_harness import GEOMETRY, ToyCluster, prompt_keys

from dualpath.core.cluster import AgentAddress, EngineAddress, HostProcess, Role, Writer
from dualpath.core.control import (
    Assign,
    ConfirmedDead,
    Failed,
    LivenessProbe,
    PeerUp,
    Registered,
    Release,
    Released,
    Reserved,
)
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import CallAssignment, DecodeTransfer, PrefillTransfer
from dualpath.engine.control.assigned_requests import MOST_TAKEN, TakenNumbers
from dualpath.engine.passes.layer_stream import LayerStream
from dualpath.node.host_process import has_exited, this_process

TOKENS, BLOCKS = 22, 6
HBM = [3, 9, 4, 7, 1, 6]
OVER = "the router was silent"


@pytest.fixture
def cluster() -> Iterator[ToyCluster]:
    made = ToyCluster()
    yield made
    made.close()


def whole(cluster: ToyCluster) -> list[bool]:
    """Whether each engine, PE and DE, has its whole buffer and no request."""
    reports = [(engine.manager, engine.report()) for engine in (cluster.pe, cluster.de)]
    return [
        report.load.free_buffer_tokens == manager.buffer_tokens
        and report.load.unfinished_requests == 0
        for manager, report in reports
    ]


def test_a_request_that_only_waits_leaves_no_state(cluster: ToyCluster) -> None:
    capacity = cluster.de.manager.buffer_tokens // GEOMETRY.block_tokens
    cluster.de.assign("first", TOKENS, capacity)
    cluster.de.answer(Reserved, "first")
    cluster.de.assign("second", TOKENS, BLOCKS)
    cluster.de.manager.end_session(OVER)
    assert cluster.de.report().load.unfinished_requests == 0
    assert cluster.de.manager.in_doubt().quarantined == ("first",)
    cluster.de.command(Release(request_id="first", reason="no writer is left"))
    assert whole(cluster) == [True, True]


def test_a_request_that_decodes_goes_on_and_counts_until_it_ends(cluster: ToyCluster) -> None:
    manager = cluster.de.manager
    cluster.de.assign("r", TOKENS, BLOCKS)
    slots = cluster.de.answer(Reserved, "r").slots
    transfer = DecodeTransfer(request_id="r", prompt_tokens=TOKENS, slots=slots)
    assert cluster.fill(transfer, HBM) is None
    for _ in range(2):  # the second scheduler is lost as well
        manager.end_session(OVER)
        assert manager.active.any_detached
        report = cluster.de.report()
        assert (report.load.unfinished_requests, report.load.unfinished_tokens) == (1, TOKENS)
        assert report.load.free_buffer_tokens == manager.buffer_tokens
        assert manager.in_doubt()[:2] == ((), ())
        cluster.de.command(Registered())
    manager.ended("r")
    assert not manager.active.any_detached
    assert whole(cluster) == [True, True]


def test_an_ended_request_does_not_count_as_decoding(cluster: ToyCluster) -> None:
    manager = cluster.de.manager
    cluster.de.assign("r", TOKENS, BLOCKS)
    slots = cluster.de.answer(Reserved, "r").slots
    transfer = DecodeTransfer(request_id="r", prompt_tokens=TOKENS, slots=slots)
    assert cluster.fill(transfer, HBM) is None
    manager.ended("r")
    assert cluster.de.report().load.unfinished_requests == 1  # until the router releases it
    manager.end_session(OVER)
    assert not manager.active.any_detached
    assert whole(cluster) == [True, True]


def test_slots_that_await_kv_are_quarantined_and_reported_with_their_writers(
    cluster: ToyCluster,
) -> None:
    writer = Writer("pe-9", "epoch-9", HostProcess("host", 1, 2))
    address = EngineAddress(
        *writer.id, Role.PREFILL, (AgentAddress("agent", b"", ()),), process=writer.process
    )
    cluster.de.command(PeerUp(address))
    cluster.load("r", prompt_keys(TOKENS), TOKENS, 0, 0)
    cluster.pe.manager.end_session(OVER)
    cluster.de.manager.end_session(OVER)
    assert whole(cluster) == [True, False]
    in_doubt = cluster.de.manager.in_doubt()
    assert in_doubt.quarantined == ("r",)
    assert writer in in_doubt.writers
    assert cluster.pe.manager.in_doubt() == ((), (), ())


def test_the_name_of_an_in_doubt_request_is_not_reused(cluster: ToyCluster) -> None:
    """Else the end of the former request's quarantine would free the slots of this one."""
    cluster.load("r", prompt_keys(TOKENS), TOKENS, 0, 0)
    cluster.de.manager.end_session(OVER)
    cluster.de.command(Assign(request_id="r", tokens=TOKENS, reserve_blocks=1))
    assert "has not left the engine" in cluster.de.answer(Failed, "r").reason


def called(cluster: ToyCluster, request_id: str, session: str, number: int) -> PrefillTransfer:
    """A call whose assignment comes with it; the DE has reserved slots for its prompt."""
    blocks = cluster.geometry.blocks_for(TOKENS)
    cluster.de.assign(request_id, TOKENS, blocks)
    return PrefillTransfer(
        request_id=request_id,
        prompt_tokens=TOKENS,
        hit_blocks=0,
        hit_key_tail=b"",
        hits=(),
        decode_engine="de-0",
        decode_epoch=cluster.de.epoch,
        de_slots=cluster.de.answer(Reserved, request_id).slots,
        assignment=CallAssignment(session, number, TOKENS),
    )


def test_a_call_brings_its_assignment_which_is_counted_and_named(cluster: ToyCluster) -> None:
    manager = cluster.pe.manager
    cluster.pe.command(Registered(session="s1"))
    transfer = called(cluster, "r", "s1", 1)
    assert manager.take_call(transfer)
    assert manager.take_call(transfer), "each pass of a prompt in chunks brings it again"
    report = cluster.pe.report()
    assert (report.load.unfinished_requests, report.load.unfinished_tokens) == (1, TOKENS)
    assert report.called == ("r",)
    manager.sent("r", None)
    assert not manager.take_call(transfer), "it comes twice: the slots may have other owners"
    assert cluster.pe.report().called == ()


def test_a_call_that_comes_after_its_release_is_refused(cluster: ToyCluster) -> None:
    cluster.pe.command(Registered(session="s1"))
    late, other = called(cluster, "late", "s1", 1), called(cluster, "other", "s1", 2)
    assert cluster.pe.manager.take_call(other)
    cluster.pe.command(Release(request_id="late", reason="its front end is lost", assignment=1))
    cluster.pe.answer(Released, "late")
    assert not cluster.pe.manager.take_call(late)
    assert cluster.pe.report().called == ("other",)


def test_a_call_of_another_session_is_refused(cluster: ToyCluster) -> None:
    manager = cluster.pe.manager
    former, present = called(cluster, "former", "s1", 1), called(cluster, "present", "s2", 1)
    cluster.pe.command(Registered(session="s1"))
    manager.end_session(OVER)
    assert not manager.take_call(former), "there is no session"
    cluster.pe.command(Registered(session="s2"))
    assert not manager.take_call(former)
    assert manager.take_call(present)


def test_a_number_is_taken_once_and_memory_is_bounded() -> None:
    numbers = TakenNumbers()
    assert [numbers.take(number) for number in (2, 1, 2, 1, 4)] == [True, True, False, False, True]
    assert [numbers.take(number) for number in range(5, 5 + MOST_TAKEN)] == [True] * MOST_TAKEN
    assert not numbers.take(3), "it has not come for so long that it counts as taken"
    assert numbers.take(5 + MOST_TAKEN)
    assert len(numbers._above) <= MOST_TAKEN


def test_a_pass_under_way_goes_on_and_its_end_is_reported_in_the_next_session(
    cluster: ToyCluster,
) -> None:
    keys = prompt_keys(TOKENS)
    transfer = cluster.load("r", keys, TOKENS, 0, 0)
    manager = cluster.pe.manager

    def lose_router(layer: int, stream: LayerStream) -> None:
        if layer == 1:
            manager.end_session(OVER)
            assert manager.in_doubt().unsettled == ("r",)
            assert not manager.active.is_active("r")

    cluster.forward([(transfer, keys, BlockRun(0, BLOCKS), HBM)], lose_router)
    cluster.pe.answer(Released, "r")  # it was sent while no session was open, and lost
    assert manager.in_doubt().unsettled == ()
    cluster.pe.command(Registered())
    cluster.pe.answer(Released, "r")
    assert whole(cluster)[0]


def test_an_engine_confirms_the_death_of_processes_of_its_machine(
    cluster: ToyCluster,
) -> None:
    here = this_process()
    assert not has_exited(here)
    assert not has_exited(HostProcess("another machine", 1, 1))
    assert not has_exited(HostProcess())
    former = HostProcess(here.host, here.pid, here.start_ticks - 1)
    cluster.de.command(LivenessProbe(Writer("pe-1", "alive", here)))
    cluster.de.command(LivenessProbe(Writer("pe-2", "ended", former)))
    assert cluster.de.answer(ConfirmedDead).writer.engine_id == "pe-2"
