"""Many seeds, on several processor cores."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import msgspec

from dualpath.laboratory.chaos.simulation.plants import planted
from dualpath.laboratory.chaos.simulation.play import Outcome, play

#: Seeds handed to a process at a time.
_CHUNK = 20


class Totals(msgspec.Struct):
    """What many runs came to; ``failing`` are the seeds with problems."""

    seeds: int = 0
    faults: int = 0
    requests: int = 0
    answered: int = 0
    virtual_s: float = 0.0
    events: int = 0
    failing: list[int] = []

    def add(self, outcome: Outcome) -> None:
        """Count one more."""
        self.seeds += 1
        self.faults += outcome.faults
        self.requests += outcome.requests
        self.answered += outcome.answered
        self.virtual_s += outcome.virtual_s
        self.events += outcome.events
        if outcome.problems:
            self.failing.append(outcome.seed)


def outcomes(first: int, count: int, jobs: int, plant: str = "") -> Iterator[Outcome]:
    """Play ``count`` seeds in ``jobs`` processes; yield what came of them, in order."""
    chunks = [
        (start, min(_CHUNK, first + count - start), plant)
        for start in range(first, first + count, _CHUNK)
    ]
    if jobs == 1:
        for chunk in chunks:
            yield from _play_some(chunk)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            for played in pool.map(_play_some, chunks):
                yield from played
        finally:
            pool.shutdown(cancel_futures=True)


def _play_some(chunk: tuple[int, int, str]) -> list[Outcome]:
    first, count, plant = chunk
    with planted(plant):
        return [play(seed) for seed in range(first, first + count)]
