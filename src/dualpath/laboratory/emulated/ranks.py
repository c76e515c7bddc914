"""How the ranks of an emulated engine hear of each other: vLLM's executor and its groups, in small.

The first rank leads: it takes requests, decides what is computed, and gives that to all ranks as
*work*.  Each does its share of it, in the same order, and is in step with the others by the end of
each piece of work, as by the all-reduces of real ranks.  What a rank finds out between two pieces,
it *tells* the leader, who hears it before anything that this rank gives later.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from dualpath.core.errors import EngineLostError
from dualpath.engine.ranks import RankGroup
from dualpath.engine.threads import OS_THREADS, Threads

T = TypeVar("T")
#: What a rank tells: called with the rank and what it has to say, on whatever thread brings it.
Hear = Callable[[int, Any], None]


class LeadingEnd(RankGroup, Protocol):
    """The first rank's end."""

    def listen(self, hear: Hear, lost: Callable[[str], None]) -> None:
        """Begin to hear what others tell; ``lost`` gets the reason when one of them has ended."""
        ...

    def end(self) -> None:
        """There is no more work: other ranks end, and that is no loss."""
        ...


class FollowingEnd(RankGroup, Protocol):
    """Another rank's end."""

    def work(self) -> Any:  # noqa: ANN401 - whatever the leader gives
        """Wait for the next work, as long as it takes; None when there is no more.

        Raises ``EngineLostError`` if the leader is gone.
        """
        ...

    def tell(self, news: object) -> None:
        """Let the leader know; may be called from any thread."""
        ...


class NoFollowers:
    """The end of an engine's only rank."""

    rank, size = 0, 1

    def broadcast(self, value: T | None) -> T:
        """Return it."""
        assert value is not None
        return value

    def gather(self, value: T) -> list[T]:
        """Return it."""
        return [value]

    def listen(self, hear: Hear, lost: Callable[[str], None]) -> None:
        """Nobody tells anything."""

    def end(self) -> None:
        """Nobody waits for work."""


class ThreadRanks:
    """Ranks that are threads of one process; ``ends[r]`` is rank ``r``'s.

    ``threads`` are those of the engine, so that a simulation may bring its own.  ``lose`` ends the
    group, as the death of one rank's process does.
    """

    def __init__(self, size: int, threads: Threads = OS_THREADS) -> None:
        self.size = size
        self._changed = threads.condition()
        self._given: list[deque[Any]] = [deque() for _ in range(size)]
        self._received: list[deque[Any]] = [deque() for _ in range(size)]
        self._hear: Hear = lambda rank, news: None
        self._lost: Callable[[str], None] = lambda reason: None
        self._reason: str | None = None
        self._ending = False
        self.leader = _ThreadLeader(self)
        self.followers = tuple(_ThreadFollower(self, rank) for rank in range(1, size))

    @property
    def ends(self) -> "Sequence[_ThreadLeader | _ThreadFollower]":
        """The ends of all ranks, in their order."""
        return (self.leader, *self.followers)

    def lose(self, reason: str = "a rank is gone") -> None:
        """Let every wait fail from now on, and tell the leader."""
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()
        self._lost(reason)

    def ended(self, reason: str) -> None:
        """A rank is no more: a loss, unless there is no more work."""
        if not self._ending:
            self.lose(reason)

    def end(self) -> None:
        """See ``LeadingEnd``."""
        self._ending = True
        self.give(self._received[1:], None)

    def give(self, queues: Sequence[deque[Any]], value: object) -> None:
        """Put a value into queues."""
        with self._changed:
            for queue in queues:
                queue.append(value)
            self._changed.notify_all()

    def take(self, queue: deque[Any]) -> Any:  # noqa: ANN401 - what was given
        """Wait for the next of a queue; raises ``EngineLostError`` if a rank is gone."""
        with self._changed:
            self._changed.wait_for(lambda: bool(queue) or self._reason is not None)
            if self._reason is not None:
                raise EngineLostError(self._reason)
            return queue.popleft()


class _ThreadLeader:
    """See ``LeadingEnd``."""

    def __init__(self, shared: ThreadRanks) -> None:
        self._shared = shared
        self.rank, self.size = 0, shared.size

    def broadcast(self, value: T | None) -> T:
        assert value is not None
        self._shared.give(self._shared._received[1:], value)
        return value

    def gather(self, value: T) -> list[T]:
        shared = self._shared
        everything = [value, *(shared.take(given) for given in shared._given[1:])]
        shared.give(shared._received[1:], everything)
        return everything

    def listen(self, hear: Hear, lost: Callable[[str], None]) -> None:
        self._shared._hear, self._shared._lost = hear, lost

    def end(self) -> None:
        self._shared.end()


class _ThreadFollower:
    """See ``FollowingEnd``."""

    def __init__(self, shared: ThreadRanks, rank: int) -> None:
        self._shared = shared
        self.rank, self.size = rank, shared.size

    def work(self) -> Any:  # noqa: ANN401 - as in the contract
        return self._shared.take(self._shared._received[self.rank])

    def broadcast(self, value: T | None) -> T:
        told: T = self.work()
        return told

    def gather(self, value: T) -> list[T]:
        self._shared.give([self._shared._given[self.rank]], value)
        everything: list[T] = self.work()
        return everything

    def tell(self, news: object) -> None:
        self._shared._hear(self.rank, news)
