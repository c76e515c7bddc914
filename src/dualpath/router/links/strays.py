"""Attempts that decode on after the session in which they were placed.

Their tokens come from their engine, and no scheduler knows them any more.  So nobody says that the
engine is lost but its connection, which says nothing where a whole machine has gone: the front end
looks for the engine among those that the next scheduler tells of.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from dualpath.core.errors import EngineLostError
from dualpath.core.sessions import ROUTER_TIMEOUT_S
from dualpath.router.engines import EngineInfo

#: An engine that lives has noticed by then that the scheduler is another, and greeted it.
BACK_S = 3 * ROUTER_TIMEOUT_S
_NEVER_S = float("inf")


class Stray(Protocol):
    """An attempt, as far as it matters here."""

    @property
    def decode_engine(self) -> EngineInfo | None:
        """Where its tokens come from."""
        ...

    def break_off(self, error: EngineLostError) -> None:
        """End it; another attempt may follow."""
        ...


class StrayAttempts:
    """Breaks off those whose engine is gone; ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: By when the engine must have been seen; None once it was, and never without a scheduler.
        self._due_s: dict[Stray, float | None] = {}

    def begin(self, attempts: Iterable[Stray]) -> None:
        """The session is over: none of the engines is known to live."""
        self._due_s = dict.fromkeys(attempts, _NEVER_S)

    def forget(self, attempt: Stray) -> None:
        """It is over; idempotent."""
        self._due_s.pop(attempt, None)

    def look(self, engines: Iterable[EngineInfo]) -> None:
        """A scheduler tells which engines live: one it no longer tells of is lost."""
        epochs = {engine.engine_id: engine.epoch for engine in engines}
        for attempt, due_s in list(self._due_s.items()):
            wanted = attempt.decode_engine
            if wanted is not None and epochs.get(wanted.engine_id) == wanted.epoch:
                self._due_s[attempt] = None
            elif due_s is None or (wanted is not None and wanted.engine_id in epochs):
                self._break_off(attempt, "is lost")
            elif due_s == _NEVER_S:
                self._due_s[attempt] = self._clock() + BACK_S

    def expire(self) -> None:
        """Break off what waits too long for its engine to come back."""
        now_s = self._clock()
        for attempt, due_s in list(self._due_s.items()):
            if due_s is not None and now_s > due_s:
                self._break_off(attempt, f"has greeted no scheduler for {BACK_S:g} s")

    def _break_off(self, attempt: Stray, how: str) -> None:
        del self._due_s[attempt]
        engine = attempt.decode_engine
        name = engine.engine_id if engine is not None else "of an attempt"
        attempt.break_off(EngineLostError(f"engine {name} {how}; see that it runs, and its log"))
