"""SIGTERM ends a command as Ctrl-C does, so that what it has begun is taken down."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


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
