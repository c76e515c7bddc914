"""The event queue: things happen in order of (time, number of their push)."""

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class EventQueue:
    """Pending actions under virtual time; ``now_ns`` moves when the next one runs."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.handled = 0
        self._pushed = 0
        self._pending: list[tuple[int, int, Action, tuple[Any, ...]]] = []

    def at(self, time_ns: int, action: Action, *arguments: Any) -> None:  # noqa: ANN401
        """Let an action run at ``time_ns`` ≥ now, after all pushed before for that time."""
        heapq.heappush(self._pending, (time_ns, self._pushed, action, arguments))
        self._pushed += 1

    def next_ns(self) -> int | None:
        """When the next action runs, None without any."""
        return self._pending[0][0] if self._pending else None

    def run_next(self) -> None:
        """Run the next action."""
        self.now_ns, _, action, arguments = heapq.heappop(self._pending)
        self.handled += 1
        action(*arguments)
