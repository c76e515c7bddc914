"""What is said in one turn of the event loop travels in one frame, or in few."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from dualpath.core.control import Envelope, Message, encode_batches

M = TypeVar("M", bound=Message)

#: Of a frame with several messages: far below what a scheduler takes at most.  All that a front end
#: has under way is said at once when a scheduler is back, and each request may have many keys.
_MOST_BYTES = 1 << 20


def frames_of(envelopes: Iterable[Envelope[M]]) -> list[bytes]:
    """Return the frames in which these messages travel, in order."""
    return encode_batches(envelopes, _MOST_BYTES)


class Frames(Generic[M]):
    """Gathers envelopes for one receiver and gives ``send`` their frames in the next turn."""

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
            for frame in frames_of(gathered):
                self._send(frame)
