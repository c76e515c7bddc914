"""Which of the tests marked `long` a run has: none, all, or one that a number chooses.

A mark alone would not do: `-m 'not engine'` replaces what another `-m` has left out.
"""

from collections.abc import Sequence
from typing import TypeVar

Test = TypeVar("Test")

NONE, ALL = "none", "all"


def chosen(tests: Sequence[Test], option: str) -> list[Test]:
    """Return the tests to run; ``option`` is `none`, `all` or a hexadecimal number (a commit).

    Of a number's neighbours each chooses another test, so that over many commits all have their
    turn, and each commit has the same one wherever it is tested.  Raises ``ValueError`` for
    another word.
    """
    if option == ALL:
        return list(tests)
    if option == NONE or not tests:
        return []
    try:
        number = int(option, 16)
    except ValueError:
        raise ValueError(
            f"--long {option}: none, all or a hexadecimal number is needed, such as a commit"
        ) from None
    return [tests[number % len(tests)]]
