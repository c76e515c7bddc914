"""Processes that end on their own are started again: at once, or after ever longer pauses.

One that had lived long is started at once.  One that ends soon after every start has a reason that
the next start will not mend; it is tried less and less often, and the reason is said every time.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

#: A process that had lived for so long is started again at once.
LONG_LIFE_S = 60.0
#: Pauses after shorter lives: the first, doubled each time up to the last.
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0


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


class Restarts:
    """``start`` starts the next process of a name; ``say`` gets what an operator should know."""

    def __init__(self, start: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._start = start
        self._say = say
        self._since_s: dict[str, float] = {}
        self._pause_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}

    def turn(self, processes: Iterable[Ending], now_s: float) -> None:
        """Look at all processes; call it often."""
        for process in tuple(processes):
            name = process.name
            if process.alive:
                self._since_s.setdefault(name, now_s)
            elif name not in self._due_s:
                self._ended(process, now_s)
            if name in self._due_s and now_s >= self._due_s[name]:
                del self._due_s[name]
                self._start(name)

    def _ended(self, process: Ending, now_s: float) -> None:
        name = process.name
        lived_s = now_s - self._since_s.pop(name, now_s)
        before_s = self._pause_s.get(name, 0.0)
        pause_s = min(max(2 * before_s, FIRST_PAUSE_S), LAST_PAUSE_S)
        self._pause_s[name] = pause_s = 0.0 if lived_s >= LONG_LIFE_S else pause_s
        self._due_s[name] = now_s + pause_s
        when = f"in {pause_s:g} s" if pause_s else "at once"
        self._say(f"{process.ending()}\n{name} is started again {when}")
