"""Long tests run when asked for; over many commits each has its turn."""

import pytest
from tests.long_tests import chosen

LONG = ["gemma", "mixture", "latent"]


def test_a_run_has_none_or_all_of_them() -> None:
    assert chosen(LONG, "none") == []
    assert chosen(LONG, "all") == LONG


def test_a_commit_has_one_of_them_always_the_same() -> None:
    commit = "f75b24c0ffee"
    assert chosen(LONG, commit) == chosen(LONG, commit) == [LONG[int(commit, 16) % 3]]
    assert {test for n in range(3) for test in chosen(LONG, f"{n:x}")} == set(LONG)
    assert chosen([], commit) == []


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="--long some: none, all or a hexadecimal number"):
        chosen(LONG, "some")
