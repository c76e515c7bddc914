"""Calls on all ranks of one engine at the same time, each on a thread (see ``ThreadRanks``)."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.guard import GUARD_S

T = TypeVar("T")


def on_every_rank(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Call one function for each rank concurrently; return the results.

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
