"""Sessions: nothing is lost, doubled or out of order, whatever happens to the connection."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.control import (
    EngineMessage,
    FromEngine,
    FromRouter,
    Released,
    RouterMessage,
    Sync,
)
from dualpath.core.sessions import (
    ENGINE_TABLE,
    RESEND_AFTER_S,
    ROUTER_TABLE,
    Action,
    Channel,
    EngineSideState,
    Event,
    RouterSideState,
    StateMachine,
)


class Line:
    """Both ends of a session and the messages between them, which may be lost or duplicated."""

    def __init__(self) -> None:
        self.router: Channel[RouterMessage, EngineMessage] = Channel("s")
        self.engine: Channel[EngineMessage, RouterMessage] = Channel("s")
        self.to_engine: deque[FromRouter] = deque()
        self.to_router: deque[FromEngine] = deque()
        self.sent: dict[str, list[int]] = {"router": [], "engine": []}
        self.delivered: dict[str, list[int]] = {"router": [], "engine": []}
        self.now_s = 0.0

    def send(self, end: str, number: int) -> None:
        if end == "router":
            self.to_engine.append(self.router.send(Sync(number), self.now_s))
        else:
            self.to_router.append(self.engine.send(Released(str(number)), self.now_s))
        self.sent[end].append(number)

    def heartbeat(self) -> None:
        """Heartbeats of both ends."""
        self.to_engine.append(self.router.send_lossy(Sync(-1)))
        self.to_router.append(self.engine.send_lossy(Released("-1")))

    def arrive(self) -> None:
        """Let everything under way arrive."""
        while self.to_engine:
            message, again = self.engine.receive(self.to_engine.popleft(), self.now_s)
            self.to_router.extend(again)
            if isinstance(message, Sync) and message.call_id >= 0:
                self.delivered["router"].append(message.call_id)
        while self.to_router:
            answer, missing = self.router.receive(self.to_router.popleft(), self.now_s)
            self.to_engine.extend(missing)
            if isinstance(answer, Released) and answer.request_id != "-1":
                self.delivered["engine"].append(int(answer.request_id))

    def reset(self) -> None:
        self.to_engine.clear()
        self.to_router.clear()

    def twice(self) -> None:
        self.to_engine.extend(self.to_engine.copy())
        self.to_router.extend(self.to_router.copy())

    def reorder(self) -> None:
        self.to_engine.reverse()
        self.to_router.reverse()


STEPS = ["router", "engine", "heartbeat", "arrive", "reset", "twice", "reorder", "wait"]


@given(st.lists(st.sampled_from(STEPS), max_size=60))
def test_every_message_is_delivered_once_and_in_order(steps):
    line = Line()
    for number, step in enumerate(steps):
        if step in ("router", "engine"):
            line.send(step, number)
        elif step == "wait":
            line.now_s += RESEND_AFTER_S
        else:
            getattr(line, step)()
        for end, delivered in line.delivered.items():
            assert delivered == line.sent[end][: len(delivered)]
    for _ in range(4):  # heartbeats go on, and the connection works again
        line.now_s += RESEND_AFTER_S
        line.heartbeat()
        line.arrive()
        line.arrive()
    assert line.delivered == line.sent
    line.heartbeat()
    line.arrive()
    assert line.router.unacknowledged == line.engine.unacknowledged == 0


@given(st.lists(st.sampled_from(STEPS), max_size=60))
def test_nothing_is_resent_while_the_other_end_is_silent_or_just_slow(steps):
    line = Line()
    for number, step in enumerate(steps):
        if step in ("router", "engine"):
            line.send(step, number)
    before = len(line.to_engine), len(line.to_router)
    line.now_s += RESEND_AFTER_S / 2
    line.router.receive(line.engine.send_lossy(Released("-1")), line.now_s)
    assert (len(line.to_engine), len(line.to_router)) == before


@pytest.mark.parametrize(
    ("table", "ends"), [(ENGINE_TABLE, EngineSideState), (ROUTER_TABLE, RouterSideState)]
)
def test_a_table_has_at_most_one_transition_for_each_state_and_event(table, ends):
    keys = [(row.state, row.event) for row in table]
    assert len(set(keys)) == len(keys)
    assert {row.state for row in table} | {row.next_state for row in table} == set(ends)


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_sessions_open_and_end_alternately_at_both_ends(events):
    """In any order of events nothing ends twice, and nothing opens while another one is open."""
    engine, router = (
        StateMachine(ENGINE_TABLE, EngineSideState.UNREGISTERED),
        StateMachine(ROUTER_TABLE, RouterSideState.UNKNOWN),
    )
    for on, opens, ends in (
        (engine.on, Action.BEGIN_SESSION, Action.END_SESSION),
        (router.on, Action.ADD_ENGINE, Action.REMOVE_ENGINE),
    ):
        turns = [a for event in events for a in on(event) if a in (opens, ends)]
        assert turns == [opens if i % 2 == 0 else ends for i in range(len(turns))]


def test_every_event_has_a_transition() -> None:
    """An event without a transition would have no effect and be missing in the reference."""
    assert {row.event for table in (ENGINE_TABLE, ROUTER_TABLE) for row in table} == set(Event)
