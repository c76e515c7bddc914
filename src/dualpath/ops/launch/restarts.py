"""Restarts processes that exit on their own, with exponential backoff.

A process that ran for long is restarted immediately.  One that exits soon after every start is
restarted after growing pauses, as a restart is unlikely to help; every exit is logged with the end
of the process's log.

Ranks of a data-parallel group are a unit: if one exits, the others must exit too, as vLLM cannot
restart a single rank.  Idle ranks would not notice, so they are sent SIGINT.
"""

import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

log = logging.getLogger(__name__)

#: A process that ran for this long is restarted immediately.
LONG_LIFE_S = 60.0
#: Pauses before other restarts: the first one, doubled each time up to the last.  The first ones
#: are short, because a cluster serves nothing while its scheduler restarts.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.25, 30.0
#: A drain that takes longer is ended by force.
DRAIN_GUARD_S = 3600.0
#: Time for the other processes of a unit to exit before they are killed.
OTHERS_END_S = 15.0


class RestartableProcess(Protocol):
    """Interface of a process for ``Restarts``."""

    @property
    def name(self) -> str:
        """Its name, the same after a restart."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        ...

    def exit_report(self) -> str:
        """Return its exit code and the end of its log, as text."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal to it."""
        ...

    def kill(self) -> None:
        """Kill it and its children."""
        ...


class Restarts:
    """Restarts *units*: processes that stop and start together, usually one.

    ``start`` starts all processes of a unit; ``units`` maps processes to units (default: a unit of
    the process's own name).  Exits and restarts are logged.
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

    def expect_exit(self, unit: str, now_s: float) -> None:
        """Expect the next exit of a unit: it is not a failure, and it is restarted immediately."""
        self._asked_s[unit] = now_s

    def poll(self, processes: Iterable[RestartableProcess], now_s: float) -> None:
        """Check all processes; call it periodically."""
        by_unit: dict[str, list[RestartableProcess]] = {}
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

    def _start_when_ended(
        self, unit: str, together: Sequence[RestartableProcess], now_s: float
    ) -> None:
        """Start a unit once all its processes have exited; kill them after a timeout."""
        alive = [process for process in together if process.alive]
        if not alive:
            del self._due_s[unit]
            self._start(unit)
        elif now_s >= self._due_s[unit] + OTHERS_END_S:
            self._kill(alive)

    @staticmethod
    def _kill(together: Sequence[RestartableProcess]) -> None:
        for process in together:
            if process.alive:
                process.kill()

    def _end_others(self, together: Sequence[RestartableProcess]) -> None:
        for process in together:
            if process.alive:
                process.send_signal(signal.SIGINT)

    def _ended(self, unit: str, process: RestartableProcess, now_s: float) -> None:
        lived_s = now_s - self._since_s.pop(unit, now_s)
        if self._asked_s.pop(unit, None) is not None:
            self._due_s[unit] = now_s
            log.info("%s has exited as requested and is restarted", unit)
            return
        before_s = self._pause_s.get(unit, 0.0)
        pause_s = min(max(2 * before_s, FIRST_PAUSE_S), LAST_PAUSE_S)
        self._pause_s[unit] = pause_s = 0.0 if lived_s >= LONG_LIFE_S else pause_s
        self._due_s[unit] = now_s + pause_s
        when = f"in {pause_s:g} s" if pause_s else "now"
        log.warning("%s", process.exit_report())
        log.info("%s is restarted %s", unit, when)
