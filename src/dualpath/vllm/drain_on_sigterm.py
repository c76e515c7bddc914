"""Makes SIGTERM drain a process with vLLM's server; a second SIGTERM, or SIGINT, ends it at once.

vLLM's server handles SIGINT and SIGTERM alike: it ends at once, and its engine core refuses
requests that the router sends from then on.  Here SIGTERM is handled by dualpath instead, and
vLLM gets a SIGINT when draining is complete.

An engine is two processes: the server, which receives the signal, and the engine core, which hosts
the traffic manager with its connection to the router.  The server sends ``DRAIN_SIGNAL`` to the
engine core, which sends SIGINT back.  With several ranks, or in a data-parallel group, the traffic
manager is in a third process, a worker of the engine core, and the engine core forwards the signal.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Awaitable, Callable

from dualpath.node.host_process import process_stat

#: A signal that neither vLLM nor UCX uses.
DRAIN_SIGNAL = signal.SIGUSR2
#: vLLM's name for an engine core's process; with several cores the rank is appended.
_ENGINE_CORE = "EngineCore"
#: vLLM's name for the worker process of an engine core's first rank.
_FIRST_WORKER = "VllmWorker-0"


def drain_on_sigterm(drain: Callable[[], Awaitable[None]]) -> None:
    """Make SIGTERM run ``drain`` before the server ends, from the loop's next iteration on.

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
    """Make this server's engine core drain; return after ``timeout_s`` if it has not ended us.

    Returns at once without an engine core, as in one of several servers of an engine.
    """
    cores = [c for c in multiprocessing.active_children() if c.name.startswith(_ENGINE_CORE)]
    for core in cores:
        if core.pid is not None:
            os.kill(core.pid, DRAIN_SIGNAL)
    if cores:
        await asyncio.sleep(timeout_s)


def on_drain_signal(request_drain: Callable[[], None]) -> None:
    """Call ``request_drain`` at each drain signal; does nothing outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(DRAIN_SIGNAL, lambda number, frame: request_drain())


def forward_drain_signal() -> None:
    """Forward the drain signal to the worker of the first rank; called in an engine core."""

    def pass_on() -> None:
        for child in multiprocessing.active_children():
            if child.name == _FIRST_WORKER and child.pid is not None:
                os.kill(child.pid, DRAIN_SIGNAL)

    on_drain_signal(pass_on)


class ApiServer:
    """The API server process of this engine, seen from the engine core or one of its workers."""

    def __init__(self) -> None:
        self._parent = self._pid = os.getppid()
        parent = multiprocessing.parent_process()
        if parent is not None and parent.name.startswith(_ENGINE_CORE):
            core = process_stat(self._parent)
            self._pid = core.parent if core is not None else 0

    @property
    def has_exited(self) -> bool:
        """Whether the server, or the engine core between it and this process, has ended."""
        if os.getppid() != self._parent:
            return True
        core = process_stat(self._parent) if self._pid != self._parent else None
        return core is not None and core.parent != self._pid

    def interrupt(self) -> None:
        """Send SIGINT to the server, which ends it."""
        os.kill(self._pid, signal.SIGINT)


def _end() -> None:
    os.kill(os.getpid(), signal.SIGINT)
