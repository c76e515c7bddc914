"""Connections between the ranks of a simulated engine, as pipes between processes behave.

What is sent arrives in order, after a delay that chance decides, and is read once the reader runs.
When one end's process is gone the other sees the end of the pipe, after all that was sent.
"""

import functools
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

from dualpath.laboratory.chaos.simulation.threads import SimThreads, Waiting

_DELAYS_S = (0.0, 1e-5, 1e-4, 1e-3, 0.02)


class RankPipe:
    """One end, of a process with these threads; ``emulated.rank_connections.Connection``."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._world = threads.world
        self._arrived: deque[bytes] = deque()
        self._over = False
        self._waiting: list[Waiting] = []
        #: By when all that is under way to this end has arrived.
        self._free_s = 0.0
        self._other = self

    @staticmethod
    def pair(one: SimThreads, other: SimThreads) -> "tuple[RankPipe, RankPipe]":
        """Return both ends of a new connection."""
        ends = RankPipe(one), RankPipe(other)
        ends[0]._other, ends[1]._other = ends[1], ends[0]
        return ends

    def send(self, value: Any, /) -> None:  # noqa: ANN401 - whatever ranks say
        """Send a copy; raises ``BrokenPipeError`` once the other end is known to be gone."""
        if self._over:
            raise BrokenPipeError("the process at the other end is gone")
        self._other._soon(functools.partial(self._other._arrived.append, pickle.dumps(value)))

    def recv(self) -> Any:  # noqa: ANN401 - whatever ranks say
        """Wait for the next; raises ``EOFError`` when all has come and the other end is gone."""
        while not self._arrived:
            if self._over:
                raise EOFError
            self._threads.wait(self._waiting, None)
        return pickle.loads(self._arrived.popleft())

    def cut(self) -> None:
        """This end's process is gone."""
        self._other._soon(self._other._end)

    def _end(self) -> None:
        self._over = True

    def _soon(self, happens: Callable[[], object]) -> None:
        self._free_s = max(self._free_s, self._world.now_s + self._world.pick(_DELAYS_S))
        self._world.at(self._free_s, functools.partial(self._happen, happens))

    def _happen(self, happens: Callable[[], object]) -> None:
        self._world.moment()
        happens()
        while self._waiting:
            self._waiting.pop(0).wake()
