"""Invariants of the choice of a unit, whatever requests come and whatever units do."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from dualpath.policy.units import AFFINITY, SLACK, UNIT_REASONS, Turn, UnitPolicy, UnitState

NAMES = ("A", "B", "C")
units = st.tuples(
    *(
        st.builds(
            UnitState,
            st.just(name),
            st.booleans(),
            st.booleans(),
            st.booleans(),
            st.integers(0, 2000),
            st.integers(0, 2000),
            st.sampled_from((64, 1 << 62)),
        )
        for name in NAMES
    )
)
#: The session of a turn, whether the client names it, its prompt tokens, the failed attempts, and
#: whether the request ends at once.
turns = st.tuples(
    st.integers(0, 5),
    st.booleans(),
    st.integers(1, 200),
    st.frozensets(st.sampled_from(NAMES)),
    st.booleans(),
)
plays = st.lists(st.tuples(turns, units), max_size=40)
Checked = Callable[[UnitPolicy, Turn, tuple[UnitState, ...], frozenset[str]], None]


def play(steps, check: Checked) -> UnitPolicy:
    policy = UnitPolicy(most_homes=16)
    lengths: dict[int, int] = {}
    for number, ((session, named, tokens, failed, ends), states) in enumerate(steps):
        lengths[session] = lengths.get(session, 0) + 1
        keys = tuple(f"{session}/{block}".encode() for block in range(lengths[session]))
        turn = Turn(f"r{number}", tokens, keys, session_id=f"s{session}" * named)
        check(policy, turn, states, failed)
        if ends:
            policy.answered(turn, (*keys, f"{session}/{len(keys)}/answer".encode()))
            policy.end(turn.request_id)
    return policy


@given(plays)
def test_no_choice_is_worse_than_another_unit_allows(steps) -> None:
    def check(policy, turn, states, failed) -> None:
        loads = {unit.name: policy.load(unit) for unit in states}
        choice = policy.choose(turn, states, failed)
        assert choice.reason in UNIT_REASONS
        chosen = next(unit for unit in states if unit.name == choice.unit)

        def rank(unit: UnitState) -> tuple[bool, ...]:
            fits = unit.longest_prompt_tokens >= turn.prompt_tokens
            return (
                *(not unit.serves, unit.silent, unit.draining),
                *(unit.name in failed, not fits),
            )

        best = min(map(rank, states))
        assert rank(chosen) == best
        least = min(loads[unit.name] for unit in states if rank(unit) == best)
        # A named session's first place counts as its home.
        slack = SLACK if choice.reason in (AFFINITY, "hash", "none-serves") else 0
        assert loads[chosen.name] <= least + slack

    play(steps, check)


@given(plays)
def test_equal_calls_give_equal_choices_in_whatever_order_units_are_listed(steps) -> None:
    other = UnitPolicy(most_homes=16)

    def check(policy, turn, states, failed) -> None:
        assert policy.choose(turn, states, failed) == other.choose(turn, states[::-1], failed)

    # No request ends, of which the other policy would have to be notified.
    play([((*turn[:4], False), states) for turn, states in steps], check)


@given(plays)
def test_tokens_count_at_one_unit_until_the_request_ends(steps) -> None:
    seen: dict[str, int] = {}

    def check(policy, turn, states, failed) -> None:
        policy.choose(turn, states, failed)
        policy.choose(turn, states, NAMES)
        seen[turn.request_id] = turn.prompt_tokens

    policy = play([((*turn[:4], False), states) for turn, states in steps], check)
    assert sum(map(policy.own_tokens, NAMES)) == sum(seen.values())
    for request_id in seen:
        policy.end(request_id)
    assert [policy.own_tokens(name) for name in NAMES] == [0, 0, 0]


@given(st.lists(st.integers(1, 500), max_size=60))
def test_new_sessions_leave_units_of_one_size_apart_by_one_prompt_at_most(prompts) -> None:
    policy = UnitPolicy()
    states = [UnitState(name, serves=True, capacity_tokens=1000) for name in NAMES]
    for number, tokens in enumerate(prompts):
        policy.choose(Turn(f"r{number}", tokens, (str(number).encode(),)), states)
    own = list(map(policy.own_tokens, NAMES))
    assert max(own) - min(own) <= max(prompts, default=0)
