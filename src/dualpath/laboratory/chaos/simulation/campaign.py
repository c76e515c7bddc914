"""Runs of many seeds on several CPU cores."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import msgspec

from dualpath.laboratory.chaos.simulation.plants import planted
from dualpath.laboratory.chaos.simulation.play import Outcome, run_seed

#: Seeds per task of a worker process.
_CHUNK = 20


class Totals(msgspec.Struct):
    """Totals of many runs; ``failing`` are the seeds with problems."""

    seeds: int = 0
    faults: int = 0
    requests: int = 0
    answered: int = 0
    virtual_s: float = 0.0
    events: int = 0
    failing: list[int] = []

    def add(self, outcome: Outcome) -> None:
        """Add one run."""
        self.seeds += 1
        self.faults += outcome.faults
        self.requests += outcome.requests
        self.answered += outcome.answered
        self.virtual_s += outcome.virtual_s
        self.events += outcome.events
        if outcome.problems:
            self.failing.append(outcome.seed)


def outcomes(first: int, count: int, jobs: int, bug: str = "") -> Iterator[Outcome]:
    """Run ``count`` seeds in ``jobs`` processes; yield their outcomes in order."""
    chunks = [
        (start, min(_CHUNK, first + count - start), bug)
        for start in range(first, first + count, _CHUNK)
    ]
    if jobs == 1:
        for chunk in chunks:
            yield from _run_chunk(chunk)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            for outcomes in pool.map(_run_chunk, chunks):
                yield from outcomes
        finally:
            pool.shutdown(cancel_futures=True)


def _run_chunk(chunk: tuple[int, int, str]) -> list[Outcome]:
    first, count, bug = chunk
    with planted(bug):
        return [run_seed(seed) for seed in range(first, first + count)]
