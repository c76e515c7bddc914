"""Runs the other ranks of an emulated engine as processes, forked from the first.

The first rank has a connection to each of them (``rank_connections``), which the kernel closes when
the process ends.  The other ranks end when the first one ends.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.launch.process import die_with_parent
from dualpath_lab.emulated.ranks import FollowerRank, LeaderRank, OnEvent, OnlyRank, value_of

# -------------------------------------------------------------------------------- rank connections
# Messages between the first rank of an emulated engine and the others in separate processes.
#
# ``rank_processes`` and the fault simulation provide the connections and processes.  When a process
# ends, for whatever reason, its connection ends.

T = TypeVar("T")
_EVENT, _GATHERED = "event", "gathered"


class RankConnection(Protocol):
    """One end, like ``multiprocessing.connection.Connection``; messages are copied."""

    def send(self, value: Any, /) -> None:  # noqa: ANN401 - any message
        """Send a message; raises ``OSError`` once the other end is known to be closed."""
        ...

    def recv(self) -> Any:  # noqa: ANN401 - any message
        """Wait without limit for the next message.

        Raises ``EOFError`` or ``OSError`` after the last message if the other end is closed.
        """
        ...


class FollowerConnection:
    """The first rank's connection to another; ``ended`` returns how that rank's process ended."""

    def __init__(
        self,
        rank: int,
        connection: RankConnection,
        ended: Callable[[], str],
        threads: Threads = OS_THREADS,
    ) -> None:
        self.rank = rank
        self.connection = connection
        self.ended = ended
        self._values: deque[Any] = deque()
        self._closed = False
        self._changed = threads.condition()

    def put(self, value: object) -> None:
        """Queue a value that the rank sent for a gather."""
        with self._changed:
            self._values.append(value)
            self._changed.notify()

    def close(self) -> None:
        """Record that the rank has ended and sends no more values."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def get(self) -> Any:  # noqa: ANN401 - any value
        """Wait for the rank's next value; raises ``EngineLostError`` if it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._values) or self._closed)
            if not self._values:
                raise EngineLostError(f"rank {self.rank} has ended")
            return self._values.popleft()


class ConnectedLeader:
    """See ``ranks.LeaderRank``."""

    def __init__(
        self, followers: Sequence[FollowerConnection], threads: Threads = OS_THREADS
    ) -> None:
        self.rank, self.size = 0, len(followers) + 1
        self._followers = followers
        self._ending = False
        self._on_event: OnEvent = lambda rank, event: None
        self._lost: Callable[[str], None] = lambda reason: None
        self._reason: str | None = None
        self._lock = threads.lock()
        for follower in followers:
            receive = functools.partial(self._receive, follower)
            threads.start(f"rank-{follower.rank}", receive)

    def broadcast(self, value: T | None) -> T:
        """See ``RankGroup``."""
        assert value is not None
        self._send(value)
        return value

    def gather(self, value: T) -> list[T]:
        """See ``RankGroup``."""
        everything = [value]
        for follower in self._followers:
            try:
                everything.append(follower.get())
            except EngineLostError as error:
                raise EngineLostError(self._reason or str(error)) from error
        self._send(everything)
        return everything

    def listen(self, on_event: OnEvent, lost: Callable[[str], None]) -> None:
        """See ``LeaderRank``."""
        with self._lock:
            self._on_event, self._lost, reason = on_event, lost, self._reason
        if reason is not None:
            lost(reason)

    def end(self) -> None:
        """See ``LeaderRank``."""
        self._ending = True
        with contextlib.suppress(EngineLostError):
            self._send(None)

    def _send(self, value: object) -> None:
        try:
            for follower in self._followers:
                follower.connection.send(value)
        except OSError as error:
            raise EngineLostError(self._reason or f"a rank has ended ({error})") from error

    def _receive(self, follower: FollowerConnection) -> None:
        try:
            while True:
                kind, value = follower.connection.recv()
                if kind == _EVENT:
                    self._on_event(follower.rank, value)
                else:
                    follower.put(value)
        except (EOFError, OSError):
            pass
        if not self._ending:
            reason = follower.ended()
            with self._lock:
                self._reason = self._reason or reason
                lost = self._lost
            lost(reason)
        follower.close()


class ConnectedFollower:
    """See ``ranks.FollowerRank``."""

    def __init__(
        self, rank: int, size: int, connection: RankConnection, threads: Threads = OS_THREADS
    ) -> None:
        self.rank, self.size = rank, size
        self._connection = connection
        self._lock = threads.lock()

    def work(self) -> Any:  # noqa: ANN401 - as in the contract
        """See ``FollowerRank``."""
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise EngineLostError("the engine's first rank has ended") from error

    def broadcast(self, value: T | None) -> T:
        """See ``RankGroup``."""
        received: T = value_of(self.work())
        return received

    def gather(self, value: T) -> list[T]:
        """See ``RankGroup``."""
        self._send(_GATHERED, value)
        everything: list[T] = value_of(self.work())
        return everything

    def notify(self, event: object) -> None:
        """See ``FollowerRank``."""
        with contextlib.suppress(EngineLostError):
            self._send(_EVENT, event)

    def _send(self, kind: str, value: object) -> None:
        try:
            with self._lock:
                self._connection.send((kind, value))
        except OSError as error:
            raise EngineLostError("the engine's first rank has ended") from error


log = logging.getLogger(__name__)

#: Seconds within which a rank must end after it has received the end of work.
_END_S = 10.0


@contextlib.contextmanager
def rank_processes(size: int, follow: Callable[[FollowerRank], None]) -> Iterator[LeaderRank]:
    """Start the other ranks of an engine of ``size`` ranks for the block, and end them with it.

    Each runs ``follow``.  Must be called before this process has other threads.
    """
    if size == 1:
        yield OnlyRank()
        return
    context = multiprocessing.get_context("fork")
    connections: list[Connection] = []
    processes: list[BaseProcess] = []
    for rank in range(1, size):
        mine, theirs = context.Pipe()
        connections.append(mine)
        own = tuple(connections)
        process = context.Process(
            target=_follow, args=(rank, size, theirs, own, follow, os.getpid()), name=f"rank-{rank}"
        )
        process.start()
        theirs.close()
        processes.append(process)
    leader = ConnectedLeader(
        [
            FollowerConnection(rank, connection, functools.partial(_how_it_ended, rank, process))
            for rank, (connection, process) in enumerate(
                zip(connections, processes, strict=True), start=1
            )
        ]
    )
    try:
        yield leader
    finally:
        leader.end()
        for rank, other in enumerate(processes, start=1):
            other.join(_END_S)
            if other.exitcode is None:
                log.error("rank %d does not end; killing it", rank)
                other.kill()
                other.join()


def _how_it_ended(rank: int, process: BaseProcess) -> str:
    process.join(_END_S)
    code = process.exitcode
    how = "its connection was closed" if code is None else f"with exit code {code}"
    if code is not None and code < 0:
        how = f"by {signal.Signals(-code).name}"
    return f"rank {rank} (process {process.pid}) has ended, {how}"


def _follow(
    rank: int,
    size: int,
    connection: Connection,
    leaders: Sequence[Connection],
    follow: Callable[[FollowerRank], None],
    leader: int,
) -> None:
    """Run a rank in its forked process."""
    die_with_parent(signal.SIGKILL, leader)
    # A terminal's Ctrl-C reaches all ranks; the first rank handles it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for other in leaders:
        other.close()
    try:
        follow(ConnectedFollower(rank, size, connection))
    except DualPathError as error:
        log.critical("rank %d of %d ends: %s", rank, size, error)
        os._exit(1)
