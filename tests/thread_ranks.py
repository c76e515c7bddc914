"""The ranks of an engine as threads of one process: a small real ``engine.ranks.RankGroup``."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

GUARD_S = 20.0


class RankLostError(Exception):
    """Another rank is gone, or does not come."""


class ThreadRank:
    """One rank's end."""

    def __init__(self, shared: "ThreadRanks", rank: int) -> None:
        self._shared = shared
        self.rank, self.size = rank, shared.size

    def broadcast(self, value: T | None) -> T:
        if self.rank == 0:
            for other in range(1, self.size):
                self._shared.told[other].put(value)
            assert value is not None
            return value
        told: T = self._shared.take(self._shared.told[self.rank])
        return told

    def gather(self, value: T) -> list[T]:
        self._shared.given.put((self.rank, value))
        if self.rank == 0:
            given = dict(self._shared.take(self._shared.given) for _ in range(self.size))
            everything = [given[rank] for rank in range(self.size)]
            for other in range(1, self.size):
                self._shared.gathered[other].put(everything)
            return everything
        received: list[T] = self._shared.take(self._shared.gathered[self.rank])
        return received


class ThreadRanks:
    """The group; ``lose`` ends it as the death of one rank does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.told: list[queue.Queue[Any]] = [queue.Queue() for _ in range(size)]
        self.gathered: list[queue.Queue[Any]] = [queue.Queue() for _ in range(size)]
        self.given: queue.Queue[Any] = queue.Queue()
        self.lost = threading.Event()
        self.ends = [ThreadRank(self, rank) for rank in range(size)]

    def lose(self) -> None:
        """Let every wait fail from now on."""
        self.lost.set()

    def take(self, given: "queue.Queue[Any]") -> Any:
        waited_s = 0.0
        while not self.lost.is_set() and waited_s < GUARD_S:
            try:
                return given.get(timeout=0.05)
            except queue.Empty:
                waited_s += 0.05
        raise RankLostError("a rank is gone")


def on_every_rank(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Call one thing for each rank, all at the same time; return what they return.

    The first error is raised once all are over.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int, call: Callable[[], T]) -> None:
        try:
            results[rank] = call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank, call)) for rank, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * GUARD_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(calls))]
