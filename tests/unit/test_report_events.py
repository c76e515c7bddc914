"""Events and ends of requests that ride in an engine's reports."""

import asyncio
from collections.abc import Iterator
from typing import cast

import msgspec
import pytest
from tests.engine_harness import ToyCluster, prompt_keys
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import expected, job, keys_of

from dualpath.core import control
from dualpath.core.control import (
    Ack,
    KvInHbm,
    Load,
    Registered,
    Release,
    Released,
    Report,
    RequestOver,
    unnumbered,
)
from dualpath.core.runs import BlockRun
from dualpath.core.sessions import RESEND_AFTER_S
from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.control.link import (
    REPORT_GAP_S,
    ControlLink,
    RouterConnection,
    RouterSession,
    has_events,
)
from dualpath.router.scheduler.releases import OVER_WAIT_S

TOKENS, BLOCKS = 22, 6
HBM = [3, 9, 4, 7, 1, 6]
PROMPT = list(range(100, 118))
LOAD = Load(0, 0, 0, 100, 100)

# ----------------------------------------------------------------------------------------- sessions


class Reporter:
    """An engine's session that has begun; ``events`` go with its next report."""

    def __init__(self) -> None:
        self.events: tuple[KvInHbm | RequestOver, ...] = ()
        self.session: RouterSession[control.EngineMessage, control.RouterMessage] = RouterSession(
            lambda number: control.Deregister("stands for a registration"),
            self.report,
            lambda message: None,
            lambda reason: None,
            has_events,
        )
        self.session.due(0.0)
        self.session.receive(unnumbered(Registered(1), "s"), 0.0)

    def report(self) -> Report:
        events, self.events = self.events, ()
        return Report(1, LOAD, events=events)


def test_a_report_with_events_is_resent_until_it_is_acknowledged() -> None:
    reporter = Reporter()
    (plain,) = reporter.session.load(0.0)
    reporter.events = (KvInHbm("a", 0.1),)
    (sent,) = reporter.session.load(0.0)
    assert (plain.number, sent.number) == (0, 1)
    ack = control.Envelope[control.RouterMessage]("s", 0, 0, Ack())
    (again,) = reporter.session.receive(ack, RESEND_AFTER_S)
    assert again.message == sent.message
    acknowledged = msgspec.structs.replace(ack, received=1)
    assert reporter.session.receive(acknowledged, 9.0) == []


def test_changes_of_the_load_are_gathered_for_a_while() -> None:
    reporter = Reporter()
    assert len(reporter.session.due(1.0)) == 1
    reporter.session.load_changed = True
    assert reporter.session.due(1.0 + REPORT_GAP_S / 2) == []
    assert len(reporter.session.due(1.0 + REPORT_GAP_S)) == 1


class Disconnected:
    """A router connection over which nothing is sent."""

    router = "tcp://nowhere:1"

    def wake(self) -> None:
        pass


def test_events_of_a_former_session_are_not_reported_in_the_next() -> None:
    link = ControlLink(
        cast(RouterConnection, Disconnected()),
        lambda number: None,
        lambda: Report(1, LOAD),
        lambda message: None,
        lambda reason: None,
        lambda now_ns: None,
        lambda reason: None,
    )
    link.send(KvInHbm("a", 0.1))
    assert link._report_events().events == (KvInHbm("a", 0.1),)
    link.send(KvInHbm("b", 0.1))
    link._take(Registered(2))
    assert link._report_events().events == ()


# ------------------------------------------------------------------------------------------ engines


@pytest.fixture
def toys() -> Iterator[ToyCluster]:
    made = ToyCluster()
    yield made
    made.close()


def decoding(toys: ToyCluster, *, copied: bool = True) -> DecodeTransfer:
    """Return the transfer of a request of which the KV is complete in the DE's buffer."""
    keys = prompt_keys(TOKENS)
    transfer = toys.load("r", keys, TOKENS, 0, 0)
    toys.forward([(transfer, keys, BlockRun(0, BLOCKS), HBM)])
    decode = DecodeTransfer("r", TOKENS, transfer.de_slots, persist_from=0)
    if copied:
        assert toys.fill(decode, HBM) is None
    return decode


def test_a_request_that_has_ended_at_its_decode_engine_is_released_there(toys: ToyCluster) -> None:
    decoding(toys)
    assert toys.de.report().load.unfinished_requests == 1
    toys.de.manager.ended("r")
    assert [type(m) for m in toys.de.answers(KvInHbm) + toys.de.answers(RequestOver)] == [
        KvInHbm, RequestOver
    ]  # fmt: skip
    assert toys.de.report().load.unfinished_requests == 0
    assert toys.de.manager.persister.drain(9.0)
    assert toys.de.report().load.free_buffer_tokens == toys.de.manager.buffer_tokens
    toys.de.manager.ended("r")
    toys.de.command(Release("r", "it crosses the report"))
    toys.de.answer(Released, "r")
    assert len(toys.de.answers(RequestOver)) == 1


