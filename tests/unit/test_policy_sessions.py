"""Blocks that are retained for an agent's next turn, and blocks that are prefetched for it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.blocks import BlockKey, block_keys
from dualpath.core.errors import BadRequestError
from dualpath.core.session_hints import NO_HINTS, SessionHints, session_hints
from dualpath.policy.session_warmth import (
    ASKED,
    DISPLACED,
    DONE,
    EXPECTED,
    RETAIN,
    DecodeBuffer,
    Order,
    SessionWarmth,
    WarmthSettings,
)

BUFFERS = {engine: DecodeBuffer(blocks=100, blocks_per_s=10.0) for engine in ("d0", "d1")}


def context(agent: int, blocks: int) -> tuple[BlockKey, ...]:
    return tuple(block_keys([agent] * blocks, 1))


class Router:
    """Plays turns of agents against the policy, at the times that a test says."""

    def __init__(self, **settings: Any) -> None:
        self.warmth = SessionWarmth(WarmthSettings(**({"budget_share": 0.5} | settings)))

    def turn(
        self,
        agent: int,
        start_s: float,
        end_s: float,
        blocks: int = 10,
        answer: int = 2,
        engine: str = "d0",
        **hints: Any,
    ) -> list[Order]:
        keys = context(agent, blocks + answer)
        session_hints = SessionHints(**hints)
        name = self.warmth.turn_began("", session_hints, keys[:blocks], start_s)
        return self.warmth.turn_ended(name, blocks, keys, engine, end_s, BUFFERS)


def test_a_session_with_a_retain_hint_is_retained_where_it_was_decoded() -> None:
    router = Router()
    (order,) = router.turn(1, 0.0, 5.0, session_id="a", retain_s=30.0)
    assert order == Order(
        "d0", context(1, 12), 30.0, False, RETAIN, expected_s=30.0, assigned_blocks=10
    )


def test_nothing_is_retained_for_a_session_without_hints() -> None:
    assert Router().turn(1, 0.0, 5.0) == []


def test_the_next_turn_is_recognised_by_its_keys_and_expected_after_the_usual_pause() -> None:
    router = Router()
    router.turn(1, 0.0, 5.0, blocks=10)
    router.turn(1, 15.0, 20.0, blocks=12)
    # 14 blocks take 1.4 s to read, and others read besides; the pause was 10 s.
    assert router.warmth.next_s() == pytest.approx(20.0 + 10.0 - 2 * 1.4)
    assert router.warmth.due(27.1, BUFFERS) == []
    (order,) = router.warmth.due(27.3, BUFFERS)
    assert (order.engine_id, order.keys, order.fetch) == ("d0", context(1, 14), True)
    assert order.reason == EXPECTED
    assert order.expected_s == pytest.approx(2.7)
    assert order.retain_s == pytest.approx(2.7 + 40.0)
    assert router.warmth.due(29.0, BUFFERS) == []


def test_an_answer_that_comes_back_in_other_tokens_still_continues_its_session() -> None:
    router = Router()
    router.turn(1, 0.0, 5.0, blocks=10, answer=2)
    other = (*context(1, 10), *context(2, 3))
    router.warmth.turn_began("", NO_HINTS, other, 9.0)
    assert len(router.warmth) == 1


def test_a_clients_hint_of_its_next_turn_is_used() -> None:
    router = Router(prefetch=False)
    (retained,) = router.turn(1, 0.0, 5.0, session_id="a", next_turn_s=60.0)
    assert (retained.fetch, retained.reason, retained.expected_s) == (False, RETAIN, 60.0)
    assert retained.retain_s > 60.0
    assert router.warmth.next_s() == pytest.approx(5.0 + 60.0 - 2 * 1.2)


def test_without_prefetching_only_what_clients_ask_for_is_brought_back() -> None:
    router = Router(prefetch=False)
    router.turn(1, 0.0, 5.0, session_id="a")
    router.turn(1, 15.0, 20.0, session_id="a")
    assert router.warmth.next_s() is None
    (order,) = router.warmth.hint(("", "a"), SessionHints(next_turn_s=0.0), 21.0, BUFFERS)
    assert order.fetch
    assert order.reason == ASKED


def test_a_client_may_send_more_hints_while_its_tool_runs() -> None:
    router = Router()
    router.turn(1, 0.0, 5.0, session_id="a")
    (retained,) = router.warmth.hint(
        ("", "a"), SessionHints(retain_s=9.0, next_turn_s=30.0), 10.0, BUFFERS
    )
    assert (retained.retain_s, retained.reason) == (9.0, RETAIN)
    (order,) = router.warmth.due(10.0 + 30.0 - 2 * 1.1, BUFFERS)
    assert order.fetch
    (last,) = router.warmth.hint(("", "a"), SessionHints(done=True), 41.0, BUFFERS)
    assert last.reason == DONE


def test_hints_for_an_unknown_or_running_session_have_no_effect() -> None:
    router = Router()
    assert router.warmth.hint(("", "a"), SessionHints(next_turn_s=0.0), 1.0, BUFFERS) == []
    router.warmth.turn_began("", SessionHints(session_id="a"), (), 2.0)
    assert router.warmth.hint(("", "a"), SessionHints(next_turn_s=0.0), 3.0, BUFFERS) == []


def test_a_client_may_ask_for_no_prefetching() -> None:
    router = Router()
    router.turn(1, 0.0, 5.0, session_id="a", prefetch=False)
    router.turn(1, 15.0, 20.0, session_id="a", prefetch=False)
    assert router.warmth.next_s() is None


def test_a_session_that_is_done_leaves_first() -> None:
    router = Router()
    router.turn(1, 0.0, 5.0, session_id="a", retain_s=30.0)
    (order,) = router.turn(1, 6.0, 8.0, session_id="a", done=True)
    assert order == Order("d0", context(1, 12), 0.0, False, DONE, assigned_blocks=10)
    assert len(router.warmth) == 0
    assert router.warmth.retained_blocks("d0") == 0
    assert router.warmth.done(("", "a")) == []


def test_retained_blocks_stay_within_their_share_of_the_buffer() -> None:
    router = Router()  # 50 of 100 blocks
    retained = [router.turn(a, 0.0, 5.0, session_id=f"{a}", retain_s=30.0) for a in range(5)]
    assert [len(orders) for orders in retained] == [1, 1, 1, 1, 0]
    assert router.warmth.over_budget == 1
    # Each buffer has its own share, and a retention that has expired makes room.
    assert router.turn(6, 0.0, 5.0, session_id="6", retain_s=30.0, engine="d1")
    router.warmth.due(36.0, BUFFERS)
    assert router.turn(7, 36.0, 37.0, session_id="7", retain_s=30.0)


def test_a_session_with_a_sooner_turn_displaces_one_with_a_later_turn() -> None:
    router = Router()  # four of 12 blocks fit
    for agent, next_turn_s in enumerate((40.0, 10.0, 30.0, 20.0)):
        router.turn(agent, 0.0, 5.0, session_id=f"{agent}", next_turn_s=next_turn_s)
    displaced, retained = router.turn(4, 0.0, 5.0, session_id="4", next_turn_s=25.0)
    assert displaced == Order("d0", context(0, 12), 0.0, False, DISPLACED, assigned_blocks=10)
    assert (retained.keys, retained.reason) == (context(4, 12), RETAIN)
    assert router.turn(5, 0.0, 5.0, session_id="5", next_turn_s=35.0) == []
    assert router.warmth.retained_blocks("d0") == 48
    # It comes back when its own turn is near, as two others' are over by then.
    for agent in (1, 3):
        router.warmth.turn_began("", SessionHints(session_id=f"{agent}"), (), 30.0)
    orders = router.warmth.due(45.0, BUFFERS)
    assert (ASKED, context(0, 12)) in [(order.reason, order.keys) for order in orders]


def test_what_clients_ask_for_does_not_give_way_to_a_guess() -> None:
    router = Router()
    for agent in range(4):
        router.turn(agent, 0.0, 5.0, session_id=f"{agent}", next_turn_s=1000.0)
    for turn in range(3):  # of an agent that waits a second for each tool
        router.turn(9, turn * 6.0, turn * 6.0 + 5.0)
    assert router.warmth.over_budget == 2
    assert router.warmth.retained_blocks("d0") == 48


def test_blocks_at_another_engine_than_the_last_turns_are_released() -> None:
    router = Router()
    router.turn(1, 0.0, 5.0, session_id="a", retain_s=30.0)
    left, retained = router.turn(
        1, 9.0, 12.0, blocks=12, engine="d1", session_id="a", retain_s=30.0
    )
    assert left == Order("d0", context(1, 12), 0.0, False, DISPLACED, assigned_blocks=10)
    assert (retained.engine_id, retained.keys) == ("d1", context(1, 14))
    assert router.warmth.retained_blocks("d0") == 0


def test_nothing_is_brought_back_to_a_lost_engine() -> None:
    router = Router()
    router.turn(1, 0.0, 5.0, session_id="a", retain_s=30.0, next_turn_s=10.0)
    router.warmth.engine_lost("d0")
    assert router.warmth.retained_blocks("d0") == 0
    assert router.warmth.due(100.0, BUFFERS) == []
    again = SessionHints(next_turn_s=0.0)
    assert router.warmth.hint(("", "a"), again, 100.0, BUFFERS) == []


def test_tenants_do_not_share_names() -> None:
    warmth = Router().warmth
    hints = SessionHints(session_id="a")
    assert warmth.turn_began("t", hints, (), 0.0) != warmth.turn_began("u", hints, (), 0.0)


def test_sessions_are_removed_beyond_the_bound() -> None:
    router = Router(most_blocks=3 * (12 + 16))
    for agent in range(10):
        router.turn(agent, 0.0, 5.0)
    assert len(router.warmth) == 3  # of 12 blocks, and 16 for each session


@pytest.mark.parametrize("session_id", ["", "named"])
@pytest.mark.parametrize("kind", ["short", "failed", "not cached", "done"])
def test_no_kind_of_traffic_grows_the_memory_without_a_bound(kind: str, session_id: str) -> None:
    warmth = Router(most_blocks=160).warmth
    for number in range(1000):
        keys = () if kind == "short" else context(number, 2)
        hints = SessionHints(
            session_id=session_id and f"{session_id}-{number}", done=kind == "done", retain_s=5.0
        )
        name = warmth.turn_began("t", hints, keys, float(number))
        if kind in ("short", "done"):
            warmth.turn_ended(name, len(keys), keys, f"d{number}", float(number), BUFFERS)
            warmth.engine_lost(f"d{number}")
    assert len(warmth) <= 10
    assert len(warmth._agenda) + len(warmth._retained) + len(warmth._memory._by_tail) < 100


def test_outdated_plans_are_removed() -> None:
    router = Router()
    for turn in range(1000):
        router.turn(1, turn * 10.0, turn * 10.0 + 5.0, session_id="a", retain_s=80_000.0)
    assert len(router.warmth._agenda) < 100


turns = st.tuples(
    st.integers(0, 3),
    st.integers(1, 20),
    st.sampled_from(["d0", "d1"]),
    st.sampled_from([None, 0.0, 3.0, 50.0]),
    st.sampled_from([None, 0.0, 7.0, 40.0]),
    st.booleans(),
    st.floats(0.0, 20.0),
)


@given(st.lists(turns, max_size=30))
def test_retained_blocks_stay_in_their_budget_and_expire(
    played: list[tuple[int, int, str, float | None, float | None, bool, float]],
) -> None:
    router, now_s = Router(), 0.0
    for agent, blocks, engine, retain_s, next_turn_s, done, pause_s in played:
        router.turn(
            *(agent, now_s, now_s + 1.0, blocks, 1, engine),
            session_id=str(agent), retain_s=retain_s, next_turn_s=next_turn_s, done=done,
        )  # fmt: skip
        now_s += 1.0 + pause_s
        router.warmth.due(now_s, BUFFERS)
        assert all(0 <= router.warmth.retained_blocks(engine_id) <= 50 for engine_id in BUFFERS)
    for _ in range(3):  # Blocks of a due turn may have to be retained for longer.
        now_s += 10_000.0
        router.warmth.due(now_s, BUFFERS)
    assert all(router.warmth.retained_blocks(engine_id) == 0 for engine_id in BUFFERS)
    assert router.warmth.next_s() is None


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        ({}, NO_HINTS),
        ({"temperature": 1}, NO_HINTS),
        ({"session_id": "a", "retain_s": 5}, SessionHints("a", retain_s=5.0)),
        ({"done": 1, "prefetch": 0}, SessionHints(done=True, prefetch=False)),
        ({"next_turn_s": 2.5}, SessionHints(next_turn_s=2.5)),
    ],
)
def test_hints_are_among_custom_arguments(arguments: dict[str, Any], hints: SessionHints) -> None:
    assert session_hints(arguments) == hints


def test_a_name_given_otherwise_wins() -> None:
    assert session_hints({"session_id": "a"}, "b").session_id == "b"


@pytest.mark.parametrize(
    "arguments",
    [
        {"retain_s": -1},
        {"retain_s": "long"},
        {"retain_s": float("nan")},
        {"next_turn_s": 1e9},
        {"done": "perhaps"},
        {"session_id": 7},
        {"session_id": "a\nb"},
    ],
)
def test_a_hint_that_cannot_be_is_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=next(iter(arguments))):
        session_hints(arguments)
