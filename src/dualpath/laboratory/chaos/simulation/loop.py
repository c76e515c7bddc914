"""The event loop of one simulated process: asyncio's tasks and futures on the world's events.

A loop of a process that stands still runs nothing, one of a process that was killed never again:
no ``finally`` of it gives anything back, as with ``kill -9``.
"""

import asyncio
import contextlib
import contextvars
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from dualpath.laboratory.chaos.simulation.clock import TRUE_CLOCK, Clock
from dualpath.laboratory.chaos.simulation.world import Process, Timer

#: Of what a loop could run at once, others may come after one in so many.
_INTERRUPTED_OF = 16


class ProcessLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as asyncio needs that has no sockets."""

    def __init__(self, process: Process, clock: Clock = TRUE_CLOCK) -> None:
        self.process = process
        self._clock = clock
        self._world = process.world
        # Kept, also when the process is dead: a task that is thrown away runs its ``finally``.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._ready: deque[Handle] = deque()
        self._turn_is_due = False
        self._world.at_the_end(self._dispose)

    def time(self) -> float:
        """Return what the process's clock shows."""
        return self._clock.shows(self._world.now_s)

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401
        context: contextvars.Context | None = None,
    ) -> "Handle":
        """Run after what is to be run now."""
        handle = Handle(callback, args, context)
        self._ready.append(handle)
        if not self._turn_is_due:
            self._turn_is_due = True
            self._world.after(0.0, self._comes_to_turn)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401
        context: contextvars.Context | None = None,
    ) -> "Handle":
        """Run so much later."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401
        context: contextvars.Context | None = None,
    ) -> "Handle":
        """Run at a time."""
        handle = Handle(callback, args, context)
        when_s = self._clock.when_s(when)
        handle.timer = self._world.at(when_s, functools.partial(self._is_time, handle))
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
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)

    def _dispose(self) -> None:
        self.process.alive = False
        for task in list(self._tasks):
            with contextlib.suppress(RuntimeError):  # it waits once more in a ``finally``
                task.get_coro().close()
        self._tasks.clear()

    def run_in_executor(  # type: ignore[override]
        self,
        executor: object,
        func: Callable[..., Any],
        *args: Any,  # noqa: ANN401
    ) -> "asyncio.Future[Any]":
        """Call at once; nothing that runs in a simulated thread is called like this."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Note what nobody has caught."""
        if self.process.alive:
            error = context.get("exception")
            self._world.problem(
                f"{self.process.name}: {context.get('message')}: {type(error).__name__}: {error}"
            )

    def get_debug(self) -> bool:
        """No."""
        return False

    def is_running(self) -> bool:
        """As long as the process lives."""
        return self.process.alive

    def is_closed(self) -> bool:
        """Once it does not."""
        return not self.process.alive

    def _is_time(self, handle: "Handle") -> None:
        self._ready.append(handle)
        if not self._turn_is_due:
            self._turn_is_due = True
            self._comes_to_turn()

    def _comes_to_turn(self) -> None:
        self.process.step(self._turn)

    def _turn(self) -> None:
        """Run what is ready, and what that makes ready."""
        ready, chance = self._ready, self._world.chance
        asyncio._set_running_loop(self)
        try:
            while ready:
                self._run(ready.popleft())
                if chance.random() * _INTERRUPTED_OF < 1:
                    break
        finally:
            asyncio._set_running_loop(None)
        self._turn_is_due = bool(ready)
        if ready:
            self._world.after(0.0, self._comes_to_turn)

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
            self.call_exception_handler({"message": f"{what} fails", "exception": error})


class Handle:
    """What a loop is to run; as much of ``asyncio.Handle`` as asyncio uses, and lighter."""

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
        """Let it not be run; idempotent."""
        self.callback = None
        if self.timer is not None:
            self.timer.cancel()

    def cancelled(self) -> bool:
        """Whether it is not to be run any more."""
        return self.callback is None
