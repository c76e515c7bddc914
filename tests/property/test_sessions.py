"""Sessions: nothing is lost, doubled or out of order, whatever becomes of the connection."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.control import EngineMessage, RouterMessage, Sync
from dualpath.core.envelopes import FromEngine, FromRouter
from dualpath.core.request_messages import Released
from dualpath.core.sessions import (
    ENGINE_TABLE,
    REPEAT_AFTER_S,
    ROUTER_TABLE,
    Action,
    Conversation,
    EngineEnd,
    Event,
    Machine,
    RouterEnd,
)


class Line:
    """Both ends of a session and the messages between them, which may be lost or come twice."""

    def __init__(self) -> None:
        self.router: Conversation[RouterMessage, EngineMessage] = Conversation("s")
        self.engine: Conversation[EngineMessage, RouterMessage] = Conversation("s")
        self.to_engine: deque[FromRouter] = deque()
        self.to_router: deque[FromEngine] = deque()
        self.said: dict[str, list[int]] = {"router": [], "engine": []}
        self.taken: dict[str, list[int]] = {"router": [], "engine": []}
        self.now_s = 0.0

    def say(self, end: str, number: int) -> None:
        if end == "router":
            self.to_engine.append(self.router.say(Sync(number), self.now_s))
        else:
            self.to_router.append(self.engine.say(Released(str(number)), self.now_s))
        self.said[end].append(number)

    def mention(self) -> None:
        """Heartbeats of both ends."""
        self.to_engine.append(self.router.mention(Sync(-1)))
        self.to_router.append(self.engine.mention(Released("-1")))

    def arrive(self) -> None:
        """Let everything under way arrive."""
        while self.to_engine:
            message, again = self.engine.hear(self.to_engine.popleft(), self.now_s)
            self.to_router.extend(again)
            if isinstance(message, Sync) and message.call_id >= 0:
                self.taken["router"].append(message.call_id)
        while self.to_router:
            answer, missing = self.router.hear(self.to_router.popleft(), self.now_s)
            self.to_engine.extend(missing)
            if isinstance(answer, Released) and answer.request_id != "-1":
                self.taken["engine"].append(int(answer.request_id))

    def reset(self) -> None:
        self.to_engine.clear()
        self.to_router.clear()

    def twice(self) -> None:
        self.to_engine.extend(self.to_engine.copy())
        self.to_router.extend(self.to_router.copy())

    def reorder(self) -> None:
        self.to_engine.reverse()
        self.to_router.reverse()


STEPS = ["router", "engine", "mention", "arrive", "reset", "twice", "reorder", "wait"]


@given(st.lists(st.sampled_from(STEPS), max_size=60))
def test_what_was_said_is_taken_up_once_and_in_order(steps):
    line = Line()
    for number, step in enumerate(steps):
        if step in ("router", "engine"):
            line.say(step, number)
        elif step == "wait":
            line.now_s += REPEAT_AFTER_S
        else:
            getattr(line, step)()
        for end, taken in line.taken.items():
            assert taken == line.said[end][: len(taken)]
    for _ in range(4):  # heartbeats go on, and the connection is there again
        line.now_s += REPEAT_AFTER_S
        line.mention()
        line.arrive()
        line.arrive()
    assert line.taken == line.said
    line.mention()
    line.arrive()
    assert line.router.unacknowledged == line.engine.unacknowledged == 0


@given(st.lists(st.sampled_from(STEPS), max_size=60))
def test_nothing_is_said_again_while_the_other_end_is_silent_or_just_slow(steps):
    line = Line()
    for number, step in enumerate(steps):
        if step in ("router", "engine"):
            line.say(step, number)
    before = len(line.to_engine), len(line.to_router)
    line.now_s += REPEAT_AFTER_S / 2
    line.router.hear(line.engine.mention(Released("-1")), line.now_s)
    assert (len(line.to_engine), len(line.to_router)) == before


@pytest.mark.parametrize(("table", "ends"), [(ENGINE_TABLE, EngineEnd), (ROUTER_TABLE, RouterEnd)])
def test_a_table_says_one_thing_for_each_state_and_event(table, ends):
    keys = [(row.state, row.event) for row in table]
    assert len(set(keys)) == len(keys)
    assert {row.state for row in table} | {row.following for row in table} == set(ends)


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_sessions_open_and_end_in_turn_at_both_ends(events):
    """Whatever happens in whatever order: nothing ends twice, nothing opens over another one."""
    engine, router = Machine(ENGINE_TABLE, EngineEnd.AWAY), Machine(ROUTER_TABLE, RouterEnd.UNKNOWN)
    for on, opens, ends in (
        (engine.on, Action.BEGIN, Action.END),
        (router.on, Action.JOIN, Action.LOSE),
    ):
        turns = [a for event in events for a in on(event) if a in (opens, ends)]
        assert turns == [opens if i % 2 == 0 else ends for i in range(len(turns))]


def test_every_event_has_a_row() -> None:
    """One without a row would be none, and stand in no table of the reference."""
    assert {row.event for table in (ENGINE_TABLE, ROUTER_TABLE) for row in table} == set(Event)
