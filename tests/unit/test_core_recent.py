"""A bounded map of the most recent keys."""

from dualpath.core.recent import Recent


def test_the_last_value_counts_and_removed_keys_are_absent() -> None:
    recent: Recent[str, int] = Recent(limit=10)
    recent.note("ab", 1)
    recent.age()
    recent.note("b", 2)
    assert (recent.last("xa"), recent.last("abc"), recent.last("xy")) == (1, 2, None)
    assert (recent.head("abc"), recent.head("abc", 1), recent.head("xab")) == (2, 2, 0)
    recent.remove("b")
    assert "a" in recent
    assert "b" not in recent


def test_it_holds_at_least_the_limit_and_at_most_twice_that() -> None:
    recent: Recent[int, None] = Recent(limit=3)
    for key in range(100):
        recent.note([key], None)
        assert all(late in recent for late in range(max(key - 2, 0), key + 1))
        assert sum(old in recent for old in range(100)) <= 6


def test_keys_unused_for_two_generations_are_dropped() -> None:
    recent: Recent[str, None] = Recent(limit=10)
    recent.note("a", None)
    recent.age()
    assert "a" in recent
    recent.age()
    assert "a" not in recent
