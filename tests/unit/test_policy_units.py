"""Which unit, a scheduler with its engines, serves a request: stories about one front end."""

import msgspec
import pytest

from dualpath.policy.units import (
    AFFINITY,
    HASH,
    HOME_DRAINING,
    HOME_FAILED,
    HOME_FULL,
    HOME_LOST,
    HOME_SILENT,
    HOME_SMALL,
    LOAD,
    NONE_SERVES,
    Turn,
    UnitPolicy,
    UnitState,
)

A, B, C = (UnitState(name, serves=True, capacity_tokens=1000) for name in "ABC")


def keys(*names: str) -> tuple[bytes, ...]:
    return tuple(name.encode() for name in names)


def without(unit: UnitState, **changed: object) -> UnitState:
    return msgspec.structs.replace(unit, **changed)


def unnamed(request_id: str, *names: str, tokens: int = 100) -> Turn:
    return Turn(request_id, tokens, keys(*names))


def named(request_id: str, session_id: str, tokens: int = 100, tenant: str = "") -> Turn:
    return Turn(request_id, tokens, keys(request_id), tenant, session_id)


def at_home(policy: UnitPolicy, unit: UnitState, turn: Turn) -> None:
    """Let a session have its first turn in a unit, as the only one that serves."""
    policy.choose(turn, [unit])
    policy.end(turn.request_id)


def test_sessions_without_a_name_begin_where_the_load_is_least() -> None:
    policy = UnitPolicy()
    first = policy.choose(unnamed("r1", "a"), [A, B])
    second = policy.choose(unnamed("r2", "b"), [A, B])
    assert (first.reason, second.reason) == (LOAD, LOAD)
    assert {first.unit, second.unit} == {"A", "B"}


def test_a_larger_unit_gets_more_sessions() -> None:
    policy = UnitPolicy()
    units = [without(A, capacity_tokens=3000), B]
    chosen = [policy.choose(unnamed(f"r{n}", f"{n}"), units).unit for n in range(40)]
    assert chosen.count("A") == 30


def test_requests_of_other_front_ends_count() -> None:
    busy = without(A, others_tokens=500)
    assert UnitPolicy().choose(unnamed("r", "a"), [busy, B]) == ("B", LOAD)


def test_an_ended_request_counts_no_more() -> None:
    policy = UnitPolicy()
    policy.choose(unnamed("r", "a"), [A])
    assert policy.own_tokens("A") == 100
    policy.end("r")
    policy.end("r")
    assert policy.own_tokens("A") == 0


@pytest.mark.parametrize("home", [A, B])
def test_a_prompt_that_begins_with_an_earlier_one_stays_at_its_unit(home: UnitState) -> None:
    policy = UnitPolicy()
    at_home(policy, home, unnamed("r1", "a", "b"))
    assert policy.choose(unnamed("r2", "a", "b", "c"), [A, B]) == (home.name, AFFINITY)


def test_a_prompt_that_begins_with_an_earlier_answer_stays_at_its_unit() -> None:
    policy = UnitPolicy()
    turn = unnamed("r1", "a")
    policy.choose(turn, [B])
    policy.answered(turn, keys("a", "answer"))
    policy.end("r1")
    # The first prompt is by now that of a session at another unit, as a common system prompt is.
    at_home(policy, A, unnamed("r2", "a"))
    assert policy.choose(unnamed("r3", "a", "answer", "b"), [A, B]) == ("B", AFFINITY)


@pytest.mark.parametrize("home", [A, B])
def test_a_named_session_stays_at_its_unit_whatever_its_prompts_are(home: UnitState) -> None:
    policy = UnitPolicy()
    at_home(policy, home, named("r1", "agent"))
    assert policy.choose(named("r2", "agent"), [A, B]) == (home.name, AFFINITY)
    assert policy.home("", "agent") == home.name
    assert policy.home("other tenant", "agent") is None


def test_two_front_ends_choose_the_same_unit_for_a_name() -> None:
    one, other = UnitPolicy(), UnitPolicy()
    for number in range(8):
        other.choose(unnamed(f"other {number}", f"{number}"), [A, B, C])
        turn = named(f"r{number}", f"agent {number}", tokens=1)
        choices = one.choose(turn, [A, B, C]), other.choose(turn, [C, B, A])
        assert choices[0] == choices[1]
        assert choices[0].reason == HASH


