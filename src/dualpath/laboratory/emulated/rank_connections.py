"""Ranks of an emulated engine as processes: what the first and another say through a connection.

What a connection is, and how its processes are started and end, others say (``rank_processes``, and
a simulation).  Its end is the end of the process at the other side, however that came.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from dualpath.core.errors import EngineLostError
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.laboratory.emulated.ranks import Hear

T = TypeVar("T")
_TOLD, _GIVEN = "told", "given"


class Connection(Protocol):
    """One end, as ``multiprocessing.connection.Connection``; what is sent arrives as a copy."""

    def send(self, value: Any, /) -> None:  # noqa: ANN401 - whatever ranks say
        """Send; raises ``OSError`` once the other end is known to be gone."""
        ...

    def recv(self) -> Any:  # noqa: ANN401 - whatever ranks say
        """Wait for the next, as long as it takes.

        Raises ``EOFError`` or ``OSError`` when all has come and the other end is gone.
        """
        ...


class Tie:
    """The first rank's connection to another; ``ended`` says how that one's process has ended."""

    def __init__(
        self,
        rank: int,
        connection: Connection,
        ended: Callable[[], str],
        threads: Threads = OS_THREADS,
    ) -> None:
        self.rank = rank
        self.connection = connection
        self.ended = ended
        self._given: deque[Any] = deque()
        self._over = False
        self._changed = threads.condition()

    def give(self, value: object) -> None:
        """The rank has given something."""
        with self._changed:
            self._given.append(value)
            self._changed.notify()

    def end(self) -> None:
        """The rank gives nothing any more."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def take(self) -> Any:  # noqa: ANN401 - what was given
        """Wait for what the rank gives next; raises ``EngineLostError`` when it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._given) or self._over)
            if not self._given:
                raise EngineLostError(f"rank {self.rank} has ended")
            return self._given.popleft()


class ConnectedLeader:
    """See ``ranks.LeadingEnd``."""

    def __init__(self, ties: Sequence[Tie], threads: Threads = OS_THREADS) -> None:
        self.rank, self.size = 0, len(ties) + 1
        self._ties = ties
        self._ending = False
        self._hear: Hear = lambda rank, news: None
        self._lost: Callable[[str], None] = lambda reason: None
        self._reason: str | None = None
        self._lock = threads.lock()
        for tie in ties:
            threads.start(f"rank-{tie.rank}", lambda tie=tie: self._receive(tie))  # type: ignore[misc]

    def broadcast(self, value: T | None) -> T:
        """See ``RankGroup``."""
        assert value is not None
        self._send(value)
        return value

    def gather(self, value: T) -> list[T]:
        """See ``RankGroup``."""
        everything = [value]
        for tie in self._ties:
            try:
                everything.append(tie.take())
            except EngineLostError as error:
                raise EngineLostError(self._reason or str(error)) from error
        self._send(everything)
        return everything

    def listen(self, hear: Hear, lost: Callable[[str], None]) -> None:
        """See ``LeadingEnd``."""
        with self._lock:
            self._hear, self._lost, reason = hear, lost, self._reason
        if reason is not None:
            lost(reason)

    def end(self) -> None:
        """See ``LeadingEnd``."""
        self._ending = True
        with contextlib.suppress(EngineLostError):
            self._send(None)

    def _send(self, value: object) -> None:
        try:
            for tie in self._ties:
                tie.connection.send(value)
        except OSError as error:
            raise EngineLostError(self._reason or f"a rank has ended ({error})") from error

    def _receive(self, tie: Tie) -> None:
        try:
            while True:
                kind, value = tie.connection.recv()
                if kind == _TOLD:
                    self._hear(tie.rank, value)
                else:
                    tie.give(value)
        except (EOFError, OSError):
            pass
        if not self._ending:
            reason = tie.ended()
            with self._lock:
                self._reason = self._reason or reason
                lost = self._lost
            lost(reason)
        tie.end()


class ConnectedFollower:
    """See ``ranks.FollowingEnd``."""

    def __init__(
        self, rank: int, size: int, connection: Connection, threads: Threads = OS_THREADS
    ) -> None:
        self.rank, self.size = rank, size
        self._connection = connection
        self._lock = threads.lock()

    def work(self) -> Any:  # noqa: ANN401 - as in the contract
        """See ``FollowingEnd``."""
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise EngineLostError("the engine's first rank has ended") from error

    def broadcast(self, value: T | None) -> T:
        """See ``RankGroup``."""
        told: T = self.work()
        return told

    def gather(self, value: T) -> list[T]:
        """See ``RankGroup``."""
        self._send(_GIVEN, value)
        everything: list[T] = self.work()
        return everything

    def tell(self, news: object) -> None:
        """See ``FollowingEnd``."""
        with contextlib.suppress(EngineLostError):
            self._send(_TOLD, news)

    def _send(self, kind: str, value: object) -> None:
        try:
            with self._lock:
                self._connection.send((kind, value))
        except OSError as error:
            raise EngineLostError("the engine's first rank has ended") from error
