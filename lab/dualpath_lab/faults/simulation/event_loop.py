"""The event loop of one simulated process: asyncio's tasks and futures on simulated time.

The loop of a stopped process runs no callback.  The loop of a killed process never runs again, and
none of its ``finally`` clauses is executed, as after ``kill -9``.
"""

import asyncio
import contextlib
import contextvars
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from dualpath_lab.faults.simulation.world import TRUE_CLOCK, Clock, Process, Timer

#: Other processes run after one of this many ready callbacks, on average.
_INTERRUPTED_OF = 16


class ProcessLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that asyncio needs without sockets."""

    def __init__(self, process: Process, clock: Clock = TRUE_CLOCK) -> None:
        self.process = process
        self._clock = clock
        self._world = process.world
        # References are held also after a kill: a task that is collected runs its ``finally``.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._ready: deque[Handle] = deque()
        self._is_scheduled = False
        self._world.on_end(self._dispose)

    def time(self) -> float:
        """Return the reading of the process's clock."""
        return self._clock.shows(self._world.now_s)

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401
        context: contextvars.Context | None = None,
    ) -> "Handle":
        """Schedule a callback after those that are ready."""
        handle = Handle(callback, args, context)
        self._ready.append(handle)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._world.after(0.0, self._run_once)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401
        context: contextvars.Context | None = None,
    ) -> "Handle":
        """Schedule a callback after a delay."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401
        context: contextvars.Context | None = None,
    ) -> "Handle":
        """Schedule a callback at a time."""
        handle = Handle(callback, args, context)
        when_s = self._clock.when_s(when)
        handle.timer = self._world.at(when_s, functools.partial(self._on_timer, handle))
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[Any]":
        """Return a task of this loop."""
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._remove)
        return task

    def _remove(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)

    def _dispose(self) -> None:
        self.process.alive = False
        for task in list(self._tasks):
            with contextlib.suppress(RuntimeError):  # it awaits in a ``finally``
                task.get_coro().close()
        self._tasks.clear()

    def run_in_executor(  # type: ignore[override]
        self,
        executor: object,
        func: Callable[..., Any],
        *args: Any,  # noqa: ANN401
    ) -> "asyncio.Future[Any]":
        """Call it at once; simulated threads do not use this."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an uncaught exception as a problem."""
        if self.process.alive:
            error = context.get("exception")
            self._world.problem(
                f"{self.process.name}: {context.get('message')}: {type(error).__name__}: {error}"
            )

    def get_debug(self) -> bool:
        """Return False."""
        return False

    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self.process.alive

    def is_closed(self) -> bool:
        """Whether the process is dead."""
        return not self.process.alive

    def _on_timer(self, handle: "Handle") -> None:
        self._ready.append(handle)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._run_once()

    def _run_once(self) -> None:
        self.process.step(self._run_ready)

    def _run_ready(self) -> None:
        """Run ready callbacks, including those that become ready meanwhile."""
        ready, chance = self._ready, self._world.chance
        asyncio._set_running_loop(self)
        try:
            while ready:
                self._run(ready.popleft())
                if chance.random() * _INTERRUPTED_OF < 1:
                    break
        finally:
            asyncio._set_running_loop(None)
        self._is_scheduled = bool(ready)
        if ready:
            self._world.after(0.0, self._run_once)

    def _run(self, handle: "Handle") -> None:
        callback, context = handle.callback, handle.context
        if callback is None:
            return
        try:
            if context is None:
                callback(*handle.args)
            else:
                context.run(callback, *handle.args)
        except Exception as error:
            what = getattr(callback, "__qualname__", callback)
            self.call_exception_handler({"message": f"{what} failed", "exception": error})


class Handle:
    """A scheduled callback: the part of ``asyncio.Handle`` that asyncio uses."""

    __slots__ = ("args", "callback", "context", "timer")

    def __init__(
        self,
        callback: Callable[..., object],
        args: Sequence[object],
        context: contextvars.Context | None,
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context
        self.timer: Timer | None = None

    def cancel(self) -> None:
        """Cancel the callback; idempotent."""
        self.callback = None
        if self.timer is not None:
            self.timer.cancel()

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self.callback is None
