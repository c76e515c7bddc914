"""How the ranks of one engine agree: each is a process on a device of its own (tensor parallelism).

Rank 0 *leads*: it talks to the router, owns the buffer's slots, reads and writes storage.  The
others *follow*: they move their slice of the same blocks.  All compute the same steps, so what they
say to each other goes with the steps, in one order for all.  The contract has three
implementations: an engine of one rank, vLLM's tensor parallel group, and emulated ranks, which are
processes or threads (``laboratory.emulated``).
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from dualpath.core.errors import EngineLostError
from dualpath.engine.health import Health

T = TypeVar("T")
U = TypeVar("U")


class RankGroup(Protocol):
    """One rank's end; every rank calls the same methods in the same order.

    Both raise if another rank is gone: an engine that has lost a rank cannot go on.
    """

    rank: int
    size: int

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value at every rank; what the others give does not matter."""
        ...

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks at every rank, in their order."""
        ...


class OneRank:
    """An engine of one rank agrees with itself."""

    rank = 0
    size = 1

    def broadcast(self, value: T | None) -> T:
        """Return it."""
        assert value is not None
        return value

    def gather(self, value: T) -> list[T]:
        """Return it."""
        return [value]


#: Has no state: every engine of one rank may use it.
ONE_RANK = OneRank()


class TimedGroup:
    """A group whose every wait has a limit: a rank that hangs takes its engine out.

    A call to a group may not come back, and nothing can call it off.  So ``look``, from another
    thread, has the data plane fail for good when one takes longer than ``limit_s``: whoever
    watches that ends this process, and with it the engine.
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

    def look(self) -> None:
        """Fail if a call takes too long; called now and then."""
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
