"""Lock step of an emulated data-parallel group: each pass takes as long as the slowest rank's.

Ranks that share experts wait for each other in every layer, so that a pass of the group ends for
all of them at once, and a rank that gets a request during a pass begins with the next one (§6.2).
Ranks without requests take part without work.  The first rank coordinates.  It has a connection to
every other rank, over which that rank sends ``enter SECONDS``, to get the group's seconds, or
``idle``.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Sequence
from typing import Protocol

from dualpath.core.errors import EngineLostError

log = logging.getLogger(__name__)

#: How long a rank waits for the group's next pass: far longer than any pass.
STEP_TIMEOUT_S = 120.0
_LINE_BYTES = 256


class LockStep(Protocol):
    """The group as seen by the thread that computes a rank's passes."""

    def enter(self, compute_s: float) -> float:
        """Return how long the group's next pass takes, once it begins.

        Raises ``EngineLostError`` if it does not begin within ``STEP_TIMEOUT_S``.
        """

    def idle(self) -> None:
        """This rank has no pass to compute, so that the others do not wait for it."""

    def close(self) -> None:
        """Leave the group; idempotent."""


class NoLockStep:
    """An engine without a group, or of a group whose ranks do not wait for each other."""

    def enter(self, compute_s: float) -> float:
        """Return the engine's own time."""
        return compute_s

    def idle(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Coordinator:
    """Begins the group's passes; thread-safe.

    A pass begins when no rank computes and at least one has entered: a rank that has computed
    enters again or is idle, so that busy ranks always begin together.
    """

    def __init__(self, timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._changed = threading.Condition()
        self._timeout_s = timeout_s
        #: Seconds of ranks that have entered, by rank.
        self._entered: dict[int, float] = {}
        self._computing: set[int] = set()
        #: Seconds of the group's pass, of ranks that have not taken them yet.
        self._granted: dict[int, float] = {}

    def enter(self, rank: int, compute_s: float) -> float:
        """See ``LockStep.enter``."""
        with self._changed:
            self._computing.discard(rank)
            self._entered[rank] = compute_s
            self._begin()
            if not self._changed.wait_for(lambda: rank in self._granted, self._timeout_s):
                self._entered.pop(rank, None)
                raise EngineLostError(
                    f"ranks {sorted(self._computing)} of the data-parallel group have computed a "
                    f"pass for more than {self._timeout_s:g} s; see their logs"
                )
            return self._granted.pop(rank)

    def idle(self, rank: int) -> None:
        """See ``LockStep.idle``; a rank that has ended is idle as well."""
        with self._changed:
            self._computing.discard(rank)
            self._entered.pop(rank, None)
            self._begin()

    def _begin(self) -> None:
        if self._computing or not self._entered:
            return
        group_s = max(self._entered.values())
        self._granted |= dict.fromkeys(self._entered, group_s)
        self._computing |= set(self._entered)
        self._entered.clear()
        self._changed.notify_all()


class FirstRank:
    """The first rank's end: the coordinator, and a thread for each other rank."""

    def __init__(self, peers: Sequence[socket.socket], timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._coordinator = Coordinator(timeout_s)
        self._peers = peers
        for rank, peer in enumerate(peers, start=1):
            threading.Thread(
                target=self._serve, args=(rank, peer), name=f"lock-step-{rank}", daemon=True
            ).start()

    def enter(self, compute_s: float) -> float:
        """See ``LockStep``."""
        return self._coordinator.enter(0, compute_s)

    def idle(self) -> None:
        """See ``LockStep``."""
        self._coordinator.idle(0)

    def close(self) -> None:
        """See ``LockStep``."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def _serve(self, rank: int, peer: socket.socket) -> None:
        peer.settimeout(None)
        try:
            with peer, peer.makefile("rw", encoding="ascii") as lines:
                for line in lines:
                    word, *seconds = line.split()
                    if word == "idle":
                        self._coordinator.idle(rank)
                        continue
                    lines.write(f"{self._coordinator.enter(rank, float(seconds[0]))!r}\n")
                    lines.flush()
        except (OSError, ValueError, EngineLostError) as error:
            log.warning("rank %d leaves the lock step: %s", rank, error)
        finally:
            self._coordinator.idle(rank)


class OtherRank:
    """Another rank's end of its connection to the first one."""

    def __init__(self, first: socket.socket, timeout_s: float = STEP_TIMEOUT_S) -> None:
        first.settimeout(timeout_s)
        self._first = first
        self._idle = True

    def enter(self, compute_s: float) -> float:
        """See ``LockStep``."""
        self._idle = False
        try:
            self._first.sendall(f"enter {compute_s!r}\n".encode())
            line = b""
            while not line.endswith(b"\n"):
                if not (received := self._first.recv(_LINE_BYTES)):
                    raise EngineLostError("the first rank of the data-parallel group has ended")
                line += received
        except OSError as error:
            raise EngineLostError(
                f"the first rank of the data-parallel group does not answer ({error})"
            ) from error
        return float(line)

    def idle(self) -> None:
        """See ``LockStep``."""
        if not self._idle:
            self._idle = True
            with contextlib.suppress(OSError):  # The group ends with its first rank.
                self._first.sendall(b"idle\n")

    def close(self) -> None:
        """See ``LockStep``."""
        with contextlib.suppress(OSError):
            self._first.shutdown(socket.SHUT_RDWR)
