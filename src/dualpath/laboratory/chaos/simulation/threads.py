"""Threads that run one at a time, each a greenlet that runs until it waits.

Which of the threads that could run is the next is left to chance, by small delays of every
wake-up; and a thread may lose its turn where it takes or gives back a lock.
"""

import functools
from collections.abc import Callable
from random import Random

from greenlet import GreenletExit, getcurrent, greenlet

from dualpath.engine.threads import Condition, Event, Lock, Thread
from dualpath.laboratory.chaos.simulation.world import Process, Timer

#: How long a thread that is woken needs until it runs.
_WAKE_UPS_S = (0.0, 0.0, 0.0, 0.0, 1e-6, 1e-5, 1e-4, 2e-3)
#: A thread loses its turn at one of so many locks taken or given back, on average.
_PREEMPTED_OF = 50


class SimThreads:
    """The threads of one process, and what they wait with; ``engine.threads.Threads``."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.world = process.world
        self._chance: Random = self.world.chance
        self.hub = getcurrent()
        self._running: dict[greenlet, SimThread] = {}
        #: Locks that may still be taken or given back before a thread loses its turn.
        self.turns_left = 0
        self.world.at_the_end(self._dispose)

    def start(self, name: str, work: Callable[[], None]) -> Thread:
        """Start a thread; it runs later."""
        thread = SimThread(self, name, work)
        self._running[thread.greenlet] = thread
        self.wake(thread)
        return thread

    def is_current(self, thread: Thread) -> bool:
        """Compare with the greenlet that runs."""
        return isinstance(thread, SimThread) and thread.greenlet is getcurrent()

    def lock(self) -> Lock:
        """Return a lock at which a thread may lose its turn."""
        return _SimLock(self)

    def condition(self) -> Condition:
        """Return a condition with such a lock."""
        return _SimCondition(self)

    def event(self) -> Event:
        """Return an event."""
        return _SimEvent(self)

    def now_ns(self) -> int:
        """Return the world's time."""
        return int(self.world.now_s * 1e9)

    def sleep(self, seconds: float) -> None:
        """Wait for nothing but time."""
        self.wait([], seconds)

    # ------------------------------------------------------------------ for what threads wait with

    def is_hub(self) -> bool:
        """Whether no thread runs, but the world itself."""
        return getcurrent() is self.hub

    def wait(self, queue: "list[Waiting]", timeout_s: float | None) -> bool:
        """Let the running thread wait in a queue; False if its time is over first."""
        waiting = Waiting(self, self._running[getcurrent()])
        queue.append(waiting)
        if timeout_s is not None:
            waiting.timer = self.world.after(max(timeout_s, 0.0), waiting.time_over)
        self._switch()
        if not waiting.woken and waiting in queue:
            queue.remove(waiting)
        return waiting.woken

    def lose_turn(self) -> None:
        """Let other threads run first."""
        self.turns_left = int(self._chance.random() * 2 * _PREEMPTED_OF)
        if not self.is_hub() and self.process.alive:
            self.wake(self._running[getcurrent()])
            self._switch()

    def wake(self, thread: "SimThread") -> None:
        """Let a thread run again, soon."""
        self.world.after(self.world.pick(_WAKE_UPS_S), thread.goes_on)

    def over(self, thread: "SimThread") -> None:
        """A thread has ended."""
        self._running.pop(thread.greenlet, None)

    def names(self) -> list[str]:
        """Return the names of threads that have not ended."""
        return [thread.name for thread in self._running.values()]

    def _switch(self) -> None:
        if not self.process.alive:
            raise GreenletExit
        self.hub.switch()
        if not self.process.alive:
            raise GreenletExit

    def _dispose(self) -> None:
        self.process.alive = False
        for one in list(self._running):
            if one:
                one.throw(GreenletExit)


class SimThread:
    """One thread; ``engine.threads.Thread``."""

    def __init__(self, threads: SimThreads, name: str, work: Callable[[], None]) -> None:
        self.name = name
        self._threads = threads
        self._work = work
        self._over = _SimEvent(threads)
        self.greenlet = greenlet(self._run, threads.hub)
        #: Lets it run, once its process does.
        self.goes_on = functools.partial(threads.process.step, self.greenlet.switch)

    def is_alive(self) -> bool:
        """Whether its work is not over."""
        return not self._over.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._over.wait(timeout)

    def _run(self) -> None:
        threads = self._threads
        try:
            self._work()
        except GreenletExit:
            return
        except BaseException as error:
            who = f"thread {self.name} of {threads.process.name}"
            threads.world.problem(f"{who} died: {type(error).__name__}: {error}")
        threads.over(self)
        self._over.set()


class Waiting:
    """A thread that waits, and for how long at most."""

    __slots__ = ("_thread", "_threads", "over", "timer", "woken")

    def __init__(self, threads: SimThreads, thread: SimThread) -> None:
        self._threads = threads
        self._thread = thread
        self.woken = False
        self.over = False
        self.timer: Timer | None = None

    def wake(self) -> None:
        """What was waited for is there."""
        if not self.over:
            self.over = self.woken = True
            if self.timer is not None:
                self.timer.cancel()
            self._threads.wake(self._thread)

    def time_over(self) -> None:
        """It did not come in time."""
        if not self.over:
            self.over = True
            self._thread.goes_on()


def _wake_first(queue: list[Waiting], count: int) -> None:
    while queue and count > 0:
        waiting = queue.pop(0)
        if not waiting.over:
            waiting.wake()
            count -= 1


class _SimLock:
    """``turns_left`` is counted in place: nothing is called as often as this."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._held = False
        self._queue: list[Waiting] = []

    def __enter__(self) -> bool:
        threads = self._threads
        threads.turns_left -= 1
        if threads.turns_left < 0:
            threads.lose_turn()
        if self._held:
            self._queue_up()
        self._held = True
        return True

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._held = False
        if self._queue:
            _wake_first(self._queue, 1)
        if kind is None:
            threads = self._threads
            threads.turns_left -= 1
            if threads.turns_left < 0:
                threads.lose_turn()

    def _queue_up(self) -> None:
        threads = self._threads
        while self._held and not threads.is_hub() and threads.process.alive:
            threads.wait(self._queue, None)


class _SimCondition(_SimLock):
    def __init__(self, threads: SimThreads) -> None:
        super().__init__(threads)
        self._waiting: list[Waiting] = []

    def wait(self, timeout: float | None = None) -> bool:
        self._held = False
        _wake_first(self._queue, 1)
        woken = self._threads.wait(self._waiting, timeout)
        while self._held:
            self._threads.wait(self._queue, None)
        self._held = True
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end_s = None if timeout is None else self._threads.world.now_s + timeout
        while not predicate():
            left_s = None if end_s is None else end_s - self._threads.world.now_s
            if left_s is not None and left_s <= 0:
                return False
            self.wait(left_s)
        return True

    def notify(self, n: int = 1) -> None:
        _wake_first(self._waiting, n)

    def notify_all(self) -> None:
        _wake_first(self._waiting, len(self._waiting))


class _SimEvent:
    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._set = False
        self._queue: list[Waiting] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        _wake_first(self._queue, len(self._queue))

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._threads.wait(self._queue, timeout)
        return self._set
