"""Collective communication of the ranks of one engine (tensor parallelism).

Each rank is a process on a device of its own.  Rank 0 is the *leader*: it is connected to the
router, owns the buffer's slots, reads and writes storage.  The others are *followers*: they move
their slice of the same blocks.  All execute the same steps, so collectives are called within the
steps, in the same order at all ranks.  The protocol has three implementations: an engine of one
rank, vLLM's tensor parallel group, and emulated ranks, which are processes or threads
(``laboratory.emulated``).
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from dualpath.core.errors import EngineLostError
from dualpath.engine.health import Health

T = TypeVar("T")
U = TypeVar("U")


class RankGroup(Protocol):
    """One rank's end; every rank calls the same methods in the same order.

    Both raise if another rank has ended: an engine that has lost a rank cannot go on.
    """

    rank: int
    size: int

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value at every rank; the values of other ranks are ignored."""
        ...

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks at every rank, in the order of ranks."""
        ...


class OneRank:
    """The group of an engine of one rank."""

    rank = 0
    size = 1

    def broadcast(self, value: T | None) -> T:
        """Return the value."""
        assert value is not None
        return value

    def gather(self, value: T) -> list[T]:
        """Return a list of the value."""
        return [value]


#: Has no state: every engine of one rank may use it.
ONE_RANK = OneRank()


class TimedGroup:
    """A group with a time limit for every collective: a rank that hangs breaks its engine.

    A collective may hang and cannot be cancelled.  So ``poll``, called from another thread, marks
    the data plane as broken when one takes longer than ``limit_s``; the process, and with it the
    engine, is then ended.
    """

    def __init__(self, group: RankGroup, health: Health, limit_s: float) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._health = health
        self._limit_s = limit_s
        self._since_ns: int | None = None

    def broadcast(self, value: T | None) -> T:
        """See ``RankGroup``."""
        return self._timed(lambda: self._group.broadcast(value))

    def gather(self, value: T) -> list[T]:
        """See ``RankGroup``."""
        return self._timed(lambda: self._group.gather(value))

    def poll(self) -> None:
        """Mark the data plane as broken if a collective takes too long; called periodically."""
        since_ns = self._since_ns
        if since_ns is None:
            return
        waited_s = (self._health.threads.now_ns() - since_ns) / 1e9
        if waited_s > self._limit_s:
            self._health.fail(
                f"rank {self.rank} of {self.size} has waited {waited_s:.0f} s for the others"
            )

    def _timed(self, call: Callable[[], U]) -> U:
        self._since_ns = self._health.threads.now_ns()
        try:
            return call()
        except Exception as error:
            reason = f"rank {self.rank} of {self.size} has lost the others: {error}"
            self._health.fail(reason)
            raise EngineLostError(reason) from error
        finally:
            self._since_ns = None
