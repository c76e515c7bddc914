"""SIGTERM ends a command as Ctrl-C does, so that what it has begun is taken down."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise ``KeyboardInterrupt`` in the block, unless something handles it there."""
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def interrupt(signal_number: int, frame: object) -> None:
    """Raise ``KeyboardInterrupt``, as a handler of a signal."""
    raise KeyboardInterrupt


class Watched(Protocol):
    """Processes under a command that supervises them."""

    def watch(self) -> None:
        """Start again whatever ends; never returns."""
        ...

    def drain(self) -> None:
        """Take no new requests; return when those under way have ended."""
        ...


def watch_until_ended(processes: Watched, say: Callable[[str], None]) -> None:
    """Watch until Ctrl-C, which raises ``KeyboardInterrupt``; return after SIGTERM and a drain.

    A second SIGTERM is as Ctrl-C.
    """
    signal.signal(signal.SIGTERM, _drain)
    try:
        processes.watch()
    except _DrainError:
        signal.signal(signal.SIGTERM, interrupt)
        say("ends when the requests under way have ended")
        processes.drain()


class _DrainError(Exception):
    """Leaves the loop that watches."""


def _drain(signal_number: int, frame: object) -> None:
    raise _DrainError
