"""Simulated connections between the ranks of an engine that behave like pipes.

Values arrive in order, after a random delay.  When the process at one end has exited, the other end
sees the end of the pipe after all values that were sent.
"""

import functools
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

from dualpath.laboratory.chaos.simulation.threads import SimThreads, Waiting

_DELAYS_S = (0.0, 1e-5, 1e-4, 1e-3, 0.02)


class RankPipe:
    """One end, in a process with these threads; ``emulated.rank_connections.Connection``."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._world = threads.world
        self._arrived: deque[bytes] = deque()
        self._over = False
        self._waiting: list[Waiting] = []
        #: When all values in flight to this end have arrived.
        self._free_s = 0.0
        self._other = self

    @staticmethod
    def pair(one: SimThreads, other: SimThreads) -> "tuple[RankPipe, RankPipe]":
        """Return both ends of a new connection."""
        ends = RankPipe(one), RankPipe(other)
        ends[0]._other, ends[1]._other = ends[1], ends[0]
        return ends

    def send(self, value: Any, /) -> None:  # noqa: ANN401 - any message
        """Send a copy; raises ``BrokenPipeError`` once the other end is known to have exited."""
        if self._over:
            raise BrokenPipeError("the process at the other end has exited")
        self._other._soon(functools.partial(self._other._arrived.append, pickle.dumps(value)))

    def recv(self) -> Any:  # noqa: ANN401 - any message
        """Wait for the next value; raises ``EOFError`` at the end of the pipe."""
        while not self._arrived:
            if self._over:
                raise EOFError
            self._threads.wait(self._waiting, None)
        return pickle.loads(self._arrived.popleft())

    def cut(self) -> None:
        """Close this end, whose process has exited."""
        self._other._soon(self._other._end)

    def _end(self) -> None:
        self._over = True

    def _soon(self, happens: Callable[[], object]) -> None:
        self._free_s = max(self._free_s, self._world.now_s + self._world.pick(_DELAYS_S))
        self._world.at(self._free_s, functools.partial(self._happen, happens))

    def _happen(self, happens: Callable[[], object]) -> None:
        self._world.maybe_fault()
        happens()
        while self._waiting:
            self._waiting.pop(0).wake()
