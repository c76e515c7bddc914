"""PE and DE buffers: DRAM of a node, granted first come, first served (§4.1)."""

from collections import deque
from collections.abc import Callable

Granted = Callable[[], None]


class NodeBuffer:
    """Buffer space of one node in one role."""

    def __init__(self, capacity_bytes: float) -> None:
        self._free_bytes = capacity_bytes
        self._waiting: deque[tuple[float, Granted]] = deque()

    def reserve(self, need_bytes: float, granted: Granted) -> None:
        """Run ``granted`` when the bytes are reserved: at once if nobody waits and they fit."""
        self._waiting.append((need_bytes, granted))
        self._grant()

    def release(self, held_bytes: float) -> None:
        """Give bytes back, which may let others in."""
        self._free_bytes += held_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free_bytes:
            need_bytes, granted = self._waiting.popleft()
            self._free_bytes -= need_bytes
            granted()