def test_an_end_before_the_copy_is_reported_with_the_copy(toys: ToyCluster) -> None:
    transfer = decoding(toys, copied=False)
    toys.de.manager.ended("r")
    assert toys.de.answers(RequestOver) == []
    assert toys.de.report().load.unfinished_requests == 1
    assert toys.fill(transfer, HBM) is None
    assert toys.de.answer(RequestOver, "r") == RequestOver("r")
    assert toys.de.manager.persister.drain(9.0)
    assert toys.de.report().load.free_buffer_tokens == toys.de.manager.buffer_tokens


def test_a_copy_that_ends_after_the_session_is_not_reported(toys: ToyCluster) -> None:
    transfer = decoding(toys, copied=False)
    toys.de.manager.buffer.pin(transfer.slots)
    toys.de.manager.end_session("the router is lost")
    toys.de.manager._prompts._kv_in_hbm("r", 0.1)
    toys.de.manager.buffer.unpin(transfer.slots)
    assert toys.de.answers(KvInHbm) == []


def test_a_request_that_was_aborted_before_its_copy_waits_for_its_release(toys: ToyCluster) -> None:
    decoding(toys, copied=False)
    toys.de.manager.ended("r")
    assert toys.de.report().load.free_buffer_tokens < toys.de.manager.buffer_tokens
    toys.de.command(Release("r", "its client left"))
    toys.de.answer(Released, "r")
    assert toys.de.answers(RequestOver) == []
    assert toys.de.report().load.free_buffer_tokens == toys.de.manager.buffer_tokens


# --------------------------------------------------------------------------------------- scheduler


def sent(made: Cluster, engine_id: str, kind: type) -> list[control.Message]:
    return [m for m in made.engines[engine_id].received if isinstance(m, kind)]


@pytest.mark.virtual_time
async def test_a_request_that_has_ended_needs_no_release() -> None:
    async with cluster() as made:
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        await asyncio.sleep(2 * OVER_WAIT_S)
        assert sent(made, "p0", Release) == sent(made, "d0", Release) == []
        assert made.engines["d0"].idle()
        assert made.service.scheduler.releases._ending == {}


@pytest.mark.virtual_time
async def test_a_decode_engine_that_does_not_report_the_end_is_sent_a_release() -> None:
    async with cluster() as made:
        d0 = made.engines["d0"]
        d0.ended = lambda request_id: None  # type: ignore[method-assign]
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        await asyncio.sleep(OVER_WAIT_S / 2)
        assert sent(made, "d0", Release) == []
        await asyncio.sleep(OVER_WAIT_S)
        (release,) = sent(made, "d0", Release)
        assert isinstance(release, Release)
        assert release.writer_certain
        await made.settled()


@pytest.mark.virtual_time
async def test_the_loss_of_a_decode_engine_ends_the_wait_for_its_report() -> None:
    async with cluster() as made:
        made.engines["d0"].tokens_come_first = True  # it reports nothing
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        await made.engines["d0"].kill()
        await made.revive("d0")
        await asyncio.sleep(2 * OVER_WAIT_S)
        assert sent(made, "d0", Release) == sent(made, "d0", control.Persist) == []
        assert made.service.scheduler.releases._ending == {}


@pytest.mark.virtual_time
async def test_a_request_that_ends_with_the_first_token_is_stored_and_released() -> None:
    async with cluster() as made:
        assert await made.run(job("a", PROMPT, 1)) == expected(PROMPT, 1)
        await made.settled()
        assert made.stored == set(keys_of(PROMPT))
        assert len(sent(made, "d0", Release)) == 1


@pytest.mark.virtual_time
async def test_the_events_of_a_report_that_another_has_overtaken_count() -> None:
    async with cluster() as made:
        d0 = made.engines["d0"]
        d0.tokens_come_first = True
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert len(made.service.scheduler.releases._ending) == 1
        late = Report(0, LOAD, events=(RequestOver("a"),))
        d0._post(d0.session.send(late, asyncio.get_running_loop().time()))
        await made.delivered(d0)
        assert made.service.scheduler.releases._ending == {}
        state = made.service.registry.get("d0")
        assert state is not None
        assert state.report is not None
        assert state.report.report_seq > 0, "its load does not count"


@pytest.mark.virtual_time
async def test_counters_that_a_report_leaves_out_are_those_before() -> None:
    async with cluster() as made:
        d0 = made.engines["d0"]
        d0.counters = {"h2d_bytes": 7.0}
        d0.report()
        d0.counters = {}
        d0.report()
        await made.delivered(d0)
        state = made.service.registry.get("d0")
        assert state is not None
        assert state.totals()["h2d_bytes"] == 7.0
