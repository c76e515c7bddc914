"""Discrete-event simulation: one clock, one event queue, one random source for a whole cluster.

The clock stands still while an event runs and then jumps to the next event.  A seed decides all
random choices, so equal seeds give equal runs, to the last byte.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import TypeVar

import msgspec

# ------------------------------------------------------------------------------------------- clock
# The monotonic clock of a simulated machine.

#: Bound of the time by which rounding may make a clock early.
_ROUNDED_S = 1e-9


class Clock(msgspec.Struct, frozen=True):
    """Advances by ``rate`` seconds per second, from ``zero_s`` at time 0."""

    rate: float = 1.0
    zero_s: float = 0.0

    def shows(self, now_s: float) -> float:
        """Return its reading at a time of the simulation."""
        return now_s * self.rate + self.zero_s

    def when_s(self, shown_s: float) -> float:
        """Return the time of the simulation at which its reading is at least this."""
        # A timer that fires a little too early would be set again with a delay of 0 s for ever.
        late_s = 0.0 if self == TRUE_CLOCK else _ROUNDED_S
        return (shown_s - self.zero_s) / self.rate + late_s


#: Its reading is the time of the simulation.
TRUE_CLOCK = Clock()


T = TypeVar("T")

#: An engine's clock does not start at zero.
_START_S = 100.0
#: Some thirty times as many as the longest of 200 runs: reached only by processes that wake each
#: other for ever.
_MOST_EVENTS = 1_000_000
#: How long a killed process takes to exit: its memory is freed, its transfers end.
_DYING_S = (0.0, 1e-4, 2e-3, 0.05)
#: How often the end condition of a run is polled.
_POLL_S = 0.05


class Timer:
    """A scheduled event."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Cancel the event; idempotent."""
        self.call = None


class World:
    """The clock in seconds, the events in order of their times, and the log of the run.

    ``problems`` are violated invariants; a run continues after one.
    """

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.seed = seed
        self.verbose = verbose
        self.chance = Random(seed)
        self.now_s = _START_S
        self.story: list[tuple[float, str, str]] = []
        self._details: list[tuple[float, str, str]] = []
        self.problems: list[str] = []
        #: The latest process of each name.
        self.processes: dict[str, Process] = {}
        self.events = 0
        #: Called where a fault is likely to show a bug: when something begins, arrives or is in
        #: flight.
        self.maybe_fault: Callable[[], None] = lambda: None
        self._queue: list[tuple[float, int, Timer]] = []
        self._numbered = 0
        self._disposals: list[Callable[[], None]] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the simulation."""
        return self.now_s - _START_S

    def at(self, when_s: float, call: Callable[[], object]) -> Timer:
        """Schedule an event at a time, after the events already scheduled for that time."""
        timer = Timer(call)
        self._numbered += 1
        heappush(self._queue, (max(when_s, self.now_s), self._numbered, timer))
        return timer

    def after(self, delay_s: float, call: Callable[[], object]) -> Timer:
        """Schedule an event after a delay of at least 0 s."""
        timer = Timer(call)
        self._numbered += 1
        heappush(self._queue, (self.now_s + delay_s, self._numbered, timer))
        return timer

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options, uniformly; faster than ``chance.choice``."""
        return options[int(self.chance.random() * len(options))]

    def note(self, who: str, what: str) -> None:
        """Add a line to the log; ``who`` is the process."""
        self.story.append((self.elapsed_s, who, what))

    def detail(self, who: str, what: Callable[[], str]) -> None:
        """Add a line that only a verbose log has; it does not change the run's digest."""
        if self.verbose:
            self._details.append((self.elapsed_s, who, what()))

    def problem(self, what: str) -> None:
        """Record a violated invariant."""
        self.problems.append(what)
        self.note("PROBLEM", what)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Run events until ``until`` returns True; return False if it does not in ``limit_s``."""
        end_s = self.now_s + limit_s
        while not until():
            if self.now_s >= end_s:
                return False
            self._run_to(min(self.now_s + _POLL_S, end_s))
            if self.events > _MOST_EVENTS:
                self.problem(f"more than {_MOST_EVENTS} events: the cluster never becomes idle")
                return False
        return True

    def _run_to(self, end_s: float) -> None:
        queue, most = self._queue, _MOST_EVENTS - self.events
        while queue and queue[0][0] <= end_s and most >= 0:
            self.now_s, _, timer = heappop(queue)
            if (call := timer.call) is not None:
                self.events += 1
                most -= 1
                call()
        self.now_s = end_s

    def on_end(self, dispose: Callable[[], None]) -> None:
        """Call ``dispose`` when the simulation ends."""
        self._disposals.append(dispose)

    def end(self) -> None:
        """Free what would outlive the simulation."""
        self._queue.clear()
        for dispose in self._disposals:
            dispose()
        self._disposals.clear()

    def digest(self) -> str:
        """Return a hash of the log: equal for equal runs."""
        return hashlib.sha256("\n".join(_lines(self.story)).encode()).hexdigest()[:16]

    def lines(self) -> Iterable[str]:
        """Return the log as lines, with virtual times."""
        return _lines(sorted(self.story + self._details, key=lambda line: line[0]))


def _lines(story: Iterable[tuple[float, str, str]]) -> Iterable[str]:
    for when_s, who, what in story:
        yield f"{when_s:11.6f}  {who:<12} {what}"


class Process:
    """One process, which is running, stopped or dead."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        world.processes[name] = self
        #: Time at which its machine reports its exit, a while after it was killed.
        self.exits_s = float("inf")
        self._stopped = False
        self._parked: list[Callable[[], object]] = []

    @property
    def has_exited(self) -> bool:
        """Whether its machine reports that it has exited, which takes a while after a kill."""
        return self.world.now_s >= self.exits_s

    @property
    def runs(self) -> bool:
        """Whether it is neither stopped nor dead."""
        return self.alive and not self._stopped

    def step(self, call: Callable[[], object]) -> None:
        """Run ``call`` in the process: now, or when it is resumed; never if it is dead."""
        if not self.alive:
            return
        if self._stopped:
            self._parked.append(call)
        else:
            call()

    def stop(self) -> None:
        """Stop it, as SIGSTOP does."""
        self._stopped = True

    def resume(self) -> None:
        """Resume it, as SIGCONT does; calls that were held back run now, in order."""
        self._stopped = False
        parked, self._parked = self._parked, []
        for call in parked:
            self.world.after(0.0, lambda call=call: self.step(call))  # type: ignore[misc]

    def kill(self) -> None:
        """Kill it: it runs nothing more, but posted transfers continue until it has exited."""
        self.alive = False
        self.exits_s = self.world.now_s + self.world.pick(_DYING_S)
        self._parked.clear()