def test_names_are_spread_over_units_and_an_added_unit_moves_few() -> None:
    def chosen(units: list[UnitState]) -> list[str]:
        return [UnitPolicy().choose(named(f"r{n}", f"agent {n}"), units).unit for n in range(300)]

    two, three = chosen([A, B]), chosen([A, B, C])
    assert 120 < two.count("A") < 180
    moved = [new for old, new in zip(two, three, strict=True) if old != new]
    assert set(moved) == {"C"}
    assert 70 < len(moved) < 130


@pytest.mark.parametrize(
    ("home", "failed", "reason"),
    [
        (without(A, serves=False), (), HOME_LOST),
        (without(A, silent=True), (), HOME_SILENT),
        (without(A, draining=True), (), HOME_DRAINING),
        (A, ("A",), HOME_FAILED),
        (without(A, longest_prompt_tokens=99), (), HOME_SMALL),
        (without(A, others_tokens=251), (), HOME_FULL),
    ],
)
def test_a_session_leaves_a_home_that_should_not_serve_it_and_the_reason_is_returned(
    home: UnitState, failed: tuple[str, ...], reason: str
) -> None:
    policy = UnitPolicy()
    at_home(policy, A, named("r1", "agent"))
    assert policy.choose(named("r2", "agent"), [home, B], failed) == ("B", reason)
    policy.end("r2")
    # It stays where its context is cached now.
    assert policy.choose(named("r3", "agent"), [A, B]) == ("B", AFFINITY)


def test_a_session_stays_where_the_load_is_a_quarter_of_the_capacity_larger() -> None:
    policy = UnitPolicy()
    at_home(policy, A, named("r1", "agent"))
    assert policy.choose(named("r2", "agent"), [without(A, others_tokens=250), B]).unit == "A"


def test_a_unit_that_is_no_longer_listed_is_lost() -> None:
    policy = UnitPolicy()
    at_home(policy, A, named("r1", "agent"))
    assert policy.choose(named("r2", "agent"), [B]) == ("B", HOME_LOST)


def test_a_unit_that_is_back_gets_new_sessions() -> None:
    policy = UnitPolicy()
    for number in range(3):
        policy.choose(unnamed(f"r{number}", f"{number}"), [without(A, serves=False), B])
    assert policy.choose(unnamed("r4", "4"), [A, B]) == ("A", LOAD)


def test_where_an_attempt_has_failed_the_next_one_is_made_only_if_no_other_unit_serves() -> None:
    policy = UnitPolicy()
    turn = unnamed("r", "a")
    assert policy.choose(turn, [A, without(B, others_tokens=900)], failed=["A"]).unit == "B"
    assert policy.choose(turn, [A, without(B, serves=False)], failed=["A"]).unit == "A"
    assert policy.choose(turn, [A, B], failed=["A", "B"]).unit in "AB"
    assert policy.own_tokens("A") + policy.own_tokens("B") == 100


def test_a_draining_unit_serves_if_it_is_the_only_one() -> None:
    draining = without(A, draining=True)
    assert UnitPolicy().choose(unnamed("r", "a"), [draining, without(B, serves=False)]).unit == "A"


def test_a_silent_unit_serves_if_it_is_the_only_one() -> None:
    silent = without(A, silent=True)
    assert UnitPolicy().choose(unnamed("r", "a"), [silent, without(B, serves=False)]).unit == "A"


def test_if_no_unit_serves_one_of_them_returns_its_error() -> None:
    units = [without(A, serves=False), without(B, serves=False)]
    assert UnitPolicy().choose(unnamed("r", "a"), units).reason == NONE_SERVES


def test_a_prompt_that_fits_in_no_buffer_goes_where_it_is_refused() -> None:
    units = [without(A, longest_prompt_tokens=10), without(B, longest_prompt_tokens=20)]
    assert UnitPolicy().choose(unnamed("r", "a"), units).reason == LOAD


def test_the_homes_that_are_remembered_are_bounded_and_the_latest_used_stay() -> None:
    policy = UnitPolicy(most_homes=2)
    names = ("one", "two", "one", "three", "one", "four", "one")
    for name in names:
        at_home(policy, A, named(name, name))
    assert [policy.home("", name) for name in ("one", "two", "four")] == ["A", None, "A"]
