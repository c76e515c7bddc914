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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from dualpath.core.errors import DualPathError
from dualpath.laboratory.emulated.rank_connections import (
    ConnectedFollower,
    ConnectedLeader,
    FollowerConnection,
)
from dualpath.laboratory.emulated.ranks import FollowerRank, LeaderRank, OnlyRank
from dualpath.ops.launch.process import die_with_parent

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
