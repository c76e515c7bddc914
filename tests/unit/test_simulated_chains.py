"""What schedulers of simulated clusters know of stored chains without asking an engine."""

import re

import pytest
from tests.fault_stories import count, stories

from dualpath_lab.faults.simulation.planted_bugs import planted
from dualpath_lab.faults.simulation.run import run_seed


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
    lines = stories(range(24), *faults)
    assert count(lines, r"knows that \d+ of \d+ blocks are stored") > 20
    known = [re.search(r"knows that (\d+) of (\d+) blocks", line) for line in lines]
    ends = [(int(found[1]), int(found[2])) for found in known if found is not None]
    assert any(end < blocks for end, blocks in ends), "a prompt goes on behind what is stored"


def test_a_planted_bug_of_known_chains_is_found() -> None:
    with planted("chain-unreported"):
        assert any(run_seed(seed).problems for seed in range(40))
