"""SIGTERM drains a process whose server is vLLM's; a second one, or SIGINT, ends it at once.

vLLM's server takes SIGINT and SIGTERM for the same wish to end now, and from then on its engine
core refuses the requests that the router has yet to send.  Here SIGTERM is taken from it; when
nothing is left to do, it gets its SIGINT.

An engine is two processes: the server that gets the signal, and the engine core with the traffic
manager, which talks to the router.  ``DRAIN_SIGNAL`` goes from one to the other, SIGINT comes back.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Awaitable, Callable

#: Neither vLLM nor UCX uses it.
DRAIN_SIGNAL = signal.SIGUSR2
#: vLLM's name of an engine core's process; one of several has its rank behind it.
_ENGINE_CORE = "EngineCore"


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


def _end() -> None:
    os.kill(os.getpid(), signal.SIGINT)
