"""What happens next: one clock, one queue of events, one source of chance for a whole cluster.

Time stands still while something happens and jumps to the next event then.  A seed decides all
that is left to chance, so it gives the same run again, to the last byte.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import TypeVar

T = TypeVar("T")

#: An engine's clock does not start at zero.
_START_S = 100.0
#: Far more than any run needs: two ends that wake each other for ever.
_MOST_EVENTS = 3_000_000
#: How long a killed process takes to end: its memory is given back, its network card forgets it.
_DYING_S = (0.0, 1e-4, 2e-3, 0.05)
#: How often it is asked whether what a run waits for is there.
_LOOK_EVERY_S = 0.05


class Timer:
    """Something that is to happen."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Let it not happen; idempotent."""
        self.call = None


class World:
    """Time in seconds, events in order of their times, the story of what happened.

    ``problems`` are what must never be true; a run goes on after one.
    """

    def __init__(self, seed: int, *, telling: bool = False) -> None:
        self.seed = seed
        self.telling = telling
        self.chance = Random(seed)
        self.now_s = _START_S
        self.story: list[tuple[float, str, str]] = []
        self._details: list[tuple[float, str, str]] = []
        self.problems: list[str] = []
        self.events = 0
        #: Called at moments when a fault would hurt: something begins, arrives or is under way.
        self.moment: Callable[[], None] = lambda: None
        self._queue: list[tuple[float, int, Timer]] = []
        self._numbered = 0
        self._disposals: list[Callable[[], None]] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning of the world."""
        return self.now_s - _START_S

    def at(self, when_s: float, call: Callable[[], object]) -> Timer:
        """Let something happen at a time, after what was to happen then already."""
        timer = Timer(call)
        self._numbered += 1
        heappush(self._queue, (max(when_s, self.now_s), self._numbered, timer))
        return timer

    def after(self, delay_s: float, call: Callable[[], object]) -> Timer:
        """Let something happen so much later, at least 0 s."""
        timer = Timer(call)
        self._numbered += 1
        heappush(self._queue, (self.now_s + delay_s, self._numbered, timer))
        return timer

    def pick(self, options: Sequence[T]) -> T:
        """Return one of these, each as likely; quicker than ``chance.choice``."""
        return options[int(self.chance.random() * len(options))]

    def note(self, who: str, what: str) -> None:
        """Tell the story."""
        self.story.append((self.elapsed_s, who, what))

    def detail(self, who: str, what: Callable[[], str]) -> None:
        """Tell more, to who asked for the story; the run's digest does not depend on it."""
        if self.telling:
            self._details.append((self.elapsed_s, who, what()))

    def problem(self, what: str) -> None:
        """Something happened that must not."""
        self.problems.append(what)
        self.note("PROBLEM", what)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let things happen until something is true; False if it is not after ``limit_s``."""
        end_s = self.now_s + limit_s
        while not until():
            if self.now_s >= end_s:
                return False
            self._run_to(min(self.now_s + _LOOK_EVERY_S, end_s))
            if self.events > _MOST_EVENTS:
                self.problem(f"more than {_MOST_EVENTS} events: something never comes to rest")
                return False
        return True

    def _run_to(self, end_s: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= end_s and self.events <= _MOST_EVENTS:
            self.now_s, _, timer = heappop(queue)
            if (call := timer.call) is not None:
                self.events += 1
                call()
        self.now_s = end_s

    def at_the_end(self, dispose: Callable[[], None]) -> None:
        """Call this when the world ends."""
        self._disposals.append(dispose)

    def end(self) -> None:
        """Give back what would outlive the world."""
        self._queue.clear()
        for dispose in self._disposals:
            dispose()
        self._disposals.clear()

    def digest(self) -> str:
        """Name the story: equal for equal runs."""
        return hashlib.sha256("\n".join(_lines(self.story)).encode()).hexdigest()[:16]

    def lines(self) -> Iterable[str]:
        """Return the story as lines, with virtual times."""
        return _lines(sorted(self.story + self._details, key=lambda line: line[0]))


def _lines(story: Iterable[tuple[float, str, str]]) -> Iterable[str]:
    for when_s, who, what in story:
        yield f"{when_s:11.6f}  {who:<12} {what}"


class Process:
    """One process: it runs, stands still, or is dead for good."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        #: When its machine says that it has ended, a while after it was killed.
        self.gone_s = float("inf")
        self._stopped = False
        self._parked: list[Callable[[], object]] = []

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left of it, which its machine can say: until then it is dying."""
        return self.world.now_s >= self.gone_s

    @property
    def runs(self) -> bool:
        """Whether it neither stands still nor is dead."""
        return self.alive and not self._stopped

    def step(self, call: Callable[[], object]) -> None:
        """Let the process do something, once it runs again."""
        if not self.alive:
            return
        if self._stopped:
            self._parked.append(call)
        else:
            call()

    def stop(self) -> None:
        """Let it stand still, as SIGSTOP does."""
        self._stopped = True

    def go_on(self) -> None:
        """Let it run again; what came meanwhile comes now, in order."""
        self._stopped = False
        parked, self._parked = self._parked, []
        for call in parked:
            self.world.after(0.0, lambda call=call: self.step(call))  # type: ignore[misc]

    def kill(self) -> None:
        """Nothing of it happens any more, but that what its network card has to send is sent."""
        self.alive = False
        self.gone_s = self.world.now_s + self.world.pick(_DYING_S)
        self._parked.clear()
