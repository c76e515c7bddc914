"""Handling of SIGTERM in commands: it stops a command like Ctrl-C, or drains it first."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

# -------------------------------------------------------------------------------------- event loop
# The event loop of commands that serve without vLLM: uvloop's if it is installed.


def run_served(main: Coroutine[Any, Any, None]) -> None:
    """Run until ``main`` returns, as ``asyncio.run``."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise ``KeyboardInterrupt`` in the ``with`` block, unless it gets a handler."""
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def interrupt(signal_number: int, frame: object) -> None:
    """Raise ``KeyboardInterrupt``; a signal handler."""
    raise KeyboardInterrupt


class Watched(Protocol):
    """Processes that a command supervises."""

    def watch(self) -> None:
        """Restart processes that exit; never returns."""
        ...

    def drain(self) -> None:
        """Accept no new requests; return when running ones have ended."""
        ...


def watch_until_stopped(processes: Watched, report: Callable[[str], None]) -> None:
    """Supervise until Ctrl-C, which raises ``KeyboardInterrupt``; on SIGTERM, drain and return.

    A second SIGTERM has the effect of Ctrl-C.
    """
    signal.signal(signal.SIGTERM, _drain)
    try:
        processes.watch()
    except _DrainError:
        signal.signal(signal.SIGTERM, interrupt)
        report("draining: stops when running requests have ended")
        processes.drain()


class _DrainError(Exception):
    """Raised by SIGTERM to leave the supervision loop."""


def _drain(signal_number: int, frame: object) -> None:
    raise _DrainError
