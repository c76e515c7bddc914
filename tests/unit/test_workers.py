"""`make test` runs two tests at once, as far as they may."""

import re
from pathlib import Path

from tests.workers import APART, COMPILED, OF_THE_MACHINE, OF_THEIR_PROCESS, group

TESTS = Path(__file__).parent.parent


def test_what_uses_nixl_runs_beside_nothing_else_that_does() -> None:
    marked = [
        str(file.relative_to(TESTS.parent))
        for file in TESTS.rglob("test_*.py")
        if re.search(r"pytest\.mark\.nixl\b", file.read_text())
    ]

    assert len(marked) > 5
    assert {group(file) for file in marked} == {group("tests/e2e/")}


def test_each_name_is_that_of_a_file_or_a_folder() -> None:
    names = (*OF_THE_MACHINE, *OF_THEIR_PROCESS, *COMPILED, *APART)
    assert [name for name in names if not (TESTS.parent / name).exists()] == []


def test_tests_that_may_run_apart_share_no_fixture_of_their_module() -> None:
    shared = [file for file in APART if 'scope="module"' in (TESTS.parent / file).read_text()]

    assert shared == []
    assert group(f"{APART[0]}::test_one") != group(f"{APART[0]}::test_another")
