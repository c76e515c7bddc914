"""Processes that end on their own are started again: at once, or after ever longer pauses.

One that had lived long is started at once.  One that ends soon after every start has a reason that
the next start will not mend; it is tried less and less often, and the reason is said every time.

Ranks of a data-parallel group are a unit: one that ends takes the others with it, and vLLM starts
none alone.  An idle one would not notice, so it is told.
"""

import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

log = logging.getLogger(__name__)

#: A process that had lived for so long is started again at once.
LONG_LIFE_S = 60.0
#: Pauses after shorter lives: the first, doubled each time up to the last.  The first ones are
#: short: without its scheduler a cluster places nothing, and that may be lost while young as well.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.25, 30.0
#: Longer than a drain may take.
DRAIN_GUARD_S = 3600.0
#: The others of a unit may take so long to end, then they are killed.
OTHERS_END_S = 15.0


class Ending(Protocol):
    """What is asked of a process."""

    @property
    def name(self) -> str:
        """Its name, which the next one has as well."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        ...

    def ending(self) -> str:
        """Say how it ended."""
        ...

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        ...

    def kill(self) -> None:
        """End it at once, with all that it has started."""
        ...


class Restarts:
    """Watches *units*: processes that end and start together, mostly one.

    ``start`` starts all processes of a unit anew; ``units`` names the unit of a process where it is
    another name than its own.  What an operator should know is logged.
    """

    def __init__(
        self,
        start: Callable[[str], None],
        units: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._start = start
        self._units = units
        self._since_s: dict[str, float] = {}
        self._pause_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}

    def ask(self, unit: str, now_s: float) -> None:
        """A unit is to end: its next end is no fault, and it starts at once."""
        self._asked_s[unit] = now_s

    def turn(self, processes: Iterable[Ending], now_s: float) -> None:
        """Look at all processes; call it often."""
        by_unit: dict[str, list[Ending]] = {}
        for process in processes:
            by_unit.setdefault(self._units.get(process.name, process.name), []).append(process)
        for unit, together in by_unit.items():
            ended = next((process for process in together if not process.alive), None)
            if now_s >= self._asked_s.get(unit, now_s) + DRAIN_GUARD_S:
                self._kill(together)
            if ended is None:
                self._since_s.setdefault(unit, now_s)
            elif unit not in self._due_s:
                self._ended(unit, ended, now_s)
                self._end_others(together)
            if unit in self._due_s and now_s >= self._due_s[unit]:
                self._start_when_ended(unit, together, now_s)

    def _start_when_ended(self, unit: str, together: Sequence[Ending], now_s: float) -> None:
        """Start a unit once all of it have ended, by force if need be."""
        alive = [process for process in together if process.alive]
        if not alive:
            del self._due_s[unit]
            self._start(unit)
        elif now_s >= self._due_s[unit] + OTHERS_END_S:
            self._kill(alive)

    @staticmethod
    def _kill(together: Sequence[Ending]) -> None:
        for process in together:
            if process.alive:
                process.kill()

    def _end_others(self, together: Sequence[Ending]) -> None:
        for process in together:
            if process.alive:
                process.send_signal(signal.SIGINT)

    def _ended(self, unit: str, process: Ending, now_s: float) -> None:
        lived_s = now_s - self._since_s.pop(unit, now_s)
        if self._asked_s.pop(unit, None) is not None:
            self._due_s[unit] = now_s
            log.info("%s has ended as it was asked to and is started again at once", unit)
            return
        before_s = self._pause_s.get(unit, 0.0)
        pause_s = min(max(2 * before_s, FIRST_PAUSE_S), LAST_PAUSE_S)
        self._pause_s[unit] = pause_s = 0.0 if lived_s >= LONG_LIFE_S else pause_s
        self._due_s[unit] = now_s + pause_s
        when = f"in {pause_s:g} s" if pause_s else "at once"
        log.warning("%s", process.ending())
        log.info("%s is started again %s", unit, when)
