"""Transfers that no step waits for, posted a few at a time.

A whole prompt goes into HBM while others decode.  Posted at once it would hold the decode step that
posts it, as posting may send bytes on the spot, and each copy that a step does wait for would queue
behind all of its bytes.  So the pump posts, and few bytes are under way at a time.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from dualpath.engine.pump import TransferPump
from dualpath.engine.threads import Threads

#: What a copy that a step waits for may find before it.  At 50 GB/s less than the pump's pause
#: between two looks, during which no new bytes follow.
MOST_BYTES = 8 << 20


class _Post(NamedTuple):
    size_bytes: int
    post: Callable[[Callable[[], None]], object]


class PacedPosts:
    """First come, first served; one that alone is too large goes alone.

    Everything happens on the pump's thread.  What does not end for ``deadline_s`` holds up nothing
    any more: one transfer that hangs says nothing of the others.
    """

    def __init__(
        self,
        pump: TransferPump,
        threads: Threads,
        deadline_s: float,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._pump = pump
        self._threads = threads
        self._deadline_ns = int(deadline_s * 1e9)
        self._most_bytes = most_bytes
        self._waiting: deque[_Post] = deque()
        #: By number, in the order of posting: bytes, and when they were posted.
        self._moving: dict[int, tuple[int, int]] = {}
        self._posted = 0
        self._posting = False
        pump.each_turn(self._advance)

    def add(self, size_bytes: int, post: Callable[[Callable[[], None]], object]) -> None:
        """Have a transfer posted; ``post`` gets what is to be called once it is over, by the pump.

        It must not raise.
        """

        def queue() -> None:
            self._waiting.append(_Post(size_bytes, post))
            self._advance()

        self._pump.call(queue)

    def _advance(self) -> None:
        if self._posting:
            return  # one that was over at once; whoever posted it goes on
        self._posting = True
        while self._waiting and self._has_room(self._waiting[0].size_bytes):
            size_bytes, post = self._waiting.popleft()
            number = self._posted
            self._posted += 1
            self._moving[number] = (size_bytes, self._threads.now_ns())
            post(lambda number=number: self._over(number))  # type: ignore[misc]
        self._posting = False

    def _over(self, number: int) -> None:
        self._moving.pop(number, None)
        self._advance()

    def _has_room(self, size_bytes: int) -> bool:
        since_ns = self._threads.now_ns() - self._deadline_ns
        moving = [size for size, posted_ns in self._moving.values() if posted_ns > since_ns]
        return not moving or sum(moving) + size_bytes <= self._most_bytes
