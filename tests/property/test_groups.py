"""Groups of ranks at the router: whatever comes, late, twice or never, a whole start or none."""

from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control_network import ControlNetwork
from tests.unit.router_fakes import FakeEngine

from dualpath.core import control
from dualpath.core import control as envelopes
from dualpath.core.cluster import GroupRank, Role, Writer
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.control_server import ControlServer
from dualpath.router.scheduler.registry import Registry

SIZE = 3
TIMEOUT_S = 2.0

ranks = st.integers(0, SIZE - 1)
steps = st.one_of(
    st.tuples(st.just("register"), ranks),
    st.tuples(st.just("restart"), ranks),
    st.tuples(st.just("start all"), st.just(0)),
    st.tuples(st.just("repeat"), st.integers(0, 50)),
    st.tuples(st.just("lose"), ranks),
    st.tuples(st.just("dead"), ranks),
    st.tuples(st.just("goodbye"), ranks),
    st.tuples(st.just("drained"), ranks),
    st.tuples(st.just("silence"), st.just(0)),
)


class Listener:
    """The server's notifications: the ranks of a group join all at once or not at all."""

    def __init__(self) -> None:
        self.live: dict[str, EngineInfo] = {}

    def on_joined(self, info: EngineInfo) -> None:
        assert info.engine_id not in self.live
        self.live[info.engine_id] = info

    def on_lost(self, lost: Sequence[EngineInfo], reason: str) -> None:
        for info in lost:
            assert self.live.pop(info.engine_id).epoch == info.epoch
        assert not self.live, f"{sorted(self.live)} live on without {[i.engine_id for i in lost]}"

    def on_missed(self, missed: Sequence[EngineInfo]) -> None:
        assert not {info.engine_id for info in missed} & set(self.live)

    def on_dead(self, writer: Writer) -> None:
        pass

    def on_message(self, info: EngineInfo, message: control.EngineMessage, received: int) -> None:
        pass

    def in_doubt(self) -> list[Writer]:
        return []


class Group:
    """Ranks as processes; each registers when asked to, and its registrations may be resent."""

    def __init__(self) -> None:
        self.listener = Listener()
        self.now_s = 0.0
        self.registry = Registry()
        self.server = ControlServer(
            self.registry, self.listener, lambda: self.now_s, TIMEOUT_S, ControlNetwork()
        )
        self.engines = [FakeEngine(f"p{rank}", Role.PREFILL, set()) for rank in range(SIZE)]
        self.starts = [0] * SIZE
        self.registrations = [1] * SIZE
        self.sent: list[control.Register] = []

    def step(self, what: str, number: int) -> None:
        engine_id = f"p{number}"
        if what == "register":
            self.registrations[number] += 1
            self.register(number)
        elif what == "restart":
            self.restart(number, max(self.starts) + 1)
        elif what == "start all":
            start = max(self.starts) + 1
            for rank in range(SIZE):
                self.restart(rank, start)
        elif what == "repeat" and self.sent:
            self.receive(self.sent[number % len(self.sent)])
        elif what == "lose":
            self.server.declare_lost(engine_id, "test", certain=False)
        elif what == "dead" and (state := self.registry.get(engine_id)):
            self.server.declare_dead(state.info.writer)
        elif what == "goodbye" and (state := self.registry.get(engine_id)):
            goodbye = control.Deregister("test")
            self.server._receive(state, b"", envelopes.unnumbered(goodbye, state.talk.session))
        elif what == "drained" and (state := self.registry.get(engine_id)):
            state.drained = state.alive
        elif what == "silence":
            self.now_s += 2 * TIMEOUT_S
            self.server._stalls.late_s(self.now_s)
            self.server.check_liveness()

    def restart(self, rank: int, start: int) -> None:
        self.starts[rank], self.registrations[rank] = start, 1
        self.register(rank)

    def register(self, rank: int) -> None:
        self.engines[rank].generation = self.starts[rank]
        dp = GroupRank("p", str(self.starts[rank]), rank, SIZE)
        hello = msgspec.structs.replace(self.engines[rank].hello(self.registrations[rank]), dp=dp)
        self.sent.append(hello)
        self.receive(hello)

    def receive(self, hello: control.Register) -> None:
        self.server._handle(b"peer", [envelopes.encode(envelopes.unnumbered(hello))])


@settings(max_examples=300)
@given(st.lists(steps, max_size=40))
def test_a_group_takes_part_as_one_start_or_not_at_all(happens):
    group = Group()
    for what, number in happens:
        group.step(what, number)
        live = group.listener.live.values()
        assert len(live) in (0, SIZE)
        assert len({info.dp.epoch for info in live if info.dp}) <= 1
        assert {e.engine_id for e in group.registry.alive()} == set(group.listener.live)


@given(st.lists(steps, max_size=40))
def test_a_group_of_restarted_processes_joins(happens):
    """Whatever was before, and whatever comes late meanwhile: it does not wait for ever."""
    group = Group()
    for what, number in happens:
        group.step(what, number)
    late = list(group.sent)
    group.step("start all", 0)
    for hello in late:
        group.receive(hello)
    for rank in range(SIZE):  # a late registration may have ended a session: they register again
        group.step("register", rank)
    group.step("register", 0)
    for rank in range(1, SIZE):
        group.step("register", rank)
    assert len(group.listener.live) == SIZE
    assert {info.dp.epoch for info in group.listener.live.values() if info.dp} == {
        str(group.starts[0])
    }
