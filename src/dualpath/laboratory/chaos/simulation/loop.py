"""The event loop of one simulated process: asyncio's tasks and futures on the world's events.

A loop of a process that stands still runs nothing, one of a process that was killed never again:
no ``finally`` of it gives anything back, as with ``kill -9``.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

from dualpath.laboratory.chaos.simulation.world import Process


class ProcessLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as asyncio needs that has no sockets."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._world = process.world
        # Kept, also when the process is dead: a task that is thrown away runs its ``finally``.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._world.at_the_end(self._dispose)

    def time(self) -> float:
        """Return the world's time in seconds."""
        return self._world.now_s

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Run after what is to be run now."""
        handle = asyncio.Handle(callback, args, self, context)
        self._world.after(0.0, lambda: self._step(handle))
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run so much later."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run at a time."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.at(when, lambda: self._step(handle))
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

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _step(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            self.process.step(lambda: self._run(handle))

    def _run(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        asyncio._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(None)
