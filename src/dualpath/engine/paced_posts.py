"""Transfers that no engine step waits for, posted a few at a time.

A whole prompt is copied into HBM while other requests decode.  Posted at once, it would delay the
decode step that posts it, as posting may copy bytes synchronously, and every copy that a step waits
for would queue behind all of its bytes.  So the pump posts it, with few bytes under way at a time.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from dualpath.engine.pump import TransferPump
from dualpath.engine.threads import Threads

#: Bytes under way, behind which a copy that a step waits for may queue.  At 50 GB/s they take less
#: time than the pump's pause between two polls, during which no new bytes are posted.
MAX_BYTES = 8 << 20


class _Post(NamedTuple):
    size_bytes: int
    post: Callable[[Callable[[], None]], object]


class PacedPosts:
    """Posts transfers FIFO; a transfer larger than the limit is posted alone.

    Everything happens on the pump's thread.  A transfer that is not over after ``deadline_s`` does
    not count any more, as its hanging need not affect the others.
    """

    def __init__(
        self,
        pump: TransferPump,
        threads: Threads,
        deadline_s: float,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._pump = pump
        self._threads = threads
        self._deadline_ns = int(deadline_s * 1e9)
        self._max_bytes = max_bytes
        self._waiting: deque[_Post] = deque()
        #: Bytes and time of posting by number, in the order of posting.
        self._moving: dict[int, tuple[int, int]] = {}
        self._posted = 0
        self._posting = False
        pump.each_poll(self._advance)

    def add(self, size_bytes: int, post: Callable[[Callable[[], None]], object]) -> None:
        """Queue a transfer; ``post`` gets a callback to call on the pump's thread once it is over.

        ``post`` must not raise.
        """

        def queue() -> None:
            self._waiting.append(_Post(size_bytes, post))
            self._advance()

        self._pump.call(queue)

    def _advance(self) -> None:
        if self._posting:
            return  # a transfer was over at once; the outer call goes on
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
        return not moving or sum(moving) + size_bytes <= self._max_bytes
