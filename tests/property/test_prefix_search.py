"""The end of a stored head is found, with few questions, also where the chain has holes."""

from hypothesis import given
from hypothesis import strategies as st

from dualpath.engine.io.lookups import PrefixSearch


def run(search: PrefixSearch, stored: set[int]) -> tuple[int, int]:
    """Return (questions, rounds) until the search is over."""
    questions = rounds = 0
    while not search.is_over:
        positions = search.next_positions()
        assert positions == sorted(set(positions))
        assert positions
        questions, rounds = questions + len(positions), rounds + 1
        search.note({position: position in stored for position in positions})
    return questions, rounds


def test_a_thousand_blocks_take_eleven_queries_or_six_rounds_of_four() -> None:
    for width, most_questions, most_rounds in ((1, 11, 11), (4, 20, 6)):
        for stored in range(1001):
            search = PrefixSearch(1000, width)
            questions, rounds = run(search, set(range(stored)))
            assert search.stored == stored
            assert questions <= most_questions
            assert rounds <= most_rounds


def test_a_chain_that_has_not_grown_takes_one_query() -> None:
    search = PrefixSearch(1000, 1)
    search.advance(700)
    assert run(search, set(range(700))) == (1, 1)
    assert search.stored == 700


@given(st.sets(st.integers(0, 60)), st.integers(0, 61), st.integers(1, 6))
def test_with_gaps_it_ends_at_an_absent_block_after_a_stored_one(
    stored: set[int], count: int, width: int
) -> None:
    search = PrefixSearch(count, width)
    questions, _ = run(search, stored)
    assert questions <= count
    assert search.stored == count or search.stored not in stored
    assert search.stored == 0 or search.stored - 1 in stored


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 4))
def test_blocks_written_meanwhile_advance_the_search(first: int, more: int, width: int) -> None:
    search = PrefixSearch(64, width)
    run(search, set(range(first)))
    search.advance(first + more)
    run(search, set(range(first + more + 3)))
    assert search.stored == (first + more + 3 if more else first)
