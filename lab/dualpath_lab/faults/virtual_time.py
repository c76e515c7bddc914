"""An event loop on virtual time: time-outs pass at once, and always in the same order.

The clock stands still while any task can run.  When all tasks wait, it jumps to the earliest time
for which one of them waits.  So tests use the time-outs of the live system, their results do not
depend on the machine, and a test that would wait for ever fails at once.

The clock stands still while threads (``asyncio.to_thread``) run.  Sockets are not supported: the
loop cannot know whether bytes are in flight.  Tests with ``pytest.mark.virtual_time`` run on this
loop; their control connections are those of ``tests.control_network``.
"""

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")

#: No test waits for a day: after this time only periodic timers are running.
_LONGEST_S = 86_400.0


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module's docstring; ``time`` starts at 0 s."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._in_threads = 0
        self._jumping = _JumpingSelector(self._jump)
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since the loop was created."""
        return self._now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., T], *args: object
    ) -> "asyncio.Future[T]":
        """Run in a thread; the clock stands still until it is done."""
        future = super().run_in_executor(executor, func, *args)
        self._in_threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *limit: float | None) -> None:
        """Wait for the threads to end; Python 3.12 passes a time limit."""
        self._in_threads += 1
        try:
            await super().shutdown_default_executor(*limit)
        finally:
            self._in_threads -= 1

    def _thread_done(self, future: "asyncio.Future[Any]") -> None:
        self._in_threads -= 1

    def _jump(self, seconds: float | None) -> bool:
        """Advance the clock; False if a thread is running."""
        if self._in_threads:
            return False
        if len(self._jumping.get_map()) > 1:  # one is the loop's own, by which threads wake it
            raise RuntimeError("a task in virtual time waits for a socket; use one in memory")
        if seconds is None or self._now_s > _LONGEST_S:
            raise RuntimeError(
                f"after {self._now_s:g} s of virtual time every task waits for ever: "
                f"{[task.get_name() for task in asyncio.all_tasks(self)]}"
            )
        self._now_s += seconds
        return True


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[float | None], bool]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0 or self._jump(timeout):
            return ready
        return super().select(None)
