"""SIGTERM drains a process whose server is vLLM's; a second one, or SIGINT, ends it at once.

vLLM's server takes SIGINT and SIGTERM for the same wish to end now, and from then on its engine
core refuses the requests that the router has yet to send.  Here SIGTERM is taken from it; when
nothing is left to do, it gets its SIGINT.

An engine is two processes: the server that gets the signal, and the engine core with the traffic
manager, which talks to the router.  ``DRAIN_SIGNAL`` goes from one to the other, SIGINT comes back.
With several ranks, or in a data-parallel group, the traffic manager is in a third, a worker of the
engine core, which passes the signal on.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Awaitable, Callable

from dualpath.storage.host_process import process_stat

#: Neither vLLM nor UCX uses it.
DRAIN_SIGNAL = signal.SIGUSR2
#: vLLM's name of an engine core's process; one of several has its rank behind it.
_ENGINE_CORE = "EngineCore"
#: vLLM's name of the process of an engine core's first rank, where it is not the core itself.
_FIRST_WORKER = "VllmWorker-0"


def drained_on_sigterm(drain: Callable[[], Awaitable[None]]) -> None:
    """From the loop's next turn on, let SIGTERM run ``drain`` before the server ends.

    By then vLLM's ``serve_http``, if it is awaited next, has set its own handlers.
    """
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    async def drain_and_end() -> None:
        try:
            await drain()
        finally:
            _end()

    def terminated() -> None:
        if draining:
            _end()
        else:
            draining.append(loop.create_task(drain_and_end(), name="drain"))

    loop.call_soon(loop.add_signal_handler, signal.SIGTERM, terminated)


async def drain_engine_core(timeout_s: float) -> None:
    """Let this server's engine core drain; returns without having heard of it after ``timeout_s``.

    At once where there is none, as in one of several servers of an engine.
    """
    cores = [c for c in multiprocessing.active_children() if c.name.startswith(_ENGINE_CORE)]
    for core in cores:
        if core.pid is not None:
            os.kill(core.pid, DRAIN_SIGNAL)
    if cores:
        await asyncio.sleep(timeout_s)


def on_drain_signal(ask: Callable[[], None]) -> None:
    """Let the signal call ``ask``; in a thread, which cannot set it, nothing happens."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(DRAIN_SIGNAL, lambda number, frame: ask())


def pass_drain_signal_on() -> None:
    """Let the signal go on to the worker of the first rank; called in an engine core."""

    def pass_on() -> None:
        for child in multiprocessing.active_children():
            if child.name == _FIRST_WORKER and child.pid is not None:
                os.kill(child.pid, DRAIN_SIGNAL)

    on_drain_signal(pass_on)


class ApiServer:
    """The server of the engine that this process belongs to: the engine core, or a worker of it."""

    def __init__(self) -> None:
        self._parent = self._pid = os.getppid()
        parent = multiprocessing.parent_process()
        if parent is not None and parent.name.startswith(_ENGINE_CORE):
            core = process_stat(self._parent)
            self._pid = core.parent if core is not None else 0

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, or the engine core between it and this process has."""
        if os.getppid() != self._parent:
            return True
        core = process_stat(self._parent) if self._pid != self._parent else None
        return core is not None and core.parent != self._pid

    def interrupt(self) -> None:
        """Let it end."""
        os.kill(self._pid, signal.SIGINT)


def _end() -> None:
    os.kill(os.getpid(), signal.SIGINT)
