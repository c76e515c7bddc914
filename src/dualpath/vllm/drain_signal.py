"""SIGTERM drains a process whose server is vLLM's; a second one, or SIGINT, ends it at once.

vLLM's server takes SIGINT and SIGTERM for the same wish to end now.  Here SIGTERM is taken from it;
when nothing is left to do, it gets its SIGINT.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable


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


def _end() -> None:
    os.kill(os.getpid(), signal.SIGINT)
