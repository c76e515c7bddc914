"""`make test` runs two tests at once, as far as they may."""

import re
from pathlib import Path

from tests.workers import OF_THE_MACHINE, group

TESTS = Path(__file__).parent.parent


def test_a_worker_has_all_that_needs_the_machine_and_others_a_file_at_a_time() -> None:
    engines = "tests/e2e/test_engines.py::test_agents_on_all_paths[pe-path]"
    transports = "tests/contract/test_transport_contract.py::test_done"
    blocks = "tests/unit/test_blocks.py::test_a_block"

    assert group(engines) == group(transports) != group(blocks)
    assert group(blocks) == group("tests/unit/test_blocks.py::test_another")


def test_what_uses_nixl_runs_beside_nothing_else_that_does() -> None:
    marked = [
        str(file.relative_to(TESTS.parent))
        for file in TESTS.rglob("test_*.py")
        if re.search(r"pytest\.mark\.nixl\b", file.read_text())
    ]

    assert len(marked) > 5
    assert {group(file) for file in marked} == {group("tests/e2e/")}


def test_each_name_is_that_of_a_file_or_a_folder() -> None:
    assert [name for name in OF_THE_MACHINE if not (TESTS.parent / name).exists()] == []
