"""The other ranks of an emulated engine as processes, forked from the first.

A connection leads from the first rank to each.  Its end is the end of that process, however it
came: the kernel closes what a process held.  Others end with the first as well.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, TypeVar

from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.laboratory.emulated.ranks import FollowingEnd, Hear, LeadingEnd, NoFollowers
from dualpath.ops.launch.process import die_with_parent

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Within it a rank has ended that has no more work.
_END_S = 10.0
_TOLD, _GIVEN = "told", "given"


class _Tie:
    """The leader's connection to one rank."""

    def __init__(self, rank: int, connection: Connection, process: BaseProcess) -> None:
        self.rank = rank
        self.connection = connection
        self.process = process
        #: What the rank gives, None at its end.
        self.given: SimpleQueue[tuple[Any] | None] = SimpleQueue()

    def ended(self) -> str:
        """Say how its process ended."""
        self.process.join(_END_S)
        code = self.process.exitcode
        how = "its connection was cut" if code is None else f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by {signal.Signals(-code).name}"
        return f"rank {self.rank} (process {self.process.pid}) has ended, {how}"


class LeadingProcess:
    """See ``ranks.LeadingEnd``."""

    def __init__(self, ties: Sequence[_Tie]) -> None:
        self.rank, self.size = 0, len(ties) + 1
        self._ties = ties
        self._ending = False
        self._hear: Hear = lambda rank, news: None
        self._lost: Callable[[str], None] = lambda reason: None
        self._reason: str | None = None
        self._lock = threading.Lock()
        for tie in ties:
            name = f"rank-{tie.rank}"
            threading.Thread(target=self._receive, args=(tie,), name=name, daemon=True).start()

    def broadcast(self, value: T | None) -> T:
        """See ``RankGroup``."""
        assert value is not None
        self._send(value)
        return value

    def gather(self, value: T) -> list[T]:
        """See ``RankGroup``."""
        everything = [value]
        for tie in self._ties:
            if (given := tie.given.get()) is None:
                tie.given.put(None)
                raise EngineLostError(self._reason or f"rank {tie.rank} has ended")
            everything.append(given[0])
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

    def _receive(self, tie: _Tie) -> None:
        try:
            while True:
                kind, value = tie.connection.recv()
                if kind == _TOLD:
                    self._hear(tie.rank, value)
                else:
                    tie.given.put((value,))
        except (EOFError, OSError):
            pass
        if not self._ending:
            reason = tie.ended()
            with self._lock:
                self._reason = self._reason or reason
                lost = self._lost
            lost(reason)
        tie.given.put(None)


class FollowingProcess:
    """See ``ranks.FollowingEnd``."""

    def __init__(self, rank: int, size: int, connection: Connection) -> None:
        self.rank, self.size = rank, size
        self._connection = connection
        self._lock = threading.Lock()

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


@contextlib.contextmanager
def rank_processes(size: int, follow: Callable[[FollowingEnd], None]) -> Iterator[LeadingEnd]:
    """Start the other ranks of an engine of ``size`` for the block, and end them with it.

    Each runs ``follow``.  To be called before this process has threads of its own.
    """
    if size == 1:
        yield NoFollowers()
        return
    context = multiprocessing.get_context("fork")
    ties: list[_Tie] = []
    for rank in range(1, size):
        mine, theirs = context.Pipe()
        own = [tie.connection for tie in ties] + [mine]
        process = context.Process(
            target=_follow, args=(rank, size, theirs, own, follow, os.getpid()), name=f"rank-{rank}"
        )
        process.start()
        theirs.close()
        ties.append(_Tie(rank, mine, process))
    leader = LeadingProcess(ties)
    try:
        yield leader
    finally:
        leader.end()
        for tie in ties:
            tie.process.join(_END_S)
            if tie.process.exitcode is None:
                log.error("rank %d does not end; it is killed", tie.rank)
                tie.process.kill()
                tie.process.join()


def _follow(
    rank: int,
    size: int,
    connection: Connection,
    leaders: Sequence[Connection],
    follow: Callable[[FollowingEnd], None],
    leader: int,
) -> None:
    """Run a rank in the process that was forked for it."""
    die_with_parent(signal.SIGKILL, leader)
    # A terminal's Ctrl-C reaches all ranks; the first decides what comes of it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for other in leaders:
        other.close()
    try:
        follow(FollowingProcess(rank, size, connection))
    except DualPathError as error:
        log.critical("rank %d of %d ends: %s", rank, size, error)
        os._exit(1)
