"""The scheduler's work per message and per turn does not grow with the number of engines.

Tests count what is looked at, sent or asked; none takes a time.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.front_end_links import link_server
from tests.unit.router_cluster import cluster
from tests.unit.router_fakes import FakeEngine, expected, job

from dualpath.core import control
from dualpath.core.cluster import GroupRank, HostProcess, Role
from dualpath.core.control import CacheUpdate, Load, Report
from dualpath.core.modes import Mode
from dualpath.core.sessions import (
    HEARTBEAT_S,
    HEARTBEATS_PER_TIMEOUT,
    MOST_HEARTBEATS_PER_S,
    Event,
    heartbeat_s,
)
from dualpath.engine.control.link import RouterSession
from dualpath.router.engines import EngineInfo
from dualpath.router.refusals import ControlRefusals
from dualpath.router.scheduler import cached_blocks, control_socket
from dualpath.router.scheduler import link_messages as m
from dualpath.router.scheduler.cached_blocks import CachedBlockIndex
from dualpath.router.scheduler.control_server import ControlServer
from dualpath.router.scheduler.control_socket import ControlConnections
from dualpath.router.scheduler.exchange import Exchange
from dualpath.router.scheduler.front_end_server import FrontEndServer
from dualpath.router.scheduler.pauses import Pauses
from dualpath.router.scheduler.registry import Admission, EngineState, Registry

RANKS = 8


class Watched(dict[str, EngineState]):
    """A table of engines that notes which functions look at all of them."""

    def __init__(self, engines: dict[str, EngineState]) -> None:
        super().__init__(engines)
        self.scans: list[str] = []

    def values(self) -> Any:
        self.scans.append(sys._getframe(1).f_code.co_name)
        return super().values()

    def items(self) -> Any:
        self.scans.append(sys._getframe(1).f_code.co_name)
        return super().items()

    def __iter__(self) -> Iterator[str]:
        self.scans.append(sys._getframe(1).f_code.co_name)
        return super().__iter__()


def rank_of(number: int, role: Role = Role.DECODE, epoch: str = "1") -> FakeEngine:
    """Return an engine of a cluster in which each group has ``RANKS`` ranks."""
    engine = FakeEngine(f"{role.value}-{number}", role, set())
    engine.dp = GroupRank(f"{role.value} {number // RANKS}", epoch, number % RANKS, RANKS)
    return engine


def admit(registry: Registry, engine: FakeEngine) -> Admission:
    admission = registry.admit(engine.hello())
    assert admission is not None
    admission.engine.machine.on(admission.event)
    return admission


def watched_registry(engines: int) -> tuple[Registry, Watched]:
    registry = Registry()
    for number in range(engines):
        state = admit(registry, rank_of(number)).engine
        state.machine.on(Event.GROUP_COMPLETE)
        registry.open(state, f"session {number}", 0.0)
    watched = registry._engines = Watched(registry._engines)
    return registry, watched


def report(seq: int = 1, *, draining: str | None = None) -> Report:
    return Report(seq, Load(0, 0, 0, 0, 0), draining=draining)


async def test_a_registration_is_checked_without_a_look_at_other_groups() -> None:
    registry, watched = watched_registry(10 * RANKS)
    for number in (0, 10 * RANKS):
        info = admit(registry, rank_of(number)).engine.info
        assert len(registry.group(info)) == (RANKS if number == 0 else 1)
        registry.waits_for(info)
    assert registry.by_session("session 3") is registry.get("decode-3")
    assert registry.by_session("unknown") is None
    neighbour = registry.neighbour("container of decode-3-0")
    assert neighbour is not None
    assert neighbour.engine_id == "decode-3"
    assert registry.unproven() == []
    assert watched.scans == []


async def test_a_report_is_taken_without_a_look_at_other_groups() -> None:
    registry, watched = watched_registry(10 * RANKS)
    sent: list[str] = []
    paused: Any = Paused()
    pauses = Pauses(registry, Exchange(), lambda name, message: sent.append(name), lambda: paused)
    state = registry.get("decode-3")
    assert state is not None
    state.report = report()
    pauses.reported(state.info, state.report)
    assert sent == []
    state.report = report(2, draining="SIGTERM")
    pauses.reported(state.info, state.report)
    assert sent == ["decode-3"]
    assert watched.scans == []
    assert {state.info.engine_id for state in registry.all() if state.pauses} == {
        f"decode-{number}" for number in range(RANKS)
    }


class Paused:
    """A dispatcher that takes pauses."""

    def pause(self, engine_id: str, *, paused: bool) -> None:
        pass


async def test_acknowledgements_and_heartbeats_go_to_those_that_need_one() -> None:
    registry, watched = watched_registry(10 * RANKS)
    now_s = 0.0
    server = ControlServer(registry, None, lambda: now_s, 3.0)  # type: ignore[arg-type]
    sent: Counter[bytes] = Counter()
    server.loops.post = lambda identity, frame: sent.update([identity])  # type: ignore[method-assign]
    states = [registry.get(f"decode-{number}") for number in range(10 * RANKS)]
    for number, state in enumerate(states):
        assert state is not None
        state.identity = b"%d" % number
        server.send(state.info.engine_id, control.Sync(1))
    sent.clear()
    first = states[0]
    assert first is not None
    envelope: control.FromEngine = control.Envelope("session 0", 1, 0, control.Synced(1))
    server._listener = Listener()  # type: ignore[assignment]
    server._receive(first, b"0", envelope)
    server._acknowledge()
    assert sent == {b"0": 1}
    sent.clear()
    now_s = HEARTBEAT_S
    server._acknowledge()
    assert sum(sent.values()) == 10 * RANKS
    server._acknowledge()
    assert sum(sent.values()) == 10 * RANKS
    assert watched.scans == []


def test_heartbeats_of_all_engines_are_bounded() -> None:
    assert heartbeat_s(96, 5.0) == HEARTBEAT_S
    for engines in (1152, 4096):
        most_per_s = max(MOST_HEARTBEATS_PER_S, engines / 2.5)
        assert engines / heartbeat_s(engines, 1e6) == pytest.approx(most_per_s)
    # An engine is not declared lost because a heartbeat or two are late.
    for engines in (1, 1152, 4096):
        assert heartbeat_s(engines, 5.0) * HEARTBEATS_PER_TIMEOUT <= 5.0
    assert heartbeat_s(4096, 0.1) == HEARTBEAT_S


async def test_engines_report_as_often_as_the_router_asks_for() -> None:
    reports: list[control.Report] = []

    def reporting() -> control.Report:
        reports.append(report())
        return reports[-1]

    session: RouterSession[control.EngineMessage, control.RouterMessage] = RouterSession(
        lambda registration: rank_of(0).hello(registration),
        reporting,
        lambda message: None,
        lambda reason: None,
    )
    session.due(0.0)
    session.receive(control.unnumbered(control.Registered(1), "s"), 0.0)
    now_s = 0.0
    for asked_s, expected_reports in ((None, 20), (2.0, 5), (None, 20)):
        session.receive(control.unnumbered(control.Ack(asked_s), "s"), now_s)
        session.load(now_s)
        reports.clear()
        for _ in range(40):
            now_s += 0.25
            session.receive(control.unnumbered(control.Ack(asked_s), "s"), now_s)
            session.due(now_s)
        assert len(reports) == expected_reports


class Listener:
    """Takes messages."""

    def on_message(self, *message: object) -> None:
        pass


async def test_a_turn_looks_at_no_list_of_all_engines() -> None:
    async with cluster(4, 8) as made:
        watched = made.service.registry._engines = Watched(made.service.registry._engines)
        assert await made.run(job("a", range(30))) == expected(range(30), 6)
        # Timers look at all engines a few times a second, however many turns there are.
        assert set(watched.scans) <= {"all", "silent", "staying"}


async def test_an_engine_that_joins_is_announced_to_no_engine() -> None:
    async with cluster(3, 5) as made:
        received = [message for engine in made.engines.values() for message in engine.received]
        kinds = {type(message) for message in received}
        assert kinds <= {control.Registered, control.Ack, control.Sync}


async def test_engines_are_named_only_to_those_that_share_a_request() -> None:
    async with cluster(3, 5) as made:
        for number in range(6):
            await made.run(job(f"r{number}", range(9)))
        ups = [
            (engine.engine_id, peer.engine_id)
            for engine in made.engines.values()
            for peer in engine.named_peers()
        ]
        placed = {(r.engines["prefill"], r.engines["decode"]) for r in _records(made)}
        assert {*ups} == placed | {(decode, prefill) for prefill, decode in placed}
        assert len(ups) == len({*ups})


def _records(made: Any) -> list[Any]:
    placements = made.service.scheduler.dispatch.recent
    return [Record(one.assignment) for one in placements]


class Record:
    """The engines of a placement."""

    def __init__(self, assignment: Any) -> None:
        self.engines = {"prefill": assignment.prefill_engine, "decode": assignment.decode_engine}


@pytest.mark.virtual_time
async def test_a_loss_is_sent_to_the_engines_that_know_the_lost_one() -> None:
    async with cluster(1, 3) as made:
        await made.run(job("a", range(9)))
        (placed,) = _records(made)
        other = next(
            e for e in made.engines.values()
            if e.role is Role.DECODE and e.engine_id != placed.engines["decode"]
        )  # fmt: skip
        await made.engines[placed.engines["prefill"]].kill()
        await made.service.saw_loss(placed.engines["prefill"])
        await made.engines[placed.engines["decode"]].saw(control.PeerDown)
        assert not any(isinstance(message, control.PeerDown) for message in other.received)


@pytest.mark.virtual_time
async def test_front_ends_are_sent_each_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[m.SchedulerMessage] = []
    send = FrontEndServer._send

    def counting(self: FrontEndServer, front_end: Any, message: m.SchedulerMessage) -> None:
        sent.append(message)
        send(self, front_end, message)

    monkeypatch.setattr(FrontEndServer, "_send", counting)
    async with (
        cluster(1, 1) as made,
        link_server(made.service.scheduler) as opened,
        opened.link("f") as link,
    ):
        await link.wait_for_engines(1, 1, 10.0)
        sent.clear()
        for number in range(6):
            await made.add(f"more-{number}", Role.DECODE)
        await link.wait_for_engines(1, 7, 10.0)
        snapshots = [x for x in sent if isinstance(x, m.EnginesUpdate)]
        changes = [x for x in sent if isinstance(x, m.EnginesChanged)]
        assert len(snapshots) <= 1  # The first engine may bring what all have in common.
        assert [len(x.joined) for x in changes] == [1] * len(changes)
        # Metadata of transports is for engines only.
        assert b"metadata" not in msgspec.msgpack.encode(changes)
        await made.engines["more-3"].kill()
        await made.service.saw_loss("more-3")
        assert sent[-1] == m.EnginesChanged(lost=(("more-3", "more-3-1"),))


@pytest.mark.virtual_time
async def test_a_front_end_knows_the_engines_although_frames_are_lost_and_come_twice() -> None:
    async with (
        cluster(1, 1) as made,
        link_server(made.service.scheduler) as opened,
        opened.link("f") as link,
    ):
        await link.wait_for_engines(1, 1, 10.0)
        for number in range(8):
            link.connection.reset()
            await made.add(f"more-{number}", Role.DECODE)
            if number % 3 == 2:
                await made.engines[f"more-{number - 1}"].kill()
                await made.service.saw_loss(f"more-{number - 1}")
        await link.wait_for_engines(1, 7, 60.0)
        assert link.engines.alive() == made.service.registry.alive()


# ------------------------------------------------------------------------ cached blocks

KEYS = [bytes([number]) * 32 for number in range(8)]


def info(number: int) -> EngineInfo:
    return EngineInfo(
        engine_id=f"d{number}", epoch="1", role=Role.DECODE, node="n", group="g", api_url="",
        process=HostProcess(), order=number, hbm_tokens=1, buffer_tokens=64 * 100,
    )  # fmt: skip


def test_only_places_with_the_first_block_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    index = CachedBlockIndex()
    for number in range(100):
        index.engine_joined(info(number), 64)
    index.update("d70", CacheUpdate(added=tuple(KEYS[:3])))
    index.update("d20", CacheUpdate(added=tuple(KEYS[:5])))
    index.update("d30", CacheUpdate(added=tuple(KEYS[1:])))
    searched: list[object] = []
    head = cached_blocks._Place.head

    def counting(place: cached_blocks._Place, keys: list[bytes]) -> int:
        searched.append(place)
        return head(place, keys)

    monkeypatch.setattr(cached_blocks._Place, "head", counting)
    found = index.prefixes(KEYS, Mode.DUALPATH)
    assert [(one.engine_id, one.blocks) for one in found] == [("d20", 5), ("d70", 3)]
    assert len(searched) == 2
    index.engine_lost(info(20))
    index.update("d70", CacheUpdate(removed=(KEYS[0],)))
    assert index.prefixes(KEYS, Mode.DUALPATH) == ()
    for number in range(100):
        index.engine_lost(info(number))
    assert not index._places
    assert not index._readers


# ------------------------------------------------------------------------ connections


async def test_the_kernel_is_asked_about_some_connections_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    memory = [0]

    def received_bytes(file: int) -> int:
        asked.append(file)
        return 100

    monkeypatch.setattr(control_socket, "_received_bytes", received_bytes)
    monkeypatch.setattr(control_socket, "resident_bytes", lambda: memory[0])
    connections = ControlConnections.__new__(ControlConnections)
    connections._refusals = ControlRefusals()
    connections._taken = dict.fromkeys(range(1000), 100)
    connections._held, connections._unasked, connections._memory_bytes = {}, [], 0
    for _ in range(16):
        before = len(asked)
        connections.check_some()
        assert len(asked) - before <= control_socket._ASKED_AT_ONCE
    assert set(asked) == set(range(1000))
    asked.clear()
    memory[0] = control_socket.MOST_HELD_BYTES + 1
    connections.check_some()
    assert set(asked) == set(range(1000))
