"""What is said in one turn of the event loop travels in one frame."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from dualpath.core.envelopes import Envelope, encode_together
from dualpath.core.message import Message

M = TypeVar("M", bound=Message)


class Frames(Generic[M]):
    """Gathers envelopes for one receiver and gives ``send`` their frame in the next turn."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._gathered: list[Envelope[M]] = []

    def add(self, envelopes: Iterable[Envelope[M]]) -> None:
        """Send them after those before."""
        waiting = bool(self._gathered)
        self._gathered += envelopes
        if self._gathered and not waiting:
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send at once what was gathered."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._send(encode_together(gathered))
