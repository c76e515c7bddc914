"""Long tests run when asked for; each commit chooses one of them."""

from tests.long_tests import chosen

LONG = ["gemma", "mixture", "latent"]


def test_a_run_has_none_or_all_of_them_or_that_of_a_commit() -> None:
    assert chosen(LONG, "none") == []
    assert chosen(LONG, "all") == LONG
    assert {test for n in range(3) for test in chosen(LONG, f"{n:x}")} == set(LONG)
