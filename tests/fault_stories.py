"""Runs of the fault simulation with chosen kinds of faults: as many as a test needs.

A test that waits for what happens in some of the runs ends with the run in which it has happened
often enough, so that it may name more seeds than it needs: which of them show it changes with the
code.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence

from dualpath_lab.faults.simulation.adversary import FAULT_KINDS, LEASE_FAULT_KINDS, FaultKind
from dualpath_lab.faults.simulation.planted_bugs import planted
from dualpath_lab.faults.simulation.run import run_seed
from dualpath_lab.faults.simulation.settings import faults_of

#: Each kind of fault is played in this many clusters, even if fewer show what a test waits for.
_LEAST_RUNS = 12


def of(*names: str) -> list[FaultKind]:
    """Return these kinds of faults."""
    kinds = [kind for kind in (*FAULT_KINDS, *LEASE_FAULT_KINDS) if kind.name in names]
    assert len(kinds) == len(names)
    return kinds


class Stories:
    """The logs of runs with these faults, none of which has a problem.

    Seeds without a fault are left out where kinds of faults are named.
    """

    def __init__(self, seeds: Iterable[int], *names: str, least: int = _LEAST_RUNS) -> None:
        self._kinds = of(*names)
        self._seeds = iter([seed for seed in seeds if not names or faults_of(seed)])
        self.logs: list[Sequence[str]] = []
        self.until(lambda: len(self.logs) >= least)

    def until(self, enough: Callable[[], bool]) -> bool:
        """Run further seeds until ``enough`` returns True; return whether it does."""
        while not enough():
            if (seed := next(self._seeds, None)) is None:
                return False
            outcome = run_seed(seed, story=True, kinds=self._kinds)
            assert not outcome.problems, "\n".join(outcome.story)
            self.logs.append(outcome.story)
        return True

    def exceeds(self, few: int, number: Callable[[Sequence[str]], int]) -> bool:
        """Whether the sum of a number of each log is above ``few``; run seeds until it is."""
        logs, total = 0, 0

        def enough() -> bool:
            nonlocal logs, total
            total += sum(map(number, self.logs[logs:]))
            logs = len(self.logs)
            return total > few

        return self.until(enough)

    def more_than(self, few: int, pattern: str) -> bool:
        """Whether more lines than ``few`` match; run seeds until they do."""
        return self.exceeds(few, lambda log: _matching(pattern, log))

    def count(self, pattern: str) -> int:
        """Return the number of matching lines of the runs so far."""
        return sum(_matching(pattern, log) for log in self.logs)


def _matching(pattern: str, log: Sequence[str]) -> int:
    return sum(re.search(pattern, line) is not None for line in log)


def finds(bug: str, seeds: Iterable[int], *faults: str, first: int | None = None) -> bool:
    """Whether one of the seeds finds a planted bug with these faults.

    ``first`` is run before the others: a seed that has found the bug.  After a change of the code
    another one may find it, which a warning names.  Runs with many faults come next.
    """
    kinds = of(*faults)
    others = sorted(seeds, key=faults_of, reverse=True) if faults else seeds
    with planted(bug):
        for seed in others if first is None else (first, *others):
            if run_seed(seed, kinds=kinds).problems:
                if first not in (None, seed):
                    what = f"{bug} is found by seed {seed}, no longer by {first}: name {seed} first"
                    warnings.warn(what, stacklevel=2)
                return True
    return False
