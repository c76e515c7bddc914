"""What schedulers of simulated clusters know of stored chains without asking an engine."""

import re

import pytest
from tests.fault_stories import Stories, finds


@pytest.mark.parametrize(
    "faults",
    [
        (),
        ("kill an engine", "kill the router"),
        ("duplicate control messages", "reset a control connection"),
    ],
)
def test_what_is_known_is_so_whatever_fails(faults: tuple[str, ...]) -> None:
    """Each answer is compared with the disk (``ClusterResources.check_known_end``)."""
    runs = Stories(range(60), *faults)
    assert runs.more_than(20, r"knows that \d+ of \d+ blocks are stored")
    lines = (line for log in runs.logs for line in log)
    known = [re.search(r"knows that (\d+) of (\d+) blocks", line) for line in lines]
    ends = [(int(found[1]), int(found[2])) for found in known if found is not None]
    assert any(end < blocks for end, blocks in ends), "a prompt goes on behind what is stored"


def test_a_planted_bug_of_known_chains_is_found() -> None:
    assert finds("chain-unreported", range(40))
