"""Simulated threads: greenlets, of which one runs at a time until it waits.

A small random delay of every wake-up decides which of the ready threads runs next.  A thread may
also be preempted where it acquires or releases a lock.
"""

import functools
from collections.abc import Callable
from random import Random

from greenlet import GreenletExit, getcurrent, greenlet

from dualpath.engine.threads import Condition, Event, Lock, Thread
from dualpath_lab.faults.simulation.world import Process, Timer

#: Delay until a woken thread runs.
_WAKE_UPS_S = (0.0, 0.0, 0.0, 0.0, 1e-6, 1e-5, 1e-4, 2e-3)
#: A thread is preempted at one of this many acquisitions and releases of locks, on average.
_PREEMPTED_OF = 50
#: Names of the threads that compute.
_CORES = ("prefill", "decode")


class SimThreads:
    """The threads of one process and their synchronization; ``engine.threads.Threads``."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.world = process.world
        self._chance: Random = self.world.chance
        self.hub = getcurrent()
        self._running: dict[greenlet, SimThread] = {}
        #: Acquisitions and releases of locks until the running thread is preempted.
        self.until_preempted = 0
        #: Whether the thread that computes hangs, while the others of its process go on.
        self.core_hangs = False
        self._hanging: list[Waiting] = []
        self.world.on_end(self._dispose)

    def start(self, name: str, work: Callable[[], None]) -> Thread:
        """Start a thread, which runs later."""
        thread = SimThread(self, name, work)
        self._running[thread.greenlet] = thread
        self.wake(thread)
        return thread

    def is_current(self, thread: Thread) -> bool:
        """Whether the thread is the one that runs."""
        return isinstance(thread, SimThread) and thread.greenlet is getcurrent()

    def lock(self) -> Lock:
        """Return a lock at which a thread may be preempted."""
        return _SimLock(self)

    def condition(self) -> Condition:
        """Return a condition with such a lock."""
        return _SimCondition(self)

    def event(self) -> Event:
        """Return an event."""
        return _SimEvent(self)

    def now_ns(self) -> int:
        """Return the time of the simulation."""
        return int(self.world.now_s * 1e9)

    def sleep(self, seconds: float) -> None:
        """Sleep; the thread that computes sleeps as long as it hangs."""
        self.wait([], seconds)
        while self.core_hangs and self._running[getcurrent()].name in _CORES:
            self.wait(self._hanging, None)

    def hang_core(self) -> Callable[[], None]:
        """Let the thread that computes hang; return the function that ends it."""
        self.core_hangs = True

        def end() -> None:
            self.core_hangs = False
            _wake_first(self._hanging, len(self._hanging))

        return end

    # ------------------------------------------------------------------ for locks and events

    def is_hub(self) -> bool:
        """Whether the event queue runs, not a thread."""
        return getcurrent() is self.hub

    def wait(self, queue: "list[Waiting]", timeout_s: float | None) -> bool:
        """Make the running thread wait in a queue; False after a time-out."""
        waiting = Waiting(self, self._running[getcurrent()])
        queue.append(waiting)
        if timeout_s is not None:
            waiting.timer = self.world.after(max(timeout_s, 0.0), waiting.time_out)
        self._switch()
        if not waiting.woken and waiting in queue:
            queue.remove(waiting)
        return waiting.woken

    def preempt(self) -> None:
        """Let other threads run before this one continues."""
        self.until_preempted = int(self._chance.random() * 2 * _PREEMPTED_OF)
        if not self.is_hub() and self.process.alive:
            self.wake(self._running[getcurrent()])
            self._switch()

    def wake(self, thread: "SimThread") -> None:
        """Schedule a thread to run again soon."""
        self.world.after(_WAKE_UPS_S[int(self._chance.random() * len(_WAKE_UPS_S))], thread.resume)

    def on_ended(self, thread: "SimThread") -> None:
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
        #: Continues the thread; if its process is stopped, once that is resumed.
        self.resume = functools.partial(threads.process.step, self.greenlet.switch)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
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
        threads.on_ended(self)
        self._over.set()


class Waiting:
    """A waiting thread with its time-out."""

    __slots__ = ("_thread", "_threads", "over", "timer", "woken")

    def __init__(self, threads: SimThreads, thread: SimThread) -> None:
        self._threads = threads
        self._thread = thread
        self.woken = False
        self.over = False
        self.timer: Timer | None = None

    def wake(self) -> None:
        """Wake the thread."""
        if not self.over:
            self.over = self.woken = True
            if self.timer is not None:
                self.timer.cancel()
            self._threads.wake(self._thread)

    def time_out(self) -> None:
        """The wait has timed out."""
        if not self.over:
            self.over = True
            self._thread.resume()


def _wake_first(queue: list[Waiting], count: int) -> None:
    while queue and count > 0:
        waiting = queue.pop(0)
        if not waiting.over:
            waiting.wake()
            count -= 1


class _SimLock:
    """``until_preempted`` is counted inline, since locks are the most frequent operation."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._held = False
        self._queue: list[Waiting] = []

    def __enter__(self) -> bool:
        threads = self._threads
        threads.until_preempted -= 1
        if threads.until_preempted < 0:
            threads.preempt()
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
            threads.until_preempted -= 1
            if threads.until_preempted < 0:
                threads.preempt()

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
