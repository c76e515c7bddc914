"""Communication between the ranks of an emulated engine, like vLLM's executor and rank groups.

The first rank is the leader: it accepts requests, schedules, and broadcasts *work* to all ranks.
Each rank does its share of the work in the same order, and ranks synchronise at the end of each
piece of work, like the all-reduces of real ranks.  Between two pieces of work a rank can send
*events* to the leader, which are delivered before anything that this rank sends later.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from dualpath.core.errors import EngineLostError
from dualpath.engine.ranks.group import RankGroup
from dualpath.engine.threads import OS_THREADS, Threads

T = TypeVar("T")
#: Called with the rank and the event, on the thread that receives it.
OnEvent = Callable[[int, Any], None]


class LeaderRank(RankGroup, Protocol):
    """The leader's interface to the other ranks."""

    def listen(self, on_event: OnEvent, lost: Callable[[str], None]) -> None:
        """Set the callbacks for events and for the loss of a rank, called with the reason."""
        ...

    def end(self) -> None:
        """End the work: the other ranks end, which does not count as a loss."""
        ...


class FollowerRank(RankGroup, Protocol):
    """A follower's interface to the leader."""

    def work(self) -> Any:  # noqa: ANN401 - any work
        """Wait without limit for the next work; None at the end of work.

        Raises ``EngineLostError`` if the leader has ended.
        """
        ...

    def notify(self, event: object) -> None:
        """Send an event to the leader; may be called from any thread."""
        ...


def value_of(received: T | None) -> T:
    """Return what a follower has received in a collective.

    Raises ``EngineLostError`` if it is the end of work: the leader has ended, or could not start.
    """
    if received is None:
        raise EngineLostError("the engine's first rank has ended; see its log")
    return received


class OnlyRank:
    """The leader's interface in an engine of one rank."""

    rank, size = 0, 1

    def broadcast(self, value: T | None) -> T:
        """Return the value."""
        assert value is not None
        return value

    def gather(self, value: T) -> list[T]:
        """Return a list of the value."""
        return [value]

    def listen(self, on_event: OnEvent, lost: Callable[[str], None]) -> None:
        """Do nothing: there are no other ranks."""

    def end(self) -> None:
        """Do nothing: there are no other ranks."""


class ThreadRanks:
    """Ranks as threads of one process; ``ends[r]`` is the interface of rank ``r``.

    ``threads`` are the engine's, so that a simulation can replace them.  ``fail`` ends the group,
    like the end of one rank's process.
    """

    def __init__(self, size: int, threads: Threads = OS_THREADS) -> None:
        self.size = size
        self._changed = threads.condition()
        self._to_leader: list[deque[Any]] = [deque() for _ in range(size)]
        self._to_rank: list[deque[Any]] = [deque() for _ in range(size)]
        self._on_event: OnEvent = lambda rank, event: None
        self._lost: Callable[[str], None] = lambda reason: None
        self._reason: str | None = None
        self._ending = False
        self.leader = _ThreadLeader(self)
        self.followers = tuple(_ThreadFollower(self, rank) for rank in range(1, size))

    @property
    def ends(self) -> "Sequence[_ThreadLeader | _ThreadFollower]":
        """The interfaces of all ranks, in order."""
        return (self.leader, *self.followers)

    def fail(self, reason: str = "a rank is gone") -> None:
        """Make all waits fail from now on, and report the loss to the leader."""
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()
        self._lost(reason)

    def rank_ended(self, reason: str) -> None:
        """Record that a rank has ended, which fails the group unless work has ended."""
        if not self._ending:
            self.fail(reason)

    def end(self) -> None:
        """See ``LeaderRank``."""
        self._ending = True
        self.put(self._to_rank[1:], None)

    def put(self, queues: Sequence[deque[Any]], value: object) -> None:
        """Put a value into queues."""
        with self._changed:
            for queue in queues:
                queue.append(value)
            self._changed.notify_all()

    def get(self, queue: deque[Any]) -> Any:  # noqa: ANN401 - any value
        """Wait for the next value of a queue; raises ``EngineLostError`` if a rank has ended."""
        with self._changed:
            self._changed.wait_for(lambda: bool(queue) or self._reason is not None)
            if self._reason is not None:
                raise EngineLostError(self._reason)
            return queue.popleft()


class _ThreadLeader:
    """See ``LeaderRank``."""

    def __init__(self, shared: ThreadRanks) -> None:
        self._shared = shared
        self.rank, self.size = 0, shared.size

    def broadcast(self, value: T | None) -> T:
        assert value is not None
        self._shared.put(self._shared._to_rank[1:], value)
        return value

    def gather(self, value: T) -> list[T]:
        shared = self._shared
        everything = [value, *(shared.get(queue) for queue in shared._to_leader[1:])]
        shared.put(shared._to_rank[1:], everything)
        return everything

    def listen(self, on_event: OnEvent, lost: Callable[[str], None]) -> None:
        self._shared._on_event, self._shared._lost = on_event, lost

    def end(self) -> None:
        self._shared.end()


class _ThreadFollower:
    """See ``FollowerRank``."""

    def __init__(self, shared: ThreadRanks, rank: int) -> None:
        self._shared = shared
        self.rank, self.size = rank, shared.size

    def work(self) -> Any:  # noqa: ANN401 - as in the contract
        return self._shared.get(self._shared._to_rank[self.rank])

    def broadcast(self, value: T | None) -> T:
        received: T = value_of(self.work())
        return received

    def gather(self, value: T) -> list[T]:
        self._shared.put([self._shared._to_leader[self.rank]], value)
        everything: list[T] = value_of(self.work())
        return everything

    def notify(self, event: object) -> None:
        self._shared._on_event(self.rank, event)
