"""A capacity is found by bisection, in few runs, although a run may err."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath_sim.evaluation.serving import Bracket, RateSearch, within

capacities = st.floats(0.06, 3.0)


def serving(capacity: float, wrong_runs: frozenset[int] = frozenset()) -> Callable[[float], bool]:
    """A system that meets the SLO up to ``capacity``, but for runs, counted from 0, that err."""
    runs = iter(range(10_000))
    return lambda rate: (rate <= capacity) is not (next(runs) in wrong_runs)


def measured(agreeing_runs: int = 2, most_runs: int = 1000) -> RateSearch:
    return RateSearch(
        0.4,
        within(0.1),
        least_rate=0.05,
        most_rate=4.0,
        agreeing_runs=agreeing_runs,
        most_runs=most_runs,
    )


def runs(search: RateSearch) -> int:
    return sum(map(len, search.answers.values()))


def test_rates_double_until_one_misses_then_the_bracket_is_halved_and_its_ends_are_confirmed() -> (
    None
):
    search = measured()
    search.run(serving(1.25))
    assert [round(rate, 2) for rate in search.answers] == [0.4, 0.8, 1.6, 1.13, 1.35, 1.23]
    assert search.bracket == pytest.approx((1.23, 1.35), abs=0.01)
    assert [len(answers) for answers in search.answers.values()] == [1, 1, 1, 1, 2, 2]
    assert (search.overturned, search.cut_short) == ((), False)


def test_rates_are_halved_where_the_first_one_misses() -> None:
    search = RateSearch(0.4, within(0.5), least_rate=0.05)
    assert search.run(serving(0.12)) == pytest.approx((0.1, 0.141), abs=0.001)
    assert list(search.answers) == pytest.approx([0.4, 0.2, 0.1, 0.141], abs=0.001)


@given(capacity=capacities)
def test_a_system_that_does_not_err_is_known_to_the_precision_in_few_runs(capacity: float) -> None:
    search = measured(agreeing_runs=1)
    met, missed = search.run(serving(capacity))
    assert missed is not None
    assert met <= capacity < missed <= met * 1.1 * (1 + 1e-9)
    # 0.4 and three doublings or halvings, then a missed rate 2, 1.41, 1.19, 1.09 times that met.
    assert runs(search) <= 7


@given(capacity=capacities, wrong=st.integers(0, 12))
def test_one_run_that_errs_changes_no_result_whenever_it_comes(capacity: float, wrong: int) -> None:
    search = measured()
    met, missed = search.run(serving(capacity, frozenset({wrong})))
    assert missed is not None
    assert met <= capacity < missed <= met * 1.1 * (1 + 1e-9)


def test_an_end_that_does_not_hold_is_reported_and_the_search_goes_on_beyond_it() -> None:
    # The second run, at 0.8, gives a wrong answer; all later rates are below it until it is
    # retried.
    search = measured()
    search.run(serving(1.25, frozenset({1})))
    assert search.overturned == (0.8,)
    assert search.answers[0.8] == [False, True, True]
    assert search.bracket == pytest.approx((1.23, 1.35), abs=0.01)


@given(answers=st.lists(st.booleans(), min_size=200, max_size=200), most=st.integers(1, 40))
def test_no_answers_whatever_take_more_runs_than_are_allowed(
    answers: list[bool], most: int
) -> None:
    search = measured(agreeing_runs=3, most_runs=most)
    given_answers = iter(answers)
    search.run(lambda rate: next(given_answers))
    assert runs(search) <= most


def test_a_search_without_runs_left_reports_that_it_is_cut_short() -> None:
    search = measured(most_runs=4)
    assert search.run(serving(1.25)) == pytest.approx((1.13, 1.6), abs=0.01)
    assert search.cut_short


@pytest.mark.parametrize(
    ("capacity", "found"), [(9.0, Bracket(4.0, None)), (0.01, Bracket(0.0, 0.05))]
)
def test_a_capacity_beyond_the_limits_leaves_the_bracket_open(
    capacity: float, found: Bracket
) -> None:
    search = measured()
    assert search.run(serving(capacity)) == found
    assert not search.cut_short
    assert len(search.answers[found.missed or found.met]) == 2


def test_a_known_bracket_is_narrowed_and_its_ends_are_not_tried() -> None:
    search = RateSearch(0.0, within(0.1), known=Bracket(1.0, 2.0), agreeing_runs=2)
    assert search.run(serving(0.5)) == pytest.approx((1.0, 1.09), abs=0.001)
    assert not {1.0, 2.0} & set(search.answers)
