"""Runs of the fault simulation with chosen kinds of faults, and their log lines."""

import re
from collections.abc import Iterable, Sequence

from dualpath_lab.faults.simulation.adversary import FAULT_KINDS, LEASE_FAULT_KINDS, FaultKind
from dualpath_lab.faults.simulation.run import run_seed


def of(*names: str) -> list[FaultKind]:
    """Return these kinds of faults."""
    kinds = [kind for kind in (*FAULT_KINDS, *LEASE_FAULT_KINDS) if kind.name in names]
    assert len(kinds) == len(names)
    return kinds


def stories(seeds: Iterable[int], *names: str) -> list[str]:
    """Return the log lines of runs with these faults, none of which has a problem."""
    lines: list[str] = []
    for seed in seeds:
        outcome = run_seed(seed, story=True, kinds=of(*names))
        assert not outcome.problems, "\n".join(outcome.story)
        lines += outcome.story
    return lines


def count(lines: Sequence[str], pattern: str) -> int:
    """Return the number of matching lines."""
    return sum(re.search(pattern, line) is not None for line in lines)
